// Package proxy is the loop between a source and the kernel: it plans what the source
// delivers, one Service at a time, and passes the plans to package reconcile.
package proxy

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Network reads the node's network, and reports changes and deletions of our state.
// Package routing implements it.
type Network interface {
	Inventory() (routing.Inventory, error)
	Listeners() ([]routing.Listener, error)
	ClientPorts() ([]routing.PortRange, error)
	Watch(ctx context.Context, changed func(), deleted func(...routing.Removal)) error
}

// Rules reports when another program has changed a rule in a chain that concerns the
// proxy. Package nat implements it.
type Rules interface {
	Watch(ctx context.Context, concerns func(nat.Chain) bool, changed func()) error
}

// HealthChecks serves the Services' health check node ports.
type HealthChecks interface {
	Set(types.NamespacedName, plan.HealthCheck)
	Delete(types.NamespacedName)
}

// Observer receives the state of the loop. Its methods return at once.
type Observer interface {
	Queued()                                             // there is work
	Idle()                                               // there is none any more, without a pass
	Serving()                                            // the kernel serves what an earlier process programmed; before the first pass
	Passed(took time.Duration, services, problems int)   // a pass ended; large Services may be left for the next one
	Failing(node bool, services, all int)                // whether the node cannot be read or programmed, and how many Services of all cannot be programmed
	Compared(took time.Duration, differences int)        // a comparison with the kernel ended; it may have covered only a part
	Held(virtualServers, realServers, draining int)      // our state in the kernel
	Conflicts(count int)                                 // virtual servers not served, because another Service has precedence
	Node(exists, deleting, excludedFromAutoscaling bool) // state of the Node object
}

// Meter receives values that only metrics show. Its methods return at once.
type Meter interface {
	Changes(services, endpoints int)         // delivered, for the next pass
	Planned(took time.Duration)              // in one pass
	Programmed(latency time.Duration)        // since the cluster saw an endpoint's change
	NoLocalEndpoints(internal, external int) // Services, by policy, without an endpoint on this node
	Interfaces(modes []plan.InterfaceMode)   // all known interfaces
	Restored(count int)                      // rules, addresses and routes that another program had deleted
	Cut(connections int)                     // at the drain deadline, or on an unreachable node
}

// Events writes Events. Package event implements it. Warn returns at once.
type Events interface {
	Warn(event.Warning)
}

// Options configures the proxy, apart from the plan.
type Options struct {
	Config        plan.Config
	Kernel        reconcile.Kernel
	KernelVersion plan.Version
	// ProbeScheduler returns an error if the kernel cannot use an IPVS scheduler. It
	// loads the scheduler if necessary.
	ProbeScheduler func(name string) error
	// BridgeNetfilter returns the state of br_netfilter. load requests loading the
	// module if it is missing.
	BridgeNetfilter func(load bool) plan.BridgeNetfilter
	// ReadOnly means that this process cannot set kernel parameters.
	ReadOnly bool
	// APIServer is where this process reaches the API server, if that is an IP address.
	APIServer    []netip.AddrPort
	Network      Network
	Rules        Rules
	HealthChecks HealthChecks
	Observer     Observer
	Meter        Meter
	Events       Events

	MinSyncPeriod time.Duration // minimum time between two passes; 0: none
	SyncPeriod    time.Duration // time between two comparisons with the kernel; see reconcile.Periods
	Running       bool          // Once plans placeholder rules, as Run does
	RulesWatched  bool          // Rules reports every change of a rule that concerns the proxy
	DrainPeriod   time.Duration // time between two checks of draining real servers
	DrainDeadline time.Duration // for connections to a removed endpoint
}

// nodeKey represents the node itself among the names of Services.
var nodeKey types.NamespacedName

