// Package plan decides what shall stand in the kernel. It is pure: from a
// Service, the node's facts and the configuration it computes plain values,
// and the same input gives the same values in the same order. It knows no
// clock, no netlink and no program.
package plan

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Node is what the plan gets to know of the node that it plans for.
type Node struct {
	Zone      string         // label topology.kubernetes.io/zone, or ""
	PodCIDRs  []netip.Prefix // spec.podCIDRs
	Addresses []netip.Addr   // status.addresses, InternalIP before ExternalIP
	Inventory routing.Inventory
	Kernel    Version // of uname(2)
	// Bound are the interfaces' values in the plans before; see Remember.
	Bound []Binding
	// SNATSources are the ENIs' primary addresses by interface, from the
	// Node's annotation.
	SNATSources     map[string][]netip.Addr
	BridgeNetfilter BridgeNetfilter
	Listeners       []routing.Listener // sorted
	// APIServer is where it is reached, past any Service.
	APIServer []netip.AddrPort
	// Services is how many there have been at most since the process began. So
	// what depends on it does not change to and fro.
	Services int
	// Lost are the other nodes that the cluster does not hear of any more.
	Lost []string
	// Lingering are addresses that an interface had until a moment ago. They
	// count as the node's until it is certain that they stay away.
	Lingering []netip.Addr
	// MainGone are the families of which the main table's default routes in
	// Inventory lingered: the kernel has none now.
	MainGone map[ip.Family]bool
	// ReadOnly says that kernel parameters cannot be set by this process.
	ReadOnly bool
	// Uses are the sets that rules are written for.
	Uses SetsInUse
}

// Version is a kernel's, such as 6.1. The zero Version is unknown.
type Version struct{ Major, Minor int }

// AtLeast compares; an unknown version is taken for a new one.
func (v Version) AtLeast(major, minor int) bool {
	if v == (Version{}) {
		return true
	}
	return v.Major > major || v.Major == major && v.Minor >= minor
}

// Facts are what Services' plans depend on besides the Services, derived from
// the Node once, whenever it changes.
type Facts struct {
	NodeName  string
	Zone      string
	Primary   map[ip.Family]netip.Addr // the node's own address
	NodePorts []netip.Addr             // addresses that node ports are served on
	OnLinks   map[netip.Addr]bool      // addresses on any interface but kube-ipvs0
	Many      bool                     // Services, too many for an address each
	Listeners map[routing.Listener]bool
	Loopback  map[routing.Listener]bool // those at the loopback address; see loopbackListeners
	Caches    map[routing.Listener]bool // those at an address of a dummy interface; see cachedHere
	APIServer map[netip.AddrPort]bool
	Lost      []string            // nodes
	Peers     map[netip.Addr]bool // addresses of other nodes, as far as routes show them
}

// AddressesAtMost is for how many Services ClaimAuto gives addresses to
// kube-ipvs0. The kernel goes through all of them to add one: measured on an
// emulated machine a thousand take 0.19 s, where as many routes take 0.12 s, and
// ten thousand 3.8 s and 0.61 s.
const AddressesAtMost = 1000

// Depends names the facts that a Service's plan was made from, so that a
// change of the node costs only the Services that it changes.
type Depends uint16

// The facts, as bits of Depends.
const (
	OnZone Depends = 1 << iota
	OnNodePorts
	OnLinks
	OnPrimary
	OnMany
	OnListeners
	OnAPIServer
	OnLost
	// OnCaches is what every plan depends on that has a cluster IP, without saying so.
	OnCaches
	OnPeers
	OnLoopback
)

// FactsOf derives the facts.
func FactsOf(cfg *Config, n *Node) Facts {
	f := Facts{
		NodeName: cfg.NodeName,
		Zone:     n.Zone,
		Lost:     n.Lost,
		Primary:  map[ip.Family]netip.Addr{},
		OnLinks:  map[netip.Addr]bool{},
		Many:     n.Services > AddressesAtMost,

		Listeners: setOf(n.Listeners),
		APIServer: setOf(n.APIServer),
		Peers:     setOf(n.Inventory.Peers),
	}
	for _, a := range linkAddresses(n) {
		f.OnLinks[a] = true
	}
	f.Caches = caches(n)
	f.Loopback = loopbackListeners(n.Listeners)
	for _, family := range cfg.Families {
		if a := primary(n, family); a.IsValid() {
			f.Primary[family] = a
		}
	}
	f.NodePorts = nodePortAddresses(cfg, n, f.Primary)
	for _, family := range cfg.Families {
		if servesLocalhost(cfg, &f, family) {
			f.NodePorts = append(f.NodePorts, loopback.Address(family))
		}
	}
	return f
}

