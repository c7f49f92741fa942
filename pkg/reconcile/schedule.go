package reconcile

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Periods determines when the Reconciler acts without a change of desired state.
type Periods struct {
	Sync          time.Duration // between two comparisons with the kernel; see statePeriod
	Drain         time.Duration // between two checks of draining real servers
	DrainDeadline time.Duration // for connections to a removed endpoint
	RulesWatched  bool          // every change of a rule that concerns us is reported to Step
}

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

// How often each part is compared, in periods of Periods.Sync:
//
//   - Kernel parameters: every period.
//   - State (virtual servers and sets): every period with fewer than stateSize entries, every
//     two periods with fewer than twice as many, and so on up to maxPeriods periods. So the CPU share
//     of comparisons does not grow with the number of Services. If reading is slow, the time
//     between comparisons is at least stateShare times the duration of the last read, up to
//     maxStatePeriod. Spot checks find missing state much earlier.
//   - Rules: after the kernel reported a change, and every maxPeriods periods. If the kernel does not
//     report changes (iptables-legacy), or some rules are refused: every period.
//   - Routing: after a report that anything may have been deleted. Also as often as the state while
//     that has fewer than routingSize entries, and every maxPeriods periods with more.
const (
	stateSize      = 2000
	routingSize    = 4 * stateSize
	maxPeriods     = 40
	stateShare     = 300
	maxStatePeriod = time.Hour
)

// spotCheckPeriod is the time between two spot checks.
const spotCheckPeriod = time.Second

// drainBatch is the maximum number of virtual servers whose connections are checked
// before other changes get their turn.
const drainBatch = 256

// schedule holds what the Reconciler does next, and when. A comparison starts when it is due, or soon
// after an event requests it (compareSoon). observe reads the kernel in another goroutine. readStep
// begins a resync with the result. resyncStep continues it, and repairs the differences at its end.
type schedule struct {
	periods Periods
	retries *retries
	refused map[types.NamespacedName]struct{} // since the last call of Settle
	retried []types.NamespacedName            // likewise

	compareAt      time.Time     // next comparison; zero while an observation runs, unless another must follow soon
	comparedAt     time.Time     // when the last observation ended
	readRetry      time.Duration // after a failed observation, the time until the next one
	stateAt        time.Time     // next periodic comparison of the state
	stateTook      time.Duration // to read the state the last time
	rulesAt        time.Time     // next periodic comparison of the rules
	routingAt      time.Time     // next periodic comparison of VIPs and policy rules
	omits          bool          // rules are refused
	need           extent        // of the next comparison, in addition to the periodic parts
	rulesChanged   bool          // by another program, since the last observation began
	byRules        bool          // rulesChanged triggered the observation
	calm           int           // comparisons in a row that rulesChanged triggered and that found nothing
	spotCheckAt    time.Time     // next spot check
	bySpotCheck    bool          // a spot check triggered the comparison
	spotCheckPause time.Duration // pause after spot checks whose comparison found nothing
	demandsAt      time.Time     // next look for demands

	readExtent extent        // of the current or the last observation
	ready      chan struct{} // closed when the observation has ended; nil while none runs
	result     *readResult   // of it
	resync     *resync       // nil unless observed state is being compared
}

// readResult is the result of an observation of the kernel.
type readResult struct {
	seen *observation
	err  error
	took time.Duration
}

func newSchedule(p Periods) schedule {
	return schedule{periods: p, retries: newRetries(), refused: map[types.NamespacedName]struct{}{}}
}

// Load initializes the cached state from the kernel, and returns the number of virtual servers
// that are ours. After an error it must be called again: what cannot be read is never assumed
// to be empty.
func (r *Reconciler) Load() (virtualServers int, err error) {
	r.planNode()
	o, err := r.beginObserve(everything)()
	if err != nil {
		return 0, err
	}
	r.runResync(o)
	r.recordDemands()
	for _, set := range r.sets.list {
		if set.existing > 0 {
			r.sets.use(set.name)
		}
	}
	r.compareAt = time.Time{} // everything has just been read
	r.foundServers = r.servers.existing > 0
	return r.servers.existing, nil
}

