// Package reconcile reconciles the kernel with the plan. It caches what it has programmed, so
// that a change of one Service costs only that change. It reads the kernel at startup,
// periodically, and after an error, and repairs drift.
package reconcile

import (
	"errors"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Reconciler holds the desired state and the cached state of the kernel, and writes the
// difference. Its methods must not be called concurrently.
//
// It has three layers, each embedding the one before: serviceTables is what Services own, nodeSections
// adds what only the node owns, and Reconciler adds the order of writes, comparisons with the kernel,
// and the schedule.
//
// At startup call SetNode, Load and Flush, then Set and Flush or FlushAhead for every Service, then Prune.
// From then on call Set, Delete and SetNode as objects change, then Flush. Call Step when it is due
// (see Next), or when another program has changed the kernel, and Settle after all of these.
type Reconciler struct {
	*nodeSections
	schedule

	spotChecker spotChecker
	ahead       *additions // being written; nil if there are none
}

// New returns a Reconciler with an empty cached state.
func New(cfg *plan.Config, kernel Kernel, periods Periods) *Reconciler {
	sections := newNodeSections(newServiceTables(cfg), kernel)
	return &Reconciler{
		nodeSections: sections,
		schedule:     newSchedule(periods),
		spotChecker:  spotChecker{t: sections.serviceTables, kernel: &sections.kernel},
	}
}

// Problem is state that could not be programmed.
type Problem struct {
	// Owners are the Services that lack it; empty if it belongs to the node, or to no
	// Service any more.
	Owners []types.NamespacedName
	Err    error
}

// Problems are the problems of one Flush.
type Problems []Problem

// Err joins the errors; nil if there are none.
func (p Problems) Err() error {
	errs := make([]error, len(p))
	for i := range p {
		errs[i] = p[i].Err
	}
	return errors.Join(errs...)
}

// add adds a problem of the owners, or of the node if there are none.
func (p *Problems) add(owners []types.NamespacedName, err error) {
	*p = append(*p, Problem{owners, err})
}

// Set replaces the desired state of a Service. Only keys that differ from the state before
// become dirty. Set assigns the fwmarks of desired.Internal; the error names the addresses and
// ports without one.
func (r *Reconciler) Set(owner *Owner, desired plan.ServicePlan) error {
	desired, err := r.assignMarks(owner.Name, r.keepPortClaims(owner.Name, desired))
	r.setDesired(owner, desired)
	return err
}

// Delete removes the desired state of a Service.
func (r *Reconciler) Delete(name types.NamespacedName) {
	_, _ = r.allocator.assign(name, nil, nil) // never fails: it requests no fwmark
	r.retries.succeeded(name)
	if o := r.owned.Get(name); o != nil {
		r.setDesired(o.owner, plan.ServicePlan{})
		r.owned.Delete(name)
	}
}
