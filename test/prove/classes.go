//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Class is a class of packets, represented by one of them.
type Class struct {
	trace.Question
	target target
}

func (c *Class) String() string {
	from := fmt.Sprintf("%s by %s", c.From, c.In)
	if c.In == "" {
		from = "the node"
	}
	return fmt.Sprintf("%s %s > %s %s (%s)", protocolName(c.Protocol), from, c.To, cmp.Or(c.State, trace.New), c.target)
}

func protocolName(p ip.Protocol) string {
	if p == trace.ICMP || p == trace.ICMPv6 {
		return "ICMP"
	}
	return p.String()
}

// atoms are the values of the fields that a kernel's rules distinguish.
type atoms struct {
	node   *trace.Node
	oracle *Oracle
	uses   []setUse // of sets by rules
	froms  []netip.Prefix
	tos    []netip.Prefix
	fronts map[ipset.Entry]bool // addresses and ports that have members by source
	// byProtocol reports whether a rule matches TCP, UDP or SCTP without matching a set.
	byProtocol bool
}

// setUse is a set with the directions in which a rule matches it.
type setUse struct{ name, fields string }

func newAtoms(n *trace.Node, o *Oracle) *atoms {
	a := &atoms{node: n, oracle: o, fronts: map[ipset.Entry]bool{}}
	uses := map[setUse]bool{}
	for _, contents := range n.Ruleset {
		for _, rules := range contents.Chains {
			for _, r := range rules {
				a.read(r, uses)
			}
		}
	}
	for u := range uses {
		a.uses = append(a.uses, u)
	}
	slices.SortFunc(a.uses, func(x, y setUse) int { return strings.Compare(x.name+x.fields, y.name+y.fields) })
	for _, r := range n.Rules {
		a.froms, a.tos = append(a.froms, r.From), append(a.tos, r.To)
	}
	for _, r := range n.Routes {
		a.froms, a.tos = append(a.froms, r.Dst), append(a.tos, r.Dst)
	}
	for _, set := range n.Sets {
		for e := range set.Entries {
			a.readEntry(e)
		}
	}
	a.froms = append(a.froms, slices.Concat(o.Config.LocalTraffic.CIDRs, o.Node.PodCIDRs)...)
	for _, s := range o.Services {
		a.froms = append(a.froms, s.SourceRanges...)
	}
	a.froms, a.tos = a.ofFamily(a.froms), a.ofFamily(a.tos)
	return a
}

func (a *atoms) read(r nat.Rule, uses map[setUse]bool) {
	words, _ := nat.Words(string(r))
	if at := slices.Index(words, "-p"); at >= 0 && at+1 < len(words) && !slices.Contains(words, "--match-set") {
		a.byProtocol = a.byProtocol || !strings.Contains(words[at+1], "icmp")
	}
	for i, w := range words {
		switch {
		case (w == "--match-set" || w == "--map-set" || w == "--add-set") && i+2 < len(words):
			uses[setUse{words[i+1], words[i+2]}] = true
		case (w == "-s" || w == "-d") && i+1 < len(words):
			p, err := netip.ParsePrefix(words[i+1])
			if err != nil {
				continue
			}
			if w == "-s" {
				a.froms = append(a.froms, p)
			} else {
				a.tos = append(a.tos, p)
			}
		}
	}
}

func (a *atoms) readEntry(e ipset.Entry) {
	front := e
	switch {
	case e.Net.IsValid():
		a.froms = append(a.froms, e.Net)
		front.Net = netip.Prefix{}
	case e.Addr2.IsValid():
		a.froms = append(a.froms, netip.PrefixFrom(e.Addr2, e.Addr2.BitLen()))
		front.Addr2 = netip.Addr{}
	default:
		return
	}
	a.fronts[front] = true
}

