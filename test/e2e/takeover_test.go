//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// takeOver is a cluster with kube-proxy on two nodes, and clients of every kind that hold
// connections and keep opening new ones.
type takeOver struct {
	*cluster
	mode   string
	old    map[*lab.BridgeNode]*lab.Process // kube-proxy
	young  map[*lab.BridgeNode]*lab.Process // kube-ipvs
	held   []held
	clocks []clock
	opened int // held connections so far
	began  int // clocks so far
}

// clock keeps opening connections.
type clock struct {
	*lab.Load
	name string
}

// The source ports of connections, below the kernel's ephemeral ports: those of held
// connections, and those of each load.
const (
	heldPorts   = 2000
	newPorts    = 10000
	portsOfEach = 500
)

// stallLimit is how long an emulated machine may stall while two programs start. It covers
// the retransmissions after 1, 3, 7 and 15 s. A connection that no proxy serves still fails:
// its client is refused or reset, or is never answered.
const stallLimit = 30 * time.Second

// held is a connection that must not break.
type held struct {
	name       string
	connection *lab.Connection
	server     string
}

func newTakeOver(t *testing.T, mode string) *takeOver {
	t.Helper()
	c := newServed(t, mode)
	for _, node := range c.takenOver() {
		c.startKubeProxy(t, node)
	}
	return c
}

// newServed returns the cluster with its Services and without a proxy.
func newServed(t *testing.T, mode string) *takeOver {
	t.Helper()
	c := &takeOver{cluster: newCluster(t), mode: mode, old: map[*lab.BridgeNode]*lab.Process{}, young: map[*lab.BridgeNode]*lab.Process{}}
	local := newExposed("local", 2)
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	for _, svc := range []*corev1.Service{newExposed("web", 1), local} {
		c.api.addService(svc)
		for _, slice := range dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)) {
			c.api.addSlice(slice)
		}
	}
	return c
}

// takenOver returns the nodes to which VIPs are routed. On one, kube-proxy stops after
// kube-ipvs has started, on the other before.
func (c *takeOver) takenOver() [2]*lab.BridgeNode { return [2]*lab.BridgeNode{c.Nodes[0], c.Nodes[2]} }

