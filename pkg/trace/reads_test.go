package trace

import (
	"hash/maphash"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// A change affects the evaluations that read what differs.
func TestChangesAffectReads(t *testing.T) {
	const from, to = "10.1.0.5", "10.96.0.10:80"
	other := netip.MustParseAddr("10.96.0.99")
	for name, c := range map[string]struct {
		change func(*Node)
		want   bool
	}{
		"nothing": {func(*Node) {}, false},
		"a chain that the packet passes": {func(n *Node) {
			c := n.Ruleset[nat.NAT]
			c.Chains["KUBE-SERVICES"] = append(c.Chains["KUBE-SERVICES"], "-j ACCEPT")
		}, true},
		"a chain that no rule leads to": {func(n *Node) { n.Ruleset[nat.NAT].Chains["OTHER"] = []nat.Rule{"-j ACCEPT"} }, false},
		"a policy": {func(n *Node) {
			n.Ruleset[nat.Filter] = nat.Contents{Chains: map[string][]nat.Rule{"OUTPUT": nil}, Policies: map[string]string{"OUTPUT": "DROP"}}
		}, true},
		"the packet's member of a set": {func(n *Node) { clear(n.Sets["KUBE-CLUSTER-IP"].Entries) }, true},
		"another member": {func(n *Node) {
			n.Sets["KUBE-CLUSTER-IP"].Entries[ipset.Entry{Addr: other, Port: 80, Protocol: ip.TCP}] = 0
		}, false},
		"the set": {func(n *Node) { delete(n.Sets, "KUBE-CLUSTER-IP") }, true},
		"the virtual server": {func(n *Node) {
			n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80}] = ipvs.Service{}
		}, true},
		"another virtual server": {func(n *Node) { n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: other, Port: 80}] = ipvs.Service{} }, false},
		"the address of the VIP": {func(n *Node) { n.Routes = append(n.Routes[:1:1], n.Routes[2:]...) }, true},
		"another address": {func(n *Node) {
			n.Routes = append(n.Routes, routing.Route{Table: 255, Dst: netip.PrefixFrom(other, 32), Link: "kube-ipvs0", Local: true})
		}, false},
		"the order of routes": {func(n *Node) { n.Routes[0], n.Routes[1] = n.Routes[1], n.Routes[0] }, false},
		"a route to a prefix": {func(n *Node) {
			n.Routes = append(n.Routes, routing.Route{Table: 7, Dst: prefix("10.0.0.0/8"), Link: "eth1"})
		}, true},
		"a policy rule":    {func(n *Node) { n.Rules = n.Rules[1:] }, true},
		"a parameter":      {func(n *Node) { n.Sysctls["net/ipv4/vs/snat_reroute"] = "0" }, true},
		"an interface":     {func(n *Node) { n.Links = n.Links[1:] }, true},
		"another back end": {func(n *Node) { n.Other = nat.Ruleset{} }, true},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := newNode(t, "10.244.1.5:8080"), newNode(t, "10.244.1.5:8080")
			c.change(after)
			changes := Compare(before, after)
			var open []*Connection
			var request, next Reads
			e := Evaluator{Reads: &request, Opened: func(c *Connection) { open = append(open, c) }}
			e.Explain(before, ask(from, to))
			got := changes.Affect(&request)
			for tries := 0; got && !c.want && tries < 5; tries++ { // by chance, with this seed
				seed, request = maphash.MakeSeed(), Reads{}
				e.Explain(before, ask(from, to))
				changes = Compare(before, after)
				got = changes.Affect(&request)
			}
			if got != c.want {
				t.Errorf("affects the first packet: %t, want %t", got, c.want)
			}
			e.Reads = &next
			e.Continue(before, open[0])
			if e.Continue(after, open[0]).Outcome != Answered && !changes.Affect(&next) {
				t.Error("does not affect the next packet, which is not answered")
			}
		})
	}
}
