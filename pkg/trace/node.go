package trace

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// Node is the kernel state of a node that affects packets of one family.
type Node struct {
	Family  ip.Family
	Links   []routing.Link  // without kube-ipvs0
	Rules   []routing.Rule  // of this family, in the kernel's order
	Routes  []routing.Route // of this family, of all tables
	Ruleset nat.Ruleset
	// Other are the rules in the other back end of iptables, or nil.
	Other nat.Ruleset
	// Native are the chains that other programs wrote with nftables directly, or nil.
	Native *nft.Ruleset
	Unread []string // rules that could not be read, and why
	Sets   ipset.State
	IPVS   ipvs.State
	// Connections counts those of real servers with a limit.
	Connections Connections
	Sysctls     sysctl.State // existing parameters among keys
	// Hairpin are the ports of bridges in hairpin mode: a frame may leave by the port
	// that it entered by.
	Hairpin map[string]bool
	// Delivers, if set, returns the interface on which the network outside the node
	// delivers an address, the only one on which it accepts that address as a source.
	// If it is not set, only addresses of interfaces are known.
	Delivers func(netip.Addr) string

	index *index // only of an Evaluator's copy
}

// Connections are counts by virtual server and real server.
type Connections map[ipvs.Key]map[netip.AddrPort]ipvs.Connections

// Parameters of interfaces, including "all".
var linkParameters = []string{"rp_filter", "src_valid_mark", "accept_local", "route_localnet"}

// keys returns the parameters that are read.
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

// set reports whether a parameter exists and is not 0.
func (n *Node) set(key string) bool {
	value, ok := n.Sysctls[key]
	return ok && value != "0"
}

// Forwards reports whether the node forwards packets.
func (n *Node) Forwards() bool {
	if n.Family == ip.IPv6 {
		return n.set(sysctl.LinkKey(n.Family, "all", "forwarding"))
	}
	return n.set("net/ipv4/ip_forward")
}

// BridgeFilters reports whether bridged packets pass the rules.
func (n *Node) BridgeFilters() bool {
	if n.Family == ip.IPv6 {
		return n.set("net/bridge/bridge-nf-call-ip6tables")
	}
	return n.set("net/bridge/bridge-nf-call-iptables")
}

// ports lists the ports of a bridge.
func (n *Node) ports(bridge string) []string {
	var out []string
	for _, l := range n.Links {
		if l.Master == bridge {
			out = append(out, l.Name)
		}
	}
	return out
}

// Link returns the interface with a name.
func (n *Node) Link(name string) (routing.Link, bool) {
	i := slices.IndexFunc(n.Links, func(l routing.Link) bool { return l.Name == name })
	if i < 0 {
		return routing.Link{}, false
	}
	return n.Links[i], true
}

// LinkOf returns the interface that has an address, or "".
func (n *Node) LinkOf(a netip.Addr) string {
	for _, l := range n.Links {
		if l.HasAddress(a) {
			return l.Name
		}
	}
	return ""
}

// deliveredBy returns the interface on which packets for an address enter from outside
// the node, or "" if unknown.
func (n *Node) deliveredBy(a netip.Addr) string {
	if n.Delivers != nil {
		return n.Delivers(a)
	}
	return n.LinkOf(a)
}

// leadsOut reports whether an interface has a default route in any table.
func (n *Node) leadsOut(link string) bool {
	if n.index != nil {
		return n.index.routes.defaults[link]
	}
	return slices.ContainsFunc(n.Routes, func(r routing.Route) bool {
		return r.Link == link && r.Dst.Bits() == 0 && !r.Local
	})
}

// Local reports whether an address is local, according to table local.
func (n *Node) Local(a netip.Addr) bool {
	r, ok := n.inTable(routing.TableLocal, a)
	return ok && r.Local
}

// SNATTo returns the address of the SNAT rule for an interface in a chain of table nat, or "".
func (n *Node) SNATTo(chain, link string) string {
	for _, r := range n.Ruleset[nat.NAT].Chains[chain] {
		if slices.Contains(nat.Arguments(r, "-o"), link) {
			return strings.Join(nat.Arguments(r, "--to-source"), "")
		}
	}
	return ""
}