// startKubeProxy does not change conntrack's limits, which belong to the machine.
// kube-proxy is ready when every client is answered, because it programs virtual servers
// before the masquerade rules.
func (c *takeOver) startKubeProxy(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	c.old[node] = node.StartProgram(func(*lab.Process) error { return c.serves(node) }, lab.Peer("kube-proxy"),
		"--proxy-mode", c.mode, "--kubeconfig", lab.Kubeconfig(), "--hostname-override", node.Name, "--cluster-cidr", podCIDRs,
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
}

// serves connects from every client to every address.
func (c *takeOver) serves(node *lab.BridgeNode) error {
	for _, a := range c.asks(node) {
		if answer := a.from.DialWithin(time.Second, lab.TCP, a.address); answer.Err != nil {
			return fmt.Errorf("%s: %w", a.name, answer.Err)
		}
	}
	return nil
}

func (c *takeOver) callerOn(node *lab.BridgeNode) *lab.Pod {
	if node == c.Nodes[0] {
		return c.caller1
	}
	return c.caller3
}

// asks returns all connections to a node's Services: from pods, the node and external
// clients.
func (c *takeOver) asks(node *lab.BridgeNode) []ask {
	outside := balancerIPs(1)
	if node == c.Nodes[2] {
		outside = externalIPs(1)
	}
	asks := []ask{
		{"outside, a node port", c.Client, at(node.IPv4.String(), 30001)},
		{"outside, a node port, IPv6", c.Client, at(node.IPv6.String(), 30001)},
	}
	for i, family := range []string{"IPv4", "IPv6"} {
		asks = append(asks,
			ask{"a pod, a cluster IP, " + family, c.callerOn(node).Namespace, at(clusterIPs(1)[i], 80)},
			ask{"the node, a cluster IP, " + family, node.Namespace, at(clusterIPs(1)[i], 80)},
			ask{"a pod, a VIP, " + family, c.callerOn(node).Namespace, at(outside[i], 80)},
			ask{"outside, a VIP, " + family, c.Client, at(outside[i], 80)},
		)
	}
	if node == c.Nodes[0] {
		asks = append(asks, ask{"outside, a VIP, Local", c.Client, at(balancerIPs(2)[0], 80)})
	}
	return asks
}

// ask is a client and an address.
type ask struct {
	name    string
	from    *lab.Namespace
	address string
}

// hold opens two connections of each kind.
func (c *takeOver) hold(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	for _, a := range c.asks(node) {
		for range 2 {
			connection, err := a.from.ConnectFrom(heldPorts+uint16(c.opened), stallLimit, lab.TCP, a.address)
			c.opened++
			if err != nil {
				t.Fatalf("%s: %s to %s: %v", node.Name, a.name, a.address, err)
			}
			answer := connection.Ask(stallLimit)
			if answer.Err != nil {
				t.Fatalf("%s: %s to %s: %s", node.Name, a.name, a.address, answer)
			}
			c.held = append(c.held, held{fmt.Sprintf("%s: %s to %s", node.Name, a.name, a.address), connection, answer.Server})
		}
	}
}

// keepTalking sends requests all the time on connections of each kind, so that a moment without
// translation resets some. The returned function ends them, and checks that no request failed.
func (c *takeOver) keepTalking(t *testing.T, node *lab.BridgeNode) (end func()) {
	t.Helper()
	before := len(c.held)
	c.hold(t, node)
	talking := slices.Clone(c.held[before:])
	c.held = c.held[:before]
	stop := make(chan struct{})
	var all sync.WaitGroup
	for _, h := range talking {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
				}
				if answer := h.connection.Ask(stallLimit); answer.Err != nil || answer.Server != h.server {
					t.Errorf("in use: the connection of %s, to %s, results in %s", h.name, h.server, answer)
					return
				}
			}
		})
	}
	end = sync.OnceFunc(func() {
		close(stop)
		all.Wait()
	})
	t.Cleanup(end)
	return end
}

// keepAsking keeps opening new connections of each kind.
func (c *takeOver) keepAsking(node *lab.BridgeNode) {
	c.keepAskingBut(node, func(string) bool { return false })
}

// keepAskingBut excludes kinds by name.
func (c *takeOver) keepAskingBut(node *lab.BridgeNode, without func(string) bool) {
	for _, a := range c.asks(node) {
		if without(a.name) {
			continue
		}
		first := newPorts + portsOfEach*uint16(c.began)
		c.began++
		c.clocks = append(c.clocks, clock{a.from.PortLoad(first, 300*time.Millisecond, stallLimit, lab.TCP, a.address), node.Name + ": " + a.name})
	}
}

// intact checks that every held connection is answered by the same endpoint.
func (c *takeOver) intact(t *testing.T, when string) {
	t.Helper()
	for _, h := range c.held {
		if answer := h.connection.Ask(stallLimit); answer.Err != nil || answer.Server != h.server {
			t.Errorf("%s: the connection of %s, to %s, results in %s", when, h.name, h.server, answer)
		}
	}
}

// answered checks that every new connection since the last call was answered.
func (c *takeOver) answered(t *testing.T) {
	t.Helper()
	c.answeredBut(t, func(clock, lab.Answer) bool { return false })
}

// answeredBut is answered, but excuses some failures.
func (c *takeOver) answeredBut(t *testing.T, excused func(clock, lab.Answer) bool) {
	t.Helper()
	for _, clock := range c.clocks {
		tally := clock.Stop()
		failures := slices.DeleteFunc(tally.Failures, func(a lab.Answer) bool { return excused(clock, a) })
		if n := len(failures); n > 0 {
			first, last := failures[0], failures[n-1]
			t.Errorf("%s: %d new connections of %d failed, from %s (%s) to %s (%s)", clock.name, n, n+tally.Outcomes[lab.OK],
				first.Ended.Format(clockTime), first, last.Ended.Format(clockTime), last)
		}
	}
	c.clocks = nil
}

