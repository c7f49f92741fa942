package reconcile

import (
	"slices"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Rules of the plan add members to the sets of plan.Demands. No Service wants these members,
// and the Reconciler leaves them alone: it only counts such a set as in use from the first
// member on, as long as it runs.

// isDemand reports whether a set is one of plan.Demands.
func isDemand(name string) bool {
	return slices.ContainsFunc(ip.Families, func(f ip.Family) bool {
		return slices.ContainsFunc(plan.Demands, func(d plan.Demand) bool { return d.Set.In(f) == name })
	})
}

// demand counts a set of plan.Demands as in use.
func (r *Reconciler) demand(name string) {
	r.sets.get(name).demanded = true
	r.useSet(name)
}

// demandPeriod is the time between two looks for demands: a client sends its first packet
// again after a second, and the rules should be there by then.
const demandPeriod = 500 * time.Millisecond

// lookForDemands reads which sets have members. It does not wait for comparisons.
func (r *Reconciler) lookForDemands(now time.Time) {
	if len(r.node.Demands) == 0 || now.Before(r.demandsAt) {
		return
	}
	r.demandsAt = now.Add(demandPeriod)
	sizes, err := r.kernel.IPSet.Sizes(r.node.Demands)
	if err != nil {
		return // the next look tries again
	}
	for _, name := range r.node.Demands {
		if n, there := sizes[name]; there && n != 0 { // -1: not reported, before Linux 4.10
			r.demand(name)
		}
	}
}

// adoptDemands counts sets as in use whose rules an earlier process has written.
func (r *Reconciler) adoptDemands() {
	for _, family := range r.cfg.Families {
		for _, d := range plan.Demands {
			if _, written := r.cached.nat[family].Chains[d.Rules(family)]; written {
				r.demand(d.Set.In(family))
			}
		}
	}
}

// refusedDemands counts sets as in use to which no rule can add members, because the kernel
// or iptables refuses such a rule.
func (r *Reconciler) refusedDemands(omitted []nat.OmittedRule) {
	for _, o := range omitted {
		for _, name := range nat.Arguments(o.Rule, "--add-set") {
			r.demand(name)
		}
	}
}
