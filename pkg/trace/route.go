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

// lookup is a question to the kernel's routing.
type lookup struct {
	src, dst netip.Addr // src invalid: not chosen yet
	in       string     // "lo" for what the node itself sends
	mark     uint32
}

// found is a route with the policy rule that led to its table.
type found struct {
	routing.Route
	rule routing.Rule
}

// out is the interface that a packet leaves by. What is for the node itself leaves
// by lo, whatever interface has the address (ip_route_output_key_hash_rcu).
func (f found) out() string {
	if f.Local {
		return "lo"
	}
	return f.Link
}

func (f found) String() string {
	return fmt.Sprintf("%s, by %s", f.Route, strings.TrimPrefix(f.rule.String(), f.rule.Family.String()+" "))
}

// route goes through the policy rules in order; the first table with a route
// for the destination decides. doubt is not empty if a rule in front of the
// deciding one could have acted, and is not known here.
func (n *Node) route(q lookup) (way found, ok bool, doubt string) {
	for i := 0; i < len(n.Rules); i++ {
		rule := n.Rules[i]
		switch {
		case !matches(rule, q):
		case rule.Other:
			doubt = fmt.Sprintf("%s: not all of the policy rule is known here", rule)
		case rule.Action == routing.Goto:
			i = n.target(i) - 1
		case rule.Action == routing.Lookup:
			if route, ok := n.inTable(rule.Table, q.dst); ok {
				return found{route, rule}, true, doubt
			}
		}
	}
	return found{}, false, doubt
}

// RouteOf is the route of an unmarked packet that comes in by an interface ("lo":
// from the node). An invalid src is one that is not chosen yet.
func (n *Node) RouteOf(src, dst netip.Addr, in string) (routing.Route, bool) {
	way, ok, _ := n.route(lookup{src: src, dst: dst, in: in})
	return way.Route, ok
}

// target returns where the rule goes on to that is a goto. One without a
// target matches nothing.
func (n *Node) target(from int) int {
	for i := from + 1; i < len(n.Rules); i++ {
		if n.Rules[i].Priority == n.Rules[from].Target {
			return i
		}
	}
	return from + 1
}

// matches: a source that is not chosen yet is none of any prefix's but all's.
func matches(r routing.Rule, q lookup) bool {
	in := func(p netip.Prefix, a netip.Addr) bool {
		return !p.IsValid() || p.Bits() == 0 || a.IsValid() && p.Contains(a)
	}
	all := in(r.From, q.src) && in(r.To, q.dst) && (r.IIf == "" || r.IIf == q.in) && r.OIf == "" && q.mark&r.Mask == r.Mark&r.Mask
	return all != r.Invert
}

// inTable is the longest match, and of those the first with the lowest metric.
func (n *Node) inTable(table int, dst netip.Addr) (best routing.Route, ok bool) {
	for _, r := range n.Routes {
		if r.Table != table || !r.Dst.Contains(dst) {
			continue
		}
		better := cmp.Or(cmp.Compare(r.Dst.Bits(), best.Dst.Bits()), cmp.Compare(best.Metric, r.Metric))
		if !ok || better > 0 {
			best, ok = r, true
		}
	}
	return best, ok
}

// dropped is why the reverse-path check drops a packet that has come in, or "".
// It is fib_validate_source of the kernel; IPv6 has none. The way back of a packet
// that is forwarded is looked up as if it entered by the interface that the packet
// leaves by.
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
		return fmt.Sprintf("rp_filter=%d on %s: there is no way back to %s", strictness, p.in, q.dst)
	}
	return fmt.Sprintf("rp_filter=1 on %s: the way back to %s is %s", p.in, q.dst, back)
}

// PassesReversePath reports whether the reverse-path check lets an unmarked packet
// in by an interface.
func (n *Node) PassesReversePath(src, dst netip.Addr, in string) bool {
	return n.reversePath(&packet{src: netip.AddrPortFrom(src, 0), dst: netip.AddrPortFrom(dst, 0), in: in}) == ""
}

// ReversePathFilter is the greater of the interface's value and that of all.
func (n *Node) ReversePathFilter(link string) int {
	value := func(name string) int {
		v, _ := strconv.Atoi(n.Sysctls[sysctl.LinkKey(n.Family, name, "rp_filter")])
		return v
	}
	return max(value("all"), value(link))
}

// Either tells whether a parameter is set for an interface or for all.
func (n *Node) Either(link, parameter string) bool {
	return n.own(link, parameter) || n.own("all", parameter)
}

func (n *Node) own(link, parameter string) bool {
	return n.set(sysctl.LinkKey(n.Family, link, parameter))
}

// sourceTowards is the address that the node takes for a packet of its own.
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

// SourceOn is the address that the kernel chooses for what leaves by an
// interface, which MASQUERADE asks, too: one of the interface's, and only if it
// has none, another one's.
func (n *Node) SourceOn(link string, next netip.Addr) netip.Addr {
	var own, others []netip.Prefix
	for _, l := range n.Links {
		for _, a := range l.Addresses {
			switch {
			case ip.Of(a.Prefix.Addr()) != n.Family || !a.Global || a.Second:
			case l.Name == link:
				own = append(own, a.Prefix)
			case !l.Loopback:
				others = append(others, a.Prefix)
			}
		}
	}
	if len(own) > 0 {
		return n.best(own, next)
	}
	return n.best(others, next)
}

// best is the first address, unless another suits better: in IPv4 one in the
// next hop's subnet (inet_select_addr), in IPv6 the one that has the longest
// prefix in common with the destination (RFC 6724, rule 8).
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

// inCommon counts the leading bits that two addresses share.
func inCommon(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	for i := range x {
		if x[i] != y[i] {
			return 8*i + bits.LeadingZeros8(x[i]^y[i])
		}
	}
	return 8 * len(x)
}
