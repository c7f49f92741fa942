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
	draining    []netip.AddrPort   // terminating but still serving
	unreachable []netip.AddrPort   // on unreachable nodes; empty if there are no other endpoints
}

// choose selects a port's endpoints of one family: the ready ones that topology
// prefers, or, if none is ready, those that are terminating but still serving
// (KEP-1669). The cluster and the node-local endpoints are selected independently.
func choose(facts *Facts, family ip.Family, all []service.Endpoint) chosen {
	all = filter(all, func(e service.Endpoint) bool { return ip.Of(e.Addr.Addr()) == family })
	byAddress := func(a, b service.Endpoint) int { return a.Addr.Compare(b.Addr) }
	if !slices.IsSortedFunc(all, byAddress) { // package service sorts them, tests may not
		all = slices.SortedFunc(slices.Values(all), byAddress)
	}
	ready := filter(all, func(e service.Endpoint) bool { return e.Ready })
	draining := filter(all, func(e service.Endpoint) bool { return e.Serving && e.Terminating })
	onNode := func(e service.Endpoint) bool { return e.Node != "" && e.Node == facts.NodeName }

	c := chosen{cluster: nearest(facts, ready), local: filter(ready, onNode)}
	c.all, c.draining = all, addresses(draining)
	if len(c.cluster) == 0 {
		c.cluster = draining
	}
	if len(c.local) == 0 {
		c.local = filter(draining, onNode)
	}
	if len(c.cluster) > 0 && len(facts.UnreachableNodes) > 0 {
		c.unreachable = addresses(filter(all, func(e service.Endpoint) bool { return notServing(e) && slices.Contains(facts.UnreachableNodes, e.Node) }))
	}
	return c
}

// notServing reports whether an endpoint is neither ready nor serving, and is on a known node,
// which may be unreachable.
func notServing(e service.Endpoint) bool { return !e.Ready && !e.Serving && e.Node != "" }

// nearest returns the endpoints that the hints of the EndpointSlice controller select for this
// node or, if none do, for its zone (KEP-2433, KEP-3015). It returns all ready endpoints if one
// of them has no hint, or if no hint selects this node or zone.
func nearest(facts *Facts, ready []service.Endpoint) []service.Endpoint {
	byNode := hinted(ready, facts.NodeName, func(e service.Endpoint) []string { return e.NodeHints() })
	if len(byNode) > 0 {
		return byNode
	}
	byZone := hinted(ready, facts.Zone, func(e service.Endpoint) []string { return e.ZoneHints() })
	if len(byZone) > 0 {
		return byZone
	}
	return ready
}

// hinted returns the endpoints with a hint for here. It returns none if an endpoint has no
// hint.
func hinted(ready []service.Endpoint, here string, hints func(service.Endpoint) []string) []service.Endpoint {
	if here == "" || slices.ContainsFunc(ready, func(e service.Endpoint) bool { return len(hints(e)) == 0 }) {
		return nil
	}
	return filter(ready, func(e service.Endpoint) bool { return slices.Contains(hints(e), here) })
}

func addresses(endpoints []service.Endpoint) []netip.AddrPort {
	out := make([]netip.AddrPort, len(endpoints))
	for i, e := range endpoints {
		out[i] = e.Addr
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
