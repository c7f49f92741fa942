package routing

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// snapshot is what the kernel holds, of which some is ours.
type snapshot struct {
	dummyLink bool
	addresses []boundAddress // on DummyLink
	rules     []rawRule
	routes    []foundRoute // without those that the kernel made itself
}

// foundRoute is a route, and whether it has our Protocol.
type foundRoute struct {
	Route
	ours bool
}

type boundAddress struct {
	prefix   netip.Prefix
	misbound bool
}

// state picks what is ours: the dummy link with its addresses, and every rule
// and route that has our Protocol, whatever its priority, mark or table. So
// what another configuration or version has left is found too.
func (snap snapshot) state() State {
	s := State{
		DummyLink: snap.dummyLink,
		Addresses: map[netip.Addr]struct{}{},
		Misbound:  map[netip.Addr]struct{}{},
		Rules:     map[Rule]struct{}{},
		Routes:    map[Route]struct{}{},
	}
	for _, a := range snap.addresses {
		switch {
		case !a.prefix.IsSingleIP() || a.prefix.Addr().IsLinkLocalUnicast():
			// fe80::/64 is the kernel's own, made when the link is set up.
			// Others' networks on the link take no VIP's place.
		case a.misbound:
			s.Misbound[a.prefix.Addr()] = struct{}{}
		default:
			s.Addresses[a.prefix.Addr()] = struct{}{}
		}
	}
	for _, r := range snap.rules {
		if r.protocol == Protocol && r.Action == Lookup && !r.Other {
			s.Rules[r.Rule] = struct{}{}
		}
	}
	for _, f := range ip.Families {
		of := slices.DeleteFunc(slices.Clone(snap.rules), func(r rawRule) bool { return r.Family != f })
		for _, r := range exemptions(of) {
			s.Rules[r] = struct{}{}
		}
	}
	for _, r := range snap.routes {
		if r.ours {
			s.Routes[normal(r.Route)] = struct{}{}
		}
	}
	return s
}

// kernelMetric6 is IP6_RT_PRIO_USER, the metric that the kernel gives an IPv6
// route that was given none.
const kernelMetric6 = 1024

// normal is the route as it was written: the kernel's metric for none is 0.
func normal(r Route) Route {
	if r.Family == ip.IPv6 && r.Metric == kernelMetric6 {
		r.Metric = 0
	}
	return r
}
