package reconcile

import (
	"cmp"
	"errors"
	"fmt"
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
	return r.cleanup()
}

// cleanup deletes rules first, so that no rule refers to the sets, and virtual servers while
// the sets still say which ones are ours.
func (r *Reconciler) cleanup() (kubeProxyActive bool, err error) {
	o, err := r.beginObserve(everything)()
	if err != nil {
		return false, err
	}
	r.runResync(o)
	var errs []error
	for family, k := range r.kernel.NAT {
		errs = append(errs, kernel.Join(r.kernel.writeNAT(k, nat.Diff(r.rulesToRemove(family, r.cached.nat[family]), nat.State{}))))
	}
	f := &flush{Reconciler: r}
	f.flushAll(r.leftoverSections(r.rulesToRemove, func(ip.Family) {})...)
	errs = append(errs, f.problems.Err())
	for family, err := range r.cached.leftovers.unread {
		errs = append(errs, fmt.Errorf("rules of %s in %s may remain: %w", family, r.kernel.Leftovers.Programs, err))
	}
	if r.kernel.Loopback != nil {
		errs = append(errs, kernel.Join(r.kernel.writeLoopback(nft.DiffLoopback(o.loopback, nil))))
	}
	if r.kubeProxyErr != nil {
		errs = append(errs, fmt.Errorf("kube-proxy's nftables tables may remain: %w", r.kubeProxyErr))
	}
	if r.kernel.KubeProxy != nil {
		errs = append(errs, kernel.Join(r.kernel.writeKubeProxy(r.tablesToRemove())))
	}
	servers, inUse := r.serversToRemove()
	errs = append(append(errs, inUse...),
		kernel.Join(r.kernel.writeIPVS(servers)),
		kernel.Join(r.kernel.writeRouting(r.routingRemovals())),
		kernel.Join(r.kernel.writeSets(removals(r.setsToRemove(servers)))))
	return r.kubeProxyActive(), errors.Join(errs...)
}

// NotTakenOver returns the families whose rules are still ours: no kube-proxy has replaced
// them.
func NotTakenOver(cfg *plan.Config, kernel Kernel) ([]ip.Family, error) {
	return New(cfg, kernel, Periods{}).notTakenOver()
}

func (r *Reconciler) notTakenOver() ([]ip.Family, error) {
	o, err := r.beginObserve(extent{rules: true})()
	if err != nil {
		return nil, err
	}
	if o.kubeProxyErr != nil {
		return nil, o.kubeProxyErr
	}
	r.takeRules(o)
	return slices.DeleteFunc(slices.Clone(r.cfg.Families), func(f ip.Family) bool {
		_, rules := r.cached.nat[f].Chains[servicesChain(f)]
		return !rules || r.successor(f) != &noSuccessor
	}), nil
}

func (r *Reconciler) routingRemovals() []routing.Change {
	var changes []routing.Change
	for rule := range r.cached.rules {
		changes = append(changes, routing.Change{Op: routing.DeleteRule, Rule: rule})
	}
	for _, routes := range []map[routing.Route]struct{}{r.staleRoutes, r.cached.routes} {
		for route := range routes {
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	for v := range r.vips.allExisting() {
		if route, ok := r.cfg.VIPs.Route(v.key); ok { // addresses are removed with the link
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	return append(changes, r.linkRemovals()...)
}

func removals(sets []ipset.Set) []ipset.Change {
	slices.SortFunc(sets, func(a, b ipset.Set) int { return cmp.Compare(a.Name, b.Name) })
	changes := make([]ipset.Change, len(sets))
	for i, set := range sets {
		changes[i] = ipset.Change{Op: ipset.DestroySet, Set: set}
	}
	return changes
}
