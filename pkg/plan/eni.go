package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// ENI is a secondary interface through which policy routing sends some pods' traffic: a
// rule selects a table whose default route uses the interface, and the main table's
// default route does not.
type ENI struct {
	Link    string
	Table   int            // the first table that routes there
	Sources []netip.Prefix // sources that the rules select; sorted
	SNAT    netip.Addr     // SNAT source; invalid if not known
	// Masquerades is whether the kernel chooses the source, because the interface has addresses of
	// several networks. SNAT is one of them.
	Masquerades bool
}

// enis returns the ENIs of one family, sorted by name.
func enis(cfg *Config, n *Node, family ip.Family) []ENI {
	var out []ENI
	inv := &n.Inventory
	for _, r := range inv.Defaults {
		if r.Family != family || r.Table == routing.TableMain || r.Local || r.Link == "" || r.Link == primaryLink(inv, family) {
			continue
		}
		sources := sourcesOf(inv, family, r.Table)
		if len(sources) == 0 {
			continue
		}
		e := ENI{Link: r.Link, Table: r.Table, Sources: sources, SNAT: snatSource(cfg, n, r)}
		e.Masquerades = !addressFor(cfg.SNAT.Sources, inv, r.Link, family).IsValid() && hasOtherNetwork(inv, r.Link, e.SNAT)
		if at := slices.IndexFunc(out, func(o ENI) bool { return o.Link == r.Link }); at >= 0 {
			out[at].merge(e)
			continue
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b ENI) int { return strings.Compare(a.Link, b.Link) })
	return out
}

// merge adds another table that routes to the same interface. An interface has one SNAT
// source: the first that is known.
func (e *ENI) merge(o ENI) {
	e.Sources = append(e.Sources, o.Sources...)
	slices.SortFunc(e.Sources, comparePrefixes)
	e.Sources = slices.Compact(e.Sources)
	if !e.SNAT.IsValid() {
		e.SNAT, e.Masquerades = o.SNAT, o.Masquerades
	}
}

// primaryLink returns the interface of the main table's default route, or "".
func primaryLink(inv *routing.Inventory, family ip.Family) string {
	if routes := MainDefaults(inv, family); len(routes) > 0 {
		return routes[0].Link
	}
	return ""
}

// MainDefaults returns the main table's default routes of a family in the kernel's
// order of preference.
func MainDefaults(inv *routing.Inventory, family ip.Family) []routing.Route {
	return filter(inv.Defaults, func(r routing.Route) bool { return r.Family == family && r.Table == routing.TableMain && !r.Local })
}

// uplinks returns the interfaces of the main table's default routes, and the ENIs.
func uplinks(cfg *Config, n *Node, family ip.Family) []string {
	var out []string
	for _, r := range n.Inventory.Defaults {
		if r.Family == family && r.Table == routing.TableMain && r.Link != "" && !slices.Contains(out, r.Link) {
			out = append(out, r.Link)
		}
	}
	for _, e := range enis(cfg, n, family) {
		if !slices.Contains(out, e.Link) {
			out = append(out, e.Link)
		}
	}
	return out
}

// sourcesOf returns the sources whose traffic is routed by a table, whatever its
// destination. It skips rules with another condition, such as a destination, a mark or
// an interface.
func sourcesOf(inv *routing.Inventory, family ip.Family, table int) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range inv.Rules {
		bySource := routing.Rule{Family: family, Priority: r.Priority, From: r.From, Table: table}
		if r == bySource && r.From.IsValid() && r.From.Bits() > 0 {
			out = append(out, r.From)
		}
	}
	slices.SortFunc(out, comparePrefixes)
	return slices.Compact(out)
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