// startKubeIPVS starts kube-ipvs with its own ports for health and metrics, because
// kube-proxy may use both default ports.
func (c *takeOver) startKubeIPVS(node *lab.BridgeNode) { c.startBuild(node, lab.Program()) }

// startBuild starts a build of kube-ipvs.
func (c *takeOver) startBuild(node *lab.BridgeNode, program string, flags ...string) {
	passed := func(*lab.Process) error { return hasPassedAt(node.Node, 10276) }
	c.young[node] = node.StartProgram(passed, program, append([]string{
		"--hostname-override", node.Name, "--kubeconfig", lab.Kubeconfig(),
		"--cluster-cidr", podCIDRs, "--ipvs-sync-period", "5s",
		"--healthz-bind-address", "127.0.0.1:10276", "--metrics-bind-address", "127.0.0.1:10259",
	}, flags...)...)
}

// leftovers are name prefixes that only kube-proxy uses, in any mode.
var leftovers = []string{"KUBE-SVC-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-CANARY", "table ip kube-proxy", "table ip6 kube-proxy"}

// hasNoLeftovers returns an error if rules of any kind contain a leftover.
func hasNoLeftovers(node *lab.BridgeNode) error {
	state := kernelState(node.Node) + node.Exec("nft", "list", "tables")
	for _, l := range leftovers {
		if strings.Contains(state, l) {
			return fmt.Errorf("%s: there is still %s", node.Name, l)
		}
	}
	for vip := range vips(node.Node) {
		if strings.HasPrefix(vip.String(), "203.0.113.") && strings.Contains(node.Exec("ip", "address", "show", "dev", "kube-ipvs0"), vip.String()+"/") {
			return fmt.Errorf("%s: %s is still on kube-ipvs0", node.Name, vip)
		}
	}
	return nil
}

// testTakeOver takes over both nodes, each in its order.
func testTakeOver(t *testing.T, mode string) *takeOver {
	c := newTakeOver(t, mode)
	both, after := c.takenOver()[0], c.takenOver()[1]
	c.hold(t, both)
	endBoth := c.keepTalking(t, both)
	c.keepAsking(both)
	c.startKubeIPVS(both)
	c.intact(t, "beside kube-proxy")
	c.old[both].Stop()
	c.hold(t, after)
	endAfter := c.keepTalking(t, after)
	c.keepAsking(after)
	c.old[after].Stop()
	c.startKubeIPVS(after)
	for _, node := range c.takenOver() {
		lab.Eventually(t, 2*syncLimit, "kube-proxy's leftovers are gone", func() error { return hasNoLeftovers(node) })
	}
	endBoth()
	endAfter()
	c.intact(t, "after kube-proxy")
	c.answered(t)
	return c
}

func TestBehaviourTakeOverFromIptables(t *testing.T) { testTakeOver(t, "iptables") }

// TestBehaviourTakeOverFromNFTablesAndBack tests the warning of docs/guides/migrate.md:
// kube-proxy empties IPVS when it starts in nftables mode, and most connections through
// IPVS end. Connections that kube-proxy itself had translated before continue.
func TestBehaviourTakeOverFromNFTablesAndBack(t *testing.T) {
	c := testTakeOver(t, "nftables")
	node := c.takenOver()[0]
	remembered := c.held
	c.held = nil
	c.hold(t, node)
	c.young[node].Stop()
	c.intact(t, "with neither")
	c.succeed(t, node)
	c.ended(t)
	c.held = remembered
	c.intact(t, "back with kube-proxy")
	c.keepAsking(node)
	c.cleanUp(t, node)
	c.intact(t, "without kube-ipvs")
	c.answered(t)
}

