package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

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
// Slices are taken by name, so that the order in which they come decides
// nothing.
func mergeSlices(b *builder, endpointSlices []*discoveryv1.EndpointSlice) map[portKey][]Endpoint {
	m := merger{seen: map[portKey]map[netip.AddrPort]int{}, out: map[portKey][]Endpoint{}}
	object := b.object
	defer func() { b.object = object }()
	byName := slices.SortedStableFunc(slices.Values(endpointSlices), func(a, b *discoveryv1.EndpointSlice) int {
		return strings.Compare(a.Name, b.Name)
	})
	for _, slice := range byName {
		b.object = fmt.Sprintf("EndpointSlice %s/%s", slice.Namespace, slice.Name)
		m.addSlice(b, slice)
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

// addSlice adds the endpoints of a slice for each of its ports. An address
// that cannot be used is reported once, not for every port.
func (m *merger) addSlice(b *builder, slice *discoveryv1.EndpointSlice) {
	addrs := addressesOf(b, slice)
	for i := range slice.Ports {
		key, number, ok := endpointPort(b, slice, i)
		if !ok {
			continue
		}
		for j, addr := range addrs {
			if addr.IsValid() {
				m.put(key, newEndpoint(slice.Endpoints[j], addr, number))
			}
		}
	}
}

// addressesOf gives each endpoint's address, invalid where there is none that
// can be used. Further addresses of an endpoint are no longer defined by the
// API.
func addressesOf(b *builder, slice *discoveryv1.EndpointSlice) []netip.Addr {
	out := make([]netip.Addr, len(slice.Endpoints))
	for j, e := range slice.Endpoints {
		if len(e.Addresses) == 0 {
			continue
		}
		addr, err := parseEndpointAddr(slice.AddressType, e.Addresses[0])
		if err != nil {
			b.errorf(fmt.Sprintf("endpoints[%d].addresses[0]", j), "%v", err)
			continue
		}
		out[j] = addr
	}
	return out
}

// endpointPort reads one of a slice's ports. One without a number means
// "every port" in the API, which a proxy cannot serve.
func endpointPort(b *builder, slice *discoveryv1.EndpointSlice, i int) (key portKey, number uint16, ok bool) {
	p := slice.Ports[i]
	if p.Port == nil || *p.Port == 0 {
		return key, 0, false
	}
	field := fmt.Sprintf("ports[%d]", i)
	if number, ok = b.port(field+".port", *p.Port, false); !ok {
		return key, 0, false
	}
	protocol, err := parseProtocol(deref(p.Protocol, corev1.ProtocolTCP))
	if err != nil {
		b.errorf(field+".protocol", "%v", err)
		return key, 0, false
	}
	return portKey{deref(p.Name, ""), protocol}, number, true
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
