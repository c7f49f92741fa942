package routing

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// snapshot is what was read from the kernel, ours and foreign.
type snapshot struct {
	dummyLink bool
	addresses []dummyAddress // on DummyLink
	rules     []rawRule
	routes    []foundRoute // without those that the kernel added itself
}

// foundRoute is a route, and whether it has our Protocol.
type foundRoute struct {
	Route
	ours bool
}

type dummyAddress struct {
	prefix     netip.Prefix
	wrongScope bool
}

// state selects what is ours: the dummy link with its addresses, and every rule and route
// that has our Protocol, whatever its priority, mark or table. This includes what another
// configuration or version has left.
func (snap snapshot) state() State {
	s := State{
		DummyLink:  snap.dummyLink,
		Addresses:  map[netip.Addr]struct{}{},
		WrongScope: map[netip.Addr]struct{}{},
		Rules:      map[Rule]struct{}{},
		Routes:     make(map[Route]struct{}, len(snap.routes)),
	}
	for _, a := range snap.addresses {
		switch {
		case !a.prefix.IsSingleIP() || a.prefix.Addr().IsLinkLocalUnicast():
			// The kernel adds fe80::/64 itself when the link is set up.
			// Foreign networks on the link do not conflict with VIPs.
		case a.wrongScope:
			s.WrongScope[a.prefix.Addr()] = struct{}{}
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
			s.Routes[withoutDefaultMetric(r.Route)] = struct{}{}
		}
	}
	return s
}

// kernelMetric6 is IP6_RT_PRIO_USER, the metric that the kernel sets on an IPv6 route
// without one.
const kernelMetric6 = 1024

// withoutDefaultMetric returns the route as it was written: with metric 0 in place of the kernel's
// default.
func withoutDefaultMetric(r Route) Route {
	if r.Family == ip.IPv6 && r.Metric == kernelMetric6 {
		r.Metric = 0
	}
	return r
}
