package routing

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Inventory reads the node's network. Like Observe, it returns no partial result with an
// error. It omits routes that the kernel does not use because their link is down, and all
// but unicast routes.
func (n *Netlink) Inventory() (Inventory, error) {
	inv, err := retry(n.inventory, inconsistent)
	if err != nil {
		return Inventory{}, fmt.Errorf("read the node's network: %w", err)
	}
	return inv, nil
}

func (n *Netlink) inventory() (Inventory, error) {
	links, routes, version := n.cache.load()
	var err error
	if links == nil {
		if links, err = n.readLinks(); err != nil {
			return Inventory{}, err
		}
		routes = nil
	}
	if routes == nil {
		if routes, err = n.readRoutes(links); err != nil {
			n.cache.changed(true) // a route over a link that is not in the cache yet
			return Inventory{}, err
		}
	}
	n.cache.store(links, routes, version)
	return routes.with(links), nil
}

// readRoutes reads rules and routes, and the peers of VXLAN links.
func (n *Netlink) readRoutes(links linkTable) (*routeSet, error) {
	rules, err := n.rules()
	if err != nil {
		return nil, err
	}
	out := &routeSet{links: map[string]bool{}}
	out.Rules, out.Reroute = inventoryRules(rules), n.reroute(rules)
	for _, r := range rules {
		out.links[r.IIf], out.links[r.OIf] = true, true
	}
	peers, names, main := map[netip.Addr]struct{}{}, links.names(), map[string]bool{}
	for _, f := range ip.Families {
		t := tables{family: f, numbers: tablesOf(rules, f, n.VIPTable), names: names, inputs: inputsOf(rules, f), peers: peers, gateways: out.links, main: main}
		routes, err := n.tableRoutes(&t)
		if err != nil {
			return nil, err
		}
		out.addRoutes(&t, routes)
	}
	for _, r := range slices.Concat(out.Defaults, out.Attached, out.Direct) {
		out.links[r.Link] = true
	}
	if err := n.vxlanPeers(links, peers); err != nil {
		return nil, err
	}
	out.Peers = slices.SortedFunc(maps.Keys(peers), netip.Addr.Compare)
	delete(main, "")
	out.Gateways = slices.Sorted(maps.Keys(main))
	out.sort()
	return out, nil
}

// tablesOf returns the main table and those that rules look up, except table local and that
// of VIPs: the kernel goes through all routes of a table, even if its filter skips them.
func tablesOf(rules []rawRule, f ip.Family, vips int) []int {
	tables := []int{TableMain}
	for _, r := range rules {
		if r.Family == f && r.Action == Lookup && r.Table > 0 && r.Table != TableLocal && r.Table != vips && !slices.Contains(tables, r.Table) {
			tables = append(tables, r.Table)
		}
	}
	return tables
}

// inputsOf returns the input interfaces that rules of other programs match. lo is left out:
// it is the input interface of the node's own packets.
func inputsOf(rules []rawRule, f ip.Family) map[string]bool {
	out := map[string]bool{}
	for _, r := range rules {
		if r.Family == f && r.Action == Lookup && r.IIf != "" && r.IIf != "lo" && r.protocol != Protocol {
			out[r.IIf] = true
		}
	}
	return out
}

// tables is what to read of a family's routing tables.
type tables struct {
	family  ip.Family
	numbers []int
	names   map[int]string
	inputs  map[string]bool // interfaces whose routes to single hosts are read
	// peers receives the gateways of all routes, gateways the names of the links to them, and main
	// those of the main table.
	peers    map[netip.Addr]struct{}
	gateways map[string]bool
	main     map[string]bool
}

// wants reports whether a route may belong to the Inventory: a default route, one to a
// single host on the link of an input, or one of the main table.
func (t *tables) wants(r netlink.Route) bool {
	if isDefault(r) || r.Table == TableMain {
		return true
	}
	return len(t.inputs) > 0 && prefix(r.Dst).IsSingleIP() && len(r.MultiPath) == 0 &&
		t.inputs[t.names[r.LinkIndex]] && !gateway(hopsOf(r)[0]).IsValid()
}

