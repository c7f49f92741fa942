//go:build e2e

package e2e

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// eniChurn is an ENI cluster that changes while clients connect.
type eniChurn struct {
	*lab.ENINode
	turnover
	t   *testing.T
	dir string // folder of manifests
	// flaps is an interface whose address comes and goes; comes is plugged in and out;
	// stays does not change.
	flaps, comes, stays *lab.NodeInterface
	guest               *lab.Pod // of the interface that comes
	loads               []*eniLoad
	proxy               *lab.Process
	flags               []string      // additional flags of the proxy
	limit               time.Duration // time for the proxy to process a change
}

// eniLoad is a client, with the sources that endpoints may see.
type eniLoad struct {
	*lab.Load
	name    string
	sources []netip.Addr
}

// The LoadBalancer IPs, by the interface to which they are routed.
var (
	vipsInside = []string{"10.115.1.1", "fd00:115:1::1"}
	vipsByEth0 = []string{"10.115.20.1", "fd00:115:20::1"}
	vipsByEth1 = []string{"10.115.21.1", "fd00:115:21::1"}
	vipsByEth3 = []string{"10.115.23.1", "fd00:115:23::1"}
)

// TestENIChurn connects from pods, the node and external clients, while endpoints are
// added, terminate and are removed, eth1's address is removed and added, and eth2 with a
// pod is unplugged and plugged in. ENI_CONNECTIONS is the minimum number of connections.
//
// No connection may be lost, because no change must break one: a removed endpoint
// continues to serve its connections, and when eth1 loses its address, the cloud still
// delivers packets for it. Only connections through eth2 are lost when it is unplugged,
// under any proxy: its pod stops before that, and connects again when the proxy has seen
// the interface, as a CNI starts pods only then.
//
// No connection may have a foreign source: the fabric drops packets whose source does not
// belong to their interface, and must not have to drop any. Endpoints, including those on
// the node, must only see addresses that the client may have, never a VIP.
func TestENIChurn(t *testing.T) {
	c := newENIChurn(t, "--ipvs-sync-period", "1h", "--ipvs-min-sync-period", "0s")
	atLeast := c.atLeast()
	c.startLoads()
	begin, rounds := time.Now(), 0
	for ; rounds < 2 || c.connections() < atLeast; rounds++ {
		c.round()
	}
	for _, load := range c.loads {
		load.check(t)
	}
	if n := c.Fabric.Spoofed(); n != 0 {
		t.Errorf("the fabric dropped %d packets for their source", n)
	}
	t.Logf("%d connections in %d rounds, %s", c.connections(), rounds, time.Since(begin).Round(time.Second))
}

func (c *eniChurn) atLeast() int {
	text := cmp.Or(os.Getenv("ENI_CONNECTIONS"), "1000")
	n, err := strconv.Atoi(text)
	if err != nil {
		c.t.Fatalf("ENI_CONNECTIONS: %v", err)
	}
	return n
}

func newENIChurn(t *testing.T, flags ...string) *eniChurn {
	c := &eniChurn{ENINode: lab.NewENINode(t), t: t, flags: flags, limit: followLimit}
	c.flaps, c.comes, c.stays = c.AddENI(), c.AddENI(), c.AddENI()
	// When an interface loses its last IPv4 address, the kernel removes its routes. This
	// address stays and is never used as a source.
	c.Node.Exec("ip", "address", "add", "169.254.0.1/32", "scope", "link", "dev", c.flaps.Name())
	c.Fabric.Route("blackhole "+vipsInside[0], "blackhole "+vipsInside[1])
	c.Primary.Deliver(vipsByEth0...)
	c.flaps.Deliver(vipsByEth1...)
	c.stays.Deliver(vipsByEth3...)
	c.pods = []*lab.Pod{
		c.AddRemote("remote1"), c.flaps.AddPod("on-eth1"), c.AddRemote("remote2"),
		c.Primary.AddPod("ordinary"), c.AddRemote("remote3"), c.stays.AddPod("on-eth3"),
	}
	for _, pod := range c.pods {
		pod.Serve(pod.Name, lab.TCP, webPort)
	}
	c.guest = c.comes.AddPod("guest")
	c.live, c.next = []podEndpoint{ready(c.pods[0]), ready(c.pods[1])}, 2
	c.svc = newLoadBalancer(newService("web", corev1.ProtocolTCP, 80, clusterIPs(1)...),
		slices.Concat(vipsInside, vipsByEth0, vipsByEth1, vipsByEth3)...)
	c.dir = writeManifests(t, c.svc)
	c.writeSlices()
	c.Fabric.CheckSources()
	c.startProxy()
	return c
}

// startProxy starts the proxy and waits for its first sync.
func (c *eniChurn) startProxy() {
	c.proxy = c.Node.StartProxy(func(*lab.Process) error {
		if err := hasPassed(c.Node); err != nil {
			return err
		}
		return c.has(c.Node)
	}, append([]string{"--manifests", c.dir, "--hostname-override", "node", "--cluster-cidr", lab.ENIPodCIDRs}, c.flags...)...)
}