// TestBehaviourTakeOverWaitsForRules lets another program own the table that our rules for IPv4
// need, so that the kernel refuses them. The kernel translates packets of established
// connections only while some table has nat chains: kube-proxy's table must stay meanwhile.
func TestBehaviourTakeOverWaitsForRules(t *testing.T) {
	c := newTakeOver(t, "nftables")
	node := c.takenOver()[0]
	c.hold(t, node)
	owner := node.Start("sh", "-c", "f=$(mktemp -u) && mkfifo $f && exec 3<>$f && echo 'add table ip nat { flags owner; }' >&3 && exec nft -i <&3")
	lab.Eventually(t, syncLimit, "table nat has an owner", func() error {
		_, err := node.TryExec("nft", "list", "table", "ip", "nat")
		return err
	})
	c.old[node].Stop()
	c.young[node] = node.StartProgram(func(*lab.Process) error {
		if tables := node.Exec("nft", "list", "tables"); strings.Contains(tables, "ip6 kube-proxy") {
			return fmt.Errorf("the take-over of IPv6 has not ended: %s", tables)
		}
		return nil
	}, lab.Program(), "--hostname-override", node.Name, "--kubeconfig", lab.Kubeconfig(), "--cluster-cidr", podCIDRs)
	c.intact(t, "without our rules for IPv4")
	owner.Stop()
	lab.Eventually(t, 2*syncLimit, "kube-proxy's leftovers are gone", func() error { return hasNoLeftovers(node) })
	c.intact(t, "with our rules")
}