// Prune declares that every Service is known, and flushes: from now on undesired state is deleted. It
// also deletes stale UDP flows of all virtual servers, because an earlier process may have left some.
func (r *Reconciler) Prune() Problems {
	problems := r.finishAdditions()
	r.pruning = true
	r.vips.replaceWrongScope()
	for s := range r.servers.allExisting() {
		r.addStaleFlows(s.key)
		if !s.wanted() {
			r.servers.compared(s, true)
		}
	}
	for m := range r.members.allExisting() {
		if _, known := r.node.sets[r.sets.list[m.key.set].name]; !known {
			continue // the whole set is destroyed
		}
		if _, desired := r.desiredMember(m); !desired {
			r.members.compared(m, true)
		}
	}
	for _, v := range r.vips.list() {
		r.vips.compared(v, r.vips.desired(v) != v.exists)
	}
	problems = append(problems, r.Flush()...)
	now := time.Now()
	r.stateAt, r.routingAt, r.rulesAt = now.Add(r.periods.Sync), now.Add(r.periods.Sync), now.Add(r.rulesPeriod(r.kernel.omitsRules()))
	r.spotCheckAt = now.Add(spotCheckPeriod)
	if r.compareAt.IsZero() {
		r.compareAt = now.Add(r.periods.Sync)
	}
	return problems
}

// External is what other programs may have changed in the kernel.
type External struct {
	Removed      []routing.Removal // deleted addresses and routes of VIPs
	MaybeDeleted bool              // any state may have been deleted
	Rules        bool              // rules may have changed
}

// noteExternal notes what another program has done. It returns how many desired VIPs were removed.
func (r *Reconciler) noteExternal(now time.Time, e External) (removedVIPs int) {
	if e.MaybeDeleted {
		r.calm = 0
	}
	r.rulesChanged = r.rulesChanged || e.Rules
	if e.Rules || e.MaybeDeleted {
		r.compareSoon(now, extent{servers: e.MaybeDeleted, sets: e.MaybeDeleted, routing: e.MaybeDeleted, rules: e.Rules})
	}
	return r.vips.noteRemoved(e.Removed)
}

// compareSoon requests a comparison of some parts, no more often than minPeriod allows.
func (s *schedule) compareSoon(now time.Time, what extent) {
	s.need = s.need.with(what)
	at := s.comparedAt.Add(s.minPeriod())
	if at.Before(now) {
		at = now
	}
	if s.compareAt.IsZero() || at.Before(s.compareAt) {
		s.compareAt = at
	}
}

// minPeriod returns the current minimum time between two comparisons.
func (s *schedule) minPeriod() time.Duration {
	if s.calm >= calmAfter && !s.need.servers {
		return calmPeriod
	}
	return minComparePeriod
}

// statePeriod returns the time between two comparisons of the state, which has this many entries.
func (s *schedule) statePeriod(entries int) time.Duration {
	n := entries / stateSize
	if n == 0 {
		return s.periods.Sync // if reading took long, the machine was busy
	}
	return max(s.periods.Sync*time.Duration(min(1+n, maxPeriods)), min(s.stateTook*stateShare, maxStatePeriod))
}

// routingPeriod returns the time between two comparisons of VIPs and policy rules, beside a state
// with this many entries.
func (s *schedule) routingPeriod(entries int) time.Duration {
	if entries < routingSize {
		return s.statePeriod(entries)
	}
	return s.periods.Sync * maxPeriods
}

// rulesPeriod returns the time between two comparisons of rules. omits means that some are refused.
func (s *schedule) rulesPeriod(omits bool) time.Duration {
	if !s.periods.RulesWatched || omits {
		return s.periods.Sync // refused rules are tried again: a module may have been installed
	}
	return s.periods.Sync * maxPeriods
}

// stateEntries returns the number of virtual servers and set members.
func (t *serviceTables) stateEntries() int { return t.servers.existing + t.members.existing }

// noteOmissions requests a comparison of the rules, which reads the refused ones, if rules
// began or ceased to be refused since the last call.
func (r *Reconciler) noteOmissions(now time.Time) {
	if omits := r.kernel.omitsRules(); omits != r.omits {
		r.omits = omits
		r.compareSoon(now, extent{rules: true})
	}
}

// Next returns when Step has work: at a time, or as soon as ready is closed, because the
// kernel has been read. ready is nil while the kernel is not being read.
func (r *Reconciler) Next(now time.Time) (next time.Time, ready <-chan struct{}) {
	next = now.Add(r.periods.Sync)
	sooner := func(t time.Time) {
		if t.Before(next) {
			next = t
		}
	}
	switch {
	case r.resync != nil:
		return now, r.ready
	case r.ready == nil:
		sooner(r.compareAt)
		sooner(r.spotCheckAt)
	}
	if r.drainer.count > 0 {
		sooner(r.drainer.checkAt)
	}
	if len(r.node.Demands) > 0 {
		sooner(r.demandsAt)
	}
	if at := r.retries.next(); !at.IsZero() {
		sooner(at)
	}
	return next, r.ready
}

