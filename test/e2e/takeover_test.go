//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// takeOver is a cluster with kube-proxy on two nodes, and clients of every kind
// that hold connections and keep making new ones.
type takeOver struct {
	*cluster
	mode   string
	old    map[*lab.BridgeNode]*lab.Process // kube-proxy
	young  map[*lab.BridgeNode]*lab.Process // kube-ipvs
	held   []held
	clocks []clock
	began  int // clocks, of all times
}

// clock keeps making connections.
type clock struct {
	*lab.Load
	name string
}

// The source ports of connections, below those of the kernel's own choice: those
// that are held, and those of each load.
const (
	heldPorts   = 2000
	newPorts    = 10000
	portsOfEach = 500
)

// stallLimit is for how long an emulated machine may stand still while two
// programs start. Who is refused does not try again within it.
const stallLimit = 10 * time.Second

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

// newServed is the cluster with its Services, and nobody yet to serve them.
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

// takenOver are the nodes to which VIPs are routed: of one kube-proxy is stopped
// after kube-ipvs is there, of the other before.
func (c *takeOver) takenOver() [2]*lab.BridgeNode { return [2]*lab.BridgeNode{c.Nodes[0], c.Nodes[2]} }

// startKubeProxy leaves conntrack's limits alone, which are the machine's. It is
// ready when everybody is answered: it programs virtual servers before the rules
// that masquerade.
func (c *takeOver) startKubeProxy(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	c.old[node] = node.StartProgram(func(*lab.Process) error { return c.serves(node) }, lab.Peer("kube-proxy"),
		"--proxy-mode", c.mode, "--kubeconfig", lab.Kubeconfig(), "--hostname-override", node.Name, "--cluster-cidr", podCIDRs,
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s")
}

// serves asks in every way.
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

// asks are all the ways to a node's Services: by pods, by the node, and from
// outside.
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

// ask is who asks whom.
type ask struct {
	name    string
	from    *lab.Namespace
	address string
}

// hold opens connections, two in each way.
func (c *takeOver) hold(t *testing.T, node *lab.BridgeNode) {
	t.Helper()
	for _, a := range c.asks(node) {
		for range 2 {
			connection, err := a.from.ConnectFrom(heldPorts+uint16(len(c.held)), lab.DialTimeout, lab.TCP, a.address)
			if err != nil {
				t.Fatalf("%s: %s to %s: %v", node.Name, a.name, a.address, err)
			}
			answer := connection.Ask(lab.DialTimeout)
			if answer.Err != nil {
				t.Fatalf("%s: %s to %s: %s", node.Name, a.name, a.address, answer)
			}
			c.held = append(c.held, held{fmt.Sprintf("%s: %s to %s", node.Name, a.name, a.address), connection, answer.Server})
		}
	}
}

// keepAsking has new connections made in each way, all the time.
func (c *takeOver) keepAsking(node *lab.BridgeNode) {
	for _, a := range c.asks(node) {
		first := newPorts + portsOfEach*uint16(c.began)
		c.began++
		c.clocks = append(c.clocks, clock{a.from.PortLoad(first, 300*time.Millisecond, stallLimit, lab.TCP, a.address), node.Name + ": " + a.name})
	}
}

// intact wants every connection that is held to be where it was.
func (c *takeOver) intact(t *testing.T, when string) {
	t.Helper()
	for _, h := range c.held {
		if answer := h.connection.Ask(stallLimit); answer.Err != nil || answer.Server != h.server {
			t.Errorf("%s: the connection of %s, to %s, gives %s", when, h.name, h.server, answer)
		}
	}
}

// answered wants every new connection since the last call to have been answered.
func (c *takeOver) answered(t *testing.T) {
	t.Helper()
	for _, clock := range c.clocks {
		tally := clock.Stop()
		if len(tally.Failures) > 0 {
			t.Errorf("%s: %d new connections of %d failed, such as %s", clock.name, len(tally.Failures), len(tally.Failures)+tally.Outcomes[lab.OK], tally.Failures[0])
		}
	}
	c.clocks = nil
}

// startKubeIPVS starts it on ports of its own for health and metrics, as
// kube-proxy may have those of both.
func (c *takeOver) startKubeIPVS(node *lab.BridgeNode) {
	passed := func(*lab.Process) error {
		out, err := node.TryExec("curl", "-sf", "--max-time", "5", "http://127.0.0.1:10266/healthz")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	c.young[node] = node.StartProxy(passed, "--hostname-override", node.Name, "--kubeconfig", lab.Kubeconfig(),
		"--cluster-cidr", podCIDRs, "--ipvs-sync-period", "5s",
		"--healthz-bind-address", "127.0.0.1:10266", "--metrics-bind-address", "127.0.0.1:10259")
}

// leftovers are what only kube-proxy has, in whatever mode.
var leftovers = []string{"KUBE-SVC-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-CANARY", "table ip kube-proxy", "table ip6 kube-proxy"}

// hasNoLeftovers looks at the rules of every kind.
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

// testTakeOver has both nodes taken over, each in its order.
func testTakeOver(t *testing.T, mode string) *takeOver {
	c := newTakeOver(t, mode)
	both, after := c.takenOver()[0], c.takenOver()[1]
	c.hold(t, both)
	c.keepAsking(both)
	c.startKubeIPVS(both)
	c.intact(t, "beside kube-proxy")
	c.old[both].Stop()
	c.hold(t, after)
	c.keepAsking(after)
	c.old[after].Stop()
	c.startKubeIPVS(after)
	for _, node := range c.takenOver() {
		lab.Eventually(t, 2*syncLimit, "kube-proxy's leftovers are gone", func() error { return hasNoLeftovers(node) })
	}
	c.intact(t, "after kube-proxy")
	c.answered(t)
	return c
}

func TestBehaviourTakeOverFromIptables(t *testing.T) { testTakeOver(t, "iptables") }

func TestBehaviourTakeOverFromNFTables(t *testing.T) { testTakeOver(t, "nftables") }

// TestBehaviourTakeOverFromIPVSAndBack goes on to the way back, on which kube-proxy
// finds what it knows by its names.
func TestBehaviourTakeOverFromIPVSAndBack(t *testing.T) {
	c := testTakeOver(t, "ipvs")
	node := c.takenOver()[0]
	c.keepAsking(node)
	c.young[node].Stop()
	c.intact(t, "with neither")
	c.startKubeProxy(t, node)
	c.intact(t, "back with kube-proxy")
	c.answered(t)
}

// hasIptablesMode looks for kube-proxy's own rules that lead to endpoints.
func hasIptablesMode(node *lab.BridgeNode) error {
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		if rules := node.Exec(program, "-t", "nat"); !strings.Contains(rules, "-j DNAT") {
			return fmt.Errorf("%s: %s has no rule that leads to an endpoint:\n%s", node.Name, program, rules)
		}
	}
	return nil
}

// TestBehaviourGiveBackToIptables: connections through IPVS go on beside the rules
// of kube-proxy's iptables mode, which lead new ones before IPVS sees them. Once
// they have ended kube-ipvs's are taken away, and with them kube-proxy's, which it
// puts back; what it has led somewhere by then conntrack remembers.
// Not so in nftables mode: kube-proxy empties IPVS itself when it starts.
func TestBehaviourGiveBackToIptables(t *testing.T) {
	c := newServed(t, "iptables")
	node := c.takenOver()[0]
	c.startKubeIPVS(node)
	lab.Eventually(t, syncLimit, "everybody is answered", func() error { return c.serves(node) })
	c.hold(t, node)
	c.keepAsking(node)
	c.young[node].Stop()
	c.startKubeProxy(t, node)
	lab.Eventually(t, 6*syncLimit, "kube-proxy has programmed both families", func() error { return hasIptablesMode(node) })
	c.intact(t, "beside kube-proxy")
	c.answered(t)
	balanced := c.held
	c.hold(t, node)
	// As long as a cluster IP is an address of the node, it is the source of what
	// the node sends there.
	c.held = slices.DeleteFunc(c.held[len(balanced):], func(h held) bool { return strings.Contains(h.name, ": the node, ") })
	for _, h := range balanced {
		h.connection.Close()
	}
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Fatalf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	c.old[node].Stop()
	c.startKubeProxy(t, node)
	c.intact(t, "after kube-ipvs")
	if state := kernelState(node.Node); strings.Contains(state, "KUBE-IPVS-") || strings.Contains(state, "kube-ipvs0") {
		t.Errorf("something of kube-ipvs is left:\n%s", state)
	}
}
