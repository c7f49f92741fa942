package trace

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// lookup is the key of a route lookup.
type lookup struct {
	src, dst netip.Addr // src is invalid if not chosen yet
	in       string     // "lo" for packets of the node itself
	mark     uint32
	assume   map[string]bool // doubts that are assumed to apply
}

// found is a route, and the policy rule that selected its table.
type found struct {
	routing.Route
	rule routing.Rule
}

// out returns the interface by which a packet leaves. Packets to the node itself leave
// by lo, whichever interface has the address (ip_route_output_key_hash_rcu).
func (f found) out() string {
	if f.Local {
		return "lo"
	}
	return f.Link
}

func (f found) String() string {
	return fmt.Sprintf("%s, by %s", f.Route, strings.TrimPrefix(f.rule.String(), f.rule.Family.String()+" "))
}

// route evaluates the policy rules in order. The first table with a route for the
// destination decides; a reject route means no route. doubts name earlier rules
// that could have matched but are not fully known, and other next hops.
func (n *Node) route(q lookup) (way found, ok bool, doubts []string) {
	for i := 0; i < len(n.Rules); i++ {
		rule := &n.Rules[i]
		switch {
		case !matches(rule, &q):
		case rule.Other && !q.assumes(&doubts, "%s: the policy rule has unsupported conditions", *rule):
		case rule.Action == routing.Goto:
			i = n.target(i) - 1
		case rule.Action == routing.Lookup:
			switch route, ok := n.inTable(rule.Table, q.dst); {
			case !ok, route.Type == routing.Throw:
			case route.Type == routing.Reject:
				return found{}, false, doubts
			default:
				return found{n.nextHop(q, route, &doubts), *rule}, true, doubts
			}
		}
	}
	return found{}, false, doubts
}

// nextHop returns the first next hop of a route, or the one that is assumed to be chosen.
func (n *Node) nextHop(q lookup, first routing.Route, doubts *[]string) routing.Route {
	if !first.Multipath {
		return first
	}
	chosen := first
	for _, r := range n.Routes {
		other := r.Multipath && r.Table == first.Table && r.Dst == first.Dst && r.Metric == first.Metric && r.Link != first.Link
		if other && q.assumes(doubts, "%s: the kernel may choose the next hop %s instead of %s", r.Dst, r.Link, first.Link) {
			chosen = r
		}
	}
	return chosen
}

// assumes registers a doubt, and reports whether this evaluation assumes that it applies.
func (q lookup) assumes(doubts *[]string, format string, args ...any) bool {
	text := fmt.Sprintf(format, args...)
	*doubts = append(*doubts, text)
	return q.assume[text]
}

// RouteOf returns the route of an unmarked packet that enters on an interface ("lo":
// from the node). An invalid src means that it is not chosen yet.
func (n *Node) RouteOf(src, dst netip.Addr, in string) (routing.Route, bool) {
	way, ok, _ := n.route(lookup{src: src, dst: dst, in: in})
	return way.Route, ok
}

// target returns the index at which a goto rule continues. A rule without a target
// matches nothing.
func (n *Node) target(from int) int {
	for i := from + 1; i < len(n.Rules); i++ {
		if n.Rules[i].Priority == n.Rules[from].Target {
			return i
		}
	}
	return from + 1
}

// matches treats a source that is not chosen yet as matching only rules for all
// sources.
func matches(r *routing.Rule, q *lookup) bool {
	in := func(p netip.Prefix, a netip.Addr) bool {
		return !p.IsValid() || p.Bits() == 0 || a.IsValid() && p.Contains(a)
	}
	all := in(r.From, q.src) && in(r.To, q.dst) && (r.IIf == "" || r.IIf == q.in) && r.OIf == "" && q.mark&r.Mask == r.Mark&r.Mask
	return all != r.Invert
}

// inTable returns the longest match; among those, the first with the lowest metric.
func (n *Node) inTable(table int, dst netip.Addr) (routing.Route, bool) {
	var best *routing.Route
	try := func(r *routing.Route) {
		if r.Dst.Contains(dst) && (best == nil || cmp.Or(cmp.Compare(r.Dst.Bits(), best.Dst.Bits()), cmp.Compare(best.Metric, r.Metric)) > 0) {
			best = r
		}
	}
	if n.index != nil {
		read(n, routeKey{table, dst})
		for _, r := range n.index.routes.in(table, dst) {
			try(r)
		}
	} else {
		for i := range n.Routes {
			if n.Routes[i].Table == table {
				try(&n.Routes[i])
			}
		}
	}
	if best == nil {
		return routing.Route{}, false
	}
	return *best, true
}

