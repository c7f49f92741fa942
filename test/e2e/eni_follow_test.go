//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// followLimit is generous for an emulated machine. Changes announced by netlink take well
// under a second of it.
const followLimit = 20 * time.Second

// followedENI is the ENI cluster under a running proxy whose periodic comparison is an
// hour away and plays no part in the test.
type followedENI struct {
	*lab.ENICluster
	t     *testing.T
	proxy *lab.Process
	args  []string
	open  map[string]*lab.Connection // by who has it

	onNode *lab.Capture
}

func followENI(t *testing.T, options lab.ENIOptions) *followedENI {
	t.Helper()
	c := lab.NewENICluster(t, options)
	f := &followedENI{ENICluster: c, t: t, open: map[string]*lab.Connection{}}
	folder := eniManifests(t, c)
	writeManifest(t, filepath.Join(folder, "udp.yaml"), f.datagrams(folder))
	f.args = []string{"--manifests", folder, "--hostname-override", "node", "--ipvs-sync-period", "1h", "--ipvs-min-sync-period", "0s"}
	f.start()
	f.onNode = c.Node.Watch(lab.TCP, append([]string{c.VIP}, c.Endpoints...)...)
	return f
}

// datagrams serves UDP on the VIP too, with a Service of its own.
func (f *followedENI) datagrams(folder string) *corev1.Service {
	vip, port := netip.MustParseAddrPort(f.VIP), netip.MustParseAddrPort(f.Endpoints[0]).Port()
	svc := newLoadBalancer(newService("udp", corev1.ProtocolUDP, int32(vip.Port()), "10.96.0.81"), vip.Addr().String())
	var endpoints []endpoint
	for _, e := range f.Endpoints {
		endpoints = append(endpoints, endpoint{address: netip.MustParseAddrPort(e).Addr().String()})
	}
	writeManifest(f.t, filepath.Join(folder, "udp-slice.yaml"), newSlice(svc, "IPv4", int32(port), endpoints...))
	return svc
}

// socket opens a UDP socket of the pod that keeps sending.
func (f *followedENI) socket() *lab.Connection {
	f.t.Helper()
	socket, err := f.Pod.Connect(lab.DialTimeout, lab.UDP, f.VIP)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(socket.Close)
	return socket
}

// follows waits until the backends see an address as the source of a socket's datagrams.
func (f *followedENI) follows(when string, socket *lab.Connection, source netip.Addr) {
	f.t.Helper()
	begin := time.Now()
	f.Eventually(followLimit, "a UDP socket, "+when, func() error {
		answer := socket.Ask(time.Second)
		if answer.Err == nil && answer.SeenSource.Addr() != source {
			return fmt.Errorf("seen as %s, want %s", answer.SeenSource, source)
		}
		return answer.Err
	})
	f.t.Logf("a UDP socket, %s: after %s", when, time.Since(begin).Round(time.Millisecond))
}

func (f *followedENI) start() {
	f.t.Helper()
	f.proxy = f.Node.StartProxy(func(*lab.Process) error {
		if answer := f.Node.Dial(lab.TCP, f.VIP); answer.Err != nil {
			return answer.Err
		}
		return hasPassed(f.Node)
	}, f.args...)
}

// seenAs waits until the backends see an address as the source of a pod's new
// connections.
func (f *followedENI) seenAs(when string, pod *lab.Pod, source netip.Addr) {
	f.t.Helper()
	begin := time.Now()
	f.Eventually(followLimit, when, func() error {
		answer := pod.DialWithin(time.Second, lab.TCP, f.VIP)
		if answer.Err == nil && answer.SeenSource.Addr() != source {
			return fmt.Errorf("seen as %s, want %s", answer.SeenSource, source)
		}
		return answer.Err
	})
	f.t.Logf("%s: after %s", when, time.Since(begin).Round(time.Millisecond))
	f.undisturbed(when)
}

// connect opens a connection that must survive all following changes.
func (f *followedENI) connect(who string, from *lab.Namespace) {
	f.t.Helper()
	c, err := from.Connect(lab.DialTimeout, lab.TCP, f.VIP)
	if err != nil {
		f.t.Fatalf("%s: %v", who, err)
	}
	f.open[who] = c
	f.t.Cleanup(c.Close)
	f.undisturbed(who + " has connected")
}

func (f *followedENI) undisturbed(when string) {
	f.t.Helper()
	for who, c := range f.open {
		begin := time.Now()
		if answer := c.Ask(lab.DialTimeout); answer.Err != nil {
			f.t.Fatalf("%s: the open connection of %s: %s\n%s", when, who, answer, f.onNode.Since(begin))
		}
	}
}

