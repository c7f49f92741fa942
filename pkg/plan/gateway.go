package plan

import (
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Gateway is an interface whose network has a configured gateway, and which no policy rule of
// another program routes to. Without routes of its own, replies to clients that enter by it
// would leave by the primary interface, and a strict reverse-path check would drop the requests.
// Reply routing binds these flows to the interface, as it does for an ENI. Flows of pods and of
// the node are not concerned.
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
		via := sourceIn(cfg.SNAT.Gateways, &n.Inventory, routing.Route{Family: family, Link: l.Name})
		if !via.IsValid() || !l.Up || skip[l.Name] {
			continue
		}
		out = append(out, newGateway(l, via, cfg.VIPs.Table+l.Index))
	}
	return out
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
	for i := range routes {
		if routes[i].Dst == dst {
			return true
		}
	}
	return false
}

// addGatewayRoutes adds the routes of the interfaces that flows can be bound to.
func addGatewayRoutes(plan *NodePlan, paths Paths) {
	for _, g := range paths.Gateways {
		for _, b := range paths.Bound {
			if b.Table == g.Table {
				plan.Routes = append(plan.Routes, g.Routes...)
			}
		}
	}
}