// ofFamily returns the distinct prefixes of a family in order, including the one of all
// addresses.
func (a *atoms) ofFamily(list []netip.Prefix) []netip.Prefix {
	out := []netip.Prefix{netip.PrefixFrom(a.node.Family.Unspecified(), 0)}
	for _, p := range list {
		if p.IsValid() && ip.Of(p.Addr()) == a.node.Family {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, func(x, y netip.Prefix) int { return cmp.Or(x.Addr().Compare(y.Addr()), x.Bits()-y.Bits()) })
	return slices.Compact(out)
}

// representatives returns, for each prefix, an address that is in no smaller one, if
// there is any.
func representatives(list []netip.Prefix, family ip.Family) []netip.Addr {
	var out []netip.Addr
	for _, p := range list {
		at := p.Addr()
		if p.Bits() == 0 {
			at = faraway[family]
		}
		for range 300 {
			if !p.Contains(at) {
				break
			}
			smaller := slices.ContainsFunc(list, func(q netip.Prefix) bool { return q.Bits() > p.Bits() && q.Contains(at) })
			if !smaller && (at != p.Addr() || p.IsSingleIP()) {
				out = append(out, at)
				break
			}
			at = at.Next()
		}
	}
	return out
}

// source is a client's address and its ingress interface.
type source struct {
	addr netip.Addr
	in   string
}

// sources returns all sources that rules or the oracle distinguish.
func (a *atoms) sources() []source {
	o := a.oracle
	addrs := representatives(a.froms, a.node.Family)
	for _, s := range o.Services {
		for _, p := range s.Ports {
			for _, e := range p.Endpoints {
				addrs = append(addrs, e.Addr.Addr())
			}
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	seen := map[string]bool{}
	out := []source{{o.primary(), ""}}
	if !out[0].addr.IsValid() {
		out = nil
	}
	for _, addr := range slices.Compact(addrs) {
		if ip.Of(addr) != a.node.Family || o.nodes[addr] || addr.IsMulticast() || addr.IsLinkLocalUnicast() || addr.IsUnspecified() || addr.IsLoopback() {
			continue
		}
		links := o.uplinks(o.family)
		if link := o.podLink(o.bare, addr); link != "" {
			links = []string{link}
		}
		for _, in := range links {
			s := source{addr, in}
			if key := a.sourceKey(s); !seen[key] {
				seen[key] = true
				out = append(out, s)
			}
		}
	}
	return out
}

// sourceKey holds everything by which rules, routes and the oracle distinguish sources.
func (a *atoms) sourceKey(s source) string {
	var b strings.Builder
	b.WriteString(s.in)
	for _, p := range a.froms {
		switch {
		case !p.Contains(s.addr):
		case p.IsSingleIP() && a.node.Local(s.addr): // a VIP, which sets distinguish further
			b.WriteString(" VIP")
		default:
			fmt.Fprintf(&b, " %s", p)
		}
	}
	for _, u := range a.uses {
		if !strings.Contains(u.fields, "dst") && a.node.HasMember(u.name, u.fields, ip.TCP, netip.AddrPortFrom(s.addr, 40000), netip.AddrPort{}) {
			b.WriteString(" " + u.name)
		}
	}
	for _, svc := range a.oracle.Services {
		for _, p := range svc.Ports {
			for _, e := range p.Endpoints {
				if e.Addr.Addr() == s.addr {
					fmt.Fprintf(&b, " endpoint %s", s.addr)
				}
			}
		}
	}
	return b.String()
}

// destination is an address, a port and a protocol.
type destination struct {
	protocol ip.Protocol
	to       netip.AddrPort
	state    trace.State
}

// unusedPort is a port of no Service.
const unusedPort = 9

// destinations returns all destinations that rules or the oracle distinguish. total is
// their number before merging.
func (a *atoms) destinations() (out []destination, total int) {
	tuples := map[netip.Addr]map[destination]bool{}
	addr := func(x netip.Addr) {
		if x.IsValid() && ip.Of(x) == a.node.Family && tuples[x] == nil && !x.IsLoopback() && !x.IsLinkLocalUnicast() && !x.IsUnspecified() {
			tuples[x] = map[destination]bool{}
		}
	}
	type port struct {
		protocol ip.Protocol
		number   uint16
	}
	anywhere := map[port]bool{}
	at := func(x netip.Addr, p port) {
		addr(x)
		if t := tuples[x]; t != nil {
			t[destination{protocol: p.protocol, to: netip.AddrPortFrom(x, p.number)}] = true
		}
	}
	for _, set := range a.node.Sets {
		for e := range set.Entries {
			switch {
			case set.Type == ipset.BitmapPort:
				for _, p := range ip.Protocols {
					anywhere[port{p, e.Port}] = true
				}
			case e.Port != 0:
				at(e.Addr, port{e.Protocol, e.Port})
			default:
				addr(e.Addr)
			}
		}
	}
	for key := range a.node.IPVS {
		if key.FWMark == 0 {
			at(key.Addr, port{key.Protocol, key.Port})
		}
	}
	for _, s := range a.oracle.Services {
		for _, x := range slices.Concat(s.ClusterIPs, s.ExternalIPs, s.LoadBalancers) {
			for _, p := range s.Ports {
				at(x, port{p.Protocol, p.Port})
			}
		}
		for _, p := range s.Ports {
			for _, x := range a.oracle.ports {
				at(x, port{p.Protocol, p.NodePort})
			}
			if p.NodePort != 0 {
				anywhere[port{p.Protocol, p.NodePort}] = true
			}
		}
	}
	for x := range a.oracle.nodes {
		addr(x)
	}
	for _, x := range representatives(a.tos, a.node.Family) {
		addr(x)
	}
	icmp := trace.ICMP
	if a.node.Family == ip.IPv6 {
		icmp = trace.ICMPv6
	}
	for x, t := range tuples {
		for p := range anywhere {
			at(x, p)
		}
		for _, p := range ip.Protocols {
			at(x, port{p, unusedPort})
		}
		at(x, port{icmp, 0})
		for d := range maps.Clone(t) {
			d.state = trace.Invalid
			if d.protocol == icmp {
				d.state = trace.Related
			}
			t[d] = true
		}
	}
	seen := map[string]bool{}
	var all []destination
	for _, t := range tuples {
		for d := range t {
			all = append(all, d)
		}
	}
	slices.SortFunc(all, func(x, y destination) int {
		return cmp.Or(x.to.Compare(y.to), int(x.protocol)-int(y.protocol), strings.Compare(string(x.state), string(y.state)))
	})
	for _, d := range all {
		if key := a.destinationKey(d); !seen[key] {
			seen[key] = true
			out = append(out, d)
		}
	}
	return out, len(all)
}

// destinationKey holds everything by which rules, routes, IPVS and the oracle distinguish
// destinations.
func (a *atoms) destinationKey(d destination) string {
	var b strings.Builder
	n := a.node
	t := a.oracle.target(d.protocol, d.to)
	fmt.Fprintf(&b, "%s %s %v %v", d.state, t, t.several, t.vip)
	icmp := d.protocol == trace.ICMP || d.protocol == trace.ICMPv6
	fmt.Fprintf(&b, " %v", icmp)
	entry := ipset.Entry{Addr: d.to.Addr(), Port: d.to.Port(), Protocol: d.protocol}
	if t.svc != nil || a.fronts[entry] {
		fmt.Fprintf(&b, " %s %d", d.to, d.protocol)
	}
	for _, u := range a.uses {
		if !strings.Contains(u.fields, "src") && !icmp && n.HasMember(u.name, u.fields, d.protocol, netip.AddrPort{}, d.to) {
			fmt.Fprintf(&b, " %s", u.name)
		}
	}
	for _, p := range a.tos {
		if p.Contains(d.to.Addr()) && !(p.IsSingleIP() && n.Local(p.Addr())) {
			fmt.Fprintf(&b, " %s", p)
		}
	}
	fmt.Fprintf(&b, " local %v", n.Local(d.to.Addr()))
	if !icmp && (a.byProtocol || a.hasBitmap(d)) {
		fmt.Fprintf(&b, " %d", d.protocol)
	}
	return b.String()
}

// hasBitmap reports whether a set of ports, which has no protocols, has the port.
func (a *atoms) hasBitmap(d destination) bool {
	return slices.ContainsFunc(a.uses, func(u setUse) bool {
		return a.node.Sets[u.name].Type == ipset.BitmapPort && a.node.HasMember(u.name, u.fields, d.protocol, netip.AddrPort{}, d.to)
	})
}

// Classes returns the classes of a kernel, and the number of combinations of atoms before
// merging.
func Classes(n *trace.Node, o *Oracle) (out []*Class, combinations int) {
	a := newAtoms(n, o)
	sources := a.sources()
	destinations, total := a.destinations()
	for _, d := range destinations {
		t := o.target(d.protocol, d.to)
		for _, s := range sources {
			if s.in == "" && d.state != "" {
				continue // conntrack assigns the node's own packets
			}
			out = append(out, &Class{
				Question: trace.Question{Protocol: d.protocol, From: s.addr, In: s.in, To: d.to, State: d.state},
				target:   t,
			})
		}
	}
	return out, total * len(sources)
}