// tables waits until our policy rules lead to the given tables, and returns the rules,
// sorted: rules of one priority are listed in the order of their addition.
func (f *followedENI) tables(when string, want ...string) string {
	f.t.Helper()
	var rules string
	f.Eventually(followLimit, when, func() error {
		rules = f.Node.Exec("ip", "rule", "show", "pref", "480")
		for _, table := range want {
			if !strings.Contains(rules, "lookup "+table) {
				return fmt.Errorf("none leads to %s: %s", table, rules)
			}
		}
		if strings.Count(rules, "lookup") != len(want) {
			return errors.New(rules)
		}
		return nil
	})
	f.undisturbed(when)
	return strings.Join(slices.Sorted(strings.Lines(rules)), "")
}

// TestENIFollowed changes the ENI under a running proxy: its address is added, changed
// and removed, pods' rules are added and removed, the interface is renamed and unplugged.
// Each time the pods' next connections take the correct path, and open connections
// continue.
func TestENIFollowed(t *testing.T) {
	f := followENI(t, lab.ENIOptions{})
	const other = "10.12.192.11"
	f.Eth1.Own(other)
	second := f.Node.Pod("second", "", "10.12.192.45")
	f.Eth1.Own("10.12.192.45")
	f.Fabric.CheckSources()

	f.seenAs("without an address: over the primary interface", f.Pod, f.NodeAddress)
	f.connect("the pod, over the primary interface", f.Pod.Namespace)
	f.connect("the node", f.Node.Namespace)
	f.followAddresses(other)
	f.Node.Rule("pref 1000 to 10.12.192.45 lookup main", "pref 2000 from 10.12.192.45 lookup 1003")
	f.seenAs("another pod's rule", second, f.NodeAddress)
	f.followRename()

	f.Node.Exec("ip", "rule", "del", "pref", "2000", "from", "10.12.192.45")
	pod := f.Pod.Addresses[0].String()
	f.Node.Exec("ip", "rule", "del", "pref", "2000", "from", pod)
	f.tables("no ENI any more", "main")
	f.Node.Rule("pref 2000 from " + pod + " lookup 1003")
	f.seenAs("the pod is routed by the ENI again", f.Pod, f.NodeAddress)
	f.Node.Exec("ip", "link", "del", "ens6")
	if answer := f.Node.Dial(lab.TCP, f.VIP); answer.Err != nil {
		t.Errorf("the node, after the ENI was unplugged: %s", answer)
	}
}

// followAddresses adds eth1's address and replaces it.
func (f *followedENI) followAddresses(other string) {
	f.t.Helper()
	f.Node.Address("eth1", f.ENIAddress.String())
	f.seenAs("with an address: by eth1", f.Pod, f.ENIAddress)
	socket := f.socket()
	f.follows("by eth1", socket, f.ENIAddress)
	f.Node.Address("eth1", other)
	f.restartWithSource(socket, netip.MustParseAddr(other))
	f.Node.Exec("ip", "address", "del", f.ENIAddress.String()+"/32", "dev", "eth1")
	f.follows("with another address", socket, netip.MustParseAddr(other))
	f.seenAs("with another address", f.Pod, netip.MustParseAddr(other))
	f.dropLast("eth1", other)
	f.follows("without it again", socket, f.NodeAddress)
	f.seenAs("without it again", f.Pod, f.NodeAddress)
}

// restartWithSource configures another address of eth1 as its SNAT source, and then the first.
// Each time the UDP socket follows, and a TCP connection from an earlier source continues.
func (f *followedENI) restartWithSource(socket *lab.Connection, other netip.Addr) {
	f.t.Helper()
	const who = "the pod, by eth1"
	f.connect(who, f.Pod.Namespace)
	args := f.args
	for _, source := range []netip.Addr{other, f.ENIAddress} {
		f.proxy.Terminate()
		f.args = append(slices.Clone(args), "--snat-source", "eth1="+source.String())
		f.start()
		when := "after a restart with the source " + source.String()
		f.follows(when, socket, source)
		f.seenAs(when, f.Pod, source)
	}
	f.proxy.Terminate()
	f.args = args
	f.start()
	f.undisturbed("after a restart without a source")
	f.open[who].Close()
	delete(f.open, who)
}

// dropLast removes the ENI's only IPv4 address. The kernel removes its routes too,
// without a notification. The CNI adds them again.
func (f *followedENI) dropLast(link, address string) {
	f.t.Helper()
	f.Node.Exec("ip", "address", "del", address+"/32", "dev", link)
	f.routeBy(link)
}

func (f *followedENI) routeBy(link string) {
	f.t.Helper()
	f.Node.Route("10.12.192.1 dev "+link+" table 1003", "default via 10.12.192.1 dev "+link+" table 1003")
}

