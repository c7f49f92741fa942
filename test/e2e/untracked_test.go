//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// untrackedMode is what a node does with traffic of pods to cluster IPs.
type untrackedMode int

const (
	// tracked is kube-ipvs as it is.
	tracked untrackedMode = iota
	// twoRules leaves packets from the pods' range to the range of cluster IPs, and to the
	// pods' range, untracked.
	twoRules
	// mended tracks packets to the node's own addresses, and tracks requests again once
	// IPVS has chosen an endpoint that must see another source, or that is no pod. It refuses
	// what IPVS does not serve.
	mended
	untrackedModes
)

func (m untrackedMode) String() string {
	return [...]string{"tracked", "two rules", "mended"}[m]
}

// untrackedFamily holds what the rules of one family need.
type untrackedFamily struct {
	index          int // of addresses that are listed IPv4 first
	iptables, nft  string
	pods, services string
}

var untrackedFamilies = []untrackedFamily{
	{0, "iptables", "ip", "10.244.0.0/16", "10.96.0.0/16"},
	{1, "ip6tables", "ip6", "fd00:244::/32", "fd00:10:96::/112"},
}

// untrackedLab is a cluster whose first node does not track traffic of pods to cluster IPs.
type untrackedLab struct {
	*cluster
	t    *testing.T
	node *lab.BridgeNode // node1
	// untrackedFamily is the one that is tested.
	untrackedFamily
}

// The Services of the test, by number.
const (
	sameNode   = iota + 1 // web1
	otherNode             // web2
	ofAnother             // node2, on the host network
	ofThisNode            // node1, on the host network
	outOfRange            // the client outside
	exposed               // web1, also by load balancer IP and node port
	affinity              // web1 and web2
	moved                 // web1, then web2
)

func newUntrackedLab(t *testing.T) *untrackedLab {
	c := newOfflineCluster(t)
	u := &untrackedLab{cluster: c, t: t, node: c.Nodes[0]}
	for _, host := range []*lab.Namespace{c.Nodes[0].Namespace, c.Nodes[1].Namespace, c.Client} {
		host.Serve(host.Name, lab.TCP, webPort)
	}
	// What no Service may lead to.
	u.node.Serve("node1", lab.TCP, 22)
	u.program(c.web1)
	return u
}

// program serves all Services, the last one by a pod.
func (u *untrackedLab) program(last *lab.Pod) {
	u.t.Helper()
	pods := func(svc *corev1.Service, pods ...*lab.Pod) []runtime.Object {
		var endpoints []podEndpoint
		for _, p := range pods {
			endpoints = append(endpoints, ready(p))
		}
		return withSlices(svc, endpoints...)
	}
	hosts := func(n int, name string, addresses []string, node string) []runtime.Object {
		svc := newDualStack(name, n)
		return []runtime.Object{svc,
			newSlice(svc, "IPv4", webPort, endpoint{address: addresses[0], node: node}),
			newSlice(svc, "IPv6", webPort, endpoint{address: addresses[1], node: node})}
	}
	sticky := newDualStack("affinity", affinity)
	sticky.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	var objects []runtime.Object
	for _, part := range [][]runtime.Object{
		pods(newDualStack("same-node", sameNode), u.web1),
		pods(newDualStack("other-node", otherNode), u.web2),
		hosts(ofAnother, "of-another", nodeIPs(u.Nodes[1]), "node2"),
		hosts(ofThisNode, "of-this-node", nodeIPs(u.Nodes[0]), "node1"),
		hosts(outOfRange, "out-of-range", []string{"198.51.100.9", "fd00:51::9"}, ""),
		pods(newExposed("exposed", exposed), u.web1),
		pods(sticky, u.web1, u.web2),
		pods(newDualStack("moved", moved), last),
	} {
		objects = append(objects, part...)
	}
	u.cluster.program(u.t, u.Nodes[:1], objects)
}

// enter makes the node treat packets as the mode says, and returns the function that ends it.
func (u *untrackedLab) enter(mode untrackedMode) (leave func()) {
	u.t.Helper()
	if mode == tracked {
		return func() {}
	}
	raw := func(args string) {
		u.node.Exec(u.iptables, append([]string{"-w", "-t", "raw"}, strings.Fields(args)...)...)
	}
	table := u.nft + " untracked"
	raw(fmt.Sprintf("-A PREROUTING -s %s -d %s -j CT --notrack", u.pods, u.services))
	if mode == mended {
		raw(fmt.Sprintf("-A PREROUTING -s %s -d %s -j ACCEPT", u.pods, u.node.Gateways()[u.index]))
	}
	raw(fmt.Sprintf("-A PREROUTING -s %s -d %s -j CT --notrack", u.pods, u.pods))
	if mode == mended {
		web1 := u.web1.Addresses[u.index]
		u.node.Feed(strings.NewReplacer("TABLE", table, "FAMILY", u.nft, "TYPE", []string{"ipv4_addr", "ipv6_addr"}[u.index],
			"WEB1", web1.String(), "PODS", u.pods, "SERVICES", u.services).Replace(`
			table TABLE {
				set itself {
					type TYPE . TYPE
					elements = { WEB1 . WEB1 }
				}
				chain output {
					type filter hook output priority -250
					FAMILY saddr PODS FAMILY daddr != PODS ct zone set 0
					FAMILY saddr . FAMILY daddr @itself ct zone set 0
				}
				chain input {
					type filter hook input priority 110
					ct state untracked FAMILY daddr SERVICES reject
				}
			}`), "nft", "-f", "-")
	}
	return func() {
		raw("-F")
		u.node.TryExec("nft", "delete", "table", u.nft, "untracked")
	}
}