// reversePath returns why the reverse-path check drops a received packet, or "". It
// corresponds to the kernel's fib_validate_source; IPv6 has no such check. The return
// path of a forwarded packet is looked up as if it entered on the interface by which
// the packet leaves.
func (n *Node) reversePath(p *packet) string {
	if n.Family == ip.IPv6 || p.in == "lo" {
		return ""
	}
	q := lookup{src: p.dst.Addr(), dst: p.src.Addr(), in: "lo"}
	if way, ok, _ := n.route(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: p.in, mark: p.mark}); ok && !way.Local {
		q.in = way.Link
	}
	if n.Either(p.in, "src_valid_mark") {
		q.mark = p.mark
	}
	strictness := n.ReversePathFilter(p.in)
	back, ok, _ := n.route(q)
	switch {
	case ok && back.Local && !n.own(p.in, "accept_local"):
		return fmt.Sprintf("its source %s is an address of this node (a martian)", q.dst)
	case strictness == 0 || ok && (back.Link == p.in || strictness == 2):
		return ""
	case !ok:
		return fmt.Sprintf("rp_filter=%d on %s: no return path to %s", strictness, p.in, q.dst)
	}
	return fmt.Sprintf("rp_filter=1 on %s: the return path to %s is %s", p.in, q.dst, back)
}

// PassesReversePath reports whether the reverse-path check accepts an unmarked packet
// on an interface.
func (n *Node) PassesReversePath(src, dst netip.Addr, in string) bool {
	return n.reversePath(&packet{src: netip.AddrPortFrom(src, 0), dst: netip.AddrPortFrom(dst, 0), in: in}) == ""
}

// ReversePathFilter returns the greater of the interface's value and that of "all".
func (n *Node) ReversePathFilter(link string) int {
	value := func(name string) int {
		v, _ := strconv.Atoi(n.Sysctls[sysctl.LinkKey(n.Family, name, "rp_filter")])
		return v
	}
	return max(value("all"), value(link))
}

// Either reports whether a parameter is set for an interface or for "all".
func (n *Node) Either(link, parameter string) bool {
	return n.own(link, parameter) || n.own("all", parameter)
}

func (n *Node) own(link, parameter string) bool {
	return n.set(sysctl.LinkKey(n.Family, link, parameter))
}

// sourceTowards returns the source address of the node's own packets to a destination.
func (n *Node) sourceTowards(dst netip.Addr) (netip.Addr, found, bool) {
	way, ok, _ := n.route(lookup{dst: dst, in: "lo"})
	switch {
	case !ok:
		return netip.Addr{}, way, false
	case way.Src.IsValid():
		return way.Src, way, true
	case way.Local:
		return dst, way, true
	}
	a := n.SourceOn(way.Link, cmp.Or(way.Via, dst))
	return a, way, a.IsValid()
}

// SourceOn returns the address that the kernel chooses for packets that leave by an
// interface, also for MASQUERADE: one of the interface, or one of another interface
// only if it has none.
func (n *Node) SourceOn(link string, next netip.Addr) netip.Addr {
	var own, others []netip.Prefix
	for _, l := range n.Links {
		for _, a := range l.Addresses {
			switch {
			case ip.Of(a.Prefix.Addr()) != n.Family || !a.Global || a.Secondary:
			case l.Name == link:
				own = append(own, a.Prefix)
			case !l.Loopback:
				others = append(others, a.Prefix)
			}
		}
	}
	switch {
	case len(own) > 0:
		return n.best(own, next)
	case n.Family == ip.IPv4 && len(others) > 0:
		return others[0].Addr()
	}
	return n.best(others, next)
}

// best returns the preferred address: for IPv4 the first one in the next hop's subnet
// (inet_select_addr), for IPv6 the one with the longest prefix in common with the
// destination (RFC 6724, rule 8), else the first one.
func (n *Node) best(addresses []netip.Prefix, next netip.Addr) (best netip.Addr) {
	most := -1
	for _, p := range addresses {
		common := 0
		if n.Family == ip.IPv6 {
			common = inCommon(p.Addr(), next)
		} else if p.Contains(next) {
			common = 1
		}
		if common > most {
			best, most = p.Addr(), common
		}
	}
	return best
}

// inCommon returns the number of leading bits that two addresses share.
func inCommon(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	for i := range x {
		if x[i] != y[i] {
			return 8*i + bits.LeadingZeros8(x[i]^y[i])
		}
	}
	return 8 * len(x)
}