// isAttached reports whether a route leads to a single host on the link of an input.
func (t *tables) isAttached(r Route) bool {
	return t.inputs[r.Link] && r.Dst.IsSingleIP() && !r.Via.IsValid()
}

// addRoutes sorts a family's routes into the Inventory. Of the other routes of the main
// table, which may have one for every pod, it keeps only those of Direct.
func (inv *Inventory) addRoutes(t *tables, found []Route) {
	outside := map[string]bool{}
	for _, r := range found {
		if r.Dst.Bits() == 0 {
			inv.Defaults = append(inv.Defaults, r)
			outside[r.Link] = outside[r.Link] || r.Table != TableMain
		}
	}
	for _, r := range found {
		if r.Dst.Bits() == 0 {
			continue
		}
		if t.isAttached(r) {
			inv.Attached = append(inv.Attached, r)
		}
		if r.Table == TableMain && outside[r.Link] {
			inv.Direct = append(inv.Direct, r)
		}
	}
}

// tableRoutes reads the wanted routes of the tables, and the gateways of all their routes.
// The kernel filters by table and type, because without policy rules its main table shares a
// trie with table local, which has a route for each VIP. A kernel before 4.20 sends all routes, and the library filters.
func (n *Netlink) tableRoutes(t *tables) ([]Route, error) {
	var out []Route
	for _, table := range t.numbers {
		found, err := dump(func() ([]netlink.Route, error) { return n.dumpTable(t, table) })
		if err != nil {
			return nil, err
		}
		for _, r := range found {
			routes, err := convert(t.family, r, t.names)
			if err != nil && !isDefault(r) {
				continue // over the link of a pod that is being added
			}
			if err != nil {
				return nil, err
			}
			for _, route := range routes {
				out = append(out, route.Route)
			}
		}
	}
	return out, nil
}

func (n *Netlink) dumpTable(t *tables, table int) ([]netlink.Route, error) {
	var out []netlink.Route
	filter := &netlink.Route{Table: table, Type: unix.RTN_UNICAST}
	err := n.byTable.RouteListFilteredIter(int(t.family.AF()), filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE, func(r netlink.Route) bool {
		t.addGateways(r)
		if t.wants(r) {
			out = append(out, r)
		}
		return true
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil // no such table, or no IPv6
	}
	return out, err
}

// addGateways adds the next hops of a route.
func (t *tables) addGateways(r netlink.Route) {
	for _, hop := range hopsOf(r) {
		via, link := gateway(hop), t.names[hop.LinkIndex]
		if !via.IsValid() {
			continue
		}
		t.gateways[link] = true
		if r.Table == TableMain {
			t.main[link] = true
		}
		if !via.IsLinkLocalUnicast() {
			t.peers[via] = struct{}{}
		}
	}
}

// vxlanPeers adds the nodes that VXLAN links send to.
func (n *Netlink) vxlanPeers(links linkTable, peers map[netip.Addr]struct{}) error {
	for _, l := range links {
		if l.Type != "vxlan" {
			continue
		}
		entries, err := dump(func() ([]netlink.Neigh, error) { return n.handle.NeighList(l.Index, unix.AF_BRIDGE) })
		if err != nil {
			return err
		}
		for _, e := range entries {
			if a := address(e.IP); a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() {
				peers[a] = struct{}{}
			}
		}
	}
	return nil
}

func (n *Netlink) readLinks() (linkTable, error) {
	links, err := n.dumpLinks()
	if err != nil {
		return nil, err
	}
	out := make(linkTable, len(links))
	for _, l := range links {
		out[l.Attrs().Index] = newLink(l.Attrs(), l.Type())
	}
	addrs, err := n.dumpAddresses(nil)
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		l := out[a.LinkIndex]
		if l == nil {
			return nil, fmt.Errorf("address on unknown link %d: %w", a.LinkIndex, errChanged)
		}
		if l.Name != DummyLink {
			l.Addresses = append(l.Addresses, newAddress(prefix(a.IPNet), a.Scope, a.Flags))
		}
	}
	return out, nil
}

