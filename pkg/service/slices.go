package service

import (
	"cmp"
	"encoding/binary"
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
	endpoints []sliceEndpoint
	errs      []error
}

// slicePort is one port of a slice.
type slicePort struct {
	name     unique.Handle[string]
	protocol ip.Protocol
	number   uint16
}

// sliceEndpoint is an endpoint without its port. Node and zone names are interned,
// because many slices share few of them.
type sliceEndpoint struct {
	addr       netip.Addr
	node, zone unique.Handle[string]
	hints      *hints
	conditions
}

type hints struct{ zones, nodes []string }

// Endpoints returns the number of usable endpoints.
func (s *Slice) Endpoints() int { return len(s.endpoints) }

// ParseSlice parses an EndpointSlice. It does not keep a reference to slice.
func ParseSlice(slice *discoveryv1.EndpointSlice) *Slice {
	owner, ours := Owner(slice)
	if !ours {
		return &Slice{Name: nameOf(slice)}
	}
	s := parseSlice(slice)
	s.Service = owner.Name
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

// mergeSlices returns the endpoints of a port from all slices. If several slices contain
// an address and port, as happens while the controller moves an endpoint, it counts once,
// and a report that is not terminating takes precedence. Slices are sorted by name so
// that the result does not depend on their order.
//
// EndpointSlices use the Service's port names. Two slices may map a name to different
// numbers.
func mergeSlices(port *Port, endpointSlices []*Slice) []Endpoint {
	list := reports(port, endpointSlices)
	if len(list) == 0 {
		return nil
	}
	if !slices.IsSortedFunc(list, report.compare) {
		slices.SortFunc(list, report.compare)
	}
	out := make([]Endpoint, 0, len(list))
	for _, r := range list {
		e := r.endpoint.endpoint(r.port)
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

// report is an endpoint of a port in one slice. Sorting reports is cheaper than sorting the
// endpoints, which are three times as large and whose addresses take longer to compare.
type report struct {
	hi, lo   uint64 // of the address
	at       int32  // its position among all reports
	port     uint16
	is6      bool
	endpoint *sliceEndpoint
}

func newReport(e *sliceEndpoint, port uint16, at int) report {
	bytes := e.addr.As16()
	return report{binary.BigEndian.Uint64(bytes[:8]), binary.BigEndian.Uint64(bytes[8:]), int32(at), port, e.addr.Is6(), e}
}

// compare orders reports by address and port, as netip.AddrPort does, then by position.
func (r report) compare(s report) int {
	switch {
	case r.is6 != s.is6:
		if s.is6 {
			return -1
		}
		return 1
	case r.hi != s.hi:
		return cmp.Compare(r.hi, s.hi)
	case r.lo != s.lo:
		return cmp.Compare(r.lo, s.lo)
	case r.port != s.port:
		return cmp.Compare(r.port, s.port)
	}
	return cmp.Compare(r.at, s.at)
}

func reports(port *Port, endpointSlices []*Slice) []report {
	n := 0
	for _, slice := range endpointSlices {
		n += len(slice.endpoints)
	}
	name, list := unique.Make(port.Name), make([]report, 0, n)
	for _, slice := range endpointSlices {
		for _, p := range slice.ports {
			if p.name != name || p.protocol != port.Protocol {
				continue
			}
			for i := range slice.endpoints {
				list = append(list, newReport(&slice.endpoints[i], p.number, len(list)))
			}
		}
	}
	return list
}

// byName returns slices sorted by name.
func byName(endpointSlices []*Slice) []*Slice {
	order := func(a, b *Slice) int { return strings.Compare(a.Name.Name, b.Name.Name) }
	if slices.IsSortedFunc(endpointSlices, order) {
		return endpointSlices
	}
	return slices.SortedStableFunc(slices.Values(endpointSlices), order)
}

// preferred reports whether a is newer than b, given two reports of one endpoint: a pod
// never becomes ready again once it is terminating.
func preferred(a, b Endpoint) bool {
	if a.Terminating != b.Terminating {
		return !a.Terminating
	}
	return a.Ready && !b.Ready
}
