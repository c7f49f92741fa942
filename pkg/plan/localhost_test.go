package plan_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Node ports of the loopback address are served where --nodeport-addresses
// selects it, and the node has an address that answers come back to.
func TestLocalhostIsServed(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*scenario)
		want   bool
	}{
		"by default":    {func(*scenario) {}, true},
		"turned off":    {func(s *scenario) { s.config.LocalhostNodePorts = false }, false},
		"primary alone": {func(s *scenario) { s.config.NodePortAddresses.Primary = true }, false},
		"others selected": {func(s *scenario) {
			s.config.NodePortAddresses.Prefixes = prefixes([]string{"192.0.2.0/24", "2001:db8::/64"})
		}, false},
		"selected": {func(s *scenario) { s.config.NodePortAddresses.Prefixes = prefixes([]string{"127.0.0.0/8", "::1/128"}) }, true},
		"the Node's address is elsewhere": {func(s *scenario) {
			s.node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8::99")}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := load(t, "cluster")
			s.config.LocalhostNodePorts = true
			tc.change(s)
			part, facts := plan.NodeWide(&s.config, &s.node), plan.FactsOf(&s.config, &s.node)
			for _, family := range ip.Families {
				_, exchanged := part.Loopback[family]
				_, marked := part.NAT.Chains[nat.Chain{Family: family, Table: nat.Raw, Name: "KUBE-IPVS-LOCALHOST"}]
				served := slices.Contains(facts.NodePorts, loopback.Address(family))
				if exchanged != tc.want || marked != tc.want || served != tc.want {
					t.Errorf("%s: exchanged %t, marked %t, served %t, want %t", family, exchanged, marked, served, tc.want)
				}
			}
		})
	}
}

// What nobody outside can ask needs no number, no bitmap, and no refusal.
func TestLocalhostVirtualServers(t *testing.T) {
	s := load(t, "cluster")
	s.config.LocalhostNodePorts = true
	facts := plan.FactsOf(&s.config, &s.node)
	for i := range s.services {
		svc := &s.services[i]
		part := plan.Service(&s.config, &facts, svc)
		for _, o := range part.Internal {
			if o.Key.Addr.IsLoopback() {
				t.Errorf("%s: %s has a virtual server for outside", svc.Name, o.Key)
			}
		}
		for _, vs := range part.VirtualServers {
			if vs.Key.Addr.IsLoopback() && len(vs.RealServers) == 0 {
				t.Errorf("%s: %s has no endpoint", svc.Name, vs.Key)
			}
		}
		served := slices.ContainsFunc(part.VirtualServers, func(vs plan.VirtualServer) bool { return vs.Key.Addr.IsLoopback() })
		if want := svc.Name.Name == "web" || svc.Name.Name == "here"; want && !served {
			t.Errorf("%s has no node port on the loopback address", svc.Name)
		}
	}
}
