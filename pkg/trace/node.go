package trace

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Node is all of a node's kernel that decides on a packet of one family.
type Node struct {
	Family  ip.Family
	Links   []routing.Link  // kube-ipvs0 left out
	Rules   []routing.Rule  // of this family, in the kernel's order
	Routes  []routing.Route // of this family, of all tables
	Ruleset nat.Ruleset
	Sets    ipset.State
	IPVS    ipvs.State
	Sysctls sysctl.State // those that the kernel has of keys
	// Delivers, if set, tells the interface by which the network beyond the node
	// delivers an address, and from which alone it takes it as a source. Without it
	// only the addresses that interfaces carry are known.
	Delivers func(netip.Addr) string
}

// Of interfaces, "all" among them.
var linkParameters = []string{"rp_filter", "src_valid_mark", "accept_local", "route_localnet"}

// keys lists the parameters that matter.
func keys(family ip.Family, links []routing.Link) []string {
	out := []string{"net/ipv4/vs/snat_reroute", "net/ipv4/vs/conntrack", "net/ipv4/ip_forward"}
	if family == ip.IPv6 {
		return append(out, sysctl.LinkKey(family, "all", "forwarding"), "net/bridge/bridge-nf-call-ip6tables")
	}
	out = append(out, "net/bridge/bridge-nf-call-iptables")
	for _, parameter := range linkParameters {
		out = append(out, sysctl.LinkKey(family, "all", parameter))
		for _, l := range links {
			out = append(out, sysctl.LinkKey(family, l.Name, parameter))
		}
	}
	return out
}

// set tells whether a parameter is there and not 0.
func (n *Node) set(key string) bool {
	value, ok := n.Sysctls[key]
	return ok && value != "0"
}

// Forwards tells whether the node is a router.
func (n *Node) Forwards() bool {
	if n.Family == ip.IPv6 {
		return n.set(sysctl.LinkKey(n.Family, "all", "forwarding"))
	}
	return n.set("net/ipv4/ip_forward")
}

// BridgeFilters tells whether bridged packets are shown to the rules.
func (n *Node) BridgeFilters() bool {
	if n.Family == ip.IPv6 {
		return n.set("net/bridge/bridge-nf-call-ip6tables")
	}
	return n.set("net/bridge/bridge-nf-call-iptables")
}

// Link finds an interface by its name.
func (n *Node) Link(name string) (routing.Link, bool) {
	i := slices.IndexFunc(n.Links, func(l routing.Link) bool { return l.Name == name })
	if i < 0 {
		return routing.Link{}, false
	}
	return n.Links[i], true
}

// Owner is the interface that has an address, or "".
func (n *Node) Owner(a netip.Addr) string {
	for _, l := range n.Links {
		for _, have := range l.Addresses {
			if have.Prefix.Addr() == a {
				return l.Name
			}
		}
	}
	return ""
}

// deliveredBy is the interface that packets for an address come in by from
// beyond the node, or "" if that is not known.
func (n *Node) deliveredBy(a netip.Addr) string {
	if n.Delivers != nil {
		return n.Delivers(a)
	}
	return n.Owner(a)
}

// leadsOut tells whether a default route, of any table, leaves by an interface.
func (n *Node) leadsOut(link string) bool {
	return slices.ContainsFunc(n.Routes, func(r routing.Route) bool {
		return r.Link == link && r.Dst.Bits() == 0 && !r.Local
	})
}

// Local tells whether packets for an address are for the node, by its table
// "local".
func (n *Node) Local(a netip.Addr) bool {
	r, ok := n.inTable(localTable, a)
	return ok && r.Local
}

// SNATTo is the address of our rule for what leaves by an interface, or "".
func (n *Node) SNATTo(link string) string {
	for _, r := range n.Ruleset[nat.NAT].Chains["KUBE-POSTROUTING"] {
		if slices.Contains(nat.Arguments(r, "-o"), link) {
			return strings.Join(nat.Arguments(r, "--to-source"), "")
		}
	}
	return ""
}
