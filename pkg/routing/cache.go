package routing

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// cache holds what Inventory has read while Watch runs. Watch applies messages about a pod's link to
// the cached links; any other message discards what it may have changed, and the next Inventory
// reads that again. So the start of a pod does not cost a read of all links, which takes ten times
// as long as that of all rules and routes on a node with 50 pods.
type cache struct {
	mu       sync.Mutex
	watching bool
	version  uint64    // counts messages: a read during which one was handled is not kept
	links    linkTable // nil: to be read
	routes   *routeSet // nil: to be read
	// When links and routes were read.
	linksRead, routesRead time.Time
}

// cacheLimit is how long the cache is used. It limits how long Inventory misses what is not
// reported: routes to single addresses, and the forwarding databases of VXLAN links. On nodes with ENIs,
// package proxy calls Inventory at least every minute.
const cacheLimit = time.Minute

// linkTable holds all links by index, DummyLink without addresses. Its elements are not changed,
// but replaced.
type linkTable map[int]*knownLink

type knownLink struct {
	Link          // without the name of its master
	master int    // index; 0: none
	state  uint32 // the flags on which routes depend
}

// stateFlags are the flags of a link on which the use of its routes depends.
const stateFlags = unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP

// routeSet is the part of an Inventory that depends on rules and routes.
type routeSet struct {
	Inventory                 // without links
	links     map[string]bool // those that a rule or route refers to
}

// podLinkTypes are the types of links that lead to pods.
var podLinkTypes = []string{"veth", "netkit"}

// isPodLink reports whether a link of a pod's type has at most IPv6 link-local addresses, so that
// no route depends on it other than those in which it is named.
func (l *knownLink) isPodLink() bool {
	return slices.Contains(podLinkTypes, l.Type) && !slices.ContainsFunc(l.Addresses, func(a Address) bool { return !isLinkLocal6(a.Prefix.Addr()) })
}

func isLinkLocal6(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// load returns what is cached, and the version to pass to store.
func (c *cache) load() (linkTable, *routeSet, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.linksRead) >= cacheLimit {
		c.links = nil
	}
	if time.Since(c.routesRead) >= cacheLimit {
		c.routes = nil
	}
	return maps.Clone(c.links), c.routes, c.version
}

// store keeps what was read after load returned the version, unless a message came since then.
func (c *cache) store(links linkTable, routes *routeSet, version uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.watching || c.version != version {
		return
	}
	if c.links == nil {
		c.linksRead = time.Now()
	}
	if c.routes == nil {
		c.routesRead = time.Now()
	}
	c.links, c.routes = maps.Clone(links), routes
}

// follow discards the cache, and uses it from now on if each change is going to be reported.
func (c *cache) follow(watching bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watching = watching
	c.discard(true)
}

// changed discards rules and routes, and links if they may have changed too.
func (c *cache) changed(links bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.discard(links)
}

func (c *cache) discard(links bool) {
	c.version++
	c.routes = nil
	if links {
		c.links = nil
	}
}

// effect is what a message changes.
type effect uint8

const (
	nothing effect = iota
	podLink        // only a pod's link to which no rule or route of the Inventory refers
	more           // another link, or anything
)

// link applies a message about a link. It discards everything if routes may have changed with
// the link.
func (c *cache) link(kind uint16, l *knownLink) effect {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.links[l.Index]
	if known != nil {
		l.Type, l.Addresses = known.Type, known.Addresses
	}
	unused := c.unused(l) && (known == nil || c.unused(known))
	switch {
	case kind == unix.RTM_NEWLINK && known != nil && known.same(l):
		return nothing
	case c.links == nil || !unused && (kind == unix.RTM_DELLINK || known == nil || !known.sameRoutes(l)):
		c.discard(true)
		return more
	}
	c.version++
	if delete(c.links, l.Index); kind == unix.RTM_NEWLINK {
		c.links[l.Index] = l
	}
	if unused {
		return podLink
	}
	return more
}

// same reports whether a message says nothing new.
func (l *knownLink) same(said *knownLink) bool {
	return l.MAC == said.MAC && l.master == said.master && l.sameRoutes(said)
}

// sameRoutes reports whether the same routes use the link after a message.
func (l *knownLink) sameRoutes(said *knownLink) bool {
	return l.Name == said.Name && l.state == said.state
}

