// Package proxy is the loop between a source and the kernel: it turns what
// the source delivers into parts of the plan, one Service at a time, and has
// them applied.
package proxy

import (
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Network reads the node's network, and tells when it has changed or when
// something of ours was taken away. Package routing has it.
type Network interface {
	Inventory() (routing.Inventory, error)
	Watch(ctx context.Context, changed, taken func()) error
}

// HealthChecks serves the Services' health check node ports.
type HealthChecks interface {
	Set(types.NamespacedName, plan.HealthCheck)
	Delete(types.NamespacedName)
}

// Observer is told how the loop fares. Its methods return at once.
type Observer interface {
	Queued()                                             // there is work
	Passed(took time.Duration, services, problems int)   // a pass over all the work that there was has ended
	Compared(took time.Duration, differences int)        // the whole kernel was compared
	Held(virtualServers, realServers, draining int)      // what the kernel holds of ours
	Node(exists, deleting, excludedFromAutoscaling bool) // what the Node says
}

// Options are how the proxy runs, apart from what it plans.
type Options struct {
	Config        plan.Config
	Kernel        apply.Kernel
	KernelVersion plan.Version
	// BridgeNetfilter tells whether br_netfilter is there. It may be loaded at
	// any time.
	BridgeNetfilter func() bool
	Network         Network
	HealthChecks    HealthChecks
	Observer        Observer

	MinSyncPeriod time.Duration // least time between two passes; 0: none
	SyncPeriod    time.Duration // time between two comparisons with the kernel
	DrainPeriod   time.Duration // time between two looks at draining real servers
}

// minComparePeriod is the least time between two comparisons that are made
// because something seems to have been taken away.
const minComparePeriod = 3 * time.Second

// ownEcho is for how long after we unbound an address the news of something
// taken away is taken for ours. What somebody else took at the same moment is
// found by the periodic comparison.
const ownEcho = time.Second

// nobody stands for the node itself among the names of Services.
var nobody types.NamespacedName

// Proxy is one node's. Make it with New and use it once.
type Proxy struct {
	Options
	inbox   *inbox
	applier *apply.Applier

	// What follows belongs to the loop's goroutine.
	node     plan.Node
	facts    plan.Facts
	nodePart plan.NodePart
	depends  map[types.NamespacedName]plan.Depends
	reported map[types.NamespacedName]string // last complaint about each object

	waiting    map[types.NamespacedName]struct{} // Services to be planned
	renew      bool                              // the node's facts are to be read again
	retries    *retries
	lastPass   time.Time
	compareAt  time.Time
	comparedAt time.Time
	tookAt     time.Time // when we last unbound an address
	drainAt    time.Time
	observed   chan observed // nil while no observation runs
}

// observed is what an observation of the kernel came to.
type observed struct {
	observation *apply.Observation
	err         error
	took        time.Duration
}

// New makes a proxy. Nothing is read or written yet.
func New(o Options) *Proxy {
	return &Proxy{
		Options:  o,
		inbox:    newInbox(),
		applier:  apply.New(&o.Config, o.Kernel),
		depends:  map[types.NamespacedName]plan.Depends{},
		reported: map[types.NamespacedName]string{},
		waiting:  map[types.NamespacedName]struct{}{},
		retries:  newRetries(),
	}
}

// Run programs the kernel until the context ends, and leaves it serving. The
// error is the source's, if it cannot begin; whatever fails later is
// reported and tried again.
func (p *Proxy) Run(ctx context.Context, src source.Source) error {
	ended := make(chan error, 1)
	go func() { ended <- src.Run(ctx, p.inbox) }()
	go p.watchNetwork(ctx)
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		return endOfSource(ctx, err)
	case <-p.inbox.synced:
	}
	p.Observer.Queued()
	for !p.start(ctx) {
		if !sleep(ctx, p.retries.failed(nobody, time.Now())) {
			return nil
		}
	}
	return p.loop(ctx, ended)
}

// Once programs what the source has, one time, and gives all that could not
// be used or programmed.
func (p *Proxy) Once(ctx context.Context, src source.Source) error {
	unused := p.load(ctx, src)
	select {
	case <-p.inbox.synced:
	default:
		return unused
	}
	if err := p.begin(ctx); err != nil {
		return errors.Join(unused, err)
	}
	return errors.Join(unused, p.programAll(ctx).Err())
}

