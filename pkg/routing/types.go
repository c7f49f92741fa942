// Package routing programs the kube-ipvs0 link, its addresses, and our policy rules and
// routes. It also reads the node's interfaces, rules and default routes, from which the plan
// derives where each flow leaves the node.
package routing

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// DummyLink is the link that has the VIPs as its addresses. It has kube-proxy's name, because other
// programs (CNIs, kubelet, node-IP detection) know it by that name.
const DummyLink = "kube-ipvs0"

// Numbers of the routing tables that every node has.
const (
	TableDefault = unix.RT_TABLE_DEFAULT // 253, the lowest of these numbers
	TableMain    = unix.RT_TABLE_MAIN
	TableLocal   = unix.RT_TABLE_LOCAL // 255, the highest
)

// PriorityMain is the priority of the kernel's own policy rule for the main table. The one for
// the local table has priority 0.
const PriorityMain = 32766

// Action is what a Rule does with the packets that match it.
type Action uint8

const (
	// Lookup looks up Table, and continues with the next rule if no route there
	// matches the packet.
	Lookup Action = iota
	// Goto continues with the first rule of priority Target. Nop does nothing; it can be
	// such a target. Inventory reports them; to write them, use SkipLocal. Nop is reported
	// only for our rules; those of other programs are Other.
	Goto
	Nop
	// SkipLocal exempts packets with the mark from table local: they are routed as if the
	// node had none of the addresses in it. The rule is evaluated before the one of table
	// local, wherever that is, and continues behind it.
	//
	// To use it, put
	//
	//	Rule{Family: f, Action: SkipLocal, Mark: 0x4, Mask: 0x4}
	//
	// into the desired state, one per family and mark, with all other fields zero. IIf may
	// limit it to one interface: with "lo", to packets that the node sends and to
	// reverse-path checks that use the mark. Apply chooses the priorities and keeps the
	// order, as skiplocal.go describes; Observe reports the same value while the rule is in
	// effect. If the rule cannot be put in its place, Apply fails with EBUSY and the mark
	// has no effect: marked packets are routed by table local.
	SkipLocal
)

// Rule is a policy routing rule (ip-rule(8)).
type Rule struct {
	Family   ip.Family
	Priority int
	From, To netip.Prefix // invalid: all
	IIf, OIf string       // "": any
	Mark     uint32
	Mask     uint32 // 0: no match on the mark
	Action   Action
	Table    int  // of Lookup
	Target   int  // of Goto: a priority
	Invert   bool // "not"
	// Own is set only by Inventory: the rule has our Protocol.
	Own bool
	// Leftover is set only by Observe, with SkipLocal: the family has parts of such rules that
	// have no effect or are misplaced. It can be deleted.
	Leftover bool
	// Other is set if the rule has conditions without a field here (type of service, ports,
	// users, …) or another action (blackhole, VRF, suppressed prefixes). Such a rule can be
	// read but not written.
	Other bool
}

func (r Rule) String() string {
	s := fmt.Sprintf("%s rule %d:", r.Family, r.Priority)
	if r.Invert {
		s += " not"
	}
	if r.From.IsValid() {
		s += " from " + r.From.String()
	}
	if r.To.IsValid() {
		s += " to " + r.To.String()
	}
	if r.IIf != "" {
		s += " iif " + r.IIf
	}
	if r.OIf != "" {
		s += " oif " + r.OIf
	}
	if r.Mask != 0 {
		s += fmt.Sprintf(" fwmark %#x/%#x", r.Mark, r.Mask)
	}
	if r.Other {
		s += " …"
	}
	return s + r.action()
}

func (r Rule) action() string {
	switch {
	case r.Action == Goto:
		return fmt.Sprintf(" goto %d", r.Target)
	case r.Action == Nop:
		return " nop"
	case r.Leftover:
		return " stray parts of rules that skip table local"
	case r.Action == SkipLocal:
		return " skip table local"
	}
	return fmt.Sprintf(" lookup %d", r.Table)
}

// Route is a unicast or local route or, only from Routes, a reject or throw route.
type Route struct {
	Family ip.Family
	Table  int
	Dst    netip.Prefix // the default route: 0.0.0.0/0 or ::/0
	Link   string       // interface name
	Via    netip.Addr   // invalid: on link
	Src    netip.Addr   // preferred source; invalid: none
	Local  bool         // type local
	Type   RouteType    // 0: unicast or local; others only from Routes, without Link and Via
	Metric int          // lower is preferred; 0 lets the kernel choose (IPv6: 1024)
	// Multipath: it is one of several next hops, among which the kernel chooses by connection.
	// Only of read routes.
	Multipath bool
}

// RouteKey identifies a route: AddRoute replaces the one with the same key.
type RouteKey struct {
	Family ip.Family
	Table  int
	Dst    netip.Prefix
	Metric int
}

// Key returns the key of a route.
func (r Route) Key() RouteKey { return RouteKey{r.Family, r.Table, r.Dst, r.Metric} }

