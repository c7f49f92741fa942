package trace

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// twoBranches gives two pods their own tables, which only packets of their interfaces use.
// Requests of the first, 10.12.0.45, to the Service are routed as kube-ipvs does it; the second,
// 10.12.0.46, is the endpoint.
func twoBranches(t *testing.T) *Node {
	t.Helper()
	n := newNode(t, "10.12.0.46:8080")
	n.Rules[0].Priority = 20
	rule := func(priority int, r routing.Rule) {
		r.Family, r.Priority = ip.IPv4, priority
		n.Rules = append(n.Rules, r)
	}
	for i, pod := range []string{"10.12.0.45/32", "10.12.0.46/32"} {
		table, link, out := 101+i, []string{"cali2", "cali3"}[i], []string{"vlan1", "vlan2"}[i]
		n.Links = append(n.Links, routing.Link{Index: 6 + 2*i, Name: link}, routing.Link{Index: 7 + 2*i, Name: out})
		n.Routes = append(n.Routes,
			routing.Route{Table: table, Dst: prefix("0.0.0.0/0"), Link: out, Via: netip.MustParseAddr("10.12.0.1")},
			routing.Route{Table: table, Dst: prefix(pod), Link: link})
		rule(10, routing.Rule{IIf: link, Table: table})
		rule(10, routing.Rule{IIf: out, Table: table})
	}
	rule(9, routing.Rule{Mark: 0x3060, Mask: 0x3060, Table: routing.TableLocal})
	rule(479, routing.Rule{Mark: 0x3060, Mask: 0x3060, To: prefix("10.12.0.45/32"), Table: 101})
	rule(32760, routing.Rule{From: prefix("10.12.0.45/32"), IIf: "lo", Table: 101})
	slices.SortStableFunc(n.Rules, func(a, b routing.Rule) int { return a.Priority - b.Priority })
	chains := n.Ruleset["nat"].Chains
	chains["KUBE-POSTROUTING"] = append([]nat.Rule{"-s 10.12.0.45/32 -j RETURN"}, chains["KUBE-POSTROUTING"]...)
	n.Ruleset["mangle"] = nat.Contents{Chains: map[string][]nat.Rule{
		"PREROUTING": {
			"-s 10.12.0.45/32 -d 10.96.0.10/32 -m conntrack --ctstate NEW -j CONNMARK --set-xmark 0x3060/0x3060",
			"-m connmark --mark 0x3060/0x3060 -j MARK --set-xmark 0x3060/0x3060",
		},
		"INPUT": {"-m mark --mark 0x3060/0x3060 -j MARK --set-xmark 0x0/0x3060"},
	}}
	return n
}

// TestRequestComesBack has a request leave the node, although the endpoint is on the node.
func TestRequestComesBack(t *testing.T) {
	pod := ask("10.12.0.45", vip+":80")
	for name, c := range map[string]struct {
		change   func(*Node)
		question Question
		outcome  Outcome
		reason   string // a part of it
		leavesBy string
		seen     string
	}{
		"the reply is one of the first connection, without its mark": {nil, pod,
			Asymmetric, "as a second connection, without the mark of the first: the request entered by cali2, the reply leaves by eth0", "vlan1", "10.12.0.45"},
		"and finds the client without a mark": {func(n *Node) {
			n.Rules = append([]routing.Rule{{Family: ip.IPv4, Priority: 8, IIf: "lo", To: prefix("10.12.0.45/32"), Table: 101}}, n.Rules...)
		}, pod, Answered, "", "vlan1", "10.12.0.45"},
		"it is masqueraded, so the reply returns as one of the first connection": {nil, ask("192.0.2.9", vip+":80"), Answered, "", "eth0", "10.1.0.5"},
		"the node, masqueraded with its own address and a random port": {func(n *Node) {
			own := netip.MustParseAddr("10.1.0.5")
			n.Sets["KUBE-CLUSTER-IP"].Entries[ipset.Entry{Addr: own, Port: 80, Protocol: ip.TCP}] = 0
			n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: own, Port: 80}] = n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80}]
		}, ask("10.1.0.5", "10.1.0.5:80"), Answered, "", "eth0", "10.1.0.5"},
		"it keeps the address of a client outside": {func(n *Node) {
			n.Ruleset["nat"].Chains["PREROUTING"] = nil
		}, ask("192.0.2.9", vip+":80"), Asymmetric, "with the client's address 192.0.2.9", "eth0", "192.0.2.9"},
		"a rule drops the second connection": {func(n *Node) {
			n.Ruleset["filter"].Chains["FORWARD"] = []nat.Rule{"-i vlan2 -j DROP"}
		}, pod, Dropped, "-i vlan2 -j DROP", "vlan1", "10.12.0.45"},
	} {
		t.Run(name, func(t *testing.T) {
			n := twoBranches(t)
			if c.change != nil {
				c.change(n)
			}
			expectPath(t, Explain(n, c.question), c.outcome, c.reason, c.leavesBy, c.seen)
		})
	}
}