// command runs a command of the family's iptables on the node.
func (u *untrackedLab) command(args string) {
	u.t.Helper()
	u.node.Exec(u.iptables, append([]string{"-w"}, strings.Fields(args)...)...)
}

// until is how long a client waits in this test. It suffices for one retransmission.
const until = 2 * time.Second

// answers returns who answers a client at a port of an address, or the outcome.
func answers(from *lab.Namespace, protocol lab.Protocol, address string, port uint16) string {
	answer := from.DialWithin(until, protocol, at(address, port))
	if answer.Err != nil {
		return string(answer.Outcome())
	}
	return answer.Server
}

// clusterIP returns the address of a Service.
func (u *untrackedLab) clusterIP(n int) string { return clusterIPs(n)[u.index] }

// fromPod returns who answers the pod caller1 by a Service.
func (u *untrackedLab) fromPod(n int) string {
	return answers(u.caller1.Namespace, lab.TCP, u.clusterIP(n), 80)
}

// seen returns which source the endpoint of a Service sees if the pod caller1 is the client.
func (u *untrackedLab) seen(n int) string {
	answer := u.caller1.DialWithin(until, lab.TCP, at(u.clusterIP(n), 80))
	switch source := answer.SeenSource.Addr().Unmap(); {
	case answer.Err != nil:
		return string(answer.Outcome())
	case source == u.caller1.Addresses[u.index]:
		return "the pod"
	case source.String() == nodeIPs(u.node)[u.index]:
		return "the node"
	default:
		return source.String()
	}
}

// entries connects to a Service, and returns "entries" if conntrack has an entry for that.
func (u *untrackedLab) entries(n int) string {
	family := []string{"ipv4", "ipv6"}[u.index]
	u.node.Exec("conntrack", "-F", "-f", family)
	u.fromPod(n)
	out := u.node.Exec("conntrack", "-L", "-f", family, "-d", u.clusterIP(n))
	if strings.Contains(out, u.clusterIP(n)) {
		return "entries"
	}
	return "none"
}

// untrackedCase is a request, what must be set up for it, and what is answered in each mode.
type untrackedCase struct {
	name string
	// rules are written before the request, by iptables of the family, and deleted after it:
	// each begins with "-A".
	rules []string
	ask   func(*untrackedLab) string
	want  [untrackedModes]string
}

