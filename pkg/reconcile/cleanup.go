package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Cleanup removes everything from the kernel that is ours, or was kube-proxy's. Where
// kube-proxy has taken over since, its state stays; kubeProxyActive reports whether any has.
func Cleanup(cfg *plan.Config, kernel Kernel) (kubeProxyActive bool, err error) {
	r := New(cfg, kernel, Periods{})
	r.setNode(plan.ForNode(cfg, &plan.Node{}))
	return (&cleaner{r}).cleanup()
}

// cleaner implements Cleanup and NotTakenOver.
type cleaner struct{ *Reconciler }

// cleanup deletes rules first, so that no rule refers to the sets, and virtual servers while
// the sets still say which ones are ours.
func (cl *cleaner) cleanup() (kubeProxyActive bool, err error) {
	o, err := cl.beginObserve(everything)()
	if err != nil {
		return false, err
	}
	cl.runResync(o)
	var errs []error
	for family, k := range cl.kernel.NAT {
		errs = append(errs, kernel.Join(cl.kernel.writeNAT(k, nat.Diff(cl.rulesToRemove(family, cl.cached.nat[family]), nat.State{}))))
	}
	f := cl.newFlush()
	f.flushAll(cl.leftoverSections(cl.rulesToRemove, func(ip.Family) {})...)
	errs = append(errs, f.problems.Err())
	for family, err := range cl.cached.leftovers.unread {
		errs = append(errs, fmt.Errorf("rules of %s in %s may remain: %w", family, cl.kernel.Leftovers.Programs, err))
	}
	if cl.kernel.Loopback != nil {
		errs = append(errs, kernel.Join(cl.kernel.writeLoopback(nft.DiffLoopback(o.loopback, nil))))
	}
	if cl.kubeProxyErr != nil {
		errs = append(errs, fmt.Errorf("kube-proxy's nftables tables may remain: %w", cl.kubeProxyErr))
	}
	if cl.kernel.KubeProxy != nil {
		errs = append(errs, kernel.Join(cl.kernel.writeKubeProxy(cl.tablesToRemove())))
	}
	servers, inUse := cl.serversToRemove()
	routes, sources := cl.routingRemovals()
	errs = append(append(append(errs, inUse...), sources...),
		kernel.Join(cl.kernel.writeIPVS(servers)),
		kernel.Join(cl.kernel.writeRouting(routes)),
		kernel.Join(cl.kernel.writeSets(removals(cl.setsToRemove(servers)))))
	return cl.kubeProxyActive(), errors.Join(errs...)
}

// NotTakenOver returns the families whose rules are still ours: no kube-proxy has replaced
// them.
func NotTakenOver(cfg *plan.Config, kernel Kernel) ([]ip.Family, error) {
	return (&cleaner{New(cfg, kernel, Periods{})}).notTakenOver()
}

func (cl *cleaner) notTakenOver() ([]ip.Family, error) {
	o, err := cl.beginObserve(extent{rules: true})()
	if err != nil {
		return nil, err
	}
	if o.kubeProxyErr != nil {
		return nil, o.kubeProxyErr
	}
	cl.takeRules(o)
	return slices.DeleteFunc(slices.Clone(cl.cfg.Families), func(f ip.Family) bool {
		_, rules := cl.cached.nat[f].Chains[servicesChain(f)]
		return !rules || cl.cached.successor(f) != &noSuccessor
	}), nil
}

// routingRemovals returns the changes that remove policy rules, routes and VIPs, and an error for
// each VIP that stays local; see keptSources. It adds the routes that keep these local: if one is
// refused, the VIP stays as it is.
func (cl *cleaner) routingRemovals() ([]routing.Change, []error) {
	sources, err := cl.sources()
	if err != nil {
		return nil, []error{err} // the addresses in use are unknown
	}
	toKeep, kept, errs := cl.keptSources(sources)
	refused := map[netip.Addr]bool{}
	for _, f := range cl.kernel.writeRouting(toKeep) {
		refused[f.Change.Route.Dst.Addr()] = true
		errs = append(errs, f)
	}
	var changes []routing.Change
	for rule := range cl.cached.rules {
		changes = append(changes, routing.Change{Op: routing.DeleteRule, Rule: rule})
	}
	for _, routes := range []map[routing.Route]struct{}{cl.staleRoutes, cl.cached.routes} {
		for route := range routes {
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	for v := range cl.vips.allExisting() {
		if route, ok := cl.cfg.VIPs.Route(v.key); ok && !kept[v.key.Addr] { // addresses are removed with the link
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	return append(changes, cl.linkRemovals(refused)...), errs
}

func removals(sets []ipset.Set) []ipset.Change {
	slices.SortFunc(sets, func(a, b ipset.Set) int { return cmp.Compare(a.Name, b.Name) })
	changes := make([]ipset.Change, len(sets))
	for i, set := range sets {
		changes[i] = ipset.Change{Op: ipset.DestroySet, Set: set}
	}
	return changes
}
