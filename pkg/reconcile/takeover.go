package reconcile

import (
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// otherRulesServe reports whether existing rules must stay until every Service is
// programmed: kube-proxy's, or those of another version or configuration of ours. kube-proxy's
// rules of iptables mode are the only path to endpoints. Those of IPVS mode match sets that we
// do not fill, while our rules match sets that are still empty: new connections would not be
// masqueraded. Without such rules, ours are written first. In nftables mode kube-proxy's table
// stays beside our rules until then.
func (f *flush) otherRulesServe() bool {
	if f.t.pruning || f.t.rulesCurrent {
		return false
	}
	for family := range f.ns.kernel.NAT {
		if len(f.ns.cached.nat[family].Chains[servicesChain(family)]) > 0 || len(f.ns.cached.leftovers.nat[family].Chains[servicesChain(family)]) > 0 {
			return true
		}
	}
	return false
}

// waitsForPrune reports whether the virtual servers, members and VIPs in the kernel stay as they
// are until every Service is known, because other rules serve them. Those rules match only sets that
// had members, because both kube-proxy and we write a rule once its set has one. So connections to
// the first Service of a kind, or to the other endpoints after externalTrafficPolicy changed, would
// not be masqueraded. Prune follows within moments; then all members are added, the rules are
// replaced, and the virtual servers change. In iptables mode kube-proxy's rules translate packets
// before IPVS sees them, so the virtual servers are added beside them.
func (f *flush) waitsForPrune() bool {
	iptables := func(family ip.Family) bool { return f.ns.cached.successor(family) == &iptablesMode }
	return f.t.foundServers && f.otherRulesServe() && !slices.ContainsFunc(ip.Families, iptables)
}

// servicesChain returns the chain where our rules begin, as kube-proxy's do in iptables and
// IPVS mode.
func servicesChain(family ip.Family) nat.Chain {
	return nat.Chain{Family: family, Table: nat.NAT, Name: plan.ChainServices}
}

// detectCurrentRules sets rulesCurrent if the rules in the kernel are the plan's, with any sets in
// use. Then an earlier process of this version and configuration wrote them, and they may be
// changed at once. A process killed while a set came into or went out of use leaves rules for other
// sets than those with members now. They count as the plan's too.
func (f *flush) detectCurrentRules() {
	if f.t.pruning || f.t.rulesCurrent {
		return
	}
	for family := range f.ns.kernel.NAT {
		variants := make([]nat.State, len(f.ns.node.Variants))
		for i, v := range f.ns.node.Variants {
			variants[i] = ofFamily(v, family)
		}
		if !nat.Among(f.ns.cached.nat[family], variants) {
			return
		}
	}
	f.t.rulesCurrent = true
}

// rulesWritten reports whether the rules of a family in the kernel are the plan's. It is true
// for a family without iptables.
func (ns *nodeSections) rulesWritten(family ip.Family) bool {
	return ns.kernel.NAT[family] == nil || len(nat.Diff(ns.cached.nat[family], ofFamily(ns.node.NAT, family))) == 0
}

// hasDeferredRemovals reports whether a removal waits until every Service is served.
func (f *flush) hasDeferredRemovals() bool {
	return f.otherRulesServe() || len(f.ns.cached.kubeProxy) > 0 || differences(f.ns.leftovers()) > 0 || len(f.ns.staleRoutes) > 0
}

// routesToDelete are the routes of an earlier configuration. They are deleted once every VIP
// is claimed as configured now.
func (ns *nodeSections) routesToDelete() nodeSection {
	return ns.routes(routing.DeleteRoute,
		func() []routing.Route { return slices.Collect(maps.Keys(ns.staleRoutes)) },
		func(route routing.Route) { delete(ns.staleRoutes, route) })
}

// stillServes reports whether a policy rule of an earlier configuration is still needed. Such a
// rule looks up a table with VIPs of that configuration, or makes packets for their other ports
// skip table local.
func (ns *nodeSections) stillServes(rule routing.Rule) bool {
	switch {
	case rule.Action == routing.SkipLocal:
		return len(ns.staleRoutes) > 0
	case rule.Action != routing.Lookup:
		return false
	}
	for route := range ns.staleRoutes {
		if route.Table == rule.Table && route.Family == rule.Family {
			return true
		}
	}
	return false
}

// kubeProxyTables are kube-proxy's nftables tables. They are deleted once every Service is
// served without them. Established connections survive: conntrack keeps their translation. The
// kernel applies it only while the family has a nat chain of any table (nf_nat_register_fn), so
// a table stays until our rules of its family are written. Without any, the packets would reach
// the VIP itself, and this node would reset their connections.
func (ns *nodeSections) kubeProxyTables() nodeSection {
	return section[nft.KubeProxyChange]{
		diff: func() []nft.KubeProxyChange {
			if ns.kernel.KubeProxy == nil {
				return nil
			}
			return slices.DeleteFunc(ns.cached.kubeProxy.Removals(), func(c nft.KubeProxyChange) bool { return !ns.rulesWritten(c.Family) })
		},
		write: ns.kernel.writeKubeProxy,
		done:  perChange(func(c nft.KubeProxyChange) { delete(ns.cached.kubeProxy, c.Family) }),
	}
}
