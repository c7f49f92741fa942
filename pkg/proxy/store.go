package proxy

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// store holds the API objects that the source has delivered, by Service.
type store struct {
	services map[types.NamespacedName]*corev1.Service
	slices   map[types.NamespacedName]map[types.NamespacedName]*discoveryv1.EndpointSlice // by Service, then by slice
	owners   map[types.NamespacedName]types.NamespacedName                                // slice → Service
	node     *corev1.Node
}

func newStore() store {
	return store{
		services: map[types.NamespacedName]*corev1.Service{},
		slices:   map[types.NamespacedName]map[types.NamespacedName]*discoveryv1.EndpointSlice{},
		owners:   map[types.NamespacedName]types.NamespacedName{},
	}
}

// setSlice files a slice and gives the Services that it changes: two where
// the slice passed from one to another.
func (s *store) setSlice(slice *discoveryv1.EndpointSlice) []types.NamespacedName {
	name := types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}
	owner, ours := service.Owner(slice)
	if !ours {
		return s.deleteSlice(name)
	}
	var changed []types.NamespacedName
	if before, known := s.owners[name]; known && before != owner {
		changed = s.deleteSlice(name)
	}
	if s.slices[owner] == nil {
		s.slices[owner] = map[types.NamespacedName]*discoveryv1.EndpointSlice{}
	}
	s.slices[owner][name] = slice
	s.owners[name] = owner
	return append(changed, owner)
}

func (s *store) deleteSlice(name types.NamespacedName) []types.NamespacedName {
	owner, known := s.owners[name]
	if !known {
		return nil
	}
	delete(s.owners, name)
	delete(s.slices[owner], name)
	if len(s.slices[owner]) == 0 {
		delete(s.slices, owner)
	}
	return []types.NamespacedName{owner}
}

// slicesOf lists a Service's slices, always in the same order.
func (s *store) slicesOf(name types.NamespacedName) []*discoveryv1.EndpointSlice {
	bySlice := s.slices[name]
	names := slices.SortedFunc(maps.Keys(bySlice), func(a, b types.NamespacedName) int {
		if a.String() < b.String() {
			return -1
		}
		return 1
	})
	out := make([]*discoveryv1.EndpointSlice, len(names))
	for i, n := range names {
		out[i] = bySlice[n]
	}
	return out
}