// Proxy is the proxy of one node. Create it with New and use it once.
type Proxy struct {
	Options
	inbox      *inbox
	reconciler *reconcile.Reconciler

	// The following fields belong to the loop's goroutine.
	node      plan.Node
	facts     plan.Facts
	linger    linger
	collector collector
	watched   bool                            // changes of the node are reported: Run, not Once
	modes     []plan.InterfaceMode            // as last reported
	reported  map[types.NamespacedName]string // last error reported for each object
	warned    map[string]bool                 // current warnings
	// failingNode are the reported reasons why the node cannot be programmed.
	failingNode map[string]bool

	triggers []trigger                                      // changes of endpoints since the last pass
	noLocal  map[types.NamespacedName]plan.NoLocalEndpoints // Services with a policy that lacks endpoints
	planning time.Duration                                  // time spent planning in this pass

	noInternal, noExternal int // totals of noLocal

	schedulers  map[string]bool                   // schedulers known to be available
	noScheduler map[types.NamespacedName]struct{} // Services whose scheduler is unavailable

	checks map[types.NamespacedName]plan.HealthCheck // health check node ports, as planned
	raised map[types.NamespacedName]struct{}         // those of checks that wait for flush

	apiServers []netip.AddrPort // the endpoints of default/kubernetes

	dirty    map[types.NamespacedName]struct{} // Services to plan
	renew    bool                              // read the node's facts again
	renewAt  time.Time                         // when to retry a failed read of the facts
	renewing wait.Backoff                      // between these retries
	renewed  time.Time                         // the last read of the facts
	lastPass time.Time
	// largeLeft means that the last pass left large Services to the next one.
	largeLeft bool
	lastLarge types.NamespacedName // the large Service that was planned last
}

// New creates a proxy. It does not read or write anything.
func New(o Options) *Proxy {
	return &Proxy{
		Options: o,
		inbox:   newInbox(),
		reconciler: reconcile.New(&o.Config, o.Kernel, reconcile.Periods{
			Sync: o.SyncPeriod, Drain: o.DrainPeriod, DrainDeadline: o.DrainDeadline, RulesWatched: o.RulesWatched,
		}),
		reported:    map[types.NamespacedName]string{},
		noLocal:     map[types.NamespacedName]plan.NoLocalEndpoints{},
		dirty:       map[types.NamespacedName]struct{}{},
		renewing:    newBackoff(),
		schedulers:  map[string]bool{},
		noScheduler: map[types.NamespacedName]struct{}{},
		checks:      map[types.NamespacedName]plan.HealthCheck{},
		raised:      map[types.NamespacedName]struct{}{},
		linger:      newLinger(),
	}
}

