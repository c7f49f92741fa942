package plan

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// chosen holds the endpoints of one port and family, sorted by address and port, and selections of
// them.
type chosen struct {
	all     []service.Endpoint // in any state
	cluster positions          // get traffic from clients that may use endpoints of the whole cluster
	local   positions          // node-local, get traffic from clients that may use only such endpoints

	here        positions // node-local, in any state
	terminating positions // terminating but still serving
	unreachable positions // not serving, on unreachable nodes; empty if cluster is
}

// positions are indexes of endpoints in a list, in its order. A Service can have thousands of
// endpoints, most of them in several selections: to copy them would take more time than all else.
type positions []uint32

// choose selects a port's endpoints of one family: the ready ones that topology
// prefers, or, if none is ready, those that are terminating but still serving
// (KEP-1669). The cluster and the node-local endpoints are selected independently.
func choose(facts *Facts, family ip.Family, list []service.Endpoint) chosen {
	c := chosen{all: familyOf(sorted(list), family)}
	ready := make(positions, 0, len(c.all))
	for i := range c.all {
		e, at := &c.all[i], uint32(i)
		here := facts.onNode(e)
		if here {
			c.here = append(c.here, at)
		}
		if e.Ready {
			ready = append(ready, at)
		}
		if e.Ready && here {
			c.local = append(c.local, at)
		}
		if e.Serving && e.Terminating {
			c.terminating = append(c.terminating, at)
		}
		if notServing(e) && slices.Contains(facts.UnreachableNodes, e.Node) {
			c.unreachable = append(c.unreachable, at)
		}
	}
	if c.cluster = c.nearest(facts, ready); len(c.cluster) == 0 {
		c.cluster = c.terminating
	}
	if len(c.local) == 0 {
		c.local = c.pick(c.terminating, facts.onNode)
	}
	if len(c.cluster) == 0 {
		c.unreachable = nil
	}
	return c
}

// pick returns the positions of the endpoints to keep.
func (c *chosen) pick(from positions, keep func(*service.Endpoint) bool) positions {
	var out positions
	for _, at := range from {
		if keep(&c.all[at]) {
			out = append(out, at)
		}
	}
	return out
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

// onNode reports whether an endpoint is on this node.
func (f *Facts) onNode(e *service.Endpoint) bool { return e.Node != "" && e.Node == f.NodeName }

// notServing reports whether an endpoint is neither ready nor serving, and its node is known: the
// node may be unreachable.
func notServing(e *service.Endpoint) bool { return !e.Ready && !e.Serving && e.Node != "" }

// nearest returns the endpoints that the hints of the EndpointSlice controller select for this
// node or, if none do, for its zone (KEP-2433, KEP-3015). It returns all ready endpoints if one
// of them has no hint, or if no hint selects this node or zone.
func (c *chosen) nearest(facts *Facts, ready positions) positions {
	byNode := c.hinted(ready, facts.NodeName, (*service.Endpoint).NodeHints)
	if len(byNode) > 0 {
		return byNode
	}
	byZone := c.hinted(ready, facts.Zone, (*service.Endpoint).ZoneHints)
	if len(byZone) > 0 {
		return byZone
	}
	return ready
}

// hinted returns the endpoints with a hint for here. It returns none if an endpoint has no
// hint.
func (c *chosen) hinted(ready positions, here string, hints func(*service.Endpoint) []string) positions {
	if here == "" || slices.ContainsFunc(ready, func(at uint32) bool { return len(hints(&c.all[at])) == 0 }) {
		return nil
	}
	return c.pick(ready, func(e *service.Endpoint) bool { return slices.Contains(hints(e), here) })
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
