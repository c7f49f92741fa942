package proxy

import (
	"context"
	"errors"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// loop serves until the context ends.
func (p *Proxy) loop(ctx context.Context, ended <-chan error) error {
	p.inbox.report(p.Observer.Queued)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		next, ready := p.nextWake()
		timer.Reset(time.Until(next))
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return endOfSource(ctx, err)
		case <-p.inbox.wake:
		case <-ready:
		case <-timer.C:
		}
		p.turn(ctx, time.Now())
	}
}

// nextWake returns when the loop has work even if no event arrives; see Reconciler.Next.
func (p *Proxy) nextWake() (next time.Time, ready <-chan struct{}) {
	next, ready = p.reconciler.Next(time.Now())
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	if len(p.dirty) > 0 || p.renew {
		sooner(p.passAt())
	}
	sooner(p.renewAt)
	sooner(p.collector.restAt())
	if !p.renew && p.renewAt.IsZero() { // else the node is about to be read anyway
		sooner(p.linger.next())
		sooner(p.rereadAt())
	}
	return next, ready
}

// rereadPeriod is how long a change of the node's network that the kernel does not report may go
// unnoticed; see routing.Netlink.Watch.
const rereadPeriod = time.Minute

// rereadAt returns when to read the node's network although no change was reported, or zero if that
// is not necessary. On nodes with ENIs the rules depend on routes to single addresses, whose changes
// are not reported.
func (p *Proxy) rereadAt() time.Time {
	if len(p.modes) == 0 || !p.watched {
		return time.Time{}
	}
	return p.renewed.Add(rereadPeriod)
}

func due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// turn runs everything that is due.
func (p *Proxy) turn(ctx context.Context, now time.Time) {
	w := p.take()
	failing := !p.renewAt.IsZero()
	retry := failing && !now.Before(p.renewAt)
	p.renew = p.renew || w.node || w.network || retry || !failing && (p.becameMany() || due(p.linger.next(), now) || due(p.rereadAt(), now))
	if len(p.dirty) > 0 || p.renew {
		p.Observer.Queued()
	}
	if retry || p.passDue(now) {
		p.pass(ctx)
	}
	p.step(ctx, now)
	p.collector.restIfDue(now)
}

// reportRestored reports what was restored after another program had deleted it: VIPs, and policy
// rules among removals, which package routing has added again.
func (p *Proxy) reportRestored(ctx context.Context, vips int, removals []routing.Removal) {
	logger, count := klog.FromContext(ctx), vips
	for _, r := range removals {
		if !r.Addr.IsValid() {
			logger.Info("Restored a policy rule that another program deleted", "rule", r.Rule.String())
			count++
		}
	}
	if vips > 0 {
		logger.Info("Restoring VIPs that were deleted", "count", vips)
	}
	if count > 0 {
		p.Meter.Restored(count)
	}
}

// step tells the reconciler what other programs have changed, lets it do what is due, and reports
// what it did.
func (p *Proxy) step(ctx context.Context, now time.Time) reconcile.StepResult {
	began := time.Now()
	external := p.inbox.takeExternal()
	done := p.reconciler.Step(now, external)
	p.reportRestored(ctx, done.Restored, external.Removed)
	if done.ReadErr != nil {
		klog.FromContext(ctx).Error(done.ReadErr, "Cannot read the kernel to compare it with the plan, retrying")
	}
	if done.Read {
		p.refreshListeners(ctx)
		maps.Copy(p.dirty, p.noScheduler) // a module may have been loaded
	}
	if len(done.Demanded) > 0 {
		klog.FromContext(ctx).Info("Wrote rules on demand, because a packet needed them", "sets", done.Demanded)
	}
	switch {
	case len(done.Demanded) > 0 || done.Retried:
		p.passed(ctx, began, 0, done.Problems)
	case done.Written || done.ReadErr != nil:
		s := p.settle(ctx, done.Problems)
		p.reportState(ctx, &s)
	}
	if done.Compared != nil {
		p.reportComparison(ctx, done.Compared)
	}
	return done
}

// muchState is the number of entries whose comparison leaves memory worth freeing.
const muchState = 2000

func (p *Proxy) reportComparison(ctx context.Context, c *reconcile.Comparison) {
	if c.Differences > 0 {
		klog.FromContext(ctx).Info("Kernel state differs from the plan, repairing the kernel state", "differences", c.Differences)
	}
	p.Observer.Compared(c.Took, c.Differences)
	if c.Entries > muchState {
		freeMemory()
	}
}