var untrackedCases = []untrackedCase{
	{name: "an endpoint on the node", ask: func(u *untrackedLab) string { return u.fromPod(sameNode) + ", " + u.seen(sameNode) },
		want: [...]string{"web1, the pod", "web1, the pod", "web1, the pod"}},
	{name: "its entries", ask: func(u *untrackedLab) string { return u.entries(sameNode) },
		want: [...]string{"entries", "none", "none"}},
	{name: "an endpoint on another node", ask: func(u *untrackedLab) string { return u.fromPod(otherNode) + ", " + u.seen(otherNode) },
		want: [...]string{"web2, the pod", "web2, the pod", "web2, the pod"}},
	{name: "UDP", ask: func(u *untrackedLab) string {
		return answers(u.caller1.Namespace, lab.UDP, u.clusterIP(sameNode), 80) + ", " + answers(u.caller1.Namespace, lab.UDP, u.clusterIP(otherNode), 80)
	}, want: [...]string{"web1, web2", "web1, web2", "web1, web2"}},
	{name: "SCTP", ask: func(u *untrackedLab) string {
		return answers(u.caller1.Namespace, lab.SCTP, u.clusterIP(sameNode), 80)
	}, want: [...]string{"web1", "web1", "web1"}},
	{name: "affinity", ask: (*untrackedLab).oneOfTwo, want: [...]string{"one", "one", "one"}},
	{name: "the endpoint itself", ask: func(u *untrackedLab) string {
		return answers(u.web1.Namespace, lab.TCP, u.clusterIP(sameNode), 80)
	}, want: [...]string{"web1", "timeout", "web1"}},
	{name: "a port that no Service has", ask: func(u *untrackedLab) string {
		return answers(u.caller1.Namespace, lab.TCP, u.clusterIP(sameNode), 22)
	}, want: [...]string{"refused", "node1", "refused"}},
	{name: "an endpoint on the host network", ask: func(u *untrackedLab) string { return u.fromPod(ofAnother) + ", " + u.fromPod(ofThisNode) },
		want: [...]string{"node2, node1", "node2, node1", "node2, node1"}},
	{name: "the same, packets without a connection are dropped", rules: []string{"-A FORWARD -m conntrack --ctstate INVALID -j DROP"},
		ask:  func(u *untrackedLab) string { return u.fromPod(ofAnother) },
		want: [...]string{"node2", "timeout", "node2"}},
	{name: "an endpoint outside, to which pods are masqueraded", rules: []string{"-t nat -A POSTROUTING -s PODS ! -d PODS -j MASQUERADE"},
		ask:  func(u *untrackedLab) string { return u.seen(outOfRange) },
		want: [...]string{"the node", "the pod", "the node"}},
	{name: "the node", ask: func(u *untrackedLab) string { return answers(u.node.Namespace, lab.TCP, u.clusterIP(sameNode), 80) },
		want: [...]string{"web1", "timeout", "web1"}},
	{name: "a node port", ask: func(u *untrackedLab) string {
		return answers(u.Client, lab.TCP, nodeIPs(u.node)[u.index], 30000+exposed)
	}, want: [...]string{"web1", "timeout", "web1"}},
	{name: "a load balancer IP, from a pod", ask: func(u *untrackedLab) string {
		return answers(u.caller1.Namespace, lab.TCP, balancerIPs(exposed)[u.index], 80)
	}, want: [...]string{"web1", "timeout", "web1"}},
	{name: "a host port, from a pod", rules: []string{"-t nat -I PREROUTING -p tcp -d NODE --dport 8080 -j DNAT --to-destination WEB1"},
		ask: func(u *untrackedLab) string {
			return answers(u.caller1.Namespace, lab.TCP, nodeIPs(u.node)[u.index], 8080)
		}, want: [...]string{"web1", "timeout", "timeout"}},
	{name: "a policy that accepts established connections", rules: []string{
		"-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -d WEB1ADDRESS -p tcp --dport 8000 -j ACCEPT", "-A FORWARD -s WEB1ADDRESS -j DROP",
	}, ask: func(u *untrackedLab) string { return u.fromPod(sameNode) },
		want: [...]string{"web1", "timeout", "timeout"}},
	{name: "the same policy, without the Service", rules: []string{
		"-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -d WEB1ADDRESS -p tcp --dport 8000 -j ACCEPT", "-A FORWARD -s WEB1ADDRESS -j DROP",
	}, ask: func(u *untrackedLab) string {
		return answers(u.caller1.Namespace, lab.TCP, u.web1.Addresses[u.index].String(), webPort)
	}, want: [...]string{"web1", "timeout", "timeout"}},
	{name: "a policy that drops packets without a connection", rules: []string{"-A FORWARD -m conntrack --ctstate INVALID -j DROP"},
		ask:  func(u *untrackedLab) string { return u.fromPod(sameNode) + ", " + u.fromPod(otherNode) },
		want: [...]string{"web1, web2", "web1, web2", "web1, web2"}},
	{name: "the policy of FORWARD is DROP", rules: []string{"-P FORWARD DROP"},
		ask:  func(u *untrackedLab) string { return u.fromPod(sameNode) },
		want: [...]string{"web1", "timeout", "timeout"}},
	{name: "an error about the size of packets", ask: (*untrackedLab).upload, want: [...]string{"uploaded", "uploaded", "uploaded"}},
	{name: "the same, packets without a connection are dropped", rules: []string{"-A FORWARD -m conntrack --ctstate INVALID -j DROP"},
		ask: (*untrackedLab).upload, want: [...]string{"uploaded", "timeout", "timeout"}},
}

// oneOfTwo returns "one" if one endpoint answers all requests.
func (u *untrackedLab) oneOfTwo() string {
	answered := map[string]bool{}
	for range 6 {
		answered[u.fromPod(affinity)] = true
	}
	if len(answered) == 1 && !answered["timeout"] {
		return "one"
	}
	return fmt.Sprint(answered)
}

// upload sends more to web2 than one packet takes. Node2 can only forward smaller ones than
// the client begins with, and reports it.
func (u *untrackedLab) upload() string {
	node2 := u.Nodes[1]
	node2.Exec("ip", "link", "set", "cni0", "mtu", "1300")
	defer node2.Exec("ip", "link", "set", "cni0", "mtu", "1500")
	defer u.caller1.Exec("ip", []string{"-4", "-6"}[u.index], "route", "flush", "cache")
	c, err := u.caller1.Connect(until, lab.TCP, at(u.clusterIP(otherNode), 80))
	if err != nil {
		return err.Error()
	}
	if err := c.Upload(100_000, 3*until); err != nil {
		return string(lab.Answer{Err: err}.Outcome())
	}
	return "uploaded"
}