// address applies a message about an IPv6 link-local address of a pod's link. It returns false for
// any other one.
func (c *cache) address(kind uint16, index int, a Address) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.links[index]
	if known == nil || !c.unused(known) || !isLinkLocal6(a.Prefix.Addr()) {
		return false
	}
	c.version++
	changed := *known
	changed.Addresses = slices.DeleteFunc(slices.Clone(known.Addresses), func(have Address) bool { return have.Prefix == a.Prefix })
	if len(changed.Addresses) == 0 {
		changed.Addresses = nil
	}
	if kind == unix.RTM_NEWADDR {
		changed.Addresses = append(changed.Addresses, a)
	}
	c.links[index] = &changed
	return true
}

// route discards rules and routes because of a route over the link, except for one that the
// kernel has added for a pod's link.
func (c *cache) route(link int, byKernel bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.links[link]; byKernel && known != nil && c.unused(known) {
		return
	}
	c.discard(false)
}

// unused reports whether a link is a pod's and no rule or route of the Inventory refers to it.
func (c *cache) unused(l *knownLink) bool {
	return l.isPodLink() && (c.routes == nil || !c.routes.links[l.Name])
}

func (t linkTable) names() map[int]string {
	out := make(map[int]string, len(t))
	for index, l := range t {
		out[index] = l.Name
	}
	return out
}

// list returns all links but DummyLink, by index, with the names of their masters.
func (t linkTable) list() []Link {
	out := make([]Link, 0, len(t))
	for _, index := range slices.Sorted(maps.Keys(t)) {
		l := t[index].Link
		if l.Name == DummyLink {
			continue
		}
		if master := t[t[index].master]; master != nil {
			l.Master = master.Name
		}
		out = append(out, l)
	}
	return out
}

// with returns the Inventory with these links. Its lists are copies.
func (s *routeSet) with(links linkTable) Inventory {
	inv := s.Inventory
	inv.Links = links.list()
	inv.Rules, inv.Peers, inv.Gateways = slices.Clone(inv.Rules), slices.Clone(inv.Peers), slices.Clone(inv.Gateways)
	inv.Defaults, inv.Attached, inv.Direct = slices.Clone(inv.Defaults), slices.Clone(inv.Attached), slices.Clone(inv.Direct)
	return inv
}

// newLink returns a link of a type, without its addresses.
func newLink(a *netlink.LinkAttrs, kind string) *knownLink {
	return &knownLink{master: a.MasterIndex, state: a.RawFlags & stateFlags, Link: Link{
		Index:    a.Index,
		Name:     a.Name,
		Type:     kind,
		Up:       a.RawFlags&unix.IFF_UP != 0,
		Loopback: a.RawFlags&unix.IFF_LOOPBACK != 0,
		MAC:      macOf(a),
	}}
}

// parseLink parses a message about a link. Its type is complete only if it is a pod's. The library
// would parse 50 attributes, and panic if one is short.
func parseLink(data []byte) *knownLink {
	info := nl.DeserializeIfInfomsg(data)
	attrs, kind := netlink.LinkAttrs{Index: int(info.Index), RawFlags: info.Flags}, ""
	list, _ := nlmsg.Attributes(data[unix.SizeofIfInfomsg:])
	for _, a := range list {
		switch a.Attr.Type &^ unix.NLA_F_NESTED {
		case unix.IFLA_IFNAME:
			attrs.Name = unix.ByteSliceToString(a.Value)
		case unix.IFLA_ADDRESS:
			if slices.ContainsFunc(a.Value, func(b byte) bool { return b != 0 }) { // as the library does
				attrs.HardwareAddr = a.Value
			}
		case unix.IFLA_MASTER:
			if len(a.Value) >= 4 {
				attrs.MasterIndex = int(binary.NativeEndian.Uint32(a.Value))
			}
		case unix.IFLA_LINKINFO:
			value, _ := attributeOf(a.Value, 0, nl.IFLA_INFO_KIND)
			kind = unix.ByteSliceToString(value)
		}
	}
	return newLink(&attrs, kind)
}

// parseAddress parses a message about an address of IPv6, whose flags have 32 bits.
func parseAddress(data []byte) (Address, bool) {
	value, ok := attributeOf(data, unix.SizeofIfAddrmsg, unix.IFA_ADDRESS)
	if !ok || !address(value).IsValid() {
		return Address{}, false
	}
	flags := uint32(data[2])
	if wide, ok := uint32Of(data, unix.SizeofIfAddrmsg, unix.IFA_FLAGS); ok {
		flags = wide
	}
	return newAddress(netip.PrefixFrom(address(value), int(data[1])), int(data[3]), int(flags)), true
}
