// Package plan computes the desired state of the kernel. It is pure: it turns a
// Service, the node's facts and the configuration into plain values, and equal input
// gives equal output in the same order. It uses no clock, no netlink and no other
// program.
package plan

import (
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Node is the plan's input about its node.
type Node struct {
	Zone      string         // label topology.kubernetes.io/zone, or ""
	PodCIDRs  []netip.Prefix // spec.podCIDRs
	Addresses []netip.Addr   // status.addresses, InternalIP before ExternalIP
	Inventory routing.Inventory
	Kernel    Version // from uname(2)
	// Bound holds the bindings of earlier plans; see MergeBindings.
	Bound []Binding
	// SNATSources maps interfaces, by routing.LinkKey, to the ENIs' primary addresses, from
	// the Node's annotation.
	SNATSources     map[string][]netip.Addr
	BridgeNetfilter BridgeNetfilter
	Listeners       []routing.Listener // sorted
	// ClientPorts are the ports that the kernel gives to clients on this node; sorted.
	ClientPorts []routing.PortRange
	// APIServer holds the addresses and ports of the API servers themselves: the endpoints of
	// default/kubernetes, and the one that this process uses.
	APIServer []netip.AddrPort
	// Services is the highest number of Services since the process started, so that
	// decisions that depend on it do not flap.
	Services int
	// UnreachableNodes lists the other nodes that are unreachable; sorted.
	UnreachableNodes []string
	// ForeignMarks holds the values of marks that rules of other programs set or match;
	// sorted. Policy rules of other programs are in Inventory.
	ForeignMarks map[ip.Family][]uint32
	// Translations are the sources of packets that rules of other programs translate: networks, or
	// an invalid prefix for any source; sorted.
	Translations map[ip.Family][]netip.Prefix
	// Refuses holds the families whose forwarded packets another program may drop.
	Refuses map[ip.Family]bool
	// Lingering lists addresses that were removed from an interface moments ago. They count as
	// node addresses, because a DHCP client may add them again at once.
	Lingering []netip.Addr
	// MainGone holds the families that currently have no default route in table main. For these,
	// Inventory keeps the last one.
	MainGone map[ip.Family]bool
	// ReadOnly means that this process cannot set kernel parameters.
	ReadOnly bool
	// Watched means that changes of the Inventory are reported to the process while it
	// runs.
	Watched bool
	// OnDemand means that a process runs that reads the sets of Demands.
	OnDemand bool
	// Demanding means that rules on demand are being written. The placeholder rules stay
	// until they exist, so that no packet is refused in between.
	Demanding bool
	// Started means that the kernel has no rules of an earlier process any more.
	Started bool
	// Uses holds the sets that rules are written for.
	Uses SetsInUse
}

// Version is a kernel version, such as 6.1. The zero Version is unknown.
type Version struct{ Major, Minor int }

// AtLeast reports whether v is the given version or newer. An unknown version counts as
// new.
func (v Version) AtLeast(major, minor int) bool {
	if v == (Version{}) {
		return true
	}
	return v.Major > major || v.Major == major && v.Minor >= minor
}

// Facts holds what the plans of Services depend on besides the Services themselves. It
// is derived from the Node whenever the Node changes.
type Facts struct {
	NodeName         string
	Zone             string
	Primary          map[ip.Family]netip.Addr // the node's own address
	NodePorts        []netip.Addr             // addresses that node ports are served on
	NodeIPs          sets.Set[netip.Addr]     // addresses on any interface except kube-ipvs0
	OwnIPs           sets.Set[netip.Addr]     // the node's own addresses; see ownAddresses
	PreferRoutes     bool                     // more Services than AddressesAtMost
	Listeners        sets.Set[routing.Listener]
	Loopback         sets.Set[routing.Listener] // sockets on the loopback address; see loopbackListeners
	ClientPorts      []routing.PortRange
	DummyListeners   sets.Set[routing.Listener] // sockets on an address of a dummy interface; see servedOnDummy
	APIServer        sets.Set[netip.AddrPort]
	UnreachableNodes []string             // names; sorted
	Peers            sets.Set[netip.Addr] // addresses of other nodes, as far as routes show them
}

// AddressesAtMost is the number of Services up to which ClaimAuto adds addresses to
// kube-ipvs0. The kernel walks all of them to add one. Measured on an emulated machine:
// 1000 addresses take 0.19 s and 1000 routes 0.12 s; 10000 addresses take 3.8 s and
// 10000 routes 0.61 s.
const AddressesAtMost = 1000

// Deps is the set of facts that a Service's plan depends on. A change of the node requeues only
// the Services that depend on what changed.
type Deps uint16

// The facts, as bits of Deps.
const (
	OnZone Deps = 1 << iota
	OnNodePorts
	OnNodeIPs
	OnPrimary
	OnServiceCount
	OnListeners
	OnAPIServer
	OnUnreachableNodes
	// OnDummyListeners is implied for every plan: any cluster IP depends on it.
	OnDummyListeners
	OnPeers
	OnLoopback
)

// AffectedBy reports whether a plan with these dependencies must be computed again when some facts
// have changed.
func (d Deps) AffectedBy(changed Deps) bool { return (d|OnDummyListeners)&changed != 0 }

// NewFacts derives the facts from a node.
func NewFacts(cfg *Config, n *Node) Facts {
	f := Facts{
		NodeName:         cfg.NodeName,
		Zone:             n.Zone,
		UnreachableNodes: n.UnreachableNodes,
		Primary:          map[ip.Family]netip.Addr{},
		NodeIPs:          sets.New(linkAddresses(n)...),
		PreferRoutes:     n.Services > AddressesAtMost,

		Listeners:   sets.New(serverSockets(n.Listeners, n.ClientPorts)...),
		ClientPorts: n.ClientPorts,
		APIServer:   sets.New(n.APIServer...),
		Peers:       sets.New(n.Inventory.Peers...),
	}
	f.OwnIPs = sets.New(ownAddresses(cfg, n)...)
	f.DummyListeners = dummyListeners(n)
	f.Loopback = loopbackListeners(n.Listeners, n.ClientPorts)
	for _, family := range cfg.Families {
		if a := primary(cfg, n, family); a.IsValid() {
			f.Primary[family] = a
		}
	}
	f.NodePorts = nodePortAddresses(cfg, n, f.Primary)
	for _, family := range cfg.Families {
		if servesLocalhost(cfg, &f, family) {
			f.NodePorts = append(f.NodePorts, family.Loopback())
		}
	}
	return f
}

// linkAddresses returns the addresses of interfaces, including recently removed ones.
// It leaves out IPv6 link-local addresses: every pod interface has one, and no Service
// can.
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

// ownAddresses returns the addresses of the Node object and the configured one. Others on the
// node's interfaces may be those of a load balancer. It returns none without a Node object.
func ownAddresses(cfg *Config, n *Node) []netip.Addr {
	if len(n.Addresses) == 0 {
		return nil
	}
	return append(slices.Clone(n.Addresses), cfg.NodeAddress)
}

// primary returns the configured address, else the Node object's, or, without a Node object,
// the address of the primary interface.
func primary(cfg *Config, n *Node, family ip.Family) netip.Addr {
	if a := cfg.NodeAddress; a.IsValid() && ip.Of(a) == family {
		return a
	}
	for _, a := range n.Addresses {
		if ip.Of(a) == family {
			return a
		}
	}
	link := primaryLink(&n.Inventory, family)
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

// nodePortAddresses applies NodePortAddresses. It never returns a loopback address or
// an IPv6 link-local address, which many nodes share.
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

// servesLocalhost reports whether node ports are served on the loopback address. The
// node's own address must be on an interface, because replies return to it.
func servesLocalhost(cfg *Config, f *Facts, family ip.Family) bool {
	if !cfg.LocalhostNodePorts || cfg.NodePortAddresses.Primary || !f.NodeIPs.Has(f.Primary[family]) {
		return false
	}
	return selected(cfg, family.Loopback())
}

// servesNodePorts reports whether node ports are served on an interface address.
// Loopback and IPv6 link-local addresses are not node addresses.
func servesNodePorts(cfg *Config, a netip.Addr) bool {
	return !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast()) && selected(cfg, a)
}

// selected reports whether the prefixes of the address's family contain it. A family
// without a prefix is served on every address, as by kube-proxy: a list of IPv4
// prefixes does not restrict IPv6.
func selected(cfg *Config, a netip.Addr) bool {
	prefixes := filter(cfg.NodePortAddresses.Prefixes, func(p netip.Prefix) bool { return ip.Of(p.Addr()) == ip.Of(a) })
	return len(prefixes) == 0 || containsAny(prefixes, a)
}

func containsAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// DiffFacts returns the facts that differ between two states of the node.
func DiffFacts(a, b *Facts) Deps {
	var d Deps
	if a.Zone != b.Zone {
		d |= OnZone
	}
	if !slices.Equal(a.NodePorts, b.NodePorts) {
		d |= OnNodePorts
	}
	if !a.NodeIPs.Equal(b.NodeIPs) {
		d |= OnNodeIPs
	}
	if !maps.Equal(a.Primary, b.Primary) || !a.OwnIPs.Equal(b.OwnIPs) {
		d |= OnPrimary
	}
	if a.PreferRoutes != b.PreferRoutes {
		d |= OnServiceCount
	}
	if !a.Listeners.Equal(b.Listeners) {
		d |= OnListeners
	}
	if !a.DummyListeners.Equal(b.DummyListeners) {
		d |= OnDummyListeners
	}
	if !a.APIServer.Equal(b.APIServer) {
		d |= OnAPIServer
	}
	if !slices.Equal(a.UnreachableNodes, b.UnreachableNodes) {
		d |= OnUnreachableNodes
	}
	if !a.Loopback.Equal(b.Loopback) || !slices.Equal(a.ClientPorts, b.ClientPorts) {
		d |= OnLoopback
	}
	if !a.Peers.Equal(b.Peers) {
		d |= OnPeers
	}
	return d
}
