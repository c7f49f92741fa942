package reconcile

import (
	"slices"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Placeholder rules add members to the sets of plan.Demands. These members have no owner, and
// the Reconciler never changes them. Once such a set has a member, the Reconciler counts the
// set as in use until the process ends.

// isDemand reports whether a set is one of plan.Demands.
func isDemand(name string) bool {
	return slices.ContainsFunc(ip.Families, func(f ip.Family) bool {
		return slices.ContainsFunc(plan.Demands, func(d plan.Demand) bool { return d.Set.In(f) == name })
	})
}

// demand records that a set of plan.Demands is in use.
func (s *sets) demand(name string) {
	s.get(name).demanded = true
	s.use(name)
}

// demandPeriod is the time between two reads of the sets. TCP sends a dropped SYN again after
// a second, and the rules should exist by then.
const demandPeriod = 500 * time.Millisecond

// checkDemands reads which sets of plan.Demands have members. It also runs during a
// comparison.
func (r *Reconciler) checkDemands(now time.Time) {
	if len(r.node.Demands) == 0 || now.Before(r.demandsAt) {
		return
	}
	r.demandsAt = now.Add(demandPeriod)
	sizes, err := r.kernel.IPSet.Sizes(r.node.Demands)
	if err != nil {
		return // the next check retries
	}
	for _, name := range r.node.Demands {
		if n, there := sizes[name]; there && n != 0 { // -1: not reported, before Linux 4.10
			r.sets.demand(name)
		}
	}
}

// demanded returns the sets whose rules on demand the node's plan does not have yet, although
// the sets are in use.
func (ns *nodeSections) demanded() []string {
	return slices.DeleteFunc(slices.Clone(ns.node.Demands), func(name string) bool { return !ns.sets.uses[name] })
}

// flushDemanded writes rules on demand, and then removes their placeholder rules.
func (r *Reconciler) flushDemanded() Problems {
	r.input.Demanding, r.input.stale = true, true
	problems := r.Flush()
	r.input.Demanding, r.input.stale = false, true
	return append(problems, r.Flush()...)
}

// recordDemands marks as in use each set whose rules on demand exist already.
func (ns *nodeSections) recordDemands() {
	for _, family := range ns.cfg.Families {
		for _, d := range plan.Demands {
			if _, written := ns.cached.nat[family].Chains[d.Rules(family)]; written {
				ns.sets.demand(d.Set.In(family))
			}
		}
	}
}

// recordRefusedDemands marks as in use each set whose placeholder rules the kernel or iptables
// refuses. Their rules on demand are then written at once.
func (ns *nodeSections) recordRefusedDemands(omitted []nat.OmittedRule) {
	for _, o := range omitted {
		for _, name := range nat.Arguments(o.Rule, "--add-set") {
			ns.sets.demand(name)
		}
	}
}