// becameMany reports whether there are now so many Services that cluster IPs in claim mode
// auto become routes instead of addresses.
func (p *Proxy) becameMany() bool {
	return !p.facts.PreferRoutes && p.inbox.services() > plan.AddressesAtMost
}

func (p *Proxy) passDue(now time.Time) bool {
	return (len(p.dirty) > 0 || p.renew) && !now.Before(p.passAt())
}

// passAt returns when the next pass may begin. Large Services that the last one has left to the
// next do not wait: kube-proxy programs all Services in one sync.
func (p *Proxy) passAt() time.Time {
	if p.largeLeft {
		return p.lastPass
	}
	return p.lastPass.Add(p.MinSyncPeriod)
}

// pass plans and programs the dirty Services.
func (p *Proxy) pass(ctx context.Context) {
	began := time.Now()
	p.collector.work(began)
	if p.renew {
		p.renewAffected(ctx)
	}
	small, large := p.inbox.bySize(p.dirty)
	count := len(small)
	for _, name := range small {
		p.planService(ctx, name)
	}
	p.shrinkDirty()
	problems := p.flush()
	if len(large) > 0 {
		// Changes that arrive while a large Service is programmed precede the next
		// large one.
		p.lastLarge = nextLarge(large, p.lastLarge)
		p.planService(ctx, p.lastLarge)
		count++
		problems = append(problems, p.flush()...)
	}
	p.passed(ctx, began, count, problems)
	p.lastPass, p.largeLeft = time.Now(), len(large) > 1
}

// shrinkDirty releases the memory of p.dirty after many Services were planned; see inbox.take.
func (p *Proxy) shrinkDirty() {
	if len(p.dirty) == 0 {
		p.dirty = map[types.NamespacedName]struct{}{}
	}
}

// nextLarge returns the first of some sorted Services after the last one, so that each has its
// turn even if one changes in every pass.
func nextLarge(large []types.NamespacedName, last types.NamespacedName) types.NamespacedName {
	for _, name := range large {
		if compareNames(name, last) > 0 {
			return name
		}
	}
	return large[0]
}

// passed reports the end of a pass.
func (p *Proxy) passed(ctx context.Context, began time.Time, services int, problems reconcile.Problems) {
	s := p.settle(ctx, problems)
	p.reportState(ctx, &s)
	p.measure(problems)
	took := time.Since(began)
	if logger := klog.FromContext(ctx).V(2); logger.Enabled() {
		logger.Info("Synced", "services", services, "problems", len(problems), "took", took.Round(time.Millisecond),
			"virtualServers", s.VirtualServers, "realServers", s.RealServers, "draining", s.Draining)
	}
	p.Observer.Passed(took, services, len(problems))
}

// settle reports what was written and refused. Refused changes are retried.
func (p *Proxy) settle(ctx context.Context, problems reconcile.Problems) reconcile.Status {
	s := p.reconciler.Settle()
	for _, name := range s.Unmarked {
		p.dirty[name] = struct{}{}
	}
	logProblems(ctx, problems, s.RetryIn)
	p.reportCuts(ctx, s.Cuts)
	if !s.NodeFailing {
		p.failingNode = nil
	}
	p.reportFailingNode(problems, s.RetryIn[nodeKey])
	p.Observer.Held(s.VirtualServers, s.RealServers, s.Draining)
	p.Observer.Failing(s.NodeFailing || !p.renewAt.IsZero(), s.FailingServices, s.Services)
	p.reportConflicts(ctx, &s)
	return s
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

// reportCuts reports connections that were cut because their endpoint was removed and has not
// answered for the time of the drain deadline, or because its node is unreachable.
func (p *Proxy) reportCuts(ctx context.Context, cuts []reconcile.Cut) {
	for _, c := range cuts {
		logger := klog.FromContext(ctx).WithValues("virtualServer", c.Key.String(), "endpoint", c.Dest.String(), "connections", c.Connections)
		if c.Unreachable {
			logger.Info("Reset connections to an endpoint on an unreachable node")
		} else {
			logger.Info("Reset connections to a removed endpoint, which does not answer any more", "deadline", p.DrainDeadline)
		}
		p.Meter.Cut(c.Connections)
	}
}
