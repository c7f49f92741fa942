package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Relevant returns the node without the interfaces that have no effect on ForNode, which are most of
// those of pods. So a pod that starts rarely changes the result.
func Relevant(cfg *Config, n *Node) Node {
	out, withVeth := *n, map[string]bool{} // bridges to which a veth is attached
	named := namedLinks(cfg, n)
	out.Inventory.Links = slices.DeleteFunc(slices.Clone(n.Inventory.Links), func(l routing.Link) bool {
		if l.Type != "veth" || named[l.Name] || named[l.MAC] || slices.ContainsFunc(l.Addresses, matters) {
			return false
		}
		// The plan depends on whether a bridge has a veth, and whether all its ports are veths.
		first := l.Master != "" && !withVeth[l.Master]
		withVeth[l.Master] = true
		return !first
	})
	return out
}

// matters reports whether the plan may depend on an address of an interface: on any except those
// that the kernel gives each interface for IPv6.
func matters(a routing.Address) bool {
	return a.Global || a.Prefix.Addr().Is4() || !a.Prefix.Addr().IsLinkLocalUnicast()
}

// namedLinks returns the names and MAC addresses of interfaces in the configuration, in rules and
// in routes.
func namedLinks(cfg *Config, n *Node) map[string]bool {
	named := map[string]bool{}
	for link := range cfg.SNAT.Gateways {
		named[link] = true
	}
	for link := range cfg.SNAT.Sources {
		named[link] = true
	}
	for link := range n.SNATSources {
		named[link] = true
	}
	inv := &n.Inventory
	for _, r := range inv.Rules {
		named[r.IIf], named[r.OIf] = true, true
	}
	for _, routes := range [][]routing.Route{inv.Defaults, inv.Attached, inv.Direct} {
		for _, r := range routes {
			named[r.Link] = true
		}
	}
	delete(named, "")
	return named
}

// nameable reports whether the name of an interface can be written in a rule. The kernel allows
// names with a quotation mark, which iptables-save prints as it is, and names that end in a plus
// sign, which iptables takes for a wildcard.
func nameable(link string) bool {
	return !strings.Contains(link, `"`) && !strings.HasSuffix(link, "+") && link != "!"
}

// withNameableLinks returns the node without the interfaces that no rule can name, and without their
// routes. Policy rules that name such an interface get Other, as if they had unknown conditions.
func withNameableLinks(n *Node) *Node {
	unnameable := func(l routing.Link) bool { return !nameable(l.Name) }
	over := func(r routing.Route) bool { return !nameable(r.Link) }
	names := func(r routing.Rule) bool { return !nameable(r.IIf) || !nameable(r.OIf) }
	inv := &n.Inventory
	if !slices.ContainsFunc(inv.Links, unnameable) && !slices.ContainsFunc(inv.Rules, names) {
		return n
	}
	out := *n
	out.Inventory.Links = slices.DeleteFunc(slices.Clone(inv.Links), unnameable)
	out.Inventory.Rules = slices.Clone(inv.Rules)
	for i := range out.Inventory.Rules {
		r := &out.Inventory.Rules[i]
		r.Other = r.Other || names(*r)
	}
	for _, routes := range []*[]routing.Route{&out.Inventory.Defaults, &out.Inventory.Attached, &out.Inventory.Direct} {
		*routes = slices.DeleteFunc(slices.Clone(*routes), over)
	}
	return &out
}

// linkNameWarnings returns a warning for each interface that withNameableLinks removes.
func linkNameWarnings(n *Node) []string {
	var out []string
	for _, l := range n.Inventory.Links {
		if !nameable(l.Name) {
			out = append(out, fmt.Sprintf("the interface %q is not recognized as an uplink, an ENI or a bridge: its name cannot be written in a rule", l.Name))
		}
	}
	return out
}
