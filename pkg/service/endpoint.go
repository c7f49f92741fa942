package service

import (
	"fmt"
	"net/netip"
	"unique"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// conditions of an endpoint.
type conditions struct{ ready, serving, terminating bool }

// newSliceEndpoint reads an endpoint's conditions as the API defines them: nil means
// unknown, which counts as true for ready and serving, and as false for terminating.
func newSliceEndpoint(e *discoveryv1.Endpoint, addr netip.Addr) sliceEndpoint {
	out := sliceEndpoint{
		addr:  addr,
		place: unique.Make(place{deref(e.NodeName, ""), deref(e.Zone, "")}),
		conditions: conditions{
			ready:       deref(e.Conditions.Ready, true),
			serving:     deref(e.Conditions.Serving, true),
			terminating: deref(e.Conditions.Terminating, false),
		},
	}
	if e.Hints == nil {
		return out
	}
	h := &Hints{}
	for _, z := range e.Hints.ForZones {
		h.Zones = append(h.Zones, unique.Make(z.Name).Value())
	}
	for _, n := range e.Hints.ForNodes {
		h.Nodes = append(h.Nodes, unique.Make(n.Name).Value())
	}
	if len(h.Zones)+len(h.Nodes) > 0 {
		out.hints = h
	}
	return out
}

// endpoint returns the endpoint with a port.
func (e *sliceEndpoint) endpoint(port uint16) Endpoint {
	at := e.place.Value()
	return Endpoint{
		Addr:        netip.AddrPortFrom(e.addr, port),
		Node:        at.node,
		Zone:        at.zone,
		Hints:       e.hints,
		Ready:       e.ready,
		Serving:     e.serving,
		Terminating: e.terminating,
	}
}

func parseEndpointAddr(t discoveryv1.AddressType, s string) (netip.Addr, error) {
	a, err := parseAddr(s)
	if err != nil {
		return a, err
	}
	want := ip.IPv4
	if t == discoveryv1.AddressTypeIPv6 {
		want = ip.IPv6
	}
	if ip.Of(a) != want {
		return a, fmt.Errorf("%q is not of addressType %s", s, t)
	}
	return a, nil
}

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}
