package apiserver

import (
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/index"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// object is a watched object.
type object interface {
	*corev1.Service | *discoveryv1.EndpointSlice | *corev1.Node
	metav1.Object
}

// store receives the objects of one kind from a reflector. It trims them and passes them
// on. It remembers which exist, so that it can derive deletions from a new list.
type store[T object] struct {
	mu     *sync.Mutex // held while the sink is called
	logger klog.Logger // names the kind
	set    func(T)     // called while the previous object is still known
	remove func(types.NamespacedName)
	synced chan struct{} // closed after the first list
	first  sync.Once
	known  index.Index[types.NamespacedName, known]
	guard  guard
	// pods, if not nil, returns the endpoints of an object to remember.
	pods func(T) []pod
}

// known is what the store remembers of an object: enough to detect whether another list
// has it unchanged.
type known struct {
	name    types.NamespacedName
	version uint64
	pods    []pod // see unreachableNodes
}

// seed is the seed of the hashes of this process.
var seed = maphash.MakeSeed()

// versionOf returns a hash that distinguishes versions of an object, in eight bytes.
func versionOf(o metav1.Object) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = h.WriteString(string(o.GetUID())) // never fails
	_ = h.WriteByte(0)
	_, _ = h.WriteString(o.GetResourceVersion())
	return h.Sum64()
}

func newStore[T object](mu *sync.Mutex, logger klog.Logger, set func(T), remove func(types.NamespacedName)) *store[T] {
	return &store[T]{
		mu: mu, logger: logger, set: set, remove: remove,
		synced: make(chan struct{}), known: index.OfNames(func(k *known) types.NamespacedName { return k.name }),
	}
}

func (s *store[T]) Add(obj any) error { return s.Update(obj) }

func (s *store[T]) Update(obj any) error {
	o, ok := obj.(T)
	if !ok {
		return fmt.Errorf("unexpected object %T, want %T", obj, o)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(o)
	if s.guard.keeping {
		s.wait()
	}
	return nil
}

// put is called under the lock.
func (s *store[T]) put(o T) {
	source.Trim(o)
	name := nameOf(o)
	delete(s.guard.missing, name)
	s.set(o)
	k := &known{name: name, version: versionOf(o)}
	if s.pods != nil {
		k.pods = s.pods(o)
	}
	s.known.Put(k)
}

func (s *store[T]) Delete(obj any) error {
	o, ok := obj.(T)
	if !ok {
		return fmt.Errorf("unexpected object %T, want %T", obj, o)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(nameOf(o))
	return nil
}

func (s *store[T]) drop(name types.NamespacedName) {
	s.known.Delete(name)
	delete(s.guard.missing, name)
	s.remove(name)
}

// listedName is what remains of an object of a list after the store has passed it on: its
// name. A list with all objects would take more memory than everything else.
type listedName struct{ types.NamespacedName }

func (o *listedName) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

func (o *listedName) DeepCopyObject() runtime.Object { return &listedName{o.NamespacedName} }

// nameList is a list for a reflector.
type nameList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []runtime.Object // each a *listedName
}

func (l *nameList) DeepCopyObject() runtime.Object {
	return &nameList{ListMeta: *l.ListMeta.DeepCopy(), Items: slices.Clone(l.Items)}
}

// listed receives an object of a list while the list is read, and passes it on if it has
// changed. Replace follows when the list is complete.
func (s *store[T]) listed(o T) *listedName {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := nameOf(o)
	if was := s.known.Get(name); was == nil || was.version != versionOf(o) {
		s.put(o)
	}
	return &listedName{name}
}

// Replace receives the names in a complete list: the first one, or one after a watch was
// broken for too long. Objects that are missing from it count as deleted, unless the guard
// keeps them.
func (s *store[T]) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	missing := make(map[types.NamespacedName]struct{}, s.known.Len())
	for k := range s.known.All() {
		missing[k.name] = struct{}{}
	}
	for _, obj := range list {
		o, ok := obj.(*listedName)
		if !ok {
			return fmt.Errorf("unexpected object %T, want %T", obj, o)
		}
		delete(missing, o.NamespacedName)
	}
	s.guard.missing = missing
	s.decide()
	s.first.Do(func() { close(s.synced) })
	return nil
}

// Resync does nothing. The store has already passed on all known objects, and the
// periodic comparison with the kernel repairs drift. Planning every Service again would
// block changes for seconds with tens of thousands of Services.
func (s *store[T]) Resync() error { return nil }

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: unique.Make(o.GetNamespace()).Value(), Name: o.GetName()}
}
