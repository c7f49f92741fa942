package proxy

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// store holds the delivered objects, by Service.
type store struct {
	services map[types.NamespacedName]*service.Parsed
	slices   map[types.NamespacedName][]*service.Slice     // by Service, sorted; replaced instead of changed, because others read them concurrently
	owners   map[types.NamespacedName]types.NamespacedName // slice → Service
	node     *corev1.Node
	lost     []string // unreachable nodes
}

func newStore() store {
	return store{
		services: map[types.NamespacedName]*service.Parsed{},
		slices:   map[types.NamespacedName][]*service.Slice{},
		owners:   map[types.NamespacedName]types.NamespacedName{},
	}
}

// setSlice stores a slice and returns the Services that it affects: two if the slice
// moved from one to another.
func (s *store) setSlice(slice *service.Slice) []types.NamespacedName {
	name := slice.Name
	if slice.Service == "" {
		return s.deleteSlice(name)
	}
	owner := types.NamespacedName{Namespace: name.Namespace, Name: slice.Service}
	var changed []types.NamespacedName
	if before, known := s.owners[name]; known && before != owner {
		changed = s.deleteSlice(name)
	}
	list := s.slices[owner]
	if at, found := find(list, name); found {
		list = slices.Clone(list)
		list[at] = slice
	} else {
		list = slices.Insert(slices.Clip(list), at, slice)
	}
	s.slices[owner] = list
	s.owners[name] = owner
	return append(changed, owner)
}

func (s *store) deleteSlice(name types.NamespacedName) []types.NamespacedName {
	owner, known := s.owners[name]
	if !known {
		return nil
	}
	delete(s.owners, name)
	list := s.slices[owner]
	if at, found := find(list, name); found {
		list = slices.Concat(list[:at], list[at+1:])
	}
	s.slices[owner] = list
	if len(list) == 0 {
		delete(s.slices, owner)
	}
	return []types.NamespacedName{owner}
}

// slice returns one of a Service's slices, or nil if none has that name.
func (s *store) slice(owner, name types.NamespacedName) *service.Slice {
	list := s.slices[owner]
	if at, found := find(list, name); found {
		return list[at]
	}
	return nil
}

// find searches for a slice by name among those of one Service, which share a
// namespace.
func find(list []*service.Slice, name types.NamespacedName) (at int, found bool) {
	return slices.BinarySearchFunc(list, name, func(s *service.Slice, n types.NamespacedName) int {
		return cmp.Compare(s.Name.Name, n.Name)
	})
}
