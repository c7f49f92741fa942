package routing

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Protocol identifies the rules and routes that Apply adds as ours. Neither the kernel nor
// iproute2 has a name for the number.
const Protocol = 81

// addressScope is the scope of IPv4 addresses on DummyLink.
//
// On a link without an address of its own, MASQUERADE uses the first address of global scope
// of any link (inet_select_addr). That must not be a VIP. Link scope excludes VIPs from that
// choice and changes nothing else. The local route of the address, of scope host, is the
// same: packets to the VIP are delivered and reach IPVS, and the node's own connections to
// the VIP have the VIP as their source, as with global scope. The end-to-end tests verify
// all of this.
//
// The scope of an IPv6 address follows from the address alone.
const addressScope = netlink.SCOPE_LINK

// requestLimit is the timeout of a request. A dump of 100,000 addresses takes less than a
// second.
const requestLimit = time.Minute

// Netlink is the kernel's routing. It belongs to the network namespace of the thread that
// called New, and is safe for concurrent use.
type Netlink struct {
	VIPTable int // the table with a local route for each claimed VIP, which Inventory omits; 0 if unknown

	handle  *netlink.Handle
	byTable *netlink.Handle // the kernel applies the filters of its dumps
	scope   netlink.Scope   // of IPv4 addresses on DummyLink; see addressScope
	buffer  int             // receive buffer of Watch's socket in bytes
	pause   time.Duration   // of Watch; see routesPause
	cache   cache
	guard   guard
	order   sync.Mutex // see orderLock

	noTCPDiag atomic.Bool // see readListing
}

// New opens the sockets in the network namespace of the calling thread.
func New() (*Netlink, error) {
	n := &Netlink{scope: addressScope, buffer: watchBuffer, pause: routesPause}
	for _, handle := range []**netlink.Handle{&n.handle, &n.byTable} {
		var err error
		if *handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err == nil {
			err = (*handle).SetSocketTimeout(requestLimit)
		}
		if err != nil {
			n.Close()
			return nil, fmt.Errorf("netlink socket: %w", err)
		}
	}
	_ = n.byTable.SetStrictCheck(true) // since Linux 4.20
	return n, nil
}

// Close closes the sockets; Watch is not affected.
func (n *Netlink) Close() {
	for _, handle := range []*netlink.Handle{n.handle, n.byTable} {
		if handle != nil {
			handle.Close()
		}
	}
}

// Apply applies the changes and returns those that the kernel refused. Adding an existing object
// and deleting a missing one succeed. A refused change does not stop the others. It fails with
// ENODEV if the link of an address or route is missing, ENETDOWN or ENETUNREACH if a route cannot lead where it says, EPERM without
// CAP_NET_ADMIN, EACCES for an IPv6 address where IPv6 is disabled, and EINVAL for an
// invalid change.
func (n *Netlink) Apply(changes []Change) []Failure {
	return apply(n.session(Protocol), changes)
}

// session is the stack of one Apply. It looks up the index of each link once.
type session struct {
	*Netlink
	links    map[string]int
	protocol netlink.RouteProtocol // of the rules and routes it adds
}

func (n *Netlink) session(protocol netlink.RouteProtocol) *session {
	return &session{n, map[string]int{}, protocol}
}

func (s *session) addLink() error {
	delete(s.links, DummyLink)
	return s.handle.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: DummyLink}})
}

func (s *session) deleteLink() error {
	index, err := s.index(DummyLink)
	if err != nil {
		return err
	}
	delete(s.links, DummyLink)
	return s.handle.LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}})
}

func (s *session) addAddress(a netip.Addr) error {
	link, addr, err := s.onDummyLink(a)
	if err != nil {
		return err
	}
	err = s.handle.AddrAdd(link, addr)
	if a.Is6() && errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (IPv6 is disabled: see net/ipv6/conf/%s/disable_ipv6)", err, DummyLink)
	}
	return err
}

func (s *session) deleteAddress(a netip.Addr) error {
	link, addr, err := s.onDummyLink(a)
	if err != nil {
		return err
	}
	return s.handle.AddrDel(link, addr)
}

// onDummyLink returns the arguments of a request for an address. Duplicate address detection
// is off: every node has the same VIPs, and none answers for them on the link.
func (s *session) onDummyLink(a netip.Addr) (netlink.Link, *netlink.Addr, error) {
	index, err := s.index(DummyLink)
	if err != nil {
		return nil, nil, err
	}
	addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen()))}
	if a.Is4() {
		addr.Scope = int(s.scope)
	} else {
		addr.Flags = unix.IFA_F_NODAD
	}
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, addr, nil
}

func (s *session) wrongScope() (map[netip.Addr]struct{}, error) {
	snap := snapshot{}
	if err := s.readDummyLink(&snap); err != nil {
		return nil, err
	}
	return snap.state().WrongScope, nil
}

func (s *session) addRule(r Rule) error {
	rule := newRule(r)
	rule.Protocol = uint8(s.protocol)
	return s.handle.RuleAdd(rule)
}

