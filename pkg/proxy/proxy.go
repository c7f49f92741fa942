// Package proxy is the loop between a source and the kernel: it turns what
// the source delivers into parts of the plan, one Service at a time, and has
// them applied.
package proxy

import (
	"context"
	"errors"
	"net/netip"
	"runtime/debug"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Network reads the node's network, and tells when it has changed or when
// something of ours was taken away. Package routing has it.
type Network interface {
	Inventory() (routing.Inventory, error)
	Listeners() ([]routing.Listener, error)
	Watch(ctx context.Context, changed func(), deleted func(...routing.Lost)) error
}

// Rules tells when somebody else has changed a rule in a chain that concerns the
// proxy. Package nat has it.
type Rules interface {
	Watch(ctx context.Context, concerns func(nat.Chain) bool, changed func()) error
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
	Failing(node bool, services, all int)                // what was refused and is retried: of the node's part, and how many of all Services
	Compared(took time.Duration, differences int)        // the whole kernel was compared
	Held(virtualServers, realServers, draining int)      // what the kernel holds of ours
	Conflicts(count int)                                 // virtual servers that are claimed in vain
	Node(exists, deleting, excludedFromAutoscaling bool) // what the Node says
}

// Meter takes what only metrics show. Its methods return at once.
type Meter interface {
	Changes(services, endpoints int)         // that came, and wait for the next pass
	Planned(took time.Duration)              // in one pass
	Programmed(latency time.Duration)        // since an endpoint's change was seen by the cluster
	NoLocalEndpoints(internal, external int) // Services, by policy, of which this node has no endpoint
	Interfaces(modes []plan.InterfaceMode)   // all that are known
	Restored(count int)                      // rules, addresses and routes that another program had deleted
	Cut(connections int)                     // at the deadline for draining, or with a node
}

// Events writes Events. Package event has it. Warn returns at once.
type Events interface {
	Warn(event.Warning)
}

// Options are how the proxy runs, apart from what it plans.
type Options struct {
	Config        plan.Config
	Kernel        apply.Kernel
	KernelVersion plan.Version
	// ProbeScheduler tells what is in the way of a scheduler of IPVS, loading it
	// if need be.
	ProbeScheduler func(name string) error
	// BridgeNetfilter reports what br_netfilter does now. load asks for the module
	// to be loaded if it is missing.
	BridgeNetfilter func(load bool) plan.BridgeNetfilter
	// ReadOnly says that this process cannot set kernel parameters.
	ReadOnly bool
	// APIServer is where this process reaches it, if that is an IP address.
	APIServer    []netip.AddrPort
	Network      Network
	Rules        Rules
	HealthChecks HealthChecks
	Observer     Observer
	Meter        Meter
	Events       Events

	MinSyncPeriod time.Duration // least time between two passes; 0: none
	SyncPeriod    time.Duration // time between two comparisons with the kernel; see statePeriod
	RulesWatched  bool          // Rules tells of every change of a rule that concerns the proxy
	DrainPeriod   time.Duration // time between two looks at draining real servers
	DrainDeadline time.Duration // for connections to an endpoint that is gone
}

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
	linger   linger
	bound    []plan.Binding // the values of interfaces in all plans so far
	uses     plan.SetsInUse // that rules are written for
	started  bool           // every Service is programmed: uses may shrink
	replan   bool           // the node's part is to be planned again
	depends  map[types.NamespacedName]plan.Depends
	reported map[types.NamespacedName]string // last complaint about each object
	warned   map[string]bool                 // what is known to be in the way

	triggers []trigger                             // changes of endpoints since the last pass
	noLocal  map[types.NamespacedName]plan.NoLocal // Services for which there is something to tell
	planning time.Duration                         // of this pass

	noInternal, noExternal int // in all of noLocal

	numbers    *numbers
	schedulers map[string]bool                   // those that the kernel is known to have
	lacking    map[types.NamespacedName]struct{} // Services that ask for one that it does not have
	apiServers []netip.AddrPort                  // the endpoints of default/kubernetes

	waiting      map[types.NamespacedName]struct{} // Services to be planned
	renew        bool                              // the node's facts are to be read again
	unread       bool                              // reading them has failed, and is to be tried again with the node's retry
	retries      *retries
	lastPass     time.Time
	compareAt    time.Time // zero while an observation runs, unless another is to follow it soon
	comparedAt   time.Time
	rulesChanged bool // by another program, since the last observation began
	byRules      bool // the observation was made for that
	calm         int  // comparisons in a row that were made for that and found nothing
	drainAt      time.Time
	observed     chan observed // nil while no observation runs
	compares                   // what the next comparison is about

	adoption    *apply.Adoption // nil while nothing that was observed is being compared
	observeTook time.Duration
}

// New makes a proxy. Nothing is read or written yet.
func New(o Options) *Proxy {
	return &Proxy{
		Options:    o,
		inbox:      newInbox(),
		applier:    apply.New(&o.Config, o.Kernel),
		depends:    map[types.NamespacedName]plan.Depends{},
		reported:   map[types.NamespacedName]string{},
		noLocal:    map[types.NamespacedName]plan.NoLocal{},
		waiting:    map[types.NamespacedName]struct{}{},
		numbers:    newNumbers(&o.Config),
		schedulers: map[string]bool{},
		lacking:    map[types.NamespacedName]struct{}{},
		retries:    newRetries(),
		linger:     newLinger(),
		uses:       plan.SetsInUse{},
	}
}

