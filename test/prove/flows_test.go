//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// The hosts around the node of testdata/cluster.yaml, and the addresses of its
// Services. Cluster IPs have the prefix "c/", external IPs "x/", load balancer IPs
// "l/".
var hosts = map[string][2]string{
	"node":     {"192.0.2.11", "2001:db8::11"},
	"bridge":   {"10.244.1.1", "fd00:244:1::1"}, // the node's address on the pod bridge
	"loopback": {"127.0.0.1", "::1"},
	"pod":      {"10.244.1.7", "fd00:244:1::7"}, // on this node, no endpoint
	"server":   {"10.244.1.5", "fd00:244:1::5"}, // a node-local endpoint
	"remote":   {"10.244.2.5", "fd00:244:2::5"}, // an endpoint on node-2
	"farpod":   {"10.244.2.7", "fd00:244:2::7"},
	"node-2":   {"192.0.2.12", "2001:db8::12"},
	"client":   {"100.64.9.9", "2001:db8:64:9::9"},
	"friend":   {"100.64.7.7", "2001:db8:64:7::7"}, // in a source range
}

func init() {
	for i, name := range []string{
		"web", "here", "away", "lb", "ranges", "ranges-node", "empty", "inside", "datagrams", "datagrams-here",
	} {
		n := 10 + i
		hosts["c/"+name] = [2]string{fmt.Sprintf("10.96.0.%d", n), fmt.Sprintf("fd00:96::%d", n)}
		hosts["x/"+name] = [2]string{fmt.Sprintf("198.51.100.%d", n), fmt.Sprintf("2001:db8:51::%d", n)}
		hosts["l/"+name] = [2]string{fmt.Sprintf("203.0.113.%d", n), fmt.Sprintf("2001:db8:113::%d", n)}
	}
}

// names maps host names to addresses of one family.
type names ip.Family

func (n names) addr(name string) netip.Addr {
	pair, ok := hosts[name]
	if !ok {
		panic("no host " + name)
	}
	if ip.Family(n) == ip.IPv6 {
		return netip.MustParseAddr(pair[1])
	}
	return netip.MustParseAddr(pair[0])
}

func (n names) name(a netip.Addr) string {
	for name := range hosts {
		if n.addr(name) == a {
			return name
		}
	}
	return a.String()
}

// flow is a connection. "client eth0" enters through eth0; a source without an interface
// is an address that a program of the node has bound. The destination is "HOST:PORT",
// followed by the protocol unless it is TCP, or "HOST ping", or "HOST error" for an ICMP
// error about a connection.
type flow struct{ from, to, want string }

func (f flow) question(n names) trace.Question {
	source := strings.Fields(f.from)
	q := trace.Question{Protocol: ip.TCP, From: n.addr(source[0]), SourceFixed: len(source) == 1}
	if len(source) > 1 {
		q.In = source[1]
	}
	to := strings.Fields(f.to)
	where, port, _ := strings.Cut(to[0], ":")
	number, _ := strconv.ParseUint(port, 10, 16)
	q.To = netip.AddrPortFrom(n.addr(where), uint16(number))
	switch {
	case len(to) == 1:
	case to[1] == "ping" || to[1] == "error":
		q.Protocol = map[ip.Family]ip.Protocol{ip.IPv4: trace.ICMP, ip.IPv6: trace.ICMPv6}[ip.Family(n)]
		if to[1] == "error" {
			q.State = trace.Related
		}
	default:
		var err error
		if q.Protocol, err = ip.ParseProtocol(to[1]); err != nil {
			panic(err)
		}
	}
	return q
}

// text formats the result of a flow. Without a virtual server that is DROP or REJECT,
// LOCAL for the node's own ports, or FORWARD. REFUSED means by IPVS.
func (n names) text(x *trace.Explanation) string {
	var out []string
	for _, r := range x.RealServers {
		to := netip.MustParseAddrPort(r.RealServer)
		way := fmt.Sprintf("%s:%d by %s as %s", n.name(to.Addr()), to.Port(), r.LeavesBy, n.name(netip.MustParseAddr(r.SeenSource)))
		if r.Verdict.Outcome != trace.Answered {
			way += " (" + string(r.Verdict.Outcome) + ")"
		}
		out = append(out, way)
	}
	switch outcome := x.Verdict.Outcome; {
	case len(x.Doubts) > 0:
		return "cannot be judged: " + strings.Join(x.Doubts, "; ")
	case len(out) > 0:
		return strings.Join(out, ", ")
	case outcome == trace.Dropped:
		return "DROP"
	case outcome == trace.Refused && x.VirtualServer != "":
		return "REFUSED"
	case outcome == trace.Refused:
		return "REJECT"
	case outcome == trace.Unserved && x.Link == "lo":
		return "LOCAL"
	case outcome == trace.Unserved:
		return "FORWARD by " + x.Link
	}
	return x.Verdict.String()
}