// Run programs the kernel until the context ends, and leaves the kernel serving. It
// returns an error only if the source ends before the context does. Other failures are
// reported and retried.
func (p *Proxy) Run(ctx context.Context, src source.Source) error {
	p.watched = true
	ended := make(chan error, 1)
	go func() { ended <- src.Run(ctx, p.inbox) }()
	missed := func() { p.inbox.networkChanged(); p.inbox.deleted() }
	go p.watch(ctx, "the node's network", missed, func() error {
		return p.Network.Watch(ctx, p.inbox.networkChanged, p.inbox.deleted)
	})
	concerns := reconcile.Concerns(&p.Config)
	go p.watch(ctx, "the node's rules", p.inbox.rulesChanged, func() error {
		return p.Rules.Watch(ctx, concerns, p.inbox.rulesChanged)
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
	for retry := newBackoff(); !p.prepare(ctx); {
		p.Observer.Queued()
		if !sleep(ctx, retry.Step()) {
			return nil
		}
	}
	p.Observer.Idle() // only Services are awaited now
	if ok, err := await(p.inbox.synced); !ok {
		return err
	}
	p.start(ctx)
	return p.loop(ctx, ended)
}

// prepare reads the node and the kernel and programs the node's plan while the Services are
// still being delivered. Writing the plan takes long, because that runs external programs, and
// does not need the Services. If the kernel has no virtual servers yet, prepare also programs the
// Services that other programs on the node need to start. Otherwise the kernel serves already:
// load balancers may use the node meanwhile. prepare returns false if the kernel cannot be read:
// state that cannot be read is never assumed to be empty.
func (p *Proxy) prepare(ctx context.Context) bool {
	virtualServers, err := p.begin(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the node or the kernel, retrying")
		return false
	}
	if virtualServers > 0 {
		p.Observer.Serving()
	}
	problems := p.reconciler.Flush()
	if virtualServers == 0 {
		problems = append(problems, p.program(ctx, p.inbox.firstServices)...)
	}
	p.settle(ctx, problems)
	return true
}

// Once syncs once, and returns an error for everything that could not be used or programmed.
func (p *Proxy) Once(ctx context.Context, src source.Source) error {
	unused := p.load(ctx, src)
	select {
	case <-p.inbox.synced:
	default:
		return unused
	}
	if _, err := p.begin(ctx); err != nil {
		return errors.Join(unused, err)
	}
	problems := p.programAll(ctx)
	if !p.Running {
		problems = append(problems, p.reconciler.DeleteDrained(time.Now())...) // no later check does it
	}
	s := p.reconciler.Settle()
	p.reportCuts(ctx, s.Cuts)
	p.reportState(ctx, &s)
	return errors.Join(unused, problems.Err())
}

// load makes the source deliver its objects once. A source without Load is run until it has
// synced.
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

// endOfSource returns the error for a source that stopped on its own.
func endOfSource(ctx context.Context, err error) error {
	if err == nil && ctx.Err() == nil {
		return errors.New("the source of Services stopped")
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// watchPause is the time between a failed watch and the next attempt.
const watchPause = 30 * time.Second

// newBackoff returns the times between attempts to read the node.
func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Steps: 1 << 30, Cap: 30 * time.Second}
}

// watch runs a watch of kernel state that other programs change. When a watch fails, it
// reports a change, because some may have been missed.
func (p *Proxy) watch(ctx context.Context, what string, changed func(), run func() error) {
	for {
		err := run()
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Watch failed, retrying", "watch", what)
		changed()
		if !sleep(ctx, watchPause) {
			return
		}
	}
}

// sleep returns false if the context ended first.
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
	problems := p.programAll(ctx)
	p.passed(ctx, began, p.inbox.services(), problems)
	p.collector.started()
}

// begin reads the node and the kernel. It returns the number of our virtual servers.
func (p *Proxy) begin(ctx context.Context) (virtualServers int, err error) {
	if err := p.renewNode(ctx); err != nil {
		return 0, err
	}
	p.inbox.takeExternal() // what the complete reading includes
	return p.reconciler.Load()
}

// programAll programs the node's plan again if it changed since prepare, then every
// Service: first the API server's and DNS, which other programs need when they start
// (kubernetes#133773). Then it removes stale state, and last the rules for sets that only an earlier
// process used. What other programs have changed since begin is repaired by the next Step.
func (p *Proxy) programAll(ctx context.Context) reconcile.Problems {
	w := p.take()
	if w.node || w.network || p.becameMany() {
		p.renewAffected(ctx)
	}
	problems := p.reconciler.Flush()
	problems = append(problems, p.program(ctx, p.dirty)...)
	p.shrinkDirty()
	return append(problems, p.reconciler.Prune()...)
}

// program programs Services batch by batch.
func (p *Proxy) program(ctx context.Context, names map[types.NamespacedName]struct{}) reconcile.Problems {
	batches := p.inbox.batches(names)
	// The API server's Service determines the addresses that others may not use.
	for _, name := range batches[0] {
		p.planService(ctx, name)
	}
	problems := p.flush()
	for drafts := range p.draftAhead(batches[1:]) {
		for _, d := range drafts {
			p.accept(ctx, d)
		}
		problems = append(problems, p.reconciler.FlushAhead()...)
		// Each batch counts as progress: a long first sync must not look like a hanging one.
		p.Observer.Idle()
		p.Observer.Queued()
	}
	return append(problems, p.flush()...)
}