// snatSource returns the SNAT source of an ENI: the configured one, else the route's
// preferred source, the interface's primary address, or the address in the Node's
// annotation. An address that another interface has too is skipped, because replies
// would arrive there (Terway gives an ENI the node's address).
func snatSource(cfg *Config, n *Node, r routing.Route) netip.Addr {
	inv := &n.Inventory
	if a := addressFor(cfg.SNAT.Sources, inv, r.Link, r.Family); a.IsValid() {
		return a
	}
	for _, a := range []netip.Addr{r.Src, linkAddress(inv, r.Link, r.Family), addressFor(n.SNATSources, inv, r.Link, r.Family)} {
		if a.IsValid() && !onOtherLink(inv, r.Link, a) {
			return a
		}
	}
	return netip.Addr{}
}

// addressFor returns the address that a mapping has for an interface and family. The MAC address
// precedes the name, which another interface may get.
func addressFor(addresses map[string][]netip.Addr, inv *routing.Inventory, link string, family ip.Family) netip.Addr {
	for _, key := range []string{macAddress(inv, link), link} {
		for _, a := range addresses[key] {
			if ip.Of(a) == family {
				return a
			}
		}
	}
	return netip.Addr{}
}

func macAddress(inv *routing.Inventory, link string) string {
	for _, l := range inv.Links {
		if l.Name == link {
			return l.MAC
		}
	}
	return ""
}

// linkAddress returns an interface's primary address of global scope, or an invalid
// one.
func linkAddress(inv *routing.Inventory, link string, family ip.Family) netip.Addr {
	for _, l := range inv.Links {
		if l.Name != link {
			continue
		}
		for _, a := range l.Addresses {
			if a.Global && !a.Secondary && ip.Of(a.Prefix.Addr()) == family {
				return a.Prefix.Addr()
			}
		}
	}
	return netip.Addr{}
}

// hasOtherNetwork reports whether an interface has the address a and, in another network, a second
// global address of the same family. Hosts of that network may have no route to a.
func hasOtherNetwork(inv *routing.Inventory, link string, a netip.Addr) bool {
	var own, others []netip.Prefix
	for _, l := range inv.Links {
		if l.Name != link {
			continue
		}
		for _, b := range l.Addresses {
			switch p := b.Prefix; {
			case p.Addr() == a:
				own = append(own, p.Masked())
			case b.Global && !b.Secondary && ip.Of(p.Addr()) == ip.Of(a):
				others = append(others, p.Masked())
			}
		}
	}
	return len(own) > 0 && slices.ContainsFunc(others, func(p netip.Prefix) bool { return !p.Overlaps(own[0]) })
}

func onOtherLink(inv *routing.Inventory, link string, a netip.Addr) bool {
	return slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name != link && l.HasAddress(a) })
}

// Paths describes how traffic of one family takes the same path in both directions.
type Paths struct {
	// SNAT lists the ENIs on which a rule sets the SNAT source, instead of the kernel.
	SNAT []ENI
	// ReplyRouted lists the sources of ENIs with the mode fwmark. Their masqueraded flows are bound to
	// the primary interface, in both directions.
	ReplyRouted []netip.Prefix
	// Bound lists the interfaces with reply routing, the primary one first. It is
	// empty without an ENI, because there is only one path.
	Bound []Binding
	// Gateways lists the interfaces with reply routing through a configured gateway.
	Gateways []Gateway
	// Diverted describes the traffic that enters by the primary interface and would
	// leave by another one if it were not bound.
	Diverted Diverted
	// Branches are the routes by input interface. Requests of their pods for Services
	// carry BranchMark.
	Branches   []Branch
	BranchMark uint32
	// Direct holds, for interfaces of Bound other than the primary one, the networks that the main
	// table routes over the interface, and over no other. Their clients need no binding.
	Direct map[string][]netip.Prefix
	// ByMain lists the interfaces with too many networks for Direct (maxDirect): no flow that enters by
	// them is bound.
	ByMain []string
	// Strays are the ENIs that must not send packets bound to the primary interface.
	Strays []Stray
	// Modes lists the mode of each ENI's pods.
	Modes []InterfaceMode
}

// InterfaceMode describes masqueraded traffic of the pods on an ENI: it leaves through
// the ENI with Source (snat), through the primary interface (fwmark), or as
// MASQUERADE decides (off).
type InterfaceMode struct {
	Family ip.Family
	Link   string
	Mode   SNATMode
	Source netip.Addr // invalid if not known
}

