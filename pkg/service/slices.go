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
	m := merger{}
	object := b.object
	defer func() { b.object = object }()
	byName := slices.SortedStableFunc(slices.Values(endpointSlices), func(a, b *discoveryv1.EndpointSlice) int {
		return strings.Compare(a.Name, b.Name)
	})
	for _, slice := range byName {
		b.object = fmt.Sprintf("EndpointSlice %s/%s", slice.Namespace, slice.Name)
		m.addSlice(b, slice)
	}
	for key, list := range m {
		m[key] = once(list)
	}
	return m
}

type merger map[portKey][]Endpoint

// addSlice adds the endpoints of a slice for each of its ports. An address
// that cannot be used is reported once, not for every port.
func (m merger) addSlice(b *builder, slice *discoveryv1.EndpointSlice) {
	addrs := addressesOf(b, slice)
	for i := range slice.Ports {
		key, number, ok := endpointPort(b, slice, i)
		if !ok {
			continue
		}
		list := slices.Grow(m[key], len(addrs))
		for j, addr := range addrs {
			if addr.IsValid() {
				list = append(list, newEndpoint(slice.Endpoints[j], addr, number))
			}
		}
		if len(list) > 0 {
			m[key] = list
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

// once sorts endpoints, and keeps of several reports of one the newest, or else
// the first.
func once(list []Endpoint) []Endpoint {
	slices.SortStableFunc(list, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) })
	out := list[:0]
	for _, e := range list {
		last := len(out) - 1
		switch {
		case last < 0 || out[last].Addr != e.Addr:
			out = append(out, e)
		case preferred(e, out[last]):
			out[last] = e
		}
	}
	return out
}

// preferred tells which of two reports of one endpoint is the newer one: a
// pod's address never goes back from terminating.
func preferred(a, b Endpoint) bool {
	if a.Terminating != b.Terminating {
		return !a.Terminating
	}
	return a.Ready && !b.Ready
}
