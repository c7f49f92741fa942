package plan

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Gateway is an interface, other than the primary one and ENIs, for whose network a gateway is
// configured. Without routes of its own, replies to clients that enter by it would leave by the
// primary interface, and a strict reverse-path check would drop the requests. Reply routing binds
// these flows to the interface, as it does for an ENI. Flows of pods and of the node do not change.
type Gateway struct {
	Link  string
	Table int // contains Routes only
	// Routes are the routes to the networks of the interface's addresses and a default route
	// through the gateway.
	Routes []routing.Route
}

// gateways returns the interfaces of one family with a configured gateway, by index. It skips
// those that are down, the primary one, and ENIs, whose tables have routes already.
func gateways(cfg *Config, n *Node, family ip.Family, found []ENI) []Gateway {
	if len(cfg.SNAT.Gateways) == 0 {
		return nil
	}
	skip := map[string]bool{primaryLink(&n.Inventory, family): true, routing.DummyLink: true}
	for _, e := range found {
		skip[e.Link] = true
	}
	var out []Gateway
	for i := range n.Inventory.Links {
		l := &n.Inventory.Links[i]
		via := addressFor(cfg.SNAT.Gateways, &n.Inventory, l.Name, family)
		if !via.IsValid() || !l.Up || skip[l.Name] || !mayReach(cfg, l, via) {
			continue
		}
		out = append(out, newGateway(l, via, cfg.VIPs.Table+l.Index))
	}
	return out
}

// mayReach reports whether an interface may lead to a gateway. VLANs and the members of a bond may
// share a MAC address. So members are skipped, and a gateway that is configured only by MAC address
// must be link-local or in a network of the interface.
func mayReach(cfg *Config, l *routing.Link, via netip.Addr) bool {
	if l.Master != "" {
		return false
	}
	if !slices.Contains(cfg.SNAT.Gateways[l.MAC], via) || slices.Contains(cfg.SNAT.Gateways[l.Name], via) || via.IsLinkLocalUnicast() {
		return true
	}
	return slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Prefix.Masked().Contains(via) })
}

func newGateway(l *routing.Link, via netip.Addr, table int) Gateway {
	g := Gateway{Link: l.Name, Table: table}
	family := ip.Of(via)
	for _, a := range l.Addresses {
		dst := a.Prefix.Masked()
		if !a.Global || ip.Of(dst.Addr()) != family || dst.IsSingleIP() || hasRoute(g.Routes, dst) {
			continue
		}
		g.Routes = append(g.Routes, routing.Route{Family: family, Table: table, Dst: dst, Link: l.Name})
	}
	all := netip.PrefixFrom(family.Unspecified(), 0)
	g.Routes = append(g.Routes, routing.Route{Family: family, Table: table, Dst: all, Link: l.Name, Via: via})
	return g
}

func hasRoute(routes []routing.Route, dst netip.Prefix) bool {
	return slices.ContainsFunc(routes, func(r routing.Route) bool { return r.Dst == dst })
}

// addGatewayRoutes adds the routes of the interfaces that flows can be bound to.
func addGatewayRoutes(plan *NodePlan, paths Paths) {
	for _, g := range paths.Gateways {
		if slices.ContainsFunc(paths.Bound, func(b Binding) bool { return b.Table == g.Table }) {
			plan.Routes = append(plan.Routes, g.Routes...)
		}
	}
}
