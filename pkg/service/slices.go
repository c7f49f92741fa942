package service

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
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

// mergeSlices returns the endpoints of a port from all slices. If several slices contain
// an address and port, as happens while the controller moves an endpoint, it counts once,
// and a report that is not terminating takes precedence. Slices are sorted by name so
// that the result does not depend on their order.
//
// EndpointSlices use the Service's port names. Two slices may map a name to different
// numbers.
func mergeSlices(port *Port, endpointSlices []*Slice) []Endpoint {
	m := mergers.Get().(*merger)
	defer mergers.Put(m)
	m.collect(port, endpointSlices)
	m.sort()
	if len(m.reports) == 0 {
		return nil
	}
	out := make([]Endpoint, 0, len(m.reports))
	for _, r := range m.reports {
		e := endpointSlices[r.slice].endpoints[r.at].endpoint(r.port)
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

// report is an endpoint of a port in one slice. It has no pointers and is smaller than an
// endpoint, so it is cheaper to sort.
type report struct {
	hi, lo    uint64 // of the address
	slice, at int32  // where the endpoint is
	port      uint16
	is6       bool
}

func newReport(addr netip.Addr, port uint16, slice, at int) report {
	bytes := addr.As16()
	return report{binary.BigEndian.Uint64(bytes[:8]), binary.BigEndian.Uint64(bytes[8:]), int32(slice), int32(at), port, addr.Is6()}
}

// compare orders reports by address and port, as netip.AddrPort does.
func (r *report) compare(s *report) int {
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
	}
	return cmp.Compare(r.port, s.port)
}

// merger sorts the reports of several slices. Those of one slice and port are a sorted run.
type merger struct {
	reports, spare []report
	runs           []int // where each run ends
}

// mergers are reused, because a Service with thousands of endpoints needs a large one for each
// change.
var mergers = sync.Pool{New: func() any { return &merger{} }}

// collect fills the merger with the reports of a port.
func (m *merger) collect(port *Port, endpointSlices []*Slice) {
	m.reports, m.runs = m.reports[:0], m.runs[:0]
	name := unique.Make(port.Name)
	for i, slice := range endpointSlices {
		for _, p := range slice.ports {
			if p.name != name || p.protocol != port.Protocol || len(slice.endpoints) == 0 {
				continue
			}
			for at := range slice.endpoints {
				m.reports = append(m.reports, newReport(slice.endpoints[at].addr, p.number, i, at))
			}
			m.runs = append(m.runs, len(m.reports))
		}
	}
}

// sort merges adjacent runs until one is left. Equal reports keep their order.
func (m *merger) sort() {
	for len(m.runs) > 1 {
		m.spare = slices.Grow(m.spare[:0], len(m.reports))
		begin, ends := 0, m.runs[:0]
		for i := 0; i < len(m.runs); i += 2 {
			middle, end := m.runs[i], m.runs[min(i+1, len(m.runs)-1)]
			m.spare = appendMerged(m.spare, m.reports[begin:middle], m.reports[middle:end])
			begin, ends = end, append(ends, end)
		}
		m.reports, m.spare, m.runs = m.spare, m.reports, ends
	}
}

// appendMerged appends the elements of two sorted lists. Of equal ones, that of a comes first.
func appendMerged(out, a, b []report) []report {
	for len(a) > 0 && len(b) > 0 && a[len(a)-1].compare(&b[0]) > 0 {
		if a[0].compare(&b[0]) <= 0 {
			out, a = append(out, a[0]), a[1:]
		} else {
			out, b = append(out, b[0]), b[1:]
		}
	}
	return append(append(out, a...), b...)
}

// byName returns slices sorted by name.
func byName(endpointSlices []*Slice) []*Slice {
	order := func(a, b *Slice) int { return strings.Compare(a.Name.Name, b.Name.Name) }
	if slices.IsSortedFunc(endpointSlices, order) {
		return endpointSlices
	}
	return slices.SortedStableFunc(slices.Values(endpointSlices), order)
}

// preferred reports whether a takes precedence over b, given two reports of one address and
// port. The pod network may give the address of a terminating pod to a new pod, so a report that
// is not terminating takes precedence, as in kube-proxy.
func preferred(a, b Endpoint) bool {
	if a.Terminating != b.Terminating {
		return !a.Terminating
	}
	return a.Ready && !b.Ready
}
