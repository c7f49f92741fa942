package service

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// portKey joins a Service's port to its endpoints: EndpointSlices name ports
// as the Service does, and may give each slice another number for the name.
type portKey struct {
	name     string
	protocol ip.Protocol
}

// mergeSlices gives the endpoints of each port over all slices. An address
// and port that stands in several slices, as it does for a moment while the
// controller moves it, counts once; one that is not terminating wins.
func mergeSlices(b *builder, slices []*discoveryv1.EndpointSlice) map[portKey][]Endpoint {
	m := merger{seen: map[portKey]map[netip.AddrPort]int{}, out: map[portKey][]Endpoint{}}
	object := b.object
	defer func() { b.object = object }()
	for _, slice := range slices {
		b.object = fmt.Sprintf("EndpointSlice %s/%s", slice.Namespace, slice.Name)
		for i := range slice.Ports {
			m.addPort(b, slice, i)
		}
	}
	for _, list := range m.out {
		sortEndpoints(list)
	}
	return m.out
}

type merger struct {
	seen map[portKey]map[netip.AddrPort]int // position in out
	out  map[portKey][]Endpoint
}

// addPort adds all endpoints of a slice for one of its ports. A port without
// a number means "every port" in the API, which a proxy cannot serve.
func (m *merger) addPort(b *builder, slice *discoveryv1.EndpointSlice, i int) {
	p := slice.Ports[i]
	field := fmt.Sprintf("ports[%d]", i)
	if p.Port == nil || *p.Port == 0 {
		return
	}
	number, ok := b.port(field+".port", *p.Port, false)
	if !ok {
		return
	}
	protocol, err := parseProtocol(deref(p.Protocol, corev1.ProtocolTCP))
	if err != nil {
		b.errorf(field+".protocol", "%v", err)
		return
	}
	key := portKey{deref(p.Name, ""), protocol}
	for j := range slice.Endpoints {
		// An address that cannot be used is reported with the first port only.
		m.addEndpoint(b, slice, j, key, number, i == 0)
	}
}

func (m *merger) addEndpoint(b *builder, slice *discoveryv1.EndpointSlice, j int, key portKey, number uint16, report bool) {
	e := slice.Endpoints[j]
	// Further addresses of an endpoint are no longer defined by the API.
	if len(e.Addresses) == 0 {
		return
	}
	addr, err := parseEndpointAddr(slice.AddressType, e.Addresses[0])
	if err != nil {
		if report {
			b.errorf(fmt.Sprintf("endpoints[%d].addresses[0]", j), "%v", err)
		}
		return
	}
	m.put(key, newEndpoint(e, addr, number))
}

func (m *merger) put(key portKey, e Endpoint) {
	if m.seen[key] == nil {
		m.seen[key] = map[netip.AddrPort]int{}
	}
	at, dup := m.seen[key][e.Addr]
	switch {
	case !dup:
		m.seen[key][e.Addr] = len(m.out[key])
		m.out[key] = append(m.out[key], e)
	case preferred(e, m.out[key][at]):
		m.out[key][at] = e
	}
}

// preferred tells which of two reports of one endpoint is the newer one: a
// pod's address never goes back from terminating.
func preferred(a, b Endpoint) bool {
	if a.Terminating != b.Terminating {
		return !a.Terminating
	}
	return a.Ready && !b.Ready
}
