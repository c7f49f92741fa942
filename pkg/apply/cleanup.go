package apply

import (
	"errors"
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Cleanup takes away all that is ours, or was kube-proxy's:
// rules first, so that the sets are free, and virtual servers while the sets
// still tell which are ours. The Applier is of no use afterwards.
func (a *Applier) Cleanup() error {
	o, err := a.BeginObserve()()
	if err != nil {
		return err
	}
	a.Adopt(o)
	var errs []error
	for family, k := range a.kernel.NAT {
		errs = append(errs, kernel.Join(k.Apply(nat.Diff(o.nat[family], nat.State{}))))
	}
	if a.kernel.Loopback != nil {
		errs = append(errs, kernel.Join(a.kernel.Loopback.Apply(loopback.Diff(o.loopback, nil))))
	}
	if a.kernel.KubeProxy != nil {
		errs = append(errs, kernel.Join(a.kernel.KubeProxy.Apply(o.kubeProxy.Removals())))
	}
	errs = append(errs,
		kernel.Join(a.kernel.IPVS.Apply(ipvs.Diff(a.have.servers, nil))),
		kernel.Join(a.kernel.Routing.Apply(a.routingRemovals())),
		kernel.Join(a.kernel.IPSet.Apply(a.setRemovals())))
	return errors.Join(errs...)
}

func (a *Applier) routingRemovals() []routing.Change {
	var changes []routing.Change
	for rule := range a.have.rules {
		changes = append(changes, routing.Change{Op: routing.DeleteRule, Rule: rule})
	}
	for vip := range a.have.vips {
		if route, ok := a.cfg.VIPs.Route(vip); ok { // addresses go with the link
			changes = append(changes, routing.Change{Op: routing.DeleteRoute, Route: route})
		}
	}
	if a.have.link {
		changes = append(changes, routing.Change{Op: routing.DeleteLink})
	}
	return changes
}

func (a *Applier) setRemovals() []ipset.Change {
	var changes []ipset.Change
	for _, name := range slices.Sorted(maps.Keys(a.have.sets)) {
		changes = append(changes, ipset.Change{Op: ipset.DestroySet, Set: a.have.sets[name].Set})
	}
	return changes
}