// macOf returns a link's Ethernet address. Tunnels have addresses of other lengths; lo has zeros.
func macOf(a *netlink.LinkAttrs) string {
	if len(a.HardwareAddr) != 6 || a.RawFlags&unix.IFF_LOOPBACK != 0 {
		return ""
	}
	return a.HardwareAddr.String()
}

// LinkKey parses the name or MAC address of a link, and reports whether it is a MAC address,
// which it returns as Link.MAC has it. No name is as long as a MAC address.
func LinkKey(text string) (key string, isMAC bool) {
	mac, err := net.ParseMAC(text)
	if err != nil || len(text) != len("02:00:00:00:00:01") {
		return text, false
	}
	return mac.String(), true
}

// newAddress converts an address. IFA_F_SECONDARY of IPv4 is the same bit as IFA_F_TEMPORARY of
// IPv6.
func newAddress(p netip.Prefix, scope, flags int) Address {
	return Address{
		Prefix:    p,
		Global:    scope == unix.RT_SCOPE_UNIVERSE,
		Secondary: flags&(unix.IFA_F_SECONDARY|unix.IFA_F_DEPRECATED) != 0,
	}
}

// isDefault reports whether a route is a default route: its prefix length is 0, or -1
// without a destination.
func isDefault(r netlink.Route) bool { return prefix(r.Dst).Bits() <= 0 }

// sort orders rules and routes. It keeps the kernel's order of equal elements.
func (inv *Inventory) sort() {
	slices.SortStableFunc(inv.Rules, compareOrder)
	slices.SortStableFunc(inv.Direct, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Link, b.Link), a.Dst.Addr().Compare(b.Dst.Addr()), cmp.Compare(a.Dst.Bits(), b.Dst.Bits()), cmp.Compare(a.Metric, b.Metric))
	})
	slices.SortStableFunc(inv.Defaults, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Metric, b.Metric))
	})
	slices.SortStableFunc(inv.Attached, compareRoutes)
}

// inventoryRules converts rules for an Inventory.
func inventoryRules(rules []rawRule) []Rule {
	out := make([]Rule, len(rules))
	for i, r := range rules {
		out[i] = r.Rule
		out[i].Own = r.protocol == Protocol
	}
	return out
}

func compareOrder(a, b Rule) int {
	return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Priority, b.Priority))
}

// Routes reads every unicast and local route that the kernel uses, of all tables, one for each
// next hop, and every reject and throw route. There is at least one for each VIP.
func (n *Netlink) Routes() ([]Route, error) {
	read := func() ([]Route, error) {
		names, err := n.linkNames()
		if err != nil {
			return nil, err
		}
		found, err := n.routesWith(names, func(r netlink.Route) bool { return delivers(r) || routeTypes[r.Type] != 0 })
		out := make([]Route, len(found))
		for i, f := range found {
			out[i] = f.Route
		}
		return out, err
	}
	out, err := retry(read, inconsistent)
	if err != nil {
		return nil, fmt.Errorf("read the routes: %w", err)
	}
	return out, nil
}

// compareRoutes orders routes; those on link precede those through gateways.
func compareRoutes(a, b Route) int {
	return cmp.Or(
		cmp.Compare(a.Family, b.Family),
		cmp.Compare(a.Table, b.Table),
		a.Via.Compare(b.Via), // the invalid address, on link, is first
		a.Dst.Addr().Compare(b.Dst.Addr()),
		cmp.Compare(a.Dst.Bits(), b.Dst.Bits()),
		cmp.Compare(a.Metric, b.Metric),
		strings.Compare(a.String(), b.String()),
	)
}
