package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

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
func (r *Reconciler) Cleanup() error {
	o, err := r.BeginObserve()()
	if err != nil {
		return err
	}
	r.Adopt(o)
	var errs []error
	for family, k := range r.kernel.NAT {
		errs = append(errs, kernel.Join(r.kernel.writeNAT(k, nat.Diff(r.rulesToRemove(family, r.cached.nat[family]), nat.State{}))))
	}
	errs = append(errs, kernel.Join(r.dropLeftovers(r.rulesToRemove)))
	for family, err := range r.cached.leftovers.unread {
		errs = append(errs, fmt.Errorf("rules of %s in %s may remain: %w", family, r.kernel.Leftovers.Programs, err))
	}
	if r.kernel.Loopback != nil {
		errs = append(errs, kernel.Join(r.kernel.writeLoopback(nft.DiffLoopback(o.loopback, nil))))
	}
	if r.kernel.KubeProxy != nil {
		errs = append(errs, kernel.Join(r.kernel.writeKubeProxy(r.tablesToRemove())))
	}
	servers, inUse := r.serversToRemove()
	errs = append(append(errs, inUse...),
		kernel.Join(r.kernel.writeIPVS(servers)),
		kernel.Join(r.kernel.writeRouting(r.routingRemovals())),
		kernel.Join(r.kernel.writeSets(removals(r.setsToRemove(servers)))))
	return errors.Join(errs...)
}

func (r *Reconciler) routingRemovals() []routing.Change {
	var changes []routing.Change
	for rule := range r.cached.rules {
		changes = append(changes, routing.Change{Op: routing.DeleteRule, Rule: rule})
	}
	for route := range r.staleRoutes {
		changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
	}
	for v := range r.vips.allHeld() {
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