// StepResult is what one Step did.
type StepResult struct {
	Problems Problems
	Written  bool        // it may have changed the kernel
	Retried  bool        // refused changes were retried
	Restored int         // VIPs that another program had removed, and that were claimed again
	Demanded []string    // sets whose rules on demand it has written; see plan.Demands
	Read     bool        // the kernel has been read
	ReadErr  error       // why it could not be read
	Compared *Comparison // a comparison that has ended; nil if none
}

// Comparison is a comparison of the kernel with the cached and the desired state.
type Comparison struct {
	Took        time.Duration // to read the kernel
	Differences int           // repaired, as far as the kernel did not refuse it
	Entries     int           // approximate number of virtual servers and members that were read
}

// Step does what is due: it claims removed VIPs again, retries refused changes, checks draining real
// servers, writes rules on demand, and compares the kernel with the cached state, by spot checks and
// completely. A comparison does not delay changes: the kernel is read in another goroutine, and each
// call compares a portion. e is what other programs have changed since the last call; it triggers a
// comparison.
func (r *Reconciler) Step(now time.Time, e External) StepResult {
	done := StepResult{Restored: r.noteExternal(now, e)}
	if due := r.retries.take(now); len(due) > 0 {
		r.retry(due...)
		r.retried, done.Retried = append(r.retried, due...), true
	}
	if done.Retried || done.Restored > 0 {
		r.flushInto(&done)
	}
	if r.drainer.count > 0 && !now.Before(r.drainer.checkAt) {
		r.drainStep(now, &done)
	}
	r.checkDemands(now)
	if done.Demanded = r.demanded(); len(done.Demanded) > 0 {
		done.Problems, done.Written = append(done.Problems, r.flushDemanded()...), true
	}
	r.readStep(now, &done)
	if r.resync != nil {
		r.resyncStep(now, &done)
	}
	if r.ready == nil && r.resync == nil {
		r.spotCheck(now)
		r.observe(now)
	}
	return done
}

func (r *Reconciler) flushInto(done *StepResult) {
	done.Written = true
	done.Problems = append(done.Problems, r.Flush()...)
}

// drainStep checks some of the draining real servers. If there are more, the next steps
// continue.
func (r *Reconciler) drainStep(now time.Time, done *StepResult) {
	done.Problems = append(done.Problems, r.checkDraining(now, r.periods.DrainDeadline, drainBatch)...)
	done.Written = true
	if len(r.drainer.toCheck) == 0 {
		r.drainer.checkAt = now.Add(r.periods.Drain)
	}
}

// spotCheck requests a comparison if a cheap check finds a difference. Another program that
// keeps changing its own virtual servers causes one too; spot checks then become less
// frequent, down to one per Periods.Sync.
func (r *Reconciler) spotCheck(now time.Time) {
	if now.Before(r.spotCheckAt) {
		return
	}
	r.spotCheckAt = now.Add(spotCheckPeriod)
	if differs := r.spotChecker.differs(); differs != (extent{}) {
		r.bySpotCheck = true
		r.compareSoon(now, differs)
	}
}

// noteSpotCheckResult sets the time of the next spot check after a comparison that a spot check
// triggered.
func (s *schedule) noteSpotCheckResult(differences int, now time.Time) {
	if !s.bySpotCheck {
		return
	}
	s.bySpotCheck = false
	if differences > 0 {
		s.spotCheckPause = 0
		return
	}
	s.spotCheckPause = min(max(2*s.spotCheckPause, minComparePeriod), max(s.periods.Sync, spotCheckPeriod))
	s.spotCheckAt = now.Add(s.spotCheckPause)
}

// periodic returns the parts whose periodic comparison is due.
func (s *schedule) periodic(now time.Time) extent {
	due := extent{routing: !now.Before(s.routingAt), rules: !now.Before(s.rulesAt)}
	if !now.Before(s.stateAt) {
		due = due.with(state)
	}
	return due
}

// observe starts reading the kernel in the background if that is due. A deletion reported
// from now on triggers another observation, because this one may already have read that part.
func (r *Reconciler) observe(now time.Time) {
	if now.Before(r.compareAt) {
		return
	}
	r.compareAt, r.byRules, r.rulesChanged = time.Time{}, r.rulesChanged, false
	r.readExtent = r.need.with(r.periodic(now))
	r.need = extent{}
	read, ready, result := r.beginObserve(r.readExtent), make(chan struct{}), &readResult{}
	r.ready, r.result = ready, result
	go func() {
		defer close(ready)
		began := time.Now()
		result.seen, result.err = read()
		result.took = time.Since(began)
	}()
}

