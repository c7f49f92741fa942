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
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Cleanup removes everything that is ours, or was kube-proxy's. It deletes rules first, so
// that no rule refers to the sets, and virtual servers while the sets still say which ones
// are ours. Where kube-proxy has taken over since, its state stays. The Reconciler must not be
// used afterwards.
func (a *Reconciler) Cleanup() error {
	o, err := a.BeginObserve()()
	if err != nil {
		return err
	}
	a.Adopt(o)
	var errs []error
	for family, k := range a.kernel.NAT {
		errs = append(errs, kernel.Join(a.kernel.writeNAT(k, nat.Diff(a.rulesToRemove(family, a.cached.nat[family]), nat.State{}))))
	}
	errs = append(errs, kernel.Join(a.dropLeftovers(a.rulesToRemove)))
	for family, err := range a.cached.leftovers.unread {
		errs = append(errs, fmt.Errorf("rules of %s in %s may remain: %w", family, a.kernel.Leftovers.Programs, err))
	}
	if a.kernel.Loopback != nil {
		errs = append(errs, kernel.Join(a.kernel.writeLoopback(nft.DiffLoopback(o.loopback, nil))))
	}
	if a.kernel.KubeProxy != nil {
		errs = append(errs, kernel.Join(a.kernel.writeKubeProxy(a.tablesToRemove())))
	}
	servers, inUse := a.serversToRemove()
	errs = append(append(errs, inUse...),
		kernel.Join(a.kernel.writeIPVS(servers)),
		kernel.Join(a.kernel.writeRouting(a.routingRemovals())),
		kernel.Join(a.kernel.writeSets(removals(a.setsToRemove(servers)))))
	return errors.Join(errs...)
}

// NotTakenOver returns the families whose rules are still ours: no kube-proxy has replaced
// them. The Reconciler must not be used afterwards.
func (a *Reconciler) NotTakenOver() ([]ip.Family, error) {
	o, err := a.BeginObserve()()
	if err != nil {
		return nil, err
	}
	a.Adopt(o)
	return slices.DeleteFunc(slices.Clone(a.cfg.Families), func(f ip.Family) bool {
		_, rules := a.cached.nat[f].Chains[servicesChain(f)]
		return !rules || a.successor(f) != &noSuccessor
	}), nil
}

func (a *Reconciler) routingRemovals() []routing.Change {
	var changes []routing.Change
	for rule := range a.cached.rules {
		changes = append(changes, routing.Change{Op: routing.DeleteRule, Rule: rule})
	}
	for route := range a.staleRoutes {
		changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
	}
	for v := range a.vips.allHeld() {
		if route, ok := a.cfg.VIPs.Route(v.key); ok { // addresses are removed with the link
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	return append(changes, a.linkRemovals()...)
}

func removals(sets []ipset.Set) []ipset.Change {
	slices.SortFunc(sets, func(a, b ipset.Set) int { return cmp.Compare(a.Name, b.Name) })
	changes := make([]ipset.Change, len(sets))
	for i, set := range sets {
		changes[i] = ipset.Change{Op: ipset.DestroySet, Set: set}
	}
	return changes
}