// deleteRule deletes a rule of ours, not an equal one of another program.
func (s *session) deleteRule(r Rule) error {
	rule := newRule(r)
	if s.protocol == Protocol {
		rule.Protocol = Protocol
	}
	return s.handle.RuleDel(rule)
}

func (s *session) addRaw(r rawRule) error {
	return s.requestRule(unix.RTM_NEWRULE, unix.NLM_F_CREATE, r)
}

func (s *session) deleteRaw(r rawRule) error { return s.requestRule(unix.RTM_DELRULE, 0, r) }

// orderLock prevents Apply and Watch from moving the rule of table local at the same time:
// both might delete it.
func (s *session) orderLock() sync.Locker { return &s.order }

// requestRule writes a rule without the library, which refuses a second rule equal to an
// existing one.
func (s *session) requestRule(kind, flags uint16, r rawRule) error {
	writer, err := nlmsg.NewWriter(unix.NETLINK_ROUTE, requestLimit)
	if err != nil {
		return err
	}
	defer writer.Close()
	writer.Add(kind, flags, func(b []byte) []byte { return appendRule(b, r) })
	answers, err := writer.Send()
	if err != nil {
		return err
	}
	return answers[0]
}

// actionNumbers are the kernel's FR_ACT_* numbers.
var actionNumbers = map[Action]uint8{Lookup: nl.FR_ACT_TO_TBL, Goto: nl.FR_ACT_GOTO, Nop: nl.FR_ACT_NOP}

// appendRule appends a struct fib_rule_hdr and its attributes, for rules that match only a
// mark and an input interface, with a table below 256.
func appendRule(b []byte, r rawRule) []byte {
	b = append(b, r.Family.AF(), 0, 0, 0, uint8(r.Table), 0, 0, actionNumbers[r.Action], 0, 0, 0, 0)
	b = nlmsg.AppendUint32(b, nl.FRA_PRIORITY, uint32(r.Priority))
	if r.IIf != "" {
		b = nlmsg.AppendAttr(b, unix.FRA_IIFNAME, append([]byte(r.IIf), 0))
	}
	if r.Mask != 0 {
		b = nlmsg.AppendUint32(b, nl.FRA_FWMARK, r.Mark)
		b = nlmsg.AppendUint32(b, nl.FRA_FWMASK, r.Mask)
	}
	if r.Action == Goto {
		b = nlmsg.AppendUint32(b, nl.FRA_GOTO, uint32(r.Target))
	}
	return nlmsg.AppendAttr(b, nl.FRA_PROTOCOL, []byte{r.protocol})
}

func (s *session) replaceRoute(r Route) error {
	route, err := s.newRoute(r)
	if err != nil {
		return err
	}
	route.Protocol = s.protocol
	return s.handle.RouteReplace(route)
}

// deleteRoute matches any scope: a route that another program added may have another scope
// than newRoute sets.
func (s *session) deleteRoute(r Route) error {
	route, err := s.newRoute(r)
	if err != nil {
		return err
	}
	route.Scope = netlink.SCOPE_NOWHERE
	return s.handle.RouteDel(route)
}

func newRule(r Rule) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family = int(r.Family.AF())
	rule.Priority = r.Priority
	rule.Table = r.Table
	rule.IifName, rule.OifName = r.IIf, r.OIf
	rule.Invert = r.Invert
	if r.From.IsValid() {
		rule.Src = ipNet(r.From)
	}
	if r.To.IsValid() {
		rule.Dst = ipNet(r.To)
	}
	if r.Mask != 0 {
		rule.Mark, rule.Mask = r.Mark, &r.Mask
	}
	return rule
}

func (s *session) newRoute(r Route) (*netlink.Route, error) {
	index, err := s.index(r.Link)
	if err != nil {
		return nil, err
	}
	route := &netlink.Route{
		Family:    int(r.Family.AF()),
		Table:     r.Table,
		Dst:       ipNet(r.Dst),
		LinkIndex: index,
		Priority:  r.Metric,
		Type:      unix.RTN_UNICAST,
		Scope:     netlink.SCOPE_LINK,
	}
	if r.Via.IsValid() {
		route.Gw = r.Via.AsSlice()
		route.Flags = int(netlink.FLAG_ONLINK) // the table may have no route to the gateway
		route.Scope = netlink.SCOPE_UNIVERSE
	}
	if r.Src.IsValid() {
		route.Src = r.Src.AsSlice()
	}
	if r.Local {
		route.Type = unix.RTN_LOCAL
		route.Scope = netlink.SCOPE_HOST
	}
	return route, nil
}

// index returns the index of a link; ENODEV if there is no such link.
func (s *session) index(name string) (int, error) {
	if i, ok := s.links[name]; ok {
		return i, nil
	}
	link, err := s.linkByName(name)
	if err != nil {
		return 0, err
	}
	s.links[name] = link.Attrs().Index
	return s.links[name], nil
}

// linkByName returns ENODEV for a missing link; the library hides the errno.
func (n *Netlink) linkByName(name string) (netlink.Link, error) {
	link, err := n.handle.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, fmt.Errorf("link %s: %w", name, unix.ENODEV)
	}
	return link, err
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
