package plan_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// TestGateways checks which interfaces get routes and a policy rule for a configured gateway.
func TestGateways(t *testing.T) {
	const own, other = "link eth0 10.0.0.1/24", "default dev eth0 via 10.0.0.254"
	for name, c := range map[string]struct {
		network  []string
		gateways map[string]string
		down     bool
		want     []string // routes
	}{
		"a second interface": {[]string{own, other, "link eth1 10.13.0.5/24"}, map[string]string{"eth1": "10.13.0.1"}, false,
			[]string{"route 10.13.0.0/24 dev eth1 table 80082", "route 0.0.0.0/0 via 10.13.0.1 dev eth1 table 80082"}},
		"two addresses in a network": {[]string{own, other, "link eth1 10.13.0.5/24 10.13.0.6/24 10.14.0.5/32"}, map[string]string{"eth1": "10.13.0.1"}, false,
			[]string{"route 10.13.0.0/24 dev eth1 table 80082", "route 0.0.0.0/0 via 10.13.0.1 dev eth1 table 80082"}},
		"no address":            {[]string{own, other, "link eth1"}, map[string]string{"eth1": "10.13.0.1"}, false, []string{"route 0.0.0.0/0 via 10.13.0.1 dev eth1 table 80082"}},
		"of the other family":   {[]string{own, other, "link eth1 10.13.0.5/24"}, map[string]string{"eth1": "fd00::1"}, false, nil},
		"not configured":        {[]string{own, other, "link eth1 10.13.0.5/24"}, nil, false, nil},
		"no such interface":     {[]string{own, other}, map[string]string{"eth1": "10.13.0.1"}, false, nil},
		"the primary interface": {[]string{own, other}, map[string]string{"eth0": "10.0.0.254"}, false, nil},
		"an ENI": {[]string{own, other, "link eth1 10.13.0.5/24", "default dev eth1 via 10.13.0.1 table 1003", "rule 2000 from 10.13.0.44/32 lookup 1003"},
			map[string]string{"eth1": "10.13.0.1"}, false, nil},
		"set down": {[]string{own, other, "link eth1 10.13.0.5/24"}, map[string]string{"eth1": "10.13.0.1"}, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := withNetwork(c.network...)
			cfg := defaultConfig()
			cfg.SNAT.Gateways = map[string][]netip.Addr{}
			for link, gateway := range c.gateways {
				cfg.SNAT.Gateways[link] = []netip.Addr{netip.MustParseAddr(gateway)}
			}
			s.Node.Inventory.Links[len(s.Node.Inventory.Links)-1].Up = !c.down
			got := plan.ForNode(&cfg, &s.Node)
			var routes []string
			for _, r := range got.Routes {
				routes = append(routes, r.String())
			}
			if !slices.Equal(routes, c.want) {
				t.Errorf("routes %q, want %q", routes, c.want)
			}
			var rules []string
			for _, r := range got.Rules {
				if r.Priority == cfg.SNAT.Priority && r.Table > cfg.VIPs.Table {
					rules = append(rules, r.String())
				}
			}
			if (len(rules) == 1 && strings.HasSuffix(rules[0], "lookup 80082")) != (len(c.want) > 0) {
				t.Errorf("policy rules %q", rules)
			}
			if stray := got.NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Mangle, Name: "KUBE-IPVS-STRAY"}]; len(stray) > 0 && c.want != nil {
				t.Errorf("packets by the interface are dropped: %q", stray)
			}
		})
	}
}