// RouteType is the type of a route that delivers no packets.
type RouteType uint8

const (
	Reject RouteType = iota + 1 // blackhole, unreachable or prohibit: the packet is dropped
	Throw                       // throw: the next policy rule decides
)

// routeTypes maps the kernel's route types.
var routeTypes = map[int]RouteType{
	unix.RTN_BLACKHOLE: Reject, unix.RTN_UNREACHABLE: Reject, unix.RTN_PROHIBIT: Reject, unix.RTN_THROW: Throw,
}

func (r Route) String() string {
	s := "route "
	if r.Local {
		s = "local route "
	}
	s += r.Dst.String()
	if r.Via.IsValid() {
		s += " via " + r.Via.String()
	}
	s += " dev " + r.Link
	if r.Src.IsValid() {
		s += " src " + r.Src.String()
	}
	return s + fmt.Sprintf(" table %d", r.Table)
}

// Address is an address of an interface.
type Address struct {
	Prefix    netip.Prefix // address and length, not masked
	Global    bool         // of global scope
	Secondary bool         // IPv4 secondary; IPv6 temporary or deprecated
}

// Link is what the plan needs to know of an interface.
type Link struct {
	Index     int
	Name      string
	Type      string // "device", "veth", "dummy", "bridge", "macvlan", …
	Master    string // the bridge or bond it belongs to, or ""
	Up        bool   // set up by the administrator, with or without a carrier
	Loopback  bool
	MAC       string // 02:00:00:00:00:01, or "" if it has none
	Addresses []Address
}

// HasAddress reports whether one of the link's addresses is a.
func (l Link) HasAddress(a netip.Addr) bool {
	return slices.ContainsFunc(l.Addresses, func(have Address) bool { return have.Prefix.Addr() == a })
}

// Inventory is the node's network as other programs configured it: all links (except
// kube-ipvs0), all policy rules, and routes of the main table and of those that a rule looks
// up.
type Inventory struct {
	Links    []Link  // by index
	Rules    []Rule  // by family, then priority, in the kernel's order
	Defaults []Route // unicast default routes by family, table, metric; one for each next hop
	// Attached are routes to single hosts on links that a rule of another program matches
	// as the input interface ("iif"): pods with an uplink of their own. By family and
	// table.
	Attached []Route
	// Direct are the main table's other routes over links that also have a default route in
	// another table. Sorted.
	Direct []Route
	// Peers are the gateways of all routes of the same tables, and the destinations in the
	// forwarding databases of VXLAN links: addresses of other nodes, among others. Sorted.
	Peers []netip.Addr
	// Gateways are the links over which routes of the main table lead to a gateway; sorted.
	Gateways []string
	// Reroute is whether replies need a second route lookup after IPVS.
	Reroute Reroute
}

// State is what we own: the dummy link, its addresses, and our rules and routes.
type State struct {
	DummyLink bool
	Addresses map[netip.Addr]struct{} // each as a host address on DummyLink
	Rules     map[Rule]struct{}
	Routes    map[Route]struct{}
	// WrongScope are addresses on DummyLink whose scope differs from the one that Apply sets;
	// kube-proxy leaves such addresses. Always empty in a desired state.
	WrongScope map[netip.Addr]struct{}
}

// Op is what a Change does.
type Op uint8

// The operations. Adding an existing object and deleting a missing one succeed. AddAddress
// adds an address with another scope again. AddRoute replaces a route with the same
// destination, table and metric.
const (
	AddLink    Op = iota + 1 // DummyLink, down and without ARP
	DeleteLink               // with its addresses
	AddAddress
	DeleteAddress
	AddRule
	DeleteRule
	AddRoute
	DeleteRoute
)

var opNames = map[Op]string{
	AddLink:       "add link",
	DeleteLink:    "delete link",
	AddAddress:    "add address",
	DeleteAddress: "delete address",
	AddRule:       "add rule",
	DeleteRule:    "delete rule",
	AddRoute:      "add route",
	DeleteRoute:   "delete route",
}

// String returns the name of the operation.
func (o Op) String() string { return opNames[o] }

// Change is one operation.
type Change struct {
	Op      Op
	Address netip.Addr // Add and DeleteAddress
	Rule    Rule       // Add and DeleteRule
	Route   Route      // Add and DeleteRoute
}

func (c Change) String() string {
	switch c.Op {
	case AddLink, DeleteLink:
		return c.Op.String() + " " + DummyLink
	case AddAddress:
		return "add address " + c.Address.String() + " to " + DummyLink
	case DeleteAddress:
		return "delete address " + c.Address.String() + " from " + DummyLink
	case AddRule:
		return "add " + c.Rule.String()
	case DeleteRule:
		return "delete " + c.Rule.String()
	case AddRoute:
		return "add " + c.Route.String()
	case DeleteRoute:
		return "delete " + c.Route.String()
	}
	return fmt.Sprintf("unknown operation %d", c.Op)
}

// Failure is a change that the kernel refused.
type Failure = kernel.Failure[Change]