// TestBehaviourUntracked shows what works and what breaks if a node does not track traffic of
// pods to cluster IPs: with two NOTRACK rules, and with rules that repair what can be repaired.
// docs/performance/dataplane.md explains why there is no such option.
func TestBehaviourUntracked(t *testing.T) {
	u := newUntrackedLab(t)
	for _, u.untrackedFamily = range untrackedFamilies {
		for mode := range untrackedModes {
			leave := u.enter(mode)
			for _, c := range untrackedCases {
				if got := u.run(c); got != c.want[mode] {
					t.Errorf("%s, %s, %s: %s, want %s", u.nft, mode, c.name, got, c.want[mode])
				}
			}
			leave()
		}
		u.switched(t)
		u.changed(t)
	}
}

func (u *untrackedLab) run(c untrackedCase) string {
	web1 := u.web1.Addresses[u.index].String()
	fill := strings.NewReplacer("PODS", u.pods, "NODE", nodeIPs(u.node)[u.index], "WEB1ADDRESS", web1, "WEB1", at(web1, webPort))
	for _, rule := range c.rules {
		rule = fill.Replace(rule)
		u.command(rule)
		undo := strings.NewReplacer("-A ", "-D ", "-I ", "-D ", "-P FORWARD DROP", "-P FORWARD ACCEPT").Replace(rule)
		defer u.command(undo)
	}
	return c.ask(u)
}

// switched checks connections while tracking ends and begins again. A TCP connection that was
// opened before tracking ended does not survive its beginning: conntrack kept the entry, and
// has not seen the packets since. It considers the next packet invalid, and takes the one that
// IPVS sends to the endpoint for a connection of its own. The old entry has the same reply, so
// that the new one gets another source port. The endpoint has no connection from that port.
func (u *untrackedLab) switched(t *testing.T) {
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		for n, endpoint := range map[int]*lab.Pod{sameNode: u.web1, otherNode: u.web2} {
			ports := map[uint16]bool{} // of the client
			check := func(what string, c *lab.Connection, want lab.Outcome) {
				t.Helper()
				answer := c.Ask(until)
				if answer.Outcome() != want {
					t.Errorf("%s %s, Service %d, %s: %s, want %s", u.nft, protocol, n, what, answer, want)
				}
				ports[answer.Local.Port()] = true
			}
			connect := func(what string) *lab.Connection {
				c, err := u.caller1.Connect(until, protocol, at(u.clusterIP(n), 80))
				if err != nil {
					t.Fatal(err)
				}
				check(what, c, lab.OK)
				return c
			}
			before, idle := connect("while tracked"), connect("while tracked")
			leave := u.enter(twoRules)
			check("opened while tracked", before, lab.OK)
			during := connect("while untracked")
			// A delayed acknowledgement may be the first packet that is tracked again.
			end := netip.AddrPortFrom(endpoint.Addresses[u.index], webPort)
			capture := endpoint.Watch(protocol, end.String())
			leave()
			check("opened while untracked, tracked again", during, lab.OK)
			check("idle while untracked, tracked again", idle, lab.OK)
			if protocol == lab.TCP {
				answer := before.Ask(until)
				fromAnotherPort := func(p lab.Packet) bool {
					return p.To == end && p.From.Addr() == u.caller1.Addresses[u.index] && !ports[p.From.Port()]
				}
				if _, ok := capture.Await(until, fromAnotherPort); !ok || answer.Outcome() != lab.Reset {
					t.Errorf("%s, Service %d, used while untracked, tracked again: %s, want it reset for another source port: %s", u.nft, n, answer, capture)
				}
			} else {
				check("used while untracked, tracked again", before, lab.OK)
			}
			capture.Stop()
			for _, c := range []*lab.Connection{before, during, idle} {
				c.Close()
			}
		}
	}
}

// changed checks that a UDP socket reaches the Service's new endpoint.
func (u *untrackedLab) changed(t *testing.T) {
	defer u.enter(twoRules)()
	c, err := u.caller1.Connect(until, lab.UDP, at(u.clusterIP(moved), 80))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if answer := c.Ask(until); answer.Server != "web1" {
		t.Errorf("%s: %s, want web1", u.nft, answer)
	}
	u.program(u.web2)
	defer u.program(u.web1)
	if answer := c.Ask(until); answer.Server != "web2" {
		t.Errorf("%s: %s, want web2 once it is the endpoint", u.nft, answer)
	}
}