// load has the source deliver one time. A source that cannot is run until it
// is synced.
func (p *Proxy) load(ctx context.Context, src source.Source) error {
	if l, ok := src.(source.Loader); ok {
		return l.Load(ctx, p.inbox)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- src.Run(ctx, p.inbox) }()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-ended:
		return endOfSource(ctx, err)
	case <-p.inbox.synced:
		return nil
	}
}

// endOfSource makes an error of a source that stopped by itself.
func endOfSource(ctx context.Context, err error) error {
	if err == nil && ctx.Err() == nil {
		return errors.New("the source of Services has ended")
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// watchNetwork has the node's network read again whenever it changes.
func (p *Proxy) watchNetwork(ctx context.Context) {
	for {
		err := p.Network.Watch(ctx, p.inbox.networkChanged, p.inbox.somethingTaken)
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Cannot follow the node's network, trying again")
		p.inbox.networkChanged()
		if !sleep(ctx, lastRetry) {
			return
		}
	}
}

// sleep is false if the context ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// start reads the kernel and programs everything for the first time. It is
// false if the kernel cannot be read, of which nothing must be assumed.
func (p *Proxy) start(ctx context.Context) bool {
	began := time.Now()
	if err := p.begin(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot begin, trying again")
		return false
	}
	problems := p.programAll(ctx)
	p.settle(ctx, problems)
	p.Observer.Passed(time.Since(began), len(p.depends), len(problems))
	p.compareAt = time.Now().Add(p.SyncPeriod)
	return true
}

// begin learns what the node and the kernel are like.
func (p *Proxy) begin(ctx context.Context) error {
	if _, err := p.renewNode(ctx); err != nil {
		return err
	}
	observation, err := p.applier.BeginObserve()()
	if err != nil {
		return err
	}
	p.applier.Adopt(observation)
	return nil
}

// programAll programs the node's part and then every Service, those first
// that others need to start at all (kubernetes#133773), and last removes what
// nobody wants any more.
func (p *Proxy) programAll(ctx context.Context) apply.Problems {
	problems := p.applier.Flush()
	for _, name := range p.inbox.take().services {
		p.waiting[name] = struct{}{}
	}
	for _, batch := range p.inbox.batches(p.waiting) {
		for _, name := range batch {
			p.planService(ctx, name)
		}
		problems = append(problems, p.applier.Flush()...)
	}
	p.applier.Sweep()
	return append(problems, p.applier.Flush()...)
}

// loop serves until the context ends.
func (p *Proxy) loop(ctx context.Context, ended <-chan error) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
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

// nextWake is when there is something to do without anything happening.
func (p *Proxy) nextWake() time.Time {
	next := time.Now().Add(p.SyncPeriod)
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	if p.observed == nil {
		sooner(p.compareAt)
	}
	if len(p.waiting) > 0 || p.renew {
		sooner(p.lastPass.Add(p.MinSyncPeriod))
	}
	if p.applier.Draining() > 0 {
		sooner(p.drainAt)
	}
	sooner(p.retries.next())
	return next
}

// turn does what is due.
func (p *Proxy) turn(ctx context.Context, now time.Time) {
	w := p.inbox.take()
	p.renew = p.renew || w.node || w.network
	if p.applier.TookAddresses() {
		p.tookAt = now
	}
	if w.taken && now.Sub(p.tookAt) > ownEcho {
		p.compareSoon(now)
	}
	for _, name := range w.services {
		p.waiting[name] = struct{}{}
	}
	if len(p.waiting) > 0 || p.renew {
		p.Observer.Queued()
	}
	if retry := p.retries.take(now); len(retry) > 0 || p.passDue(now) {
		p.pass(ctx, retry)
	}
	if p.applier.Draining() > 0 && !now.Before(p.drainAt) {
		p.drainAt = now.Add(p.DrainPeriod)
		p.settle(ctx, p.applier.Drain())
	}
	if p.observed == nil && !now.Before(p.compareAt) {
		p.observe()
	}
}

// compareSoon has the kernel compared after somebody took something away, but
// no more often than every few seconds.
func (p *Proxy) compareSoon(now time.Time) {
	at := p.comparedAt.Add(minComparePeriod)
	if at.Before(now) {
		at = now
	}
	if at.Before(p.compareAt) {
		p.compareAt = at
	}
}

func (p *Proxy) passDue(now time.Time) bool {
	return (len(p.waiting) > 0 || p.renew) && !now.Before(p.lastPass.Add(p.MinSyncPeriod))
}

// pass plans and programs the Services that wait, and what is to be tried
// again.
func (p *Proxy) pass(ctx context.Context, retry []types.NamespacedName) {
	began := time.Now()
	if p.renew {
		p.renewAffected(ctx)
	}
	count := len(p.waiting)
	for name := range p.waiting {
		p.planService(ctx, name)
	}
	for _, name := range retry {
		p.applier.Retry(name)
	}
	problems := p.applier.Flush()
	p.settle(ctx, problems)
	for _, name := range retry {
		if _, again := p.retries.due[name]; !again {
			p.retries.succeeded(name)
		}
	}
	p.lastPass = time.Now()
	p.Observer.Passed(time.Since(began), count, len(problems))
}

// settle has what failed tried again, and the kernel compared before that:
// after an error it is not certain what it holds.
func (p *Proxy) settle(ctx context.Context, problems apply.Problems) {
	failed := map[types.NamespacedName]time.Duration{}
	for _, problem := range problems {
		names := problem.Owners
		if len(names) == 0 {
			names = []types.NamespacedName{nobody}
		}
		for _, name := range names {
			if _, done := failed[name]; !done {
				failed[name] = p.retries.failed(name, time.Now())
			}
			logProblem(ctx, name, problem.Err, failed[name])
		}
	}
	for _, wait := range failed {
		if at := time.Now().Add(wait / 2); at.Before(p.compareAt) {
			p.compareAt = at
		}
	}
	p.Observer.Held(p.applier.Held())
}

func logProblem(ctx context.Context, name types.NamespacedName, err error, wait time.Duration) {
	logger := klog.FromContext(ctx)
	if name == nobody {
		logger.Error(err, "Cannot program the node", "retryIn", wait)
		return
	}
	logger.Error(err, "Cannot program Service", "service", name, "retryIn", wait)
}

// observe reads the kernel beside the loop, which goes on meanwhile.
func (p *Proxy) observe() {
	read := p.applier.BeginObserve()
	result := make(chan observed, 1)
	p.observed = result
	go func() {
		began := time.Now()
		o, err := read()
		result <- observed{o, err, time.Since(began)}
	}()
}

// compare takes the result of an observation and repairs what differs.
func (p *Proxy) compare(ctx context.Context, o observed) {
	p.observed = nil
	p.comparedAt = time.Now()
	p.compareAt = time.Now().Add(p.SyncPeriod)
	if o.err != nil {
		p.compareAt = time.Now().Add(p.retries.failed(nobody, time.Now()))
		klog.FromContext(ctx).Error(o.err, "Cannot compare the kernel with the plan, trying again")
		return
	}
	differences := p.applier.Adopt(o.observation)
	if differences > 0 {
		klog.FromContext(ctx).Info("The kernel differs from the plan, repairing it", "differences", differences)
	}
	p.Observer.Compared(o.took, differences)
	p.settle(ctx, p.applier.Flush())
}

// complain reports what is wrong with a Service, once for each complaint.
func (p *Proxy) complain(ctx context.Context, name types.NamespacedName, err error) {
	if p.news(name, err) {
		klog.FromContext(ctx).Error(err, "Parts of a Service cannot be used, serving the rest", "service", name)
	}
}

func (p *Proxy) complainOfNode(ctx context.Context, err error) {
	if p.news(nobody, err) {
		klog.FromContext(ctx).Error(err, "Parts of the Node cannot be used, using the rest", "node", p.Config.NodeName)
	}
}

// news tells whether an error is another one than the last.
func (p *Proxy) news(name types.NamespacedName, err error) bool {
	if err == nil {
		delete(p.reported, name)
		return false
	}
	text := err.Error()
	if p.reported[name] == text {
		return false
	}
	p.reported[name] = text
	return true
}
