package proxy

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
)

// loop serves until the context ends.
func (p *Proxy) loop(ctx context.Context, ended <-chan error) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer p.endComparison()
	for {
		timer.Reset(time.Until(p.nextWake()))
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return endOfSource(ctx, err)
		case <-p.inbox.wake:
		case o := <-p.observed:
			p.compare(ctx, o)
		case <-timer.C:
		}
		p.turn(ctx, time.Now())
	}
}

// nextWake returns when the loop has work even if no event arrives.
func (p *Proxy) nextWake() time.Time {
	next := time.Now().Add(p.SyncPeriod)
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	if p.comparison != nil {
		return time.Now()
	}
	if p.observed == nil {
		sooner(p.compareAt)
		sooner(p.lookAt)
	}
	if len(p.dirty) > 0 || p.renew {
		sooner(p.lastPass.Add(p.MinSyncPeriod))
	}
	if p.reconciler.Draining() > 0 {
		sooner(p.drainAt)
	}
	sooner(p.retries.next())
	sooner(p.linger.next())
	return next
}

// turn runs everything that is due.
func (p *Proxy) turn(ctx context.Context, now time.Time) {
	w := p.take()
	p.renew = p.renew || w.node || w.network || p.becameMany() || p.linger.due(now)
	p.restore(ctx, w.lost)
	if w.maybeDeleted {
		p.calm = 0
	}
	p.rulesChanged = p.rulesChanged || w.rules
	if w.rules || w.maybeDeleted {
		p.compareSoon(now, reconcile.Parts{State: w.maybeDeleted, Rules: w.rules})
	}
	if len(p.dirty) > 0 || p.renew {
		p.Observer.Queued()
	}
	retry := p.retries.take(now)
	p.renew = p.renew || p.renewFailed && slices.Contains(retry, nodeKey)
	if len(retry) > 0 || p.passDue(now) {
		p.pass(ctx, retry)
	}
	if p.reconciler.Draining() > 0 && !now.Before(p.drainAt) {
		p.drain(ctx, now)
	}
	if p.comparison != nil {
		p.stepComparison(ctx)
	}
	if p.observed == nil && p.comparison == nil && !now.Before(p.lookAt) {
		p.look(now)
	}
	if p.observed == nil && p.comparison == nil && !now.Before(p.compareAt) {
		p.observe(now)
	}
}

// logSync logs the summary of a sync.
func logSync(ctx context.Context, took time.Duration, services, problems int, reconciler *reconcile.Reconciler) {
	if logger := klog.FromContext(ctx).V(2); logger.Enabled() {
		virtualServers, realServers, draining := reconciler.Held()
		logger.Info("Synced", "services", services, "problems", problems, "took", took.Round(time.Millisecond),
			"virtualServers", virtualServers, "realServers", realServers, "draining", draining)
	}
}

// reportFailing reports the pending retries to the Observer.
func (p *Proxy) reportFailing() {
	services := len(p.retries.due)
	_, node := p.retries.due[nodeKey]
	if node {
		services--
	}
	p.Observer.Failing(node, services, len(p.depends))
}

// drainBatch is the maximum number of virtual servers whose connections are checked
// before other changes get their turn.
const drainBatch = 256

// drain removes real servers without connections. If many are draining, the next turns
// continue.
func (p *Proxy) drain(ctx context.Context, now time.Time) {
	p.settle(ctx, p.reconciler.Drain(now, p.DrainDeadline, drainBatch))
	p.reportCuts(ctx)
	if !p.reconciler.DrainsOn() {
		p.drainAt = now.Add(p.DrainPeriod)
	}
}

// becameMany reports whether there are now too many Services for an address each.
func (p *Proxy) becameMany() bool {
	return !p.facts.PreferRoutes && p.inbox.services() > plan.AddressesAtMost
}

func (p *Proxy) passDue(now time.Time) bool {
	return (len(p.dirty) > 0 || p.renew) && !now.Before(p.lastPass.Add(p.MinSyncPeriod))
}

