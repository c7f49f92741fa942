package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Slice is the parsed form of an EndpointSlice that is kept between changes. It has only
// the fields that are read, in a third of the memory of the API object.
type Slice struct {
	Name    types.NamespacedName
	Service string // the Service that it belongs to, or "" for a slice that is not ours
	// Trigger is the time, in nanoseconds since 1970, of the change of a pod or Service
	// that led to this version of the slice; 0 if unknown.
	Trigger int64

	ports     []slicePort
	endpoints []sliceEndpoint // sorted by address
	errs      []error
}

// slicePort is one port of a slice.
type slicePort struct {
	name     unique.Handle[string]
	protocol ip.Protocol
	number   uint16
}

// place is where an endpoint runs. Many endpoints share few places.
type place struct{ node, zone string }

// sliceEndpoint is an endpoint without its port.
type sliceEndpoint struct {
	addr  netip.Addr
	place unique.Handle[place]
	hints *Hints
	conditions
}

// ServiceName returns the namespace and name of the slice's Service.
func (s *Slice) ServiceName() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Name.Namespace, Name: s.Service}
}

// Endpoints returns the number of usable endpoints.
func (s *Slice) Endpoints() int { return len(s.endpoints) }

// ParseSlice parses an EndpointSlice. It does not keep a reference to slice.
func ParseSlice(slice *discoveryv1.EndpointSlice) *Slice {
	svc, ours := ServiceOf(slice)
	if !ours {
		return &Slice{Name: nameOf(slice)}
	}
	s := parseSlice(slice)
	s.Service = svc.Name
	if strings.HasPrefix(s.Name.Name, svc.Name) { // as its controller names it
		s.Service = s.Name.Name[:len(svc.Name)] // shares the bytes
	}
	if at, err := time.Parse(time.RFC3339Nano, slice.Annotations[corev1.EndpointsLastChangeTriggerTime]); err == nil {
		s.Trigger = at.UnixNano()
	}
	return s
}

func parseSlice(slice *discoveryv1.EndpointSlice) *Slice {
	s := &Slice{Name: nameOf(slice)}
	b := &builder{kind: "EndpointSlice", namespace: slice.Namespace, name: slice.Name}
	s.parseEndpoints(b, slice)
	s.parsePorts(b, slice)
	s.errs = b.errs
	return s
}

// parseEndpoints parses the first address of each endpoint. The API no longer defines
// further ones.
func (s *Slice) parseEndpoints(b *builder, slice *discoveryv1.EndpointSlice) {
	s.endpoints = make([]sliceEndpoint, 0, len(slice.Endpoints))
	for j := range slice.Endpoints {
		e := &slice.Endpoints[j]
		if len(e.Addresses) == 0 {
			continue
		}
		addr, err := parseEndpointAddr(slice.AddressType, e.Addresses[0])
		if err != nil {
			b.errorf(fmt.Sprintf("endpoints[%d].addresses[0]", j), "%v", err)
			continue
		}
		s.endpoints = append(s.endpoints, newSliceEndpoint(e, addr))
	}
	byAddress := func(a, b sliceEndpoint) int { return a.addr.Compare(b.addr) }
	if !slices.IsSortedFunc(s.endpoints, byAddress) {
		slices.SortStableFunc(s.endpoints, byAddress)
	}
}

// parsePorts parses the ports. A port without a number means "all ports" in the API,
// which a proxy cannot serve.
func (s *Slice) parsePorts(b *builder, slice *discoveryv1.EndpointSlice) {
	s.ports = make([]slicePort, 0, len(slice.Ports))
	for i, p := range slice.Ports {
		if p.Port == nil || *p.Port == 0 {
			continue
		}
		number, ok := b.port("ports", i, ".port", *p.Port, false)
		if !ok {
			continue
		}
		protocol, err := parseProtocol(deref(p.Protocol, corev1.ProtocolTCP))
		if err != nil {
			b.errorf(fmt.Sprintf("ports[%d].protocol", i), "%v", err)
			continue
		}
		s.ports = append(s.ports, slicePort{unique.Make(deref(p.Name, "")), protocol, number})
	}
}

// byName returns slices sorted by name.
func byName(endpointSlices []*Slice) []*Slice {
	order := func(a, b *Slice) int { return strings.Compare(a.Name.Name, b.Name.Name) }
	if slices.IsSortedFunc(endpointSlices, order) {
		return endpointSlices
	}
	return slices.SortedStableFunc(slices.Values(endpointSlices), order)
}
