package proxy

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// batchSize is the number of Services programmed together at start-up: few enough that
// the first ones are served long before the last, many enough that the cost per batch
// is small.
const batchSize = 256

// batches orders Services for start-up: the API server's on its own, then those of DNS,
// then all others, and the large ones last.
func (i *inbox) batches(names map[types.NamespacedName]struct{}) [][]types.NamespacedName {
	i.mu.Lock()
	defer i.mu.Unlock()
	var first, dns, rest, large []types.NamespacedName
	for name := range names {
		switch svc := i.store.of(name).service; {
		case name == service.APIServer:
			first = append(first, name)
		case i.store.large(name):
			large = append(large, name)
		case svc != nil && servesDNS(svc):
			dns = append(dns, name)
		default:
			rest = append(rest, name)
		}
	}
	sortNames(dns)
	sortNames(rest)
	sortNames(large)
	batches := [][]types.NamespacedName{first, dns}
	batches = slices.AppendSeq(batches, slices.Chunk(rest, batchSize))
	return slices.AppendSeq(batches, slices.Chunk(large, 1))
}

// largeAbove is the number of virtual and real servers per address above which a
// Service is programmed on its own, after all others.
const largeAbove = 2000

// large reports whether programming a Service would delay others noticeably.
func (s *store) large(name types.NamespacedName) bool {
	o, endpoints := s.of(name), 0
	if o.service == nil {
		return false
	}
	for _, slice := range o.slices {
		endpoints += slice.Endpoints()
	}
	return o.service.Ports()*(1+endpoints) > largeAbove
}

// bySize separates the large Services, which it sorts, from the others.
func (i *inbox) bySize(names map[types.NamespacedName]struct{}) (small, large []types.NamespacedName) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for name := range names {
		if i.store.large(name) {
			large = append(large, name)
		} else {
			small = append(small, name)
		}
	}
	sortNames(large)
	return small, large
}

func servesDNS(svc *service.Parsed) bool { return svc.HasPort(ip.UDP, 53) }

func sortNames(names []types.NamespacedName) {
	slices.SortFunc(names, compareNames)
}

func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}
