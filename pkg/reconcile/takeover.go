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

// stage says what a flush may write. Until Prune, some Services are not known yet, so no undesired
// state is deleted. The rules in the kernel may be others': those of kube-proxy, or of another version
// or configuration of ours. They serve until all Services are known:
//
//	stage     rules in the kernel                     virtual servers, members, VIPs   our rules
//	holding   others', with virtual servers           wait                             wait
//	beside    others', of iptables mode or without    are added and updated            only those of mangle
//	adding    the plan's, or none                     are added and updated            are written
//	settled   the plan's                              undesired ones are deleted too   are written
//
// A node without rules is in stage adding at once, and so is one whose rules are the plan's
// (detectCurrentRules): an earlier process of this version and configuration wrote them. Prune begins
// stage settled, once all Services have been planned.
//
// Two kinds of state do not depend on the stage. In each stage, sysctls are set, and the missing link,
// sets, policy rules and routes are added. kube-proxy's nftables tables, and rules in the other iptables
// back end, stay beside ours until stage settled (deleteReplaced).
type stage int

const (
	// holding: kube-proxy's rules of IPVS mode, or those of another version or configuration, serve
	// the virtual servers in the kernel. Our rules cannot replace them yet, because ours match sets
	// that kube-proxy does not fill. Virtual servers cannot change either: the others' rules match only
	// sets that had members, because both kube-proxy and we write a rule once its set has one. So
	// connections to the first Service of a kind, or to the other endpoints after
	// externalTrafficPolicy changed, would not be masqueraded.
	holding stage = iota
	// beside: kube-proxy's rules of iptables mode are the only path to endpoints. They translate
	// packets before IPVS sees them, so virtual servers may be added beside them. The same applies to
	// any rules on a node without virtual servers.
	beside
	// adding: no others' rules serve.
	adding
	// settled: all Services are known.
	settled
)

// othersServe reports whether rules that are not the plan's must stay.
func (s stage) othersServe() bool { return s < adding }

// stage returns the current stage.
func (ns *nodeSections) stage() stage {
	usesIPTablesMode := func(family ip.Family) bool { return ns.cached.successor(family) == &iptablesMode }
	switch {
	case ns.pruning:
		return settled
	case ns.rulesCurrent || !ns.hasServicesChain():
		return adding
	case ns.foundServers && !slices.ContainsFunc(ip.Families, usesIPTablesMode):
		return holding
	}
	return beside
}

// hasServicesChain reports whether the chain where kube-proxy's and our rules begin exists, in either
// iptables back end.
func (ns *nodeSections) hasServicesChain() bool {
	for family := range ns.kernel.NAT {
		if len(ns.cached.nat[family].Chains[servicesChain(family)]) > 0 || len(ns.cached.leftovers.nat[family].Chains[servicesChain(family)]) > 0 {
			return true
		}
	}
	return false
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
	return f.ns.stage().othersServe() || len(f.ns.cached.kubeProxy) > 0 || differences(f.ns.leftovers()) > 0 || len(f.ns.staleRoutes) > 0
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
