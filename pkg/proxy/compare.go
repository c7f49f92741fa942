package proxy

import (
	"context"
	"maps"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// minComparePeriod is the minimum time between two comparisons that were triggered
// because something may have been deleted.
const minComparePeriod = 3 * time.Second

// calmPeriod replaces minComparePeriod after calmAfter comparisons in a row that were
// triggered by another program's rule changes and found nothing. For example, Calico's
// Felix rewrites its own rules in the chains that contain ours whenever a pod starts.
const (
	calmPeriod = 15 * time.Second
	calmAfter  = 3
)

// minPeriod returns the current minimum time between two comparisons.
func (p *Proxy) minPeriod() time.Duration {
	if p.calm >= calmAfter && !p.need.State {
		return calmPeriod
	}
	return minComparePeriod
}

// observed is the result of an observation of the kernel.
type observed struct {
	observation *reconcile.Observation
	err         error
	took        time.Duration
}

// compares holds what the next comparison covers, and when.
type compares struct {
	need      reconcile.Parts // requested, in addition to the periodic parts
	reading   reconcile.Parts // covered by the running observation
	stateAt   time.Time       // next periodic comparison of the state
	rulesAt   time.Time       // next periodic comparison of the rules
	lookAt    time.Time       // next look
	byLook    bool            // a look triggered the comparison
	lookPause time.Duration   // pause after looks that found nothing of ours
}

// Kernel parameters and listeners are compared every SyncPeriod, and so is the state
// while it is small. From stateSize entries the state is compared every second period,
// and so on, up to every maxPeriods, so that the CPU share of comparisons does not grow
// with the number of Services. Looks (reconcile.Suspicious) find missing state much earlier.
// Rules are read after the kernel reported a change, and every maxPeriods. If the kernel
// does not report changes, as for iptables-legacy, they are read every period.
const (
	stateSize  = 2000
	maxPeriods = 40
)

// muchState is the number of entries whose comparison leaves memory worth freeing.
const muchState = 2000

// lookPeriod is the time between two looks.
const lookPeriod = time.Second

func (p *Proxy) statePeriod() time.Duration {
	return p.SyncPeriod * time.Duration(min(1+p.reconciler.Size()/stateSize, maxPeriods))
}

func (p *Proxy) rulesPeriod() time.Duration {
	if !p.RulesWatched {
		return p.SyncPeriod
	}
	return p.SyncPeriod * maxPeriods
}

// look checks cheaply whether the kernel holds as many objects as it should, and if
// not, triggers a comparison at once. Another program that keeps changing its own
// virtual servers triggers it too: looks then become less frequent, down to one per
// SyncPeriod.
func (p *Proxy) look(now time.Time) {
	p.lookAt = now.Add(lookPeriod)
	if p.reconciler.Suspicious() {
		p.byLook = true
		p.compareSoon(now, reconcile.Parts{State: true})
	}
}

// noteLookResult adjusts the time of the next look after a comparison that a look
// triggered.
func (p *Proxy) noteLookResult(differences int, now time.Time) {
	if !p.byLook {
		return
	}
	p.byLook = false
	if differences > 0 {
		p.lookPause = 0
		return
	}
	p.lookPause = min(max(2*p.lookPause, minComparePeriod), max(p.SyncPeriod, lookPeriod))
	p.lookAt = now.Add(p.lookPause)
}

// compareSoon requests a comparison of some parts after another program changed
// something, no more often than minPeriod allows.
func (p *Proxy) compareSoon(now time.Time, parts reconcile.Parts) {
	p.need.State, p.need.Rules = p.need.State || parts.State, p.need.Rules || parts.Rules
	at := p.comparedAt.Add(p.minPeriod())
	if at.Before(now) {
		at = now
	}
	if p.compareAt.IsZero() || at.Before(p.compareAt) {
		p.compareAt = at
	}
}

// restore adds deleted state again without reading the rest of the kernel. Deleted
// policy rules have already been added.
func (p *Proxy) restore(ctx context.Context, lost []routing.Lost) {
	logger := klog.FromContext(ctx)
	var vips []routing.Lost
	rules := 0
	for _, l := range lost {
		if l.Addr.IsValid() {
			vips = append(vips, l)
		} else {
			rules++
			logger.Info("Another program deleted a policy rule of ours, it was added again", "rule", l.Rule.String())
		}
	}
	n := p.reconciler.Lost(vips)
	if rules+n > 0 {
		p.Meter.Restored(rules + n)
	}
	if n > 0 {
		logger.Info("VIPs were deleted, adding them again", "count", n)
		p.settle(ctx, p.reconciler.Flush())
		p.reportFailing()
	}
}

// observe starts reading the kernel in the background. A deletion reported from now on
// triggers another observation, because this one may already have read that part.
func (p *Proxy) observe(now time.Time) {
	p.compareAt, p.byRules, p.rulesChanged = time.Time{}, p.rulesChanged, false
	p.reading = reconcile.Parts{State: p.need.State || !now.Before(p.stateAt), Rules: p.need.Rules || !now.Before(p.rulesAt)}
	p.need = reconcile.Parts{}
	read := p.reconciler.BeginObserveParts(p.reading)
	result := make(chan observed, 1)
	p.observed = result
	go func() {
		began := time.Now()
		o, err := read()
		result <- observed{o, err, time.Since(began)}
	}()
}

// compare starts comparing the result of an observation.
func (p *Proxy) compare(ctx context.Context, o observed) {
	p.observed = nil
	p.comparedAt = time.Now()
	if p.compareAt.IsZero() { // no deletion was reported meanwhile
		p.compareAt = p.comparedAt.Add(p.SyncPeriod)
	} else {
		p.compareAt = p.comparedAt.Add(p.minPeriod())
	}
	if o.err != nil {
		p.need = reconcile.Everything
		p.compareAt = time.Now().Add(p.retries.failed(nodeKey, time.Now()))
		klog.FromContext(ctx).Error(o.err, "Cannot read the kernel to compare it with the plan, retrying")
		return
	}
	if p.reading.State {
		p.stateAt = p.comparedAt.Add(p.statePeriod())
	}
	if p.reading.Rules {
		p.rulesAt = p.comparedAt.Add(p.rulesPeriod())
	}
	p.refreshListeners(ctx)
	maps.Copy(p.dirty, p.noScheduler) // a module may have been loaded
	p.comparison, p.observeTook = p.reconciler.BeginAdopt(o.observation), o.took
}

// stepComparison compares a portion of the observed state, so that changes need not
// wait for all of it. After the last portion it repairs the differences.
func (p *Proxy) stepComparison(ctx context.Context) {
	if p.comparison.Step() {
		return
	}
	differences := p.comparison.End()
	p.comparison = nil
	if p.calm++; differences > 0 || !p.byRules {
		p.calm = 0
	}
	if differences > 0 {
		klog.FromContext(ctx).Info("The kernel differs from the plan, repairing it", "differences", differences)
	}
	p.Observer.Compared(p.observeTook, differences)
	p.noteLookResult(differences, time.Now())
	p.settle(ctx, p.reconciler.Flush())
	p.reportFailing()
	p.warn(ctx)
	if p.reading.State && p.reconciler.Size() > muchState {
		freeMemory()
	}
}

// endComparison discards observed state that has not been compared yet.
func (p *Proxy) endComparison() {
	if p.comparison != nil {
		p.comparison.End()
	}
}