// pass plans and programs the dirty Services, and retries those that are due.
func (p *Proxy) pass(ctx context.Context, retry []types.NamespacedName) {
	began := time.Now()
	renewed := p.renew
	if renewed {
		p.renewAffected(ctx)
	}
	small, large := p.inbox.bySize(p.dirty)
	count := len(small)
	for _, name := range small {
		p.planService(ctx, name)
	}
	if len(p.dirty) == 0 {
		p.dirty = map[types.NamespacedName]struct{}{} // smaller, see take
	}
	for _, name := range retry {
		p.reconciler.Retry(name)
	}
	problems := p.flush()
	if len(large) > 0 {
		// Changes that arrive while a large Service is programmed precede the next
		// large one.
		p.planService(ctx, large[0])
		count++
		problems = append(problems, p.flush()...)
	}
	p.settle(ctx, problems)
	p.measure(problems)
	if renewed {
		p.warn(ctx)
	}
	for _, name := range retry {
		if _, again := p.retries.due[name]; !again {
			p.retries.succeeded(name)
			if name == nodeKey {
				p.failingNode = nil
			}
		}
	}
	p.lastPass = time.Now()
	p.reportFailing()
	logSync(ctx, time.Since(began), count, len(problems), p.reconciler)
	p.Observer.Passed(time.Since(began), count, len(problems))
}

// settle schedules retries of what failed. It also requests a comparison before each
// retry, because the kernel's state is uncertain after an error.
func (p *Proxy) settle(ctx context.Context, problems reconcile.Problems) {
	for _, name := range p.reconciler.ReleaseMarks() {
		p.dirty[name] = struct{}{}
	}
	failed := map[types.NamespacedName]time.Duration{}
	for _, problem := range problems {
		for _, name := range affected(problem) {
			if _, done := failed[name]; !done {
				failed[name] = p.retries.failed(name, time.Now())
			}
		}
	}
	logProblems(ctx, problems, failed)
	p.reportFailingNode(problems, failed[nodeKey])
	for _, wait := range failed {
		p.need = reconcile.Everything
		if at := time.Now().Add(wait / 2); at.Before(p.compareAt) {
			p.compareAt = at
		}
	}
	p.Observer.Held(p.reconciler.Held())
	p.reportConflicts(ctx)
}

// affected returns the Services that a problem affects, or the node.
func affected(problem reconcile.Problem) []types.NamespacedName {
	if len(problem.Owners) == 0 {
		return []types.NamespacedName{nodeKey}
	}
	return problem.Owners
}

// logProblems logs one line per Service and reason, with the first failed change as an
// example: a missing set fails every member.
func logProblems(ctx context.Context, problems reconcile.Problems, waits map[types.NamespacedName]time.Duration) {
	type ownerReason struct {
		name   types.NamespacedName
		reason string
	}
	count := map[ownerReason]int{}
	for _, problem := range problems {
		for _, name := range affected(problem) {
			count[ownerReason{name, reason(problem.Err)}]++
		}
	}
	for _, problem := range problems {
		for _, name := range affected(problem) {
			t := ownerReason{name, reason(problem.Err)}
			if n := count[t]; n > 0 {
				logProblem(ctx, name, problem.Err, n-1, waits[name])
			}
			count[t] = 0
		}
	}
}

// reason returns an error's text without the change that failed.
func reason(err error) string {
	if inner := errors.Unwrap(err); inner != nil {
		return inner.Error()
	}
	return err.Error()
}

func logProblem(ctx context.Context, name types.NamespacedName, err error, more int, wait time.Duration) {
	logger := klog.FromContext(ctx).WithValues("retryIn", wait)
	if more > 0 {
		logger = logger.WithValues("moreForThisReason", more)
	}
	if name == nodeKey {
		logger.Error(err, "Cannot program the node")
		return
	}
	logger.Error(err, "Cannot program Service", "service", name)
}

// reportCuts reports connections that were cut because their endpoint was gone for too
// long or its node is unreachable.
func (p *Proxy) reportCuts(ctx context.Context) {
	for _, c := range p.reconciler.TakeCuts() {
		logger := klog.FromContext(ctx).WithValues("virtualServer", c.Key.String(), "endpoint", c.Dest.String(), "connections", c.Connections)
		if c.Lost {
			logger.Info("Cutting connections to an endpoint on an unreachable node")
		} else {
			logger.Info("Drain deadline reached, cutting connections to a removed endpoint", "deadline", p.DrainDeadline)
		}
		p.Meter.Cut(c.Connections)
	}
}
