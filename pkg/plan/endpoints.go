package plan

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// chosen holds the endpoints of one port that may get traffic: those of the whole
// cluster, and the node-local ones.
type chosen struct {
	cluster []service.Endpoint
	local   []service.Endpoint

	all         []service.Endpoint // in any state
	here        []service.Endpoint // node-local, in any state
	draining    []netip.AddrPort   // terminating but still serving
	unreachable []netip.AddrPort   // on unreachable nodes; empty if there are no other endpoints
}

// choose selects a port's endpoints of one family: the ready ones that topology
// prefers, or, if none is ready, those that are terminating but still serving
// (KEP-1669). The cluster and the node-local endpoints are selected independently.
func choose(facts *Facts, family ip.Family, all []service.Endpoint) chosen {
	all = familyOf(sorted(all), family)
	ready := pick(all, func(e *service.Endpoint) bool { return e.Ready })
	draining := pick(all, func(e *service.Endpoint) bool { return e.Serving && e.Terminating })
	onNode := func(e *service.Endpoint) bool { return e.Node != "" && e.Node == facts.NodeName }

	c := chosen{all: all, draining: addresses(draining), cluster: nearest(facts, ready), local: pick(ready, onNode)}
	if c.here = c.local; len(ready) < len(all) {
		c.here = pick(all, onNode)
	}
	if len(c.cluster) == 0 {
		c.cluster = draining
	}
	if len(c.local) == 0 {
		c.local = pick(draining, onNode)
	}
	if len(c.cluster) > 0 && len(facts.UnreachableNodes) > 0 {
		c.unreachable = addresses(pick(all, func(e *service.Endpoint) bool { return notServing(e) && slices.Contains(facts.UnreachableNodes, e.Node) }))
	}
	return c
}

// sorted returns endpoints sorted by address and port. Package service sorts them, tests may not.
func sorted(list []service.Endpoint) []service.Endpoint {
	for i := 1; i < len(list); i++ {
		if list[i].Addr.Compare(list[i-1].Addr) < 0 {
			return slices.SortedFunc(slices.Values(list), func(a, b service.Endpoint) int { return a.Addr.Compare(b.Addr) })
		}
	}
	return list
}

// familyOf returns the endpoints of one family, a part of the sorted list: IPv4 sorts before IPv6.
func familyOf(list []service.Endpoint, family ip.Family) []service.Endpoint {
	first6, _ := slices.BinarySearchFunc(list, ip.IPv6, func(e service.Endpoint, f ip.Family) int {
		if ip.Of(e.Addr.Addr()) != f {
			return -1
		}
		return 1
	})
	if family == ip.IPv4 {
		return list[:first6:first6]
	}
	return list[first6:]
}

// notServing reports whether an endpoint is neither ready nor serving, and is on a known node,
// which may be unreachable.
func notServing(e *service.Endpoint) bool { return !e.Ready && !e.Serving && e.Node != "" }

// nearest returns the endpoints that the hints of the EndpointSlice controller select for this
// node or, if none do, for its zone (KEP-2433, KEP-3015). It returns all ready endpoints if one
// of them has no hint, or if no hint selects this node or zone.
func nearest(facts *Facts, ready []service.Endpoint) []service.Endpoint {
	byNode := hinted(ready, facts.NodeName, (*service.Endpoint).NodeHints)
	if len(byNode) > 0 {
		return byNode
	}
	byZone := hinted(ready, facts.Zone, (*service.Endpoint).ZoneHints)
	if len(byZone) > 0 {
		return byZone
	}
	return ready
}

// hinted returns the endpoints with a hint for here. It returns none if an endpoint has no
// hint.
func hinted(ready []service.Endpoint, here string, hints func(*service.Endpoint) []string) []service.Endpoint {
	if here == "" || anyOf(ready, func(e *service.Endpoint) bool { return len(hints(e)) == 0 }) {
		return nil
	}
	return pick(ready, func(e *service.Endpoint) bool { return slices.Contains(hints(e), here) })
}

func addresses(endpoints []service.Endpoint) []netip.AddrPort {
	if len(endpoints) == 0 {
		return nil
	}
	out := make([]netip.AddrPort, len(endpoints))
	for i := range endpoints {
		out[i] = endpoints[i].Addr
	}
	return out
}

// anyOf reports whether an endpoint satisfies is. Unlike slices.ContainsFunc it copies none, which
// takes most of the time for thousands.
func anyOf(list []service.Endpoint, is func(*service.Endpoint) bool) bool {
	for i := range list {
		if is(&list[i]) {
			return true
		}
	}
	return false
}

// pick returns the endpoints to keep, as filter does, and copies only those. It returns the list
// itself if all are kept.
func pick(list []service.Endpoint, keep func(*service.Endpoint) bool) []service.Endpoint {
	at := 0
	for at < len(list) && keep(&list[at]) {
		at++
	}
	if at == len(list) {
		return slices.Clip(list)
	}
	out := append([]service.Endpoint(nil), list[:at]...)
	for i := at + 1; i < len(list); i++ {
		if keep(&list[i]) {
			out = append(out, list[i])
		}
	}
	return out
}

// filter returns the elements to keep. It returns the list itself if all are kept.
func filter[T any](list []T, keep func(T) bool) []T {
	at := slices.IndexFunc(list, func(e T) bool { return !keep(e) })
	if at < 0 {
		return slices.Clip(list)
	}
	out := append([]T(nil), list[:at]...)
	for _, e := range list[at+1:] {
		if keep(e) {
			out = append(out, e)
		}
	}
	return out
}
