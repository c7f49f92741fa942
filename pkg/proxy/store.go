package proxy

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/index"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// store holds the delivered objects.
type store struct {
	objects     index.Index[types.NamespacedName, objects] // by Service
	slices      index.Index[types.NamespacedName, service.Slice]
	services    int // objects with a Service
	node        *corev1.Node
	unreachable []string // nodes
}

// objects holds a Service, or nil if there is none, and its slices, sorted by name. It is
// immutable in a store: drafts read the list concurrently.
type objects struct {
	service *service.Parsed
	slices  []*service.Slice
}

func newStore() store {
	return store{
		objects: index.OfNames((*objects).name),
		slices:  index.OfNames(func(s *service.Slice) types.NamespacedName { return s.Name }),
	}
}

// name returns the name of the Service.
func (o *objects) name() types.NamespacedName {
	if o.service != nil {
		return o.service.Name
	}
	return o.slices[0].ServiceName()
}

// of returns the objects of a Service; they are not stored if there are none.
func (s *store) of(name types.NamespacedName) *objects {
	if o := s.objects.Get(name); o != nil {
		return o
	}
	return &objects{}
}

// change replaces the objects of a Service by a changed copy.
func (s *store) change(name types.NamespacedName, do func(*objects)) {
	o := *s.of(name)
	if o.service != nil {
		s.services--
	}
	do(&o)
	if o.service != nil {
		s.services++
	}
	if o.service == nil && len(o.slices) == 0 {
		s.objects.Delete(name)
	} else {
		s.objects.Put(&o)
	}
}

func (s *store) setService(name types.NamespacedName, svc *service.Parsed) {
	s.change(name, func(o *objects) { o.service = svc })
}

// setSlice stores a slice and returns the Services that it affects: two if the slice
// moved from one to another.
func (s *store) setSlice(slice *service.Slice) []types.NamespacedName {
	name := slice.Name
	if slice.Service == "" {
		return s.deleteSlice(name)
	}
	svc := slice.ServiceName()
	var changed []types.NamespacedName
	if before := s.slices.Get(name); before != nil && before.Service != slice.Service {
		changed = s.deleteSlice(name)
	}
	s.slices.Put(slice)
	s.change(svc, func(o *objects) {
		at, found := find(o.slices, name)
		if found {
			o.slices = slices.Clone(o.slices)
			o.slices[at] = slice
		} else {
			o.slices = slices.Insert(slices.Clip(o.slices), at, slice)
		}
	})
	return append(changed, svc)
}

func (s *store) deleteSlice(name types.NamespacedName) []types.NamespacedName {
	slice := s.slices.Get(name)
	if slice == nil {
		return nil
	}
	s.slices.Delete(name)
	svc := slice.ServiceName()
	s.change(svc, func(o *objects) {
		if at, found := find(o.slices, name); found {
			o.slices = slices.Concat(o.slices[:at], o.slices[at+1:])
		}
	})
	return []types.NamespacedName{svc}
}

// find searches for a slice by name among those of one Service, which share a
// namespace.
func find(list []*service.Slice, name types.NamespacedName) (at int, found bool) {
	return slices.BinarySearchFunc(list, name, func(s *service.Slice, n types.NamespacedName) int {
		return cmp.Compare(s.Name.Name, n.Name)
	})
}
