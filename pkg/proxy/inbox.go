package proxy

import (
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// inbox is the source.Sink. It stores what the source delivers and records the work
// that follows from it. Any number of changes of one Service count as one until the
// loop takes them.
type inbox struct {
	mu       sync.Mutex
	store    store
	changed  map[types.NamespacedName]struct{} // Services
	node     bool                              // the Node, or what it knows about other nodes, has changed
	network  bool                              // the node's interfaces, addresses, policy rules or routes have changed
	external reconcile.External                // what other programs have changed of our state

	queued   func() // reports that there is work to plan; nil until the loop serves
	began    time.Time
	count    changes
	triggers []trigger

	wake                  chan struct{}                     // holds one token while there is work
	firstServices         map[types.NamespacedName]struct{} // Services delivered before Begun
	begun                 chan struct{}                     // closed by Begun, or Synced
	synced                chan struct{}                     // closed by Synced
	begunOnce, syncedOnce sync.Once
}

func newInbox() *inbox {
	return &inbox{
		began:   time.Now(),
		store:   newStore(),
		changed: map[types.NamespacedName]struct{}{},
		wake:    make(chan struct{}, 1),

		begun:  make(chan struct{}),
		synced: make(chan struct{}),
	}
}

// note changes the store under the lock, marks Services dirty and wakes the loop. It calls
// queued itself, because a loop that hangs would not. It does so under the lock: otherwise the
// loop could finish the work before it is reported as queued.
func (i *inbox) note(change func(*store) []types.NamespacedName) {
	i.mu.Lock()
	for _, name := range change(&i.store) {
		i.changed[name] = struct{}{}
	}
	if i.queued != nil && (len(i.changed) > 0 || i.node) {
		i.queued()
	}
	i.mu.Unlock()
	i.signal()
}

// report sets the function that note calls from now on. It must not call the inbox.
func (i *inbox) report(queued func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.queued = queued
}

func (i *inbox) signal() {
	select {
	case i.wake <- struct{}{}:
	default: // the last signal is still pending
	}
}

func (i *inbox) SetService(svc *corev1.Service) {
	parsed := service.Parse(svc)
	i.note(func(s *store) []types.NamespacedName {
		i.count.services++
		s.setService(parsed.Name, parsed)
		return []types.NamespacedName{parsed.Name}
	})
}

func (i *inbox) DeleteService(name types.NamespacedName) {
	i.note(func(s *store) []types.NamespacedName {
		i.count.services++
		s.setService(name, nil)
		return []types.NamespacedName{name}
	})
}

func (i *inbox) SetEndpointSlice(slice *discoveryv1.EndpointSlice) {
	parsed := service.ParseSlice(slice)
	i.note(func(s *store) []types.NamespacedName {
		i.count.endpoints++
		i.noteTrigger(parsed)
		return s.setSlice(parsed)
	})
}

func (i *inbox) DeleteEndpointSlice(name types.NamespacedName) {
	i.note(func(s *store) []types.NamespacedName {
		i.count.endpoints++
		return s.deleteSlice(name)
	})
}

// DeleteNode keeps the last known Node, as kube-proxy does (NodeManager.OnNodeDelete in
// pkg/proxy/node.go). Until the kubelet registers the node again, also after the API server has
// lost its data, the node keeps its zone and pod CIDRs, and load balancers keep using it.
func (i *inbox) DeleteNode() {}

func (i *inbox) SetNode(n *corev1.Node) {
	i.note(func(s *store) []types.NamespacedName {
		s.node = n
		i.node = true
		return nil
	})
}

// SetUnreachableNodes counts as a change of the node: the node knows which others are
// unreachable.
func (i *inbox) SetUnreachableNodes(nodes []string) {
	i.note(func(s *store) []types.NamespacedName {
		s.unreachable = nodes
		i.node = true
		return nil
	})
}

func (i *inbox) Begun() {
	i.begunOnce.Do(func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.firstServices = maps.Clone(i.changed)
		close(i.begun)
	})
}

func (i *inbox) Synced() {
	i.begunOnce.Do(func() { close(i.begun) })
	i.syncedOnce.Do(func() { close(i.synced) })
}

// networkChanged and deleted are called by the watch of the node's network,
// rulesChanged by that of its rules.
func (i *inbox) networkChanged() { i.set(&i.network) }

func (i *inbox) deleted(removals ...routing.Removal) {
	if len(removals) == 0 {
		i.set(&i.external.MaybeDeleted)
		return
	}
	i.mu.Lock()
	i.external.Removed = append(i.external.Removed, removals...)
	i.mu.Unlock()
	i.signal()
}

func (i *inbox) rulesChanged() { i.set(&i.external.Rules) }

func (i *inbox) set(flag *bool) {
	i.mu.Lock()
	*flag = true
	i.mu.Unlock()
	i.signal()
}

// takeExternal returns what other programs have changed of our state since the last call.
func (i *inbox) takeExternal() reconcile.External {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := i.external
	i.external = reconcile.External{}
	return e
}

// work is what the next pass takes from the inbox.
type work struct {
	services      []types.NamespacedName
	node, network bool
	count         changes
	triggers      []trigger
}

func (i *inbox) take() work {
	i.mu.Lock()
	defer i.mu.Unlock()
	w := work{node: i.node, network: i.network, count: i.count, triggers: i.triggers}
	for name := range i.changed {
		w.services = append(w.services, name)
	}
	// A new map: a cleared one keeps its size, and iterating over it takes time
	// proportional to that.
	i.changed = map[types.NamespacedName]struct{}{}
	i.node, i.network = false, false
	i.count, i.triggers = changes{}, nil
	return w
}

// get returns a Service and its current slices, or nil if it does not exist.
func (i *inbox) get(name types.NamespacedName) (*service.Parsed, []*service.Slice) {
	i.mu.Lock()
	defer i.mu.Unlock()
	o := i.store.of(name)
	if o.service == nil {
		return nil, nil
	}
	return o.service, o.slices
}

// services returns the number of Services.
func (i *inbox) services() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.store.services
}

// getNode returns the last known Node object, or nil if there was none, and the names of
// unreachable nodes.
func (i *inbox) getNode() (node *corev1.Node, unreachable []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.store.node, i.store.unreachable
}