// mode returns the effective mode: auto prefers a known SNAT source.
func (e *ENI) mode(cfg *Config) SNATMode {
	switch {
	case cfg.SNAT.Mode == SNATOff:
	case e.SNAT.IsValid() && cfg.SNAT.Mode != SNATFWMark:
		return SNATSource
	case cfg.SNAT.Mode != SNATSource:
		return SNATFWMark
	}
	return SNATOff
}

// PathsOf derives the paths of one family from the configured mode and the ENIs found.
func PathsOf(cfg *Config, n *Node, family ip.Family) Paths {
	var p Paths
	found := enis(cfg, n, family)
	for _, e := range found {
		mode := e.mode(cfg)
		switch mode {
		case SNATSource:
			if !e.Masquerades {
				p.SNAT = append(p.SNAT, e)
			}
		case SNATFWMark:
			p.ReplyRouted = append(p.ReplyRouted, e.Sources...)
		}
		p.Modes = append(p.Modes, InterfaceMode{Family: family, Link: e.Link, Mode: mode, Source: e.SNAT})
	}
	slices.SortFunc(p.ReplyRouted, comparePrefixes)
	p.ReplyRouted = slices.Compact(p.ReplyRouted)
	if cfg.SNAT.Mode == SNATAuto || cfg.SNAT.Mode == SNATFWMark {
		pods := branches(cfg, n, family)
		p.Gateways = gateways(cfg, n, family, found)
		p.Bound = bindings(cfg, n, family, withGateways(found, p.Gateways), len(pods) > 0)
		if mark, free := branchMark(cfg, n, family, p.Bound); free {
			p.Branches, p.BranchMark = pods, mark
		}
		p.Direct, p.ByMain = directOnly(&n.Inventory, family, p.Bound)
		p.Strays = strays(cfg, n, family, p.Bound, found)
		p.Diverted = diverted(cfg, n, family)
	}
	return p
}

// withGateways returns the interfaces that need a binding besides the primary one. Those of gateways
// are returned as ENIs without sources.
func withGateways(found []ENI, gateways []Gateway) []ENI {
	out := slices.Clone(found)
	for _, g := range gateways {
		out = append(out, ENI{Link: g.Link, Table: g.Table})
	}
	return out
}

// Diverted describes packets that policy rules of other programs, evaluated after ours, route by
// another interface than the primary one: those from Sources or, if All, possibly any.
type Diverted struct {
	Sources []netip.Prefix
	All     bool
}

// diverted examines the policy rules after ours. It skips rules for other input interfaces. It also
// skips rules whose table has no default route by another interface than the primary one: such a
// table is for single networks, such as a VPN's, and keeps deciding for them.
func diverted(cfg *Config, n *Node, family ip.Family) Diverted {
	var d Diverted
	for _, r := range n.Inventory.Rules {
		switch {
		case r.Family != family || r.Own || r.Priority <= cfg.SNAT.Priority:
		case r.IIf != "" && r.IIf != "lo" && r.IIf != primaryLink(&n.Inventory, family):
		case !r.Other && r.Action == routing.Lookup && slices.Contains([]int{routing.TableMain, routing.TableLocal, routing.TableDefault}, r.Table):
		case !r.Other && r.Action == routing.Lookup && !leadsElsewhere(&n.Inventory, family, r.Table):
		case r.Invert || !r.From.IsValid() || r.From.Bits() == 0:
			d.All = true
		default:
			d.Sources = append(d.Sources, r.From)
		}
	}
	slices.SortFunc(d.Sources, comparePrefixes)
	d.Sources = slices.Compact(d.Sources)
	return d
}

// leadsElsewhere reports whether a table has a default route by another interface than the primary one.
func leadsElsewhere(inv *routing.Inventory, family ip.Family, table int) bool {
	return slices.ContainsFunc(inv.Defaults, func(d routing.Route) bool {
		return d.Family == family && d.Table == table && d.Link != primaryLink(inv, family)
	})
}