// readStep begins to compare the result of an observation that has ended.
func (r *Reconciler) readStep(now time.Time, done *StepResult) {
	select {
	case <-r.ready:
	default:
		return
	}
	r.ready = nil
	r.comparedAt = now
	if r.compareAt.IsZero() { // no deletion was reported meanwhile
		r.compareAt = now.Add(r.periods.Sync)
	} else {
		r.compareAt = now.Add(r.minPeriod())
	}
	if done.ReadErr = r.result.err; done.ReadErr != nil {
		r.need = everything
		r.readRetry = min(max(2*r.readRetry, minBackoff), maxBackoff)
		r.compareAt = now.Add(r.readRetry)
		return
	}
	r.readRetry = 0
	done.Read = true
	if r.readExtent.sets {
		r.stateTook = r.result.took
		r.stateAt = now.Add(r.statePeriod(r.stateEntries()))
	}
	if r.readExtent.routing {
		r.routingAt = now.Add(r.routingPeriod(r.stateEntries()))
	}
	if r.readExtent.rules {
		r.rulesAt = now.Add(r.rulesPeriod(r.kernel.omitsRules()))
	}
	r.resync = r.beginResync(r.result.seen)
}

// resyncStep compares a portion of the observed state. After the last portion it repairs the
// differences.
func (r *Reconciler) resyncStep(now time.Time, done *StepResult) {
	if r.resync.step() {
		return
	}
	r.input.warnings = nil
	c := &Comparison{Took: r.result.took, Differences: r.resync.end()}
	if r.readExtent.sets {
		c.Entries = r.stateEntries()
	}
	r.resync, r.result = nil, nil
	if r.calm++; c.Differences > 0 || !r.byRules {
		r.calm = 0
	}
	r.noteSpotCheckResult(c.Differences, now)
	r.flushInto(done)
	done.Compared = c
}

// Status has the numbers of our objects in the kernel, and what happened since the last call of
// Settle.
type Status struct {
	Services                              int // with a desired state
	VirtualServers, RealServers, Draining int

	Conflicts    int        // virtual servers that a Service wants and another Service has
	NewConflicts []Conflict // begun since; sorted by loser, winner and key

	FailingServices int                                    // number of Services that wait for a retry
	NodeFailing     bool                                   // the node waits for a retry, or the kernel cannot be read
	RetryIn         map[types.NamespacedName]time.Duration // time until the retry, of those refused since; the zero name is the node
	Unmarked        []types.NamespacedName                 // Services that lack a fwmark; Set may now assign one
	Cuts            []Cut                                  // connections that were ended since

	Warnings []string             // conflicts on the node, as of its last plan and comparison; see plan.Warnings
	Modes    []plan.InterfaceMode // of the node's plan
}

// noteRefused records whose changes were refused, for Settle.
func (s *schedule) noteRefused(problems Problems) {
	for _, p := range problems {
		for _, name := range p.Owners {
			s.refused[name] = struct{}{}
		}
		if len(p.Owners) == 0 {
			s.refused[nodeOwner.Name] = struct{}{}
		}
	}
}

// Settle ends a pass, which is any number of calls of Flush and Step. It schedules retries of
// what was refused. A comparison precedes each retry, because the kernel's state is uncertain
// after an error.
func (r *Reconciler) Settle() Status {
	now := time.Now()
	waits := make(map[types.NamespacedName]time.Duration, len(r.refused))
	for name := range r.refused {
		waits[name] = r.retries.failed(name, now)
		r.need = everything
		if at := now.Add(waits[name] / 2); at.Before(r.compareAt) {
			r.compareAt = at
		}
	}
	clear(r.refused)
	for _, name := range r.retried {
		if _, again := r.retries.due[name]; !again {
			r.retries.succeeded(name)
		}
	}
	r.retried = nil
	failing := len(r.retries.due)
	_, node := r.retries.due[nodeOwner.Name]
	if node {
		failing--
	}
	return Status{
		Services:       r.owned.Len(),
		VirtualServers: r.servers.existing, RealServers: r.servers.realServers, Draining: r.drainer.count,
		Conflicts: r.conflicts.losers, NewConflicts: r.conflicts.begun(),
		FailingServices: failing, NodeFailing: node || r.readRetry > 0, RetryIn: waits, Unmarked: r.releaseMarks(), Cuts: r.drainer.takeCuts(),
		Warnings: r.nodeWarnings(), Modes: r.node.Modes,
	}
}