// followRename renames eth1. Older kernels require it to be down, which removes its
// routes. The CNI adds them again.
func (f *followedENI) followRename() {
	f.t.Helper()
	before := f.tables("before the ENI is renamed", "main", "1003")
	f.Node.Down("eth1")
	f.Node.Exec("ip", "link", "set", "eth1", "name", "ens6")
	f.Node.Up("ens6")
	f.routeBy("ens6")
	f.Node.Address("ens6", f.ENIAddress.String())
	f.seenAs("by its new name", f.Pod, f.ENIAddress)
	f.dropLast("ens6", f.ENIAddress.String())
	f.seenAs("by its new name, without an address", f.Pod, f.NodeAddress)
	if after := f.tables("after the ENI was renamed", "main", "1003"); after != before {
		f.t.Errorf("the ENI had\n%sand has after it was renamed\n%s", before, after)
	}
}

// plugIn adds another ENI with a rule for a pod. The fabric checks sources on it.
func (f *followedENI) plugIn(number int) *lab.Port {
	f.t.Helper()
	link, table, subnet := fmt.Sprintf("eth%d", number), 1002+number, fmt.Sprintf("10.12.%d.", 191+number)
	port := f.Fabric.Segment(subnet+"1/24").Attach(f.Node.Namespace, link)
	port.Own(subnet + "10")
	f.Node.Route(fmt.Sprintf("%s1 dev %s table %d", subnet, link, table), fmt.Sprintf("default via %s1 dev %s table %d", subnet, link, table))
	f.Node.Rule(fmt.Sprintf("pref 2000 from %s44 lookup %d", subnet, table))
	return port
}

// TestENIValueStays removes the middle one of three ENIs while an external client has a
// connection open that entered by the last one. The connection continues, also across a
// restart of the proxy.
func TestENIValueStays(t *testing.T) {
	f := followENI(t, lab.ENIOptions{})
	f.plugIn(2)
	youngest := f.plugIn(3)
	vip := netip.MustParseAddrPort(f.VIP).Addr().String()
	client := newClientBy(f.ENICluster, "eth0")
	f.Fabric.Route(vip + " via 10.12.194.10")
	youngest.Accept(vip)
	f.Fabric.CheckSources()
	f.tables("three ENIs", "main", "1003", "1004", "1005")
	f.connect("the client, by the youngest", client)
	f.connect("the pod, over the primary interface", f.Pod.Namespace)

	f.Node.Exec("ip", "link", "del", "eth2")
	left := f.tables("without the middle one", "main", "1003", "1005")
	f.proxy.Terminate()
	f.start()
	if rules := f.tables("after a restart", "main", "1003", "1005"); rules != left {
		t.Errorf("the restart made\n%sof\n%s", rules, left)
	}
	for _, p := range f.onNode.Packets() {
		if p.From.Addr().String() == vip && p.Out && p.Interface != "eth3" && p.Interface != f.Pod.HostInterface {
			t.Errorf("an answer left by another interface: %s", p)
		}
	}
}

// deleteRules deletes all policy rules with our protocol, as systemd-networkd
// does when it starts, in one process so that they go one right after another.
const deleteRules = `ip rule show | sed -n 's/^\([0-9]*\):.*proto 81.*/rule del pref \1/p' | ip -batch -`

// TestENIRulesDeleted lets another program delete our policy rules again and again while
// a pod's connection that depends on them is in use. The connection continues, and the
// rules are back within a fraction of a second, without the periodic comparison, which is
// an hour away.
func TestENIRulesDeleted(t *testing.T) {
	f := followENI(t, lab.ENIOptions{})
	f.Fabric.CheckSources()
	f.seenAs("over the primary interface", f.Pod, f.NodeAddress)
	f.connect("the pod", f.Pod.Namespace)
	before := f.tables("to begin with", "main", "1003")
	busy, err := f.Pod.Connect(lab.DialTimeout, lab.TCP, f.VIP)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(busy.Close)
	for range 20 {
		answers := make(chan lab.Answer, 1)
		go func() {
			var last lab.Answer
			for range 20 {
				if last = busy.Ask(lab.DialTimeout); last.Err != nil {
					break
				}
			}
			answers <- last
		}()
		f.Node.Exec("sh", "-c", deleteRules)
		deleted := time.Now()
		f.Eventually(time.Second, "the rules are back", func() error {
			if rules := f.Node.Exec("ip", "rule", "show", "pref", "480"); strings.Count(rules, "lookup") != 2 {
				return errors.New(rules)
			}
			return nil
		})
		t.Logf("the rules are back after %s", time.Since(deleted).Round(time.Millisecond))
		if answer := <-answers; answer.Err != nil {
			t.Fatalf("the connection in use: %s", answer)
		}
	}
	if after := f.tables("in the end", "main", "1003"); after != before {
		t.Errorf("rules before (-) and after (+):\n%s%s", before, after)
	}
}
