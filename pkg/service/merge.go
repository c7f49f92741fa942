package service

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Scratch is memory in which Services are built one after another: one with thousands of endpoints
// needs a lot. The endpoints of a Service are valid until the next one is built in the same
// Scratch. The zero value is ready for use, by one goroutine at a time.
type Scratch struct {
	endpoints []Endpoint // of all ports but those in kept
	merger    merger
	kept      []merged // of the Service with many endpoints that was built last
}

// merged is what was merged for a port. If few of the slices have changed since, only their reports
// are sorted again. If one has changed, and little, the endpoints are updated; see update.
type merged struct {
	name      string
	protocol  ip.Protocol
	slices    []*Slice
	reports   []report
	endpoints []Endpoint // of the reports, without weights; empty if they were weighed
}

// The results for up to keptPorts ports are kept if they have at least keptFrom reports: to sort
// fewer takes less time than the rest of a change.
const (
	keptFrom  = 1000
	keptPorts = 4
)

// reset ends the use of the memory by the Service that was built last.
func (s *Scratch) reset() { s.endpoints = s.endpoints[:0] }

// merge returns the endpoints of a port from all slices. If several slices contain
// an address and port, as happens while the controller moves an endpoint, it counts once,
// and a report that is not terminating takes precedence. Slices are sorted by name so
// that the result does not depend on their order.
//
// EndpointSlices use the Service's port names. Two slices may map a name to different
// numbers.
//
// The caller may change the result only if it is to be weighed.
func (s *Scratch) merge(port *Port, endpointSlices []*Slice, weighed bool) []Endpoint {
	k := s.keptOf(port)
	if k != nil && !weighed && k.update(endpointSlices) {
		return slices.Clip(k.endpoints)
	}
	m := &s.merger
	m.collect(port, endpointSlices, k)
	m.sort()
	if len(m.reports) == 0 {
		return nil
	}
	reports := m.reports
	if k = s.keep(port, endpointSlices); k != nil && !weighed {
		k.endpoints = appendEndpoints(slices.Grow(k.endpoints, len(reports)), reports, endpointSlices)
		return slices.Clip(k.endpoints)
	}
	s.endpoints = slices.Grow(s.endpoints, len(reports))
	first := len(s.endpoints)
	out := appendEndpoints(s.endpoints[first:], reports, endpointSlices)
	s.endpoints = s.endpoints[:first+len(out)]
	return slices.Clip(out)
}

// appendEndpoints appends the endpoints of sorted reports to an empty list, each address and port
// once.
func appendEndpoints(out []Endpoint, reports []report, endpointSlices []*Slice) []Endpoint {
	for i := range reports {
		r := &reports[i]
		e := &endpointSlices[r.slice].endpoints[r.at]
		last := len(out) - 1
		switch {
		case last < 0 || out[last].Addr.Addr() != e.addr || out[last].Addr.Port() != r.port:
			out = append(out, e.endpoint(r.port))
		case preferred(e, &out[last]):
			out[last] = e.endpoint(r.port)
		}
	}
	return out
}

// keptOf returns what was merged for a port of this name, or nil. It may be of another Service.
func (s *Scratch) keptOf(port *Port) *merged {
	for i := range s.kept {
		if k := &s.kept[i]; k.name == port.Name && k.protocol == port.Protocol {
			return k
		}
	}
	return nil
}

// keep keeps the reports that were merged for a port, and drops what was kept of another Service. It
// returns where they are kept now, without endpoints, or nil if they are not kept.
func (s *Scratch) keep(port *Port, endpointSlices []*Slice) *merged {
	m := &s.merger
	if len(m.reports) < keptFrom {
		return nil
	}
	if len(s.kept) > 0 && s.kept[0].slices[0].ServiceName() != endpointSlices[0].ServiceName() {
		s.kept = nil
	}
	k := s.keptOf(port)
	if k == nil && len(s.kept) == keptPorts {
		return nil
	}
	if k == nil {
		s.kept = append(s.kept, merged{name: port.Name, protocol: port.Protocol})
		k = &s.kept[len(s.kept)-1]
	}
	k.slices, k.reports, m.reports = endpointSlices, m.reports, k.reports
	k.endpoints = k.endpoints[:0]
	return k
}

// preferred reports whether a takes precedence over b, given two reports of one address and
// port. The pod network may give the address of a terminating pod to a new pod, so a report that
// is not terminating takes precedence, as in kube-proxy.
func preferred(a *sliceEndpoint, b *Endpoint) bool {
	if a.terminating != b.Terminating {
		return !a.terminating
	}
	return a.ready && !b.Ready
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

// sameDest reports whether two reports are of one address and port.
func (r *report) sameDest(s *report) bool {
	return r.hi == s.hi && r.lo == s.lo && r.port == s.port && r.is6 == s.is6
}

// compare orders reports by address and port, as netip.AddrPort does. Those that are equal keep the
// order of the slices.
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
	case r.port != s.port:
		return cmp.Compare(r.port, s.port)
	case r.slice != s.slice:
		return cmp.Compare(r.slice, s.slice)
	}
	return cmp.Compare(r.at, s.at)
}

// merger sorts the reports of several slices. Those of one slice and port are a sorted run.
type merger struct {
	reports, spare []report
	runs           []int   // where each run ends
	known          []bool  // by slice: its reports were merged before
	moved          []int32 // by slice of an earlier merge: its present position, or -1 if it has changed
}

// collect fills the merger with the reports of a port. Those of slices that were merged before are
// one run.
func (m *merger) collect(port *Port, endpointSlices []*Slice, before *merged) {
	m.reports, m.runs = m.reports[:0], m.runs[:0]
	m.known = append(m.known[:0], make([]bool, len(endpointSlices))...)
	if before != nil {
		m.collectKept(endpointSlices, before)
	}
	name := unique.Make(port.Name)
	for i, slice := range endpointSlices {
		for _, p := range slice.ports {
			if m.known[i] || p.name != name || p.protocol != port.Protocol || len(slice.endpoints) == 0 {
				continue
			}
			for at := range slice.endpoints {
				m.reports = append(m.reports, newReport(slice.endpoints[at].addr, p.number, i, at))
			}
			m.runs = append(m.runs, len(m.reports))
		}
	}
}

// collectKept adds the sorted reports of the slices that have not changed since they were merged.
// Both lists of slices are sorted by name.
func (m *merger) collectKept(endpointSlices []*Slice, before *merged) {
	m.moved = m.moved[:0]
	at := 0
	for _, slice := range before.slices {
		for at < len(endpointSlices) && endpointSlices[at].Name.Name < slice.Name.Name {
			at++
		}
		if at == len(endpointSlices) || endpointSlices[at] != slice {
			m.moved = append(m.moved, -1)
			continue
		}
		m.moved, m.known[at] = append(m.moved, int32(at)), true
	}
	if !slices.Contains(m.known, true) {
		return
	}
	m.reports = slices.Grow(m.reports, len(before.reports))
	for i := range before.reports {
		if now := m.moved[before.reports[i].slice]; now >= 0 {
			r := before.reports[i]
			r.slice = now
			m.reports = append(m.reports, r)
		}
	}
	m.runs = append(m.runs, len(m.reports))
}

// sort merges adjacent runs until one is left.
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

// appendMerged appends the elements of two sorted lists.
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
