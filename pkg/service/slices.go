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

// portKey joins a Service's port to its endpoints. EndpointSlices use the Service's
// port names, and each slice may have another number for a name.
type portKey struct {
	name     string
	protocol ip.Protocol
}

// mergeSlices returns the endpoints of each port from all slices. An address and port
// that several slices contain, as happens while the controller moves it, counts once; a
// report that is not terminating takes precedence. Slices are sorted by name so that
// the result does not depend on their order.
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

// addSlice adds the endpoints of a slice to each of its ports. It reports an invalid
// address once, not once per port.
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

// addressesOf returns the address of each endpoint, or an invalid one. The API no
// longer defines further addresses of an endpoint.
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

// endpointPort reads one port of a slice. A port without a number means "all ports" in
// the API, which a proxy cannot serve.
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

// once sorts endpoints and keeps one report per address and port, the preferred or else
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

// preferred reports whether a is newer than b, two reports of one endpoint: a pod's
// address never returns from terminating.
func preferred(a, b Endpoint) bool {
	if a.Terminating != b.Terminating {
		return !a.Terminating
	}
	return a.Ready && !b.Ready
}