// linkAddresses lists what addresses interfaces have, or had until a moment
// ago. IPv6 link-local ones are left out: every interface of a pod has one, and
// no Service can.
func linkAddresses(n *Node) []netip.Addr {
	out := slices.Clone(n.Lingering)
	for _, l := range n.Inventory.Links {
		for _, a := range l.Addresses {
			if addr := a.Prefix.Addr(); addr.Is4() || !addr.IsLinkLocalUnicast() {
				out = append(out, addr)
			}
		}
	}
	return out
}

func setOf[T comparable](list []T) map[T]bool {
	out := make(map[T]bool, len(list))
	for _, v := range list {
		out[v] = true
	}
	return out
}

// primary is the Node object's address; with no Node object, the one that the
// main table's default route leaves with.
func primary(n *Node, family ip.Family) netip.Addr {
	for _, a := range n.Addresses {
		if ip.Of(a) == family {
			return a
		}
	}
	link := mainLink(&n.Inventory, family)
	if link == "" {
		return firstGlobal(n, family)
	}
	return linkAddress(&n.Inventory, link, family)
}

func firstGlobal(n *Node, family ip.Family) netip.Addr {
	for _, l := range n.Inventory.Links {
		if a := linkAddress(&n.Inventory, l.Name, family); a.IsValid() && !l.Loopback {
			return a
		}
	}
	return netip.Addr{}
}

// nodePortAddresses applies NodePortAddresses. Loopback is never served, nor
// is an IPv6 link-local address, which many nodes share.
func nodePortAddresses(cfg *Config, n *Node, primary map[ip.Family]netip.Addr) []netip.Addr {
	var out []netip.Addr
	if cfg.NodePortAddresses.Primary {
		for _, a := range primary {
			out = append(out, a)
		}
	} else {
		out = filter(linkAddresses(n), func(a netip.Addr) bool { return servesNodePorts(cfg, a) })
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// servesLocalhost tells whether node ports are served on the loopback address. The
// node's own address has to be one of an interface, as answers come back to it.
func servesLocalhost(cfg *Config, f *Facts, family ip.Family) bool {
	if !cfg.LocalhostNodePorts || cfg.NodePortAddresses.Primary || !f.OnLinks[f.Primary[family]] {
		return false
	}
	return selected(cfg, loopback.Address(family))
}

// servesNodePorts leaves out what an interface has that is no node's address.
func servesNodePorts(cfg *Config, a netip.Addr) bool {
	return !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast()) && selected(cfg, a)
}

// selected goes by the prefixes of the address's own family. With none of it
// every address is served, as by kube-proxy: a list of IPv4 prefixes says nothing
// about IPv6.
func selected(cfg *Config, a netip.Addr) bool {
	prefixes := filter(cfg.NodePortAddresses.Prefixes, func(p netip.Prefix) bool { return ip.Of(p.Addr()) == ip.Of(a) })
	return len(prefixes) == 0 || containsAny(prefixes, a)
}

func containsAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Changed tells which facts differ between two states of the node.
func Changed(a, b *Facts) Depends {
	var d Depends
	if a.Zone != b.Zone {
		d |= OnZone
	}
	if !slices.Equal(a.NodePorts, b.NodePorts) {
		d |= OnNodePorts
	}
	if !maps.Equal(a.OnLinks, b.OnLinks) {
		d |= OnLinks
	}
	if !maps.Equal(a.Primary, b.Primary) {
		d |= OnPrimary
	}
	if a.Many != b.Many {
		d |= OnMany
	}
	if !maps.Equal(a.Listeners, b.Listeners) {
		d |= OnListeners
	}
	if !maps.Equal(a.Caches, b.Caches) {
		d |= OnCaches
	}
	if !maps.Equal(a.APIServer, b.APIServer) {
		d |= OnAPIServer
	}
	if !slices.Equal(a.Lost, b.Lost) {
		d |= OnLost
	}
	if !maps.Equal(a.Loopback, b.Loopback) {
		d |= OnLoopback
	}
	if !maps.Equal(a.Peers, b.Peers) {
		d |= OnPeers
	}
	return d
}
