package proxy

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// batchSize is how many Services are programmed together at the start: few
// enough that the first answer long before the last, and many enough that a
// batch costs little by itself.
const batchSize = 256

// apiServer is the Service without which nothing else on a node starts.
var apiServer = types.NamespacedName{Namespace: "default", Name: "kubernetes"}

// batches orders Services for the start: the API server's by itself, then
// those of DNS, then all others.
func (i *inbox) batches(names map[types.NamespacedName]struct{}) [][]types.NamespacedName {
	i.mu.Lock()
	defer i.mu.Unlock()
	var first, dns, rest []types.NamespacedName
	for name := range names {
		switch svc := i.store.services[name]; {
		case name == apiServer:
			first = append(first, name)
		case svc != nil && servesDNS(svc):
			dns = append(dns, name)
		default:
			rest = append(rest, name)
		}
	}
	sortNames(dns)
	sortNames(rest)
	batches := [][]types.NamespacedName{first, dns}
	return slices.AppendSeq(batches, slices.Chunk(rest, batchSize))
}

func servesDNS(svc *corev1.Service) bool {
	return slices.ContainsFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == 53 && p.Protocol == corev1.ProtocolUDP
	})
}

func sortNames(names []types.NamespacedName) {
	slices.SortFunc(names, func(a, b types.NamespacedName) int {
		return strings.Compare(a.String(), b.String())
	})
}
