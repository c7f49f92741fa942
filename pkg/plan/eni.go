package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Kernel numbers of the routing tables that every node has.
const (
	tableMain  = 254
	tableLocal = 255
)

// ENI is a secondary network interface that policy routing sends some pods'
// traffic out by: a rule leads to a table of which the default route leaves by
// it, and the main table's default route does not.
type ENI struct {
	Link    string
	Table   int            // the first of those that lead there
	Sources []netip.Prefix // what the rules send there; sorted
	SNAT    netip.Addr     // what traffic leaving by it is to carry; invalid: not known
}

// enis finds them for one family, in the order of their names.
func enis(cfg *Config, n *Node, family ip.Family) []ENI {
	var out []ENI
	inv := &n.Inventory
	for _, r := range inv.Defaults {
		if r.Family != family || r.Table == tableMain || r.Local || r.Link == "" || r.Link == mainLink(inv, family) {
			continue
		}
		sources := sourcesOf(inv, family, r.Table)
		if len(sources) == 0 {
			continue
		}
		e := ENI{Link: r.Link, Table: r.Table, Sources: sources, SNAT: snatSource(cfg, n, r)}
		if at := slices.IndexFunc(out, func(o ENI) bool { return o.Link == r.Link }); at >= 0 {
			out[at].merge(e)
			continue
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b ENI) int { return strings.Compare(a.Link, b.Link) })
	return out
}

// merge takes in another table that leads to the same interface. The SNAT
// source is one for the interface: the first that is known.
func (e *ENI) merge(o ENI) {
	e.Sources = append(e.Sources, o.Sources...)
	slices.SortFunc(e.Sources, comparePrefixes)
	e.Sources = slices.Compact(e.Sources)
	if !e.SNAT.IsValid() {
		e.SNAT = o.SNAT
	}
}

// mainLink is the interface of the main table's default route, or "".
func mainLink(inv *routing.Inventory, family ip.Family) string {
	if routes := MainDefaults(inv, family); len(routes) > 0 {
		return routes[0].Link
	}
	return ""
}

// MainDefaults returns the main table's default routes of a family, in the
// order of the kernel's preference.
func MainDefaults(inv *routing.Inventory, family ip.Family) []routing.Route {
	return filter(inv.Defaults, func(r routing.Route) bool { return r.Family == family && r.Table == tableMain && !r.Local })
}

// uplinks are the interfaces that lead out of the node: those of the main
// table's default routes, and the ENIs.
func uplinks(cfg *Config, n *Node, family ip.Family) []string {
	var out []string
	for _, r := range n.Inventory.Defaults {
		if r.Family == family && r.Table == tableMain && r.Link != "" && !slices.Contains(out, r.Link) {
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

// sourcesOf lists the sources of which rules send all traffic to a table. A
// rule with a further condition, such as a destination, a mark or an
// interface, sends only some of it there.
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

// snatSource chooses what traffic leaving by an ENI is to carry: what is
// configured; the route's preferred source; the interface's own primary
// address; what the Node's annotation says. An address that stands on another
// interface too is no choice, as its replies come back there (Terway gives an
// ENI the node's address).
func snatSource(cfg *Config, n *Node, r routing.Route) netip.Addr {
	inv := &n.Inventory
	if a := sourceIn(cfg.SNAT.Sources, r); a.IsValid() {
		return a
	}
	for _, a := range []netip.Addr{r.Src, linkAddress(inv, r.Link, r.Family), sourceIn(n.SNATSources, r)} {
		if a.IsValid() && !onOtherLink(inv, r.Link, a) {
			return a
		}
	}
	return netip.Addr{}
}

// sourceIn is a mapping's address for the route's interface and family.
func sourceIn(sources map[string][]netip.Addr, r routing.Route) netip.Addr {
	for _, a := range sources[r.Link] {
		if ip.Of(a) == r.Family {
			return a
		}
	}
	return netip.Addr{}
}

// linkAddress is an interface's primary address of global scope, or invalid.
func linkAddress(inv *routing.Inventory, link string, family ip.Family) netip.Addr {
	for _, l := range inv.Links {
		if l.Name != link {
			continue
		}
		for _, a := range l.Addresses {
			if a.Global && !a.Second && ip.Of(a.Prefix.Addr()) == family {
				return a.Prefix.Addr()
			}
		}
	}
	return netip.Addr{}
}

func onOtherLink(inv *routing.Inventory, link string, a netip.Addr) bool {
	return slices.ContainsFunc(inv.Links, func(l routing.Link) bool {
		return l.Name != link && slices.ContainsFunc(l.Addresses, func(b routing.Address) bool { return b.Prefix.Addr() == a })
	})
}

// Paths says how the traffic of one family gets the same way both ways.
type Paths struct {
	// SNAT lists the interfaces of which the source address is set.
	SNAT []ENI
	// ReplyRouted lists sources whose masqueraded flows are bound to the main
	// table's interface instead, both ways.
	ReplyRouted []netip.Prefix
	// Bound lists the interfaces that answer what enters by them, the main
	// table's first. It is empty where there is no ENI: then there is one way.
	Bound []Binding
	// Branches are the ways out by input interface, whose requests for Services
	// carry BranchMark.
	Branches   []Branch
	BranchMark uint32
	// Strays are the ENIs that packets bound to the main table's interface are
	// kept from.
	Strays []Stray
	// Modes says for each ENI what was chosen for its pods' traffic.
	Modes []InterfaceMode
}

// InterfaceMode is what becomes of masqueraded traffic of the pods on an ENI:
// it leaves there with the source (snat), by the main table's interface
// (fwmark), or as MASQUERADE will have it (off).
type InterfaceMode struct {
	Family ip.Family
	Link   string
	Mode   SNATMode
	Source netip.Addr // invalid: not known
}

// mode is the one that is used: auto takes the source where it is known.
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

// PathsOf applies the mode to the ENIs found.
func PathsOf(cfg *Config, n *Node, family ip.Family) Paths {
	var p Paths
	found := enis(cfg, n, family)
	for _, e := range found {
		mode := e.mode(cfg)
		switch mode {
		case SNATSource:
			p.SNAT = append(p.SNAT, e)
		case SNATFWMark:
			p.ReplyRouted = append(p.ReplyRouted, e.Sources...)
		}
		p.Modes = append(p.Modes, InterfaceMode{Family: family, Link: e.Link, Mode: mode, Source: e.SNAT})
	}
	slices.SortFunc(p.ReplyRouted, comparePrefixes)
	p.ReplyRouted = slices.Compact(p.ReplyRouted)
	if cfg.SNAT.Mode == SNATAuto || cfg.SNAT.Mode == SNATFWMark {
		pods := branches(cfg, n, family)
		p.Bound = bindings(cfg, n, family, found, len(pods) > 0)
		if mark, free := branchMark(cfg, p.Bound); free {
			p.Branches, p.BranchMark = pods, mark
		}
		p.Strays = strays(cfg, n, family, p.Bound)
	}
	return p
}
