package proxy

import (
	"context"
	"maps"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// minComparePeriod is the least time between two comparisons that are made
// because something seems to have been taken away.
const minComparePeriod = 3 * time.Second

// calmPeriod is that time once a few comparisons in a row have found nothing that were
// made because another program had changed rules: Calico's Felix, say, rewrites its
// own in the chains where ours are whenever a pod starts.
const (
	calmPeriod = 15 * time.Second
	calmAfter  = 3
)

// leastPeriod is the least time between two comparisons now.
func (p *Proxy) leastPeriod() time.Duration {
	if p.calm >= calmAfter && !p.need.State {
		return calmPeriod
	}
	return minComparePeriod
}

// observed is what an observation of the kernel came to.
type observed struct {
	observation *apply.Observation
	err         error
	took        time.Duration
}

// compares is what there is to compare, and when, besides the next time.
type compares struct {
	need     apply.Parts   // because of what has happened
	reading  apply.Parts   // by the observation that runs
	stateAt  time.Time     // when the state is due
	rulesAt  time.Time     // and the rules
	lookAt   time.Time     // when the next look is due
	looked   bool          // the comparison follows from a look
	mistaken time.Duration // for how long no look is taken, as looks found nothing of ours
}

// Every SyncPeriod kernel parameters and listeners are compared, and the state as long
// as it is small: beyond stateSize entries it is compared every second period, and so on,
// up to mostPeriods, so that comparing takes the same share of a processor however many
// Services there are. What is missing from it is found by looks (apply.Suspicious) much
// earlier. Rules are read only after the kernel has told of a change, and every
// mostPeriods; with every period where it does not tell, as of iptables-legacy.
const (
	stateSize   = 2000
	mostPeriods = 40
)

// lookPeriod is the time between two looks.
const lookPeriod = time.Second

func (p *Proxy) statePeriod() time.Duration {
	return p.SyncPeriod * time.Duration(min(1+p.applier.Size()/stateSize, mostPeriods))
}

func (p *Proxy) rulesPeriod() time.Duration {
	if !p.RulesWatched {
		return p.SyncPeriod
	}
	return p.SyncPeriod * mostPeriods
}

// look sees whether the kernel holds as much as it should, at little cost, and has it
// compared at once if not. Another program that keeps changing virtual servers of its
// own looks the same: then it is looked at less and less often, down to SyncPeriod.
func (p *Proxy) look(now time.Time) {
	p.lookAt = now.Add(lookPeriod)
	if p.applier.Suspicious() {
		p.looked = true
		p.compareSoon(now, apply.Parts{State: true})
	}
}

// lookedRight notes what came of a comparison that followed from a look.
func (p *Proxy) lookedRight(differences int, now time.Time) {
	if !p.looked {
		return
	}
	p.looked = false
	if differences > 0 {
		p.mistaken = 0
		return
	}
	p.mistaken = min(max(2*p.mistaken, minComparePeriod), max(p.SyncPeriod, lookPeriod))
	p.lookAt = now.Add(p.mistaken)
}

// compareSoon has parts of the kernel compared after another program has changed
// something, but no more often than every few seconds.
func (p *Proxy) compareSoon(now time.Time, parts apply.Parts) {
	p.need.State, p.need.Rules = p.need.State || parts.State, p.need.Rules || parts.Rules
	at := p.comparedAt.Add(p.leastPeriod())
	if at.Before(now) {
		at = now
	}
	if p.compareAt.IsZero() || at.Before(p.compareAt) {
		p.compareAt = at
	}
}

// restore adds again what another program has deleted, without a look at the
// rest of the kernel. Rules are back already.
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
	n := p.applier.Lost(vips)
	if rules+n > 0 {
		p.Meter.Restored(rules + n)
	}
	if n > 0 {
		logger.Info("VIPs were deleted, adding them again", "count", n)
		p.settle(ctx, p.applier.Flush())
		p.reportFailing()
	}
}

// observe reads the kernel beside the loop, which goes on meanwhile. What is told to
// be taken away from now on has it read again: it may have been read already.
func (p *Proxy) observe(now time.Time) {
	p.compareAt, p.byRules, p.rulesChanged = time.Time{}, p.rulesChanged, false
	p.reading = apply.Parts{State: p.need.State || !now.Before(p.stateAt), Rules: p.need.Rules || !now.Before(p.rulesAt)}
	p.need = apply.Parts{}
	read := p.applier.BeginObserveParts(p.reading)
	result := make(chan observed, 1)
	p.observed = result
	go func() {
		began := time.Now()
		o, err := read()
		result <- observed{o, err, time.Since(began)}
	}()
}

// compare takes the result of an observation, which is then gone through.
func (p *Proxy) compare(ctx context.Context, o observed) {
	p.observed = nil
	p.comparedAt = time.Now()
	if p.compareAt.IsZero() { // nothing was taken away meanwhile
		p.compareAt = p.comparedAt.Add(p.SyncPeriod)
	} else {
		p.compareAt = p.comparedAt.Add(p.leastPeriod())
	}
	if o.err != nil {
		p.need = apply.Everything
		p.compareAt = time.Now().Add(p.retries.failed(nobody, time.Now()))
		klog.FromContext(ctx).Error(o.err, "Cannot compare the kernel with the plan, trying again")
		return
	}
	if p.reading.State {
		p.stateAt = p.comparedAt.Add(p.statePeriod())
	}
	if p.reading.Rules {
		p.rulesAt = p.comparedAt.Add(p.rulesPeriod())
	}
	p.lookForListeners(ctx)
	maps.Copy(p.waiting, p.lacking) // a module may have been loaded
	p.adoption, p.observeTook = p.applier.BeginAdopt(o.observation), o.took
}

// goOnComparing compares some of what was observed, so that no change waits for all of
// it, and repairs what differs in the end.
func (p *Proxy) goOnComparing(ctx context.Context) {
	if p.adoption.Step() {
		return
	}
	differences := p.adoption.End()
	p.adoption = nil
	if p.calm++; differences > 0 || !p.byRules {
		p.calm = 0
	}
	if differences > 0 {
		klog.FromContext(ctx).Info("The kernel differs from the plan, repairing it", "differences", differences)
	}
	p.Observer.Compared(p.observeTook, differences)
	p.lookedRight(differences, time.Now())
	p.settle(ctx, p.applier.Flush())
	p.reportFailing()
	p.warn(ctx)
	if p.reading.State && p.applier.Size() > stateSize {
		giveBack()
	}
}

// endComparing gives up what was observed and not compared yet.
func (p *Proxy) endComparing() {
	if p.adoption != nil {
		p.adoption.End()
	}
}
