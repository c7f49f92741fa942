//go:build e2e

package plan_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat/nattest"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	testscenario "github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// TestCanonicalRules checks that iptables-save prints every rule of the plan as the
// plan writes it, for all configurations and networks. A rule printed differently would
// count as a difference and be rewritten at each comparison.
func TestCanonicalRules(t *testing.T) {
	for _, family := range ip.Families {
		rules := map[nat.Table][]nat.Rule{}
		for _, cfg := range everyConfig() {
			for _, n := range []*plan.Node{secondaryInterfaces(), awaiting(*secondaryInterfaces())} {
				part := plan.ForNode(&cfg, n)
				for table, more := range nattest.Rules(family, part.NAT) {
					rules[table] = append(rules[table], more...)
					slices.Sort(rules[table])
					rules[table] = slices.Compact(rules[table])
				}
			}
		}
		for _, table := range []nat.Table{nat.NAT, nat.Filter, nat.Mangle, nat.Raw} {
			if len(rules[table]) == 0 {
				t.Errorf("%s: no rules in table %s", family, table)
			}
		}
		nattest.CheckCanonical(t, family, rules)
	}
}

// everyConfig varies every setting that the rules depend on.
func everyConfig() []plan.Config {
	var out []plan.Config
	for _, mode := range []plan.SNATMode{plan.SNATAuto, plan.SNATSource, plan.SNATFWMark, plan.SNATOff} {
		for _, local := range []plan.LocalTraffic{
			{},
			{Mode: plan.DetectClusterCIDR, CIDRs: prefixes([]string{"10.244.0.0/16", "fd00:244::/32"})},
			{Mode: plan.DetectNodeCIDR},
			{Mode: plan.DetectBridgeInterface, Interface: "cni0"},
			{Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"},
		} {
			for _, all := range []bool{false, true} {
				c := defaultConfig()
				c.Families = ip.Families
				c.SNAT.Mode, c.LocalTraffic, c.MasqueradeAll, c.LocalhostNodePorts = mode, local, all, true
				out = append(out, c)
			}
		}
	}
	return out
}

// secondaryInterfaces returns a node with two of them in each family: eth1 with a known
// SNAT source, eth2 without one.
func secondaryInterfaces() *plan.Node {
	n := &plan.Node{PodCIDRs: prefixes([]string{"10.244.1.0/24", "fd00:244:1::/64"})}
	inv := &n.Inventory
	inv.Links = []routing.Link{
		testscenario.NewLink(1, "eth0", "10.12.97.49/24", "fd00:97::49/64"),
		testscenario.NewLink(2, "eth1", "10.12.192.10/24", "fd00:192::10/64"),
		testscenario.NewLink(3, "eth2"),
	}
	for _, family := range ip.Families {
		inv.Defaults = append(inv.Defaults, defaultRoute(family, "eth0", 254))
		for table, link := range map[int]string{1001: "eth1", 1002: "eth2"} {
			inv.Defaults = append(inv.Defaults, defaultRoute(family, link, table))
			pods := map[ip.Family]string{ip.IPv4: "10.12.192.0/28", ip.IPv6: "fd00:192:1::/80"}[family]
			inv.Rules = append(inv.Rules, routing.Rule{Family: family, Priority: table, From: netip.MustParsePrefix(pods), Table: table})
		}
	}
	return n
}

func defaultRoute(family ip.Family, link string, table int) routing.Route {
	return routing.Route{Family: family, Table: table, Link: link, Dst: netip.PrefixFrom(family.Unspecified(), 0)}
}