// Run programs the kernel until the context ends, and leaves it serving. The
// error is the source's, if it cannot begin; whatever fails later is
// reported and tried again.
func (p *Proxy) Run(ctx context.Context, src source.Source) error {
	ended := make(chan error, 1)
	go func() { ended <- src.Run(ctx, p.inbox) }()
	missed := func() { p.inbox.networkChanged(); p.inbox.deleted() }
	go p.watch(ctx, "the node's network", missed, func() error {
		return p.Network.Watch(ctx, p.inbox.networkChanged, p.inbox.deleted)
	})
	go p.watch(ctx, "the node's rules", p.inbox.rulesChanged, func() error {
		return p.Rules.Watch(ctx, p.applier.Concerns, p.inbox.rulesChanged)
	})
	await := func(event <-chan struct{}) (bool, error) {
		select {
		case <-ctx.Done():
			return false, nil
		case err := <-ended:
			return false, endOfSource(ctx, err)
		case <-event:
			return true, nil
		}
	}
	if ok, err := await(p.inbox.begun); !ok {
		return err
	}
	for !p.prepare(ctx) {
		p.Observer.Queued()
		if !sleep(ctx, p.retries.failed(nobody, time.Now())) {
			return nil
		}
	}
	if ok, err := await(p.inbox.synced); !ok {
		return err
	}
	p.start(ctx)
	return p.loop(ctx, ended)
}

// prepare learns what the node and the kernel are like, and programs the node's
// part, for which some programs are run, while the Services are still being
// delivered: none of it depends on them. Then it programs those Services that
// others on the node need to start, if the kernel has none yet. It is false if the
// kernel cannot be read, of which nothing must be assumed.
func (p *Proxy) prepare(ctx context.Context) bool {
	if err := p.begin(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot begin, trying again")
		return false
	}
	problems := p.flush()
	if servers, _, _ := p.applier.Held(); servers == 0 {
		problems = append(problems, p.program(ctx, p.inbox.first)...)
	}
	p.settle(ctx, problems)
	return true
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

// watch follows something of the kernel's that others change. What it may have
// missed after a failure is taken for changed.
func (p *Proxy) watch(ctx context.Context, what string, changed func(), run func() error) {
	for {
		err := run()
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Cannot follow "+what+", trying again")
		changed()
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

// start programs everything for the first time.
func (p *Proxy) start(ctx context.Context) {
	p.Observer.Queued()
	began := time.Now()
	p.compareAt, p.stateAt, p.rulesAt = began.Add(p.SyncPeriod), began.Add(p.SyncPeriod), began.Add(p.rulesPeriod())
	problems := p.programAll(ctx)
	p.settle(ctx, problems)
	p.measure(problems)
	p.reportFailing()
	logSync(ctx, time.Since(began), len(p.depends), len(problems), p.applier)
	p.Observer.Passed(time.Since(began), len(p.depends), len(problems))
	keepLess()
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
	p.numbers.seed(p.applier.Marks())
	p.useSets(p.applier.FilledSets())
	return nil
}

// useSets has rules written for sets that the kernel has members of: what an
// earlier process serves goes on.
func (p *Proxy) useSets(names []string) {
	for _, name := range names {
		p.uses[name] = true
	}
	p.replan = true
}

// programAll programs what of the node's part has changed since it was prepared,
// and then every Service, those first that others need to start at all
// (kubernetes#133773). Last it removes what is not desired any more, and then the
// rules for sets that only an earlier process used.
func (p *Proxy) programAll(ctx context.Context) apply.Problems {
	if w := p.take(); w.node || w.network || p.manyNow() {
		p.renewAffected(ctx)
	}
	problems := p.flush()
	problems = append(problems, p.program(ctx, p.waiting)...)
	p.applier.Sweep()
	problems = append(problems, p.flush()...)
	p.started = true
	problems = append(problems, p.flush()...)
	p.warn(ctx)
	return problems
}

// program programs Services batch by batch.
func (p *Proxy) program(ctx context.Context, names map[types.NamespacedName]struct{}) apply.Problems {
	batches := p.inbox.batches(names)
	// From the API server's Service it follows what others may not have.
	for _, name := range batches[0] {
		p.planService(ctx, name)
	}
	problems := p.flush()
	for drafts := range p.draftAhead(batches[1:]) {
		for _, d := range drafts {
			p.adopt(ctx, d)
		}
		problems = append(problems, p.flush()...)
	}
	return problems
}

// restingGC is how much the heap may grow, in per cent of what lives, before the
// garbage is collected once the start is over. Little becomes garbage then: Go's own
// 100 would mostly keep as much again as there is, unused.
const restingGC = 50

// keepLess has less memory kept from now on, unless GOGC says how much.
func keepLess() {
	if chosen := debug.SetGCPercent(restingGC); chosen != 100 {
		debug.SetGCPercent(chosen)
	}
	giveBack()
}

// giveBack returns memory to the system after much was read that is needed no
// more: else it stays until the heap has grown to it again, which it may never do.
// It takes a collection of garbage, for which nobody waits.
func giveBack() { go debug.FreeOSMemory() }