// startLoads starts a client of each kind; the families take turns.
func (c *eniChurn) startLoads() {
	pod1, pod3, plain := c.flaps.AddPod("pod1"), c.stays.AddPod("pod3"), c.Primary.AddPod("plain")
	byEth0, byEth3 := c.AddClient("by-eth0"), c.AddClient("by-eth3")
	byEth1 := []*lab.Namespace{c.AddClient("by-eth1-v4"), c.AddClient("by-eth1-v6")}
	for family := range 2 {
		c.load(pod1.Namespace, vipsInside, family)
		c.load(byEth1[family], vipsByEth1, family)
	}
	c.load(pod3.Namespace, vipsInside, 0)
	c.load(plain.Namespace, vipsInside, 1)
	c.load(c.Node.Namespace, vipsInside, 0)
	c.load(byEth0, vipsByEth0, 1)
	c.load(byEth3, vipsByEth3, 0)
}

// pause is the time between two connections of a client. Without it, the changes would be
// slow on an emulated node.
const pause = 50 * time.Millisecond

// load starts a client. Endpoints see the node, with eth0's address or, while it has one,
// eth1's: packets of pod1 leave by eth1. On the links of the node's pods, which have no
// address, the kernel chooses any address of the node.
func (c *eniChurn) load(from *lab.Namespace, vips []string, family int) *eniLoad {
	l := &eniLoad{
		from.PacedLoad(pause, lostAfter, 1, lab.TCP, at(vips[family], 80)), from.Name + " to " + vips[family],
		[]netip.Addr{c.Primary.Addresses[family], c.flaps.Addresses[family]},
	}
	c.loads = append(c.loads, l)
	return l
}

func (c *eniChurn) connections() int {
	sum := 0
	for _, load := range c.loads {
		for _, n := range load.Tally().Outcomes {
			sum += n
		}
	}
	return sum
}

// check stops the load and checks its connections.
func (l *eniLoad) check(t *testing.T) {
	tally := l.Stop()
	if len(tally.Failures) > 0 || len(tally.Outcomes) != 1 {
		t.Errorf("%s: %v, the first failures: %v", l.name, tally.Outcomes, tally.Failures)
	}
	for source, n := range tally.Sources {
		if !slices.Contains(l.sources, source) {
			t.Errorf("%s: %d connections seen as %s", l.name, n, source)
		}
	}
	t.Log(l.name, tally.Outcomes, tally.Servers, tally.Sources)
}

// round changes everything once, and endpoints both while eth1 has an address and while
// it has none.
func (c *eniChurn) round() {
	guest := c.load(c.guest.Namespace, vipsInside, 1)
	c.flaps.Carry()
	c.follows("eth1 has a SNAT source", func() bool { return c.snats("eth1") == 2 })
	c.replace(c.set)
	guest.Stop()
	c.comes.Unplug()
	c.follows("eth2 is not bound", func() bool { return c.binds("eth2") == 0 })
	c.flaps.Drop()
	c.follows("eth1 has no SNAT source", func() bool { return c.snats("eth1") == 0 })
	c.replace(c.set)
	c.comes.Plug()
	c.follows("eth2 is bound", func() bool { return c.binds("eth2") == 2 })
}

// snats and binds return the number of families in which the interface has a SNAT source,
// and in which connections that enter by it are bound to it.
func (c *eniChurn) snats(link string) int { return c.families("nat", "KUBE-POSTROUTING", "-o "+link) }
func (c *eniChurn) binds(link string) int { return c.families("nat", "KUBE-IPVS-ENTRY", "-i "+link) }

func (c *eniChurn) families(table, chain, match string) int {
	n := 0
	for _, program := range []string{"iptables", "ip6tables"} {
		if strings.Contains(c.Node.Exec(program, "-w", "-t", table, "-S", chain), match+" ") {
			n++
		}
	}
	return n
}

// follows waits until the proxy has processed a change.
func (c *eniChurn) follows(what string, check func() bool) {
	c.t.Helper()
	c.Eventually(c.limit, what, func() error {
		if !check() {
			return errors.New("not yet")
		}
		return nil
	})
}

// set replaces the endpoints and waits until the node has them.
func (c *eniChurn) set(endpoints ...podEndpoint) {
	c.t.Helper()
	c.live = slices.Clone(endpoints)
	c.writeSlices()
	c.Eventually(c.limit, "the node has the endpoints", func() error { return c.has(c.Node) })
}

func (c *eniChurn) writeSlices() {
	for _, slice := range dualStackSlices(c.svc, webPort, c.live...) {
		c.write(slice.Name, slice)
	}
}

// write replaces a file of the manifests atomically, because the proxy would read half of
// one.
func (c *eniChurn) write(name string, object runtime.Object) {
	whole := filepath.Join(c.t.TempDir(), name)
	writeManifest(c.t, whole, object)
	if err := os.Rename(whole, filepath.Join(c.dir, name+".yaml")); err != nil {
		c.t.Fatal(err)
	}
}
