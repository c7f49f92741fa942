package service

import (
	"fmt"
	"net/netip"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// newEndpoint reads an endpoint's conditions as the API defines them: nil means
// unknown, which counts as true for ready and serving, and as false for terminating.
func newEndpoint(e discoveryv1.Endpoint, addr netip.Addr, port uint16) Endpoint {
	out := Endpoint{
		Addr:        netip.AddrPortFrom(addr, port),
		Node:        deref(e.NodeName, ""),
		Zone:        deref(e.Zone, ""),
		Ready:       deref(e.Conditions.Ready, true),
		Serving:     deref(e.Conditions.Serving, true),
		Terminating: deref(e.Conditions.Terminating, false),
	}
	if e.Hints == nil {
		return out
	}
	for _, z := range e.Hints.ForZones {
		out.ZoneHints = append(out.ZoneHints, z.Name)
	}
	for _, n := range e.Hints.ForNodes {
		out.NodeHints = append(out.NodeHints, n.Name)
	}
	return out
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