// TestBehaviourTakeOverFromIPVSAndBack also rolls back. kube-proxy recognizes its state
// by name. --cleanup beside it removes the rest, except what connections still need.
func TestBehaviourTakeOverFromIPVSAndBack(t *testing.T) {
	c := testTakeOver(t, "ipvs")
	node := c.takenOver()[0]
	c.hold(t, node) // including fwmark virtual servers, under externalTrafficPolicy Local
	c.keepAsking(node)
	c.young[node].Stop()
	c.intact(t, "with neither")
	c.succeed(t, node)
	c.intact(t, "back with kube-proxy")
	if code, output := node.RunProxy("--cleanup"); code != 0 && !strings.Contains(output, "connections and stays") {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	hasNothingOfOurs(t, node, "-A -f ", "KUBE-IPVS-LOCAL", "KUBE-IPVS-DRAIN")
	c.intact(t, "without kube-ipvs")
	c.answered(t)
	for _, h := range c.held {
		h.connection.Reset()
	}
	lab.Eventually(t, timeWait+syncLimit, "kube-ipvs --cleanup leaves nothing", func() error {
		if code, output := node.RunProxy("--cleanup"); code != 0 {
			return fmt.Errorf("it ended with %d:\n%s", code, output)
		}
		return nil
	})
	hasNothingOfOurs(t, node)
	if err := c.serves(node); err != nil {
		t.Errorf("kube-proxy, without help: %v", err)
	}
}

const clockTime = "15:04:05.000"

// timeWait is how long IPVS remembers a closed connection.
const timeWait = 2 * time.Minute

// programs shows that kube-proxy has programmed a family, for each mode: a command for
// each family and its expected output.
var programs = map[string]struct {
	shown    string
	commands []string
}{
	"ipvs":     {"-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\n", []string{"iptables-save -t nat", "ip6tables-save -t nat"}},
	"iptables": {"-j DNAT", []string{"iptables-save -t nat", "ip6tables-save -t nat"}},
	"nftables": {"dnat ip", []string{"nft list table ip kube-proxy", "nft list table ip6 kube-proxy"}},
}

// succeed starts kube-proxy and waits until it serves. Until then the previous proxy may
// continue to serve.
func (c *takeOver) succeed(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	c.startKubeProxy(t, node)
	lab.Eventually(t, 6*syncLimit, "kube-proxy has programmed both families", func() error {
		p := programs[c.mode]
		for _, command := range p.commands {
			words := strings.Fields(command)
			if out, err := node.TryExec(words[0], words[1:]...); err != nil || !strings.Contains(out, p.shown) {
				return fmt.Errorf("%s: %s: %v, without %q:\n%s", node.Name, command, err, p.shown, out)
			}
		}
		return c.serves(node)
	})
}

// ended checks that every held, masqueraded connection has ended. Others are assigned
// again, and continue if they reach the same endpoint.
func (c *takeOver) ended(t *testing.T) {
	t.Helper()
	var all sync.WaitGroup
	for _, h := range c.held {
		if strings.Contains(h.name, "a pod, a cluster IP") || strings.Contains(h.name, ", Local") {
			continue
		}
		all.Go(func() {
			if answer := h.connection.Ask(stallLimit); answer.Err == nil {
				t.Errorf("the connection of %s goes on: %s", h.name, answer)
			}
		})
	}
	all.Wait()
}

// cleanUp checks that --cleanup removes everything of kube-ipvs.
func (c *takeOver) cleanUp(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Fatalf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	hasNothingOfOurs(t, node)
}

// hasNothingOfOurs looks for names of kube-ipvs, except those that kube-proxy shares and
// those that may be left.
func hasNothingOfOurs(t *testing.T, node *lab.BridgeNode, but ...string) {
	t.Helper()
	state := kernelState(node.Node) + node.Exec("nft", "list", "tables")
	for _, left := range append([]string{"KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", "KUBE-IPVS-IPS", "KUBE-6-IPVS-IPS"}, but...) {
		state = strings.ReplaceAll(state, left, "")
	}
	for _, ours := range []string{"KUBE-IPVS-", "KUBE-6-IPVS-", "-A -f ", "80080", "kubernetes load balancer source ranges", " kube-ipvs\n"} {
		if strings.Contains(state, ours) {
			t.Errorf("%s: there is still %q in\n%s", node.Name, ours, state)
		}
	}
}

// TestBehaviourGiveBackToIptables: connections through IPVS continue beside the rules of
// kube-proxy's iptables mode, which translate new ones before IPVS. When they have ended,
// --cleanup removes kube-ipvs's state beside kube-proxy. Conntrack remembers kube-proxy's
// connections, so that a switch to nftables mode breaks none.
func TestBehaviourGiveBackToIptables(t *testing.T) {
	c := newServed(t, "iptables")
	node := c.takenOver()[0]
	c.startKubeIPVS(node)
	lab.Eventually(t, syncLimit, "everybody is answered", func() error { return c.serves(node) })
	c.hold(t, node)
	c.keepAsking(node)
	c.young[node].Stop()
	c.succeed(t, node)
	c.intact(t, "beside kube-proxy")
	c.answered(t)
	balanced := c.held
	c.hold(t, node)
	// As long as a cluster IP is an address of the node, it is the source of the node's
	// own packets to it. --cleanup gives new connections another source.
	fromClusterIP := func(name string) bool { return strings.Contains(name, "the node, ") }
	c.held = c.held[len(balanced):]
	for _, h := range balanced {
		h.connection.Close()
	}
	c.keepAskingBut(node, fromClusterIP)
	if code, output := node.RunProxy("--cleanup"); code == 0 || !strings.Contains(output, "connections of this node have the source") {
		t.Errorf("while connections of the node have cluster IPs as their source, kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	c.intact(t, "while connections of the node have cluster IPs as their source")
	c.held = slices.DeleteFunc(c.held, func(h held) bool {
		if fromClusterIP(h.name) {
			h.connection.Reset()
		}
		return fromClusterIP(h.name)
	})
	c.cleanUp(t, node)
	if link, err := node.TryExec("ip", "link", "show", "dev", "kube-ipvs0"); err == nil {
		t.Errorf("there is still\n%s", link)
	}
	c.intact(t, "without kube-ipvs")
	c.answered(t)
	c.old[node].Stop()
	c.mode = "nftables"
	c.succeed(t, node)
	c.intact(t, "in nftables mode")
}
