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

// comparePeriod is the least time between two comparisons now.
func (p *Proxy) comparePeriod() time.Duration {
	if p.calm >= calmAfter {
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

// compareSoon has the kernel compared after somebody took something away, but
// no more often than every few seconds.
func (p *Proxy) compareSoon(now time.Time) {
	at := p.comparedAt.Add(p.comparePeriod())
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
	for _, l := range lost {
		if l.Addr.IsValid() {
			vips = append(vips, l)
		} else {
			logger.Info("Another program deleted a policy rule of ours, it was added again", "rule", l.Rule.String())
		}
	}
	if n := p.applier.Lost(vips); n > 0 {
		logger.Info("VIPs were deleted, adding them again", "count", n)
		p.settle(ctx, p.applier.Flush())
		p.reportFailing()
	}
}

// observe reads the kernel beside the loop, which goes on meanwhile. What is told to
// be taken away from now on has it read again: it may have been read already.
func (p *Proxy) observe() {
	p.compareAt, p.byRules, p.rulesChanged = time.Time{}, p.rulesChanged, false
	read := p.applier.BeginObserve()
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
		p.compareAt = p.comparedAt.Add(p.comparePeriod())
	}
	if o.err != nil {
		p.compareAt = time.Now().Add(p.retries.failed(nobody, time.Now()))
		klog.FromContext(ctx).Error(o.err, "Cannot compare the kernel with the plan, trying again")
		return
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
	p.settle(ctx, p.applier.Flush())
	p.reportFailing()
	p.warn(ctx)
	giveBack()
}

// endComparing gives up what was observed and not compared yet.
func (p *Proxy) endComparing() {
	if p.adoption != nil {
		p.adoption.End()
	}
}
