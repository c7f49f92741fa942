package proxy

import (
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// inbox is the source.Sink: it files what the source delivers and notes what
// there is to do about it. Any number of changes of one Service are one piece
// of work until the loop takes it.
type inbox struct {
	mu      sync.Mutex
	store   store
	changed map[types.NamespacedName]struct{} // Services
	node    bool                              // the Node has changed, or what is known of others
	network bool                              // the node's interfaces, addresses, rules or routes have
	taken   bool                              // another program may have deleted anything of ours
	lost    []routing.Lost                    // what of ours was deleted
	rules   bool                              // somebody else may have changed rules

	began    time.Time
	count    changes
	triggers []trigger

	wake   chan struct{}                     // holds one token while there is work
	first  map[types.NamespacedName]struct{} // Services that had been delivered by then
	begun  chan struct{}                     // closed by Begun, or Synced
	synced chan struct{}                     // closed by Synced
	once   [2]sync.Once
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

// note changes the store under the lock, marks Services and wakes the loop.
func (i *inbox) note(change func(*store) []types.NamespacedName) {
	i.mu.Lock()
	for _, name := range change(&i.store) {
		i.changed[name] = struct{}{}
	}
	i.mu.Unlock()
	i.signal()
}

func (i *inbox) signal() {
	select {
	case i.wake <- struct{}{}:
	default: // it has not taken the last one yet
	}
}

func (i *inbox) SetService(svc *corev1.Service) {
	name := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
	i.note(func(s *store) []types.NamespacedName {
		i.count.services++
		s.services[name] = svc
		return []types.NamespacedName{name}
	})
}

func (i *inbox) DeleteService(name types.NamespacedName) {
	i.note(func(s *store) []types.NamespacedName {
		i.count.services++
		delete(s.services, name)
		return []types.NamespacedName{name}
	})
}

func (i *inbox) SetEndpointSlice(slice *discoveryv1.EndpointSlice) {
	i.note(func(s *store) []types.NamespacedName {
		i.count.endpoints++
		i.noteTrigger(slice)
		return s.setSlice(slice)
	})
}

func (i *inbox) DeleteEndpointSlice(name types.NamespacedName) {
	i.note(func(s *store) []types.NamespacedName {
		i.count.endpoints++
		return s.deleteSlice(name)
	})
}

func (i *inbox) SetNode(n *corev1.Node) { i.setNode(n) }

func (i *inbox) DeleteNode() { i.setNode(nil) }

func (i *inbox) setNode(n *corev1.Node) {
	i.note(func(s *store) []types.NamespacedName {
		s.node = n
		i.node = true
		return nil
	})
}

// SetLostNodes is a change of the node, of what it knows about the others.
func (i *inbox) SetLostNodes(nodes []string) {
	i.note(func(s *store) []types.NamespacedName {
		s.lost = nodes
		i.node = true
		return nil
	})
}

func (i *inbox) Begun() {
	i.once[0].Do(func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.first = maps.Clone(i.changed)
		close(i.begun)
	})
}

func (i *inbox) Synced() {
	i.once[0].Do(func() { close(i.begun) })
	i.once[1].Do(func() { close(i.synced) })
}

// networkChanged and deleted are for the watch of the node's network,
// rulesChanged for that of its rules.
func (i *inbox) networkChanged() { i.set(&i.network) }

func (i *inbox) deleted(lost ...routing.Lost) {
	if len(lost) == 0 {
		i.set(&i.taken)
		return
	}
	i.mu.Lock()
	i.lost = append(i.lost, lost...)
	i.mu.Unlock()
	i.signal()
}

func (i *inbox) rulesChanged() { i.set(&i.rules) }

func (i *inbox) set(flag *bool) {
	i.mu.Lock()
	*flag = true
	i.mu.Unlock()
	i.signal()
}

// work is what the loop takes from the inbox.
type work struct {
	services             []types.NamespacedName
	node, network, taken bool
	rules                bool
	lost                 []routing.Lost
	count                changes
	triggers             []trigger
}

func (i *inbox) take() work {
	i.mu.Lock()
	defer i.mu.Unlock()
	w := work{node: i.node, network: i.network, taken: i.taken, rules: i.rules, lost: i.lost, count: i.count, triggers: i.triggers}
	for name := range i.changed {
		w.services = append(w.services, name)
	}
	// Not cleared: a map keeps the size that it has had, and to go through it
	// costs that, however little there is in it.
	i.changed = map[types.NamespacedName]struct{}{}
	i.node, i.network, i.taken, i.rules = false, false, false, false
	i.count, i.triggers, i.lost = changes{}, nil, nil
	return w
}

// get gives a Service and its slices as they stand now; nil if there is none.
func (i *inbox) get(name types.NamespacedName) (*corev1.Service, []*discoveryv1.EndpointSlice) {
	i.mu.Lock()
	defer i.mu.Unlock()
	svc := i.store.services[name]
	if svc == nil {
		return nil, nil
	}
	return svc, i.store.slices[name]
}

// services is how many there are.
func (i *inbox) services() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.store.services)
}

// getNode gives the own Node, nil if there is none, and the names of those lost.
func (i *inbox) getNode() (node *corev1.Node, lost []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.store.node, i.store.lost
}