// golden reads a scenario of pkg/plan.
func golden(t *testing.T, name string) *Scenario {
	t.Helper()
	list, err := load(filepath.Join("../../pkg/plan/testdata", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return list[0].clone()
}

// host is a node on which kube-ipvs has programmed a scenario.
type host struct {
	*trace.Node
	evaluator trace.Evaluator
}

func newHost(t *testing.T, s *Scenario, family ip.Family) *host {
	t.Helper()
	p, err := NewProduct(s)
	if err != nil {
		t.Fatal(err)
	}
	n, err := p.Observed(family)
	if err != nil {
		t.Fatal(err)
	}
	return &host{Node: n}
}

// in returns the host in one of the Environments.
func (h *host) in(environment string) *host {
	for _, e := range Environments {
		if e.Name == environment {
			return &host{Node: e.change(h.Node)}
		}
	}
	panic("no environment " + environment)
}

// entersBy returns the interface by which a client's packets enter.
func (s *Scenario) entersBy(client netip.Addr) string {
	return cmp.Or(s.podLink(s.bare(ip.IPv4), client), NewOracle(s, ip.IPv4).mainUplink())
}

// claimed reports whether an address is in the table of claimed ports.
func (h *host) claimed(a netip.Addr) bool {
	table := scenario.DefaultConfig().VIPs.Table
	return slices.ContainsFunc(h.Routes, func(r routing.Route) bool { return r.Table == table && r.Dst.Addr() == a })
}

// sorted orders real servers by name, so that the order of addresses does not matter.
func sorted(text string) string {
	list := strings.Split(text, ", ")
	slices.Sort(list)
	return strings.Join(list, ", ")
}

func checkFlows(t *testing.T, h *host, flows []flow) {
	t.Helper()
	n := names(h.Family)
	for _, f := range flows {
		q := f.question(n)
		x := h.evaluator.Explain(h.Node, q)
		if what := leftover(&q, &x); what != "" {
			t.Errorf("from %s to %s: %s", f.from, f.to, what)
		}
		if got := n.text(&x); sorted(got) != sorted(f.want) {
			t.Errorf("from %s to %s:\n got %s\nwant %s", f.from, f.to, got, f.want)
		}
	}
}

// A VIP is a local address, so the kernel also chooses it as the source of a local
// connection to it.
var flows = []flow{
	// Cluster IPs: clients other than pods, and a pod that reaches itself, are
	// masqueraded.
	{"pod cni0", "c/web:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
	{"farpod eth0", "c/web:80", "server:8080 by cni0 as farpod, remote:8080 by eth0 as farpod (dropped)"},
	{"server cni0", "c/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as server"},
	{"client eth0", "c/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"c/web", "c/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"node", "c/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"loopback", "c/web:80", "server:8080 by cni0 as loopback, remote:8080 by eth0 as loopback (asymmetric)"},
	{"pod cni0", "c/datagrams:53 UDP", "remote:53 by eth0 as pod"},
	{"client eth0", "c/datagrams:53 UDP", "remote:53 by eth0 as node"},
	{"client eth0", "c/datagrams:54 SCTP", "remote:54 by eth0 as node"},

	// A VIP answers nothing else, except pings.
	{"pod cni0", "c/web:81", "REJECT"},
	{"client eth0", "c/web:22", "REJECT"},
	{"client eth0", "c/web:80 UDP", "REJECT"},
	{"client eth0", "c/datagrams:53", "REJECT"},
	{"client eth0", "c/datagrams:54 UDP", "REJECT"},
	{"client eth0", "l/lb:443", "REJECT"},
	{"client eth0", "l/here:30081", "REJECT"},
	{"client eth0", "x/web:8080", "REJECT"},
	{"client eth0", "c/web ping", "LOCAL"},
	{"client eth0", "l/lb ping", "LOCAL"},

	// The node's own ports are not affected.
	{"client eth0", "node:22", "LOCAL"},
	{"client eth0", "node:80", "LOCAL"},
	{"client eth0", "node ping", "LOCAL"},
	{"client eth0", "node:32011", "LOCAL"},
	{"client eth0", "remote:8080", "FORWARD by eth0"},

	// External IPs and node ports are masqueraded for every client.
	{"client eth0", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"pod cni0", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"x/web", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"client eth0", "node:30080", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"pod cni0", "bridge:30080", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"node", "node:30080", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"client eth0", "node:30053 UDP", "remote:53 by eth0 as node"},
	{"client eth0", "node:30054 SCTP", "remote:54 by eth0 as node"},
	{"client eth0", "node:30053", "LOCAL"},
	{"client eth0", "node:30080 UDP", "LOCAL"},
	{"client eth0", "node:30054 UDP", "LOCAL"},

	// So are load balancer IPs.
	{"client eth0", "l/lb:80", "remote:8080 by eth0 as node"},
	{"pod cni0", "l/lb:80", "remote:8080 by eth0 as node"},
	{"l/lb", "l/lb:80", "remote:8080 by eth0 as node"},

	// externalTrafficPolicy Local keeps the client's address if there is a node-local
	// endpoint.
	{"client eth0", "l/here:80", "server:8080 by cni0 as client"},
	{"client eth0", "x/here:80", "server:8080 by cni0 as client"},
	{"client eth0", "node:30081", "server:8080 by cni0 as client"},
	{"client eth0", "node:30153 UDP", "server:53 by cni0 as client"},
	{"client eth0", "node:30154 SCTP", "server:54 by cni0 as client"},
	{"node-2 eth0", "node:30081", "server:8080 by cni0 as node-2"},

	// Internal clients get all endpoints, with a source that replies can return to.
	// Pods of other nodes are external clients.
	{"pod cni0", "l/here:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
	{"pod cni0", "x/here:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
	{"pod cni0", "node:30081", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"farpod eth0", "node:30081", "server:8080 by cni0 as farpod"},
	{"farpod eth0", "l/here:80", "server:8080 by cni0 as farpod"},
	{"server cni0", "l/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as server"},
	{"l/here", "l/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"x/here", "x/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"node", "node:30081", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"client eth0", "c/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},

	// Without a node-local endpoint, external clients are dropped, and internal clients
	// get the other nodes' endpoints.
	{"client eth0", "l/away:80", "DROP"},
	{"client eth0", "x/away:80", "DROP"},
	{"client eth0", "node:30082", "DROP"},
	{"node-2 eth0", "node:30082", "DROP"},
	{"pod cni0", "l/away:80", "remote:8080 by eth0 as pod"},
	{"pod cni0", "x/away:80", "remote:8080 by eth0 as pod"},
	{"pod cni0", "node:30082", "remote:8080 by eth0 as node"},
	{"farpod eth0", "l/away:80", "DROP"},
	{"l/away", "l/away:80", "remote:8080 by eth0 as node"},
	{"x/away", "x/away:80", "remote:8080 by eth0 as node"},
	{"node", "node:30082", "remote:8080 by eth0 as node"},
	{"client eth0", "c/away:80", "remote:8080 by eth0 as node"},
	{"client eth0", "node:32012", "LOCAL"},

	// Source ranges apply to load balancer IPs on every path.
	{"friend eth0", "l/ranges:80", "remote:8080 by eth0 as node"},
	{"client eth0", "l/ranges:80", "DROP"},
	{"pod cni0", "l/ranges:80", "DROP"},
	{"l/ranges", "l/ranges:80", "DROP"},
	{"node", "l/ranges:80", "DROP"},
	{"client eth0", "c/ranges:80", "remote:8080 by eth0 as node"},
	{"client eth0", "l/ranges:443", "REJECT"},
	{"l/ranges-node", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"node-2 eth0", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"client eth0", "l/ranges-node:80", "DROP"},

	// A Service without endpoints refuses connections.
	{"client eth0", "l/empty:80", "REFUSED"},
	{"client eth0", "node:30086", "REFUSED"},
	{"pod cni0", "c/empty:80", "REFUSED"},
	{"c/empty", "c/empty:80", "REFUSED"},
	{"pod cni0", "c/inside:80", "REFUSED"},
}

// deviceFlows are flows to VIPs whose other ports belong to another device: packets from inside
// to such a port leave the node, packets from outside are not sent back.
var deviceFlows = []flow{
	{"pod cni0", "l/lb:443", "FORWARD by eth0"},
	{"node", "l/lb:443", "FORWARD by eth0"},
	{"client eth0", "l/lb:443", "REJECT"},
	{"farpod eth0", "l/lb:443", "REJECT"},
	{"pod cni0", "x/web:8080", "FORWARD by eth0"},
	{"client eth0", "x/web:8080", "REJECT"},
	{"pod cni0", "l/lb:80 UDP", "FORWARD by eth0"},
	{"pod cni0", "l/here:30081", "FORWARD by eth0"},
	{"client eth0", "l/lb ping", "LOCAL"},
	{"client eth0", "l/here error", "LOCAL"},
	{"pod cni0", "l/here error", "LOCAL"},
	{"client eth0", "remote error", "FORWARD by eth0"},

	// Claimed ports are served as before.
	{"client eth0", "l/lb:80", "remote:8080 by eth0 as node"},
	{"pod cni0", "l/lb:80", "remote:8080 by eth0 as node"},
	{"client eth0", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"client eth0", "l/here:80", "server:8080 by cni0 as client"},
	{"client eth0", "x/here:80", "server:8080 by cni0 as client"},
	{"pod cni0", "l/here:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
	{"client eth0", "l/away:80", "DROP"},
	{"pod cni0", "l/away:80", "remote:8080 by eth0 as pod"},
	{"friend eth0", "l/ranges:80", "remote:8080 by eth0 as node"},
	{"client eth0", "l/ranges:80", "DROP"},
	{"pod cni0", "l/ranges:80", "DROP"},
	{"pod cni0", "c/web:81", "REJECT"},
}

// portFlows are flows with VIPs claimed by port. They are not addresses of the node, which
// reaches them with its own address.
var portFlows = slices.Concat(deviceFlows, []flow{
	{"pod cni0", "l/lb ping", "FORWARD by eth0"},
	{"client eth0", "x/web ping", "LOCAL"},

	{"node", "l/lb:80", "remote:8080 by eth0 as node"},
	{"node", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"node", "l/here:80", "server:8080 by cni0 as node"},
	{"client eth0", "x/away:80", "DROP"},
	{"node", "l/away:80", "remote:8080 by eth0 as node"},

	// Source ranges apply to any address of the node that its packets carry.
	{"node", "l/ranges:80", "DROP"},
	{"bridge", "l/ranges:80", "DROP"},
	{"node", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"bridge", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"node-2 eth0", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"pod cni0", "l/ranges-node:80", "DROP"},
	{"l/ranges-node eth0", "l/ranges-node:80", "DROP"},

	// A Service without endpoints refuses connections.
	{"client eth0", "l/empty:80", "REJECT"},
	{"pod cni0", "l/empty:80", "REJECT"},
	{"node", "l/empty:80", "REFUSED"},

	// Cluster IPs are addresses of the node.
	{"pod cni0", "c/web:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
	{"client eth0", "c/web ping", "LOCAL"},
	{"pod cni0", "c/empty:80", "REFUSED"},
})

// sharedFlows are flows with VIPs claimed by default: local, except for ports without a Service.
var sharedFlows = slices.Concat(deviceFlows, []flow{
	{"l/lb", "l/lb:443", "FORWARD by eth0"},
	{"pod cni0", "l/lb ping", "LOCAL"},
	{"l/lb", "l/lb:80", "remote:8080 by eth0 as node"},
	{"x/web", "x/web:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"l/here", "l/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
	{"l/away", "l/away:80", "remote:8080 by eth0 as node"},
	{"l/ranges", "l/ranges:80", "DROP"},
	{"l/ranges-node", "l/ranges-node:80", "remote:8080 by eth0 as node"},
	{"client eth0", "l/empty:80", "REFUSED"},
	{"pod cni0", "l/empty:80", "REFUSED"},
})

func TestFlowsOfSharedVIPs(t *testing.T) {
	s := golden(t, "cluster")
	for _, family := range ip.Families {
		t.Run(family.String(), func(t *testing.T) { checkFlows(t, newHost(t, s, family), sharedFlows) })
	}
}

// A VIP that is another node's address is never local as a whole.
func TestVIPOfAnotherNode(t *testing.T) {
	for name, set := range map[string]func(*Scenario){
		"a next hop": func(s *Scenario) {
			s.Node.Inventory.Peers = []netip.Addr{netip.MustParseAddr("203.0.113.13"), netip.MustParseAddr("2001:db8:113::13")}
		},
		"an endpoint on the host network": func(s *Scenario) {
			for i := range s.Services {
				if s.Services[i].Name.Name == "lb" {
					for j := range s.Services[i].Ports {
						p := &s.Services[i].Ports[j]
						p.Endpoints = append(p.Endpoints,
							service.Endpoint{Addr: netip.MustParseAddrPort("203.0.113.13:80"), Node: "node-2", Ready: true, Serving: true},
							service.Endpoint{Addr: netip.MustParseAddrPort("[2001:db8:113::13]:80"), Node: "node-2", Ready: true, Serving: true})
					}
				}
			}
		},
		"an endpoint of another Service that has the VIP": func(s *Scenario) {
			for _, svc := range s.Services {
				if svc.Name.Name == "lb" {
					svc.Name.Name, svc.ClusterIPs = "host", []netip.Addr{netip.MustParseAddr("10.96.9.9"), netip.MustParseAddr("fd00:96::9:9")}
					svc.Ports = []service.Port{{Protocol: ip.TCP, Port: 8443, Endpoints: []service.Endpoint{
						{Addr: netip.MustParseAddrPort("203.0.113.13:8443"), Node: "node-2", Ready: true, Serving: true},
						{Addr: netip.MustParseAddrPort("[2001:db8:113::13]:8443"), Node: "node-2", Ready: true, Serving: true},
					}}}
					s.Services = append(s.Services, svc)
				}
			}
		},
	} {
		for _, family := range ip.Families {
			t.Run(name+" "+family.String(), func(t *testing.T) {
				s := golden(t, "cluster")
				set(s)
				h := newHost(t, s, family)
				if strings.Contains(name, "another Service") {
					checkFlows(t, h, []flow{{"pod cni0", "l/lb:8443", "l/lb:8443 by eth0 as node"}, {"node", "l/lb:8443", "l/lb:8443 by eth0 as node"}})
				}
				if lb := names(family).addr("l/lb"); h.Local(lb) || !h.claimed(lb) {
					t.Errorf("local %t, claimed by port %t", h.Local(lb), h.claimed(lb))
				}
				want := "remote:8080 by eth0 as node"
				if name == "an endpoint on the host network" {
					want += ", l/lb:80 by eth0 as node"
				}
				checkFlows(t, h, []flow{
					{"pod cni0", "l/lb:22", "FORWARD by eth0"},
					{"node", "l/lb:22", "FORWARD by eth0"},
					{"pod cni0", "l/lb:80", want},
					{"pod cni0", "c/lb:80", strings.ReplaceAll(want, "node", "pod")},
				})
			})
		}
	}
}

func TestFlowsOfClaimedPorts(t *testing.T) {
	s := golden(t, "cluster")
	s.Config.VIPs.LoadBalancers, s.Config.VIPs.ExternalIPs = plan.ClaimPort, plan.ClaimPort
	for _, family := range ip.Families {
		t.Run(family.String(), func(t *testing.T) { checkFlows(t, newHost(t, s, family), portFlows) })
	}
}

// An established, draining connection still reaches IPVS after the last endpoint is
// removed. Only new connections are refused before.
func TestClaimedPortWithoutEndpointDrains(t *testing.T) {
	s := golden(t, "cluster")
	s.Config.VIPs.LoadBalancers = plan.ClaimPort
	h := newHost(t, s, ip.IPv4)
	q := flow{"client eth0", "l/empty:80", ""}.question(names(ip.IPv4))
	q.State = trace.Established
	x := h.evaluator.Explain(h.Node, q)
	if got := names(ip.IPv4).text(&x); got != "REFUSED" {
		t.Errorf("%s, want it to reach IPVS", got)
	}
}

// TestPolicyOfDrop sets the policy of filter INPUT to DROP. Services continue to work,
// including what they refuse and drop. Of the node's own traffic only health checks and
// errors about connections pass.
func TestPolicyOfDrop(t *testing.T) {
	for _, claim := range []plan.ClaimMode{plan.ClaimAddress, plan.ClaimPort} {
		s := golden(t, "cluster")
		s.Config.VIPs.LoadBalancers, s.Config.VIPs.ExternalIPs = claim, claim
		for _, family := range ip.Families {
			accepting := newHost(t, s, family)
			dropping, n := accepting.in("policies of DROP"), names(family)
			for _, f := range slices.Concat(flows, portFlows) {
				q := f.question(n)
				x := accepting.evaluator.Explain(accepting.Node, q)
				f.want = n.text(&x)
				open := q.In == "" || strings.HasPrefix(f.to, "node:320") || strings.HasSuffix(f.to, "error")
				forwarded := strings.HasPrefix(f.want, "FORWARD") && q.In != "" && q.State != trace.Related
				if f.want == "LOCAL" && !open || forwarded {
					f.want = "DROP"
				}
				checkFlows(t, dropping, []flow{f})
			}
			q := flow{"remote eth0", "node:40000", ""}.question(n)
			q.State, q.Reply = trace.Established, true
			x := dropping.evaluator.Explain(dropping.Node, q)
			if got := n.text(&x); got != "LOCAL" {
				t.Errorf("a reply to the node: %s", got)
			}
		}
	}
}

// VIPs that do not answer pings reject them. The node answers.
func TestNoPing(t *testing.T) {
	for claim, from := range map[plan.ClaimMode]string{plan.ClaimAddress: "REJECT", plan.ClaimPort: "FORWARD by eth0"} {
		s := golden(t, "cluster")
		s.Config.VIPs.Ping, s.Config.VIPs.LoadBalancers = false, claim
		for _, family := range ip.Families {
			checkFlows(t, newHost(t, s, family), []flow{
				{"client eth0", "c/web ping", "REJECT"},
				{"client eth0", "l/lb ping", "REJECT"},
				{"pod cni0", "l/lb ping", from},
				{"client eth0", "node ping", "LOCAL"},
			})
		}
	}
}

// The node answers a Service's health check on its own addresses and on VIPs, on which some
// load balancers probe (kubernetes#117621). Of a VIP that is claimed by port, the port belongs
// to another device.
func TestHealthCheckPortOfAVIP(t *testing.T) {
	for _, claim := range []plan.ClaimMode{plan.ClaimAuto, plan.ClaimAddress, plan.ClaimPort} {
		s := golden(t, "external-local")
		s.Config.VIPs.LoadBalancers = claim
		h := newHost(t, s, ip.IPv4).in("policies of DROP")
		for to, want := range map[string]bool{"192.0.2.11": true, "203.0.113.5": claim != plan.ClaimPort} {
			q := trace.Question{Protocol: ip.TCP, From: names(ip.IPv4).addr("client"), In: "eth0", To: netip.AddrPortFrom(netip.MustParseAddr(to), 32000)}
			x := h.evaluator.Explain(h.Node, q)
			if got := names(ip.IPv4).text(&x); (got == "LOCAL") != want {
				t.Errorf("claimed by %s, %s: %s", claim, q.To, got)
			}
		}
	}
}

// A Service must not open another Service's port to clients outside the source ranges
// by using its number as health check port.
func TestHealthCheckPortOpensNothing(t *testing.T) {
	for _, claim := range []plan.ClaimMode{plan.ClaimAuto, plan.ClaimAddress, plan.ClaimPort} {
		s := golden(t, "cluster")
		s.Config.VIPs.LoadBalancers = claim
		for i := range s.Services {
			if s.Services[i].Name.Name == "here" {
				s.Services[i].HealthCheckNodePort = 80
			}
		}
		for _, family := range ip.Families {
			checkFlows(t, newHost(t, s, family), []flow{
				{"client eth0", "l/ranges:80", "DROP"},
				{"friend eth0", "l/ranges:80", "remote:8080 by eth0 as node"},
				{"client eth0", "l/away:80", "DROP"},
			})
		}
	}
}

// An address that one kind of VIP claims by port and another as an address is claimed
// in both ways, and is an address of the node.
func TestAddressWinsOverPort(t *testing.T) {
	s := golden(t, "cluster")
	s.Config.VIPs.LoadBalancers, s.Config.VIPs.ExternalIPs = plan.ClaimAddress, plan.ClaimPort
	for i := range s.Services {
		if svc := &s.Services[i]; svc.Name.Name == "web" {
			svc.ExternalIPs = []netip.Addr{netip.MustParseAddr("203.0.113.13")} // l/lb
		}
	}
	h := newHost(t, s, ip.IPv4)
	lb := netip.MustParseAddr("203.0.113.13")
	if !h.Local(lb) || !h.claimed(lb) {
		t.Errorf("local %t, claimed by port %t", h.Local(lb), h.claimed(lb))
	}
	checkFlows(t, h, []flow{
		{"client eth0", "l/lb:80", "remote:8080 by eth0 as node"},
		{"pod cni0", "l/lb:443", "REJECT"},
		{"client eth0", "l/lb ping", "LOCAL"},
	})
}

func TestFlows(t *testing.T) {
	s := golden(t, "cluster")
	s.Config.VIPs.LoadBalancers, s.Config.VIPs.ExternalIPs = plan.ClaimAddress, plan.ClaimAddress
	for _, family := range ip.Families {
		t.Run(family.String(), func(t *testing.T) { checkFlows(t, newHost(t, s, family), flows) })
	}
}

// The way in which pods are recognized decides what is masqueraded on the path to a
// cluster IP, and which clients are forwarded by a node without an endpoint.
func TestFlowsByDetection(t *testing.T) {
	const kept, masqueraded = "remote:8080 by eth0 as pod", "remote:8080 by eth0 as node"
	for _, tc := range []struct {
		name  string
		set   func(*Scenario)
		flows []flow
	}{
		{"not at all", func(s *Scenario) { s.Config.LocalTraffic = plan.LocalTraffic{} }, []flow{
			{"pod cni0", "c/away:80", kept},
			{"client eth0", "c/away:80", "remote:8080 by eth0 as client (dropped)"},
			{"c/away", "c/away:80", masqueraded},
			{"node", "l/away:80", masqueraded},
			{"client eth0", "l/away:80", "DROP"},
			{"farpod eth0", "l/away:80", "DROP"},
			{"pod cni0", "l/away:80", kept},
			{"client eth0", "l/here:80", "server:8080 by cni0 as client"},
			{"pod cni0", "l/here:80", "server:8080 by cni0 as pod, remote:8080 by eth0 as pod"},
			{"l/here", "l/here:80", "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"},
		}},
		{"by the bridge", func(s *Scenario) {
			s.Config.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectBridgeInterface, Interface: "cni0"}
		}, []flow{
			{"pod cni0", "c/away:80", kept},
			{"client eth0", "c/away:80", masqueraded},
			{"farpod eth0", "c/away:80", masqueraded},
			{"c/away", "c/away:80", masqueraded},
			{"pod cni0", "l/away:80", kept},
			{"farpod eth0", "l/away:80", "DROP"},
			{"l/away", "l/away:80", masqueraded},
		}},
		{"by the interface's name", func(s *Scenario) { byName(s, "veth1a2b") }, []flow{
			{"pod veth1a2b", "c/away:80", kept},
			{"node", "c/away:80", masqueraded},
			{"pod veth1a2b", "l/away:80", kept},
		}},
		{"by the name of other interfaces", func(s *Scenario) { byName(s, "vet") }, []flow{
			{"pod vet", "c/away:80", masqueraded},
		}},
		{"by the Node's CIDRs", func(s *Scenario) {
			s.Config.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectNodeCIDR}
			s.Node.PodCIDRs = scenario.Prefixes([]string{"10.244.1.0/24", "fd00:244:1::/64"})
		}, []flow{
			{"pod cni0", "c/away:80", kept},
			{"farpod eth0", "c/away:80", masqueraded},
		}},
		{"by the Node's CIDRs, which it does not have", func(s *Scenario) {
			s.Config.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectNodeCIDR}
		}, []flow{
			{"client eth0", "c/away:80", "remote:8080 by eth0 as client (dropped)"},
			{"c/away", "c/away:80", masqueraded},
		}},
		{"masquerade all", func(s *Scenario) { s.Config.MasqueradeAll = true }, []flow{
			{"pod cni0", "c/away:80", masqueraded},
			{"client eth0", "l/here:80", "server:8080 by cni0 as client"},
		}},
	} {
		for _, family := range ip.Families {
			t.Run(tc.name+" "+family.String(), func(t *testing.T) {
				s := golden(t, "cluster")
				s.Config.VIPs.LoadBalancers = plan.ClaimAddress
				tc.set(s)
				checkFlows(t, newHost(t, s, family), tc.flows)
			})
		}
	}
}

// byName recognizes pods by names that begin with "veth", and has one on a link.
func byName(s *Scenario, link string) {
	s.Config.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"}
	for _, pod := range hosts["pod"] {
		a := netip.MustParseAddr(pod)
		s.AddNetwork([]string{"route", netip.PrefixFrom(a, a.BitLen()).String(), "dev", link})
	}
	s.completeNetwork()
}

// A reply must return through the interface that the packet left by: the network
// delivers packets for an interface's address there, and the node drops packets that
// enter through another interface than it would send by.
func TestSymmetricPaths(t *testing.T) {
	for _, tc := range []struct {
		scenario, pod string
		mode          plan.SNATMode
		want          string
	}{
		{"eni", "10.12.192.44", plan.SNATOff, "by eth1 as 10.12.97.49: asymmetric"},
		{"eni", "10.12.192.44", plan.SNATSource, "by eth1 as 10.12.97.49: asymmetric"},
		{"eni", "10.12.192.44", plan.SNATFWMark, "by eth0 as 10.12.97.49: answered"},
		{"eni", "10.12.192.44", plan.SNATAuto, "by eth0 as 10.12.97.49: answered"},
		{"eni-configured", "10.12.192.44", plan.SNATAuto, "by eth1 as 10.12.192.10: answered"},
		{"eni-configured", "10.12.192.44", plan.SNATSource, "by eth1 as 10.12.192.10: answered"},
		{"eni-address", "10.12.192.44", plan.SNATOff, "by eth1 as 10.12.192.10: answered"},
		{"eni-address", "10.12.192.44", plan.SNATSource, "by eth1 as 10.12.192.10: answered"},
		{"eni-address", "10.12.192.44", plan.SNATFWMark, "by eth0 as 10.12.97.49: answered"},
		{"eni-address", "10.12.192.44", plan.SNATAuto, "by eth1 as 10.12.192.10: answered"},
		{"aws", "10.12.98.44", plan.SNATAuto, "by eth1 as 10.12.98.10: answered"},
		{"aws", "10.12.99.44", plan.SNATAuto, "by eth2 as 10.12.99.10: answered"},
		{"aws", "10.12.97.44", plan.SNATAuto, "by eth0 as 10.12.97.49: answered"},
		{"aws", "10.12.99.44", plan.SNATFWMark, "by eth0 as 10.12.97.49: answered"},
		{"aws", "10.12.97.44", plan.SNATFWMark, "by eth0 as 10.12.97.49: answered"},
		{"terway", "10.12.192.44", plan.SNATSource, "by eth1 as 10.12.97.49: asymmetric"},
		{"terway", "10.12.192.44", plan.SNATAuto, "by eth0 as 10.12.97.49: answered"},
	} {
		t.Run(fmt.Sprintf("%s %s %s", tc.scenario, tc.mode, tc.pod), func(t *testing.T) {
			s := golden(t, tc.scenario)
			s.Config.SNAT.Mode = tc.mode
			h := newHost(t, s, ip.IPv4)
			pod := netip.MustParseAddr(tc.pod)
			x := h.evaluator.Explain(h.Node, trace.Question{
				Protocol: ip.TCP, From: pod, In: s.entersBy(pod), To: netip.MustParseAddrPort("10.12.115.101:80"),
			})
			if len(x.RealServers) != 2 {
				t.Fatalf("not sent to the two servers: %+v", x)
			}
			for _, r := range x.RealServers {
				if got := fmt.Sprintf("by %s as %s: %s", r.LeavesBy, r.SeenSource, r.Verdict.Outcome); got != tc.want {
					t.Errorf("to %s:\n got %s\nwant %s", r.RealServer, got, tc.want)
				}
			}
		})
	}
}

// TestInvalidIsNotSentUnmasqueraded sends packets that conntrack cannot assign to a
// connection, which the nat table does not see.
func TestInvalidIsNotSentUnmasqueraded(t *testing.T) {
	const pod, farPod = "10.244.1.7", "10.244.2.7"
	mark := plan.LocalMark{Value: 0x9, Mask: 0x3fff}
	for _, tc := range []struct {
		scenario, src, dst string
		mark               plan.LocalMark
		want               trace.Outcome
	}{
		{"eni", "10.12.192.44", "10.12.115.101:80", mark, trace.Dropped},
		{"external-local", "100.64.9.9", "203.0.113.5:80", mark, trace.Sent}, // the client's address is kept
		{"external-local", "100.64.9.9", "198.51.100.7:80", mark, trace.Sent},
		{"external-local", "100.64.9.9", "192.0.2.11:30080", mark, trace.Sent},
		{"external-local", pod, "203.0.113.5:80", mark, trace.Sent},
		{"external-local", pod, "192.0.2.11:30080", mark, trace.Sent},
		{"external-local", farPod, "203.0.113.5:80", mark, trace.Sent},
		{"external-local", farPod, "192.0.2.11:30080", mark, trace.Sent},
		{"external-local", pod, "203.0.113.6:80", mark, trace.Sent},
		{"external-local", pod, "203.0.113.5:80", plan.LocalMark{}, trace.Sent},
		{"loadbalancer", "100.64.9.9", "203.0.113.5:80", mark, trace.Dropped},
	} {
		s := golden(t, tc.scenario)
		s.Config.LocalMark = tc.mark
		h := newHost(t, s, ip.IPv4)
		src := netip.MustParseAddr(tc.src)
		x := h.evaluator.Explain(h.Node, trace.Question{
			Protocol: ip.TCP, From: src, In: s.entersBy(src), To: netip.MustParseAddrPort(tc.dst), State: trace.Invalid,
		})
		if x.Verdict.Outcome != tc.want {
			t.Errorf("%s from %s: %s, want %s", tc.dst, tc.src, x.Verdict, tc.want)
		}
	}
}

// TestLocalFlows varies the settings that affect flows under externalTrafficPolicy
// Local.
func TestLocalFlows(t *testing.T) {
	const (
		kept    = "server:8080 by cni0 as client"
		inside  = "server:8080 by cni0 as bridge, remote:8080 by eth0 as node"
		outside = "server:8080 by cni0 as bridge"
	)
	for _, tc := range []struct {
		name  string
		in    string // an environment
		set   func(*Scenario)
		flows []flow
	}{
		{"masqueraded for everybody", "no other rules", func(s *Scenario) { s.Config.MasqueradeExternalLocal = true }, []flow{
			{"client eth0", "l/here:80", outside},
			{"client eth0", "x/here:80", outside},
			{"client eth0", "node:30081", outside},
			{"pod cni0", "l/here:80", inside},
			{"l/here", "l/here:80", inside},
		}},
		{"no second virtual servers", "no other rules", func(s *Scenario) { s.Config.LocalMark = plan.LocalMark{} }, []flow{
			{"client eth0", "l/here:80", kept},
			{"pod cni0", "l/here:80", "server:8080 by cni0 as pod"},
			{"l/here", "l/here:80", "server:8080 by cni0 as l/here"},
			{"farpod eth0", "l/here:80", "server:8080 by cni0 as farpod"},
			{"client eth0", "l/away:80", "DROP"},
			{"pod cni0", "l/away:80", "remote:8080 by eth0 as pod"},
		}},
		{"pods outside the cluster CIDR, or containers of another program", "no other rules", func(s *Scenario) {
			s.Config.LocalMark = plan.LocalMark{}
			s.Config.LocalTraffic.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.99.0.0/16"), netip.MustParsePrefix("fd00:99::/48")}
		}, []flow{
			{"client eth0", "l/away:80", "DROP"},
			{"pod cni0", "l/away:80", "remote:8080 by eth0 as pod"},
		}},
		{"no endpoint here that is ready", "no other rules", func(s *Scenario) { unready(s, "node-1") }, []flow{
			{"client eth0", "l/here:80", "DROP"},
			{"pod cni0", "l/here:80", "remote:8080 by eth0 as pod"},
			{"l/here", "l/here:80", "remote:8080 by eth0 as node"},
		}},
		{"none ready anywhere", "no other rules", func(s *Scenario) { unready(s, "node-1"); unready(s, "node-2") }, []flow{
			{"client eth0", "l/here:80", "REFUSED"},
			{"pod cni0", "l/here:80", "REFUSED"},
		}},
		// IPVS does not find the fwmark then. Internal clients get the node-local
		// endpoints, as under kube-proxy.
		{"a policy engine marks in INPUT", "marks of others in INPUT", func(*Scenario) {}, []flow{
			{"client eth0", "l/here:80", kept},
			{"client eth0", "l/lb:80", "remote:8080 by eth0 as node"},
			{"pod cni0", "l/here:80", "server:8080 by cni0 as pod"},
			{"client eth0", "l/away:80", "DROP"},
		}},
	} {
		for _, family := range ip.Families {
			t.Run(tc.name+" "+family.String(), func(t *testing.T) {
				s := golden(t, "cluster")
				s.Config.VIPs.LoadBalancers, s.Config.VIPs.ExternalIPs = plan.ClaimAddress, plan.ClaimAddress
				tc.set(s)
				checkFlows(t, newHost(t, s, family).in(tc.in), tc.flows)
			})
		}
	}
}

// unready makes a node's endpoints not ready.
func unready(s *Scenario, node string) {
	for i := range s.Services {
		for _, p := range s.Services[i].Ports {
			for j := range p.Endpoints {
				if e := &p.Endpoints[j]; e.Node == node {
					e.Ready, e.Serving = false, false
				}
			}
		}
	}
}
