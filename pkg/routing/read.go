package routing

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Observe reads what is ours. If the kernel changes during each of ten reads, it returns an
// error and an empty State.
func (n *Netlink) Observe() (State, error) {
	snap, err := retry(n.snapshot, inconsistent)
	if err != nil {
		return State{}, fmt.Errorf("read routing state: %w", err)
	}
	return snap.state(), nil
}

// dump reads one of the kernel's lists. If a list changes during the read, the library
// returns ErrDumpInterrupted with what it has read, which may lack any entry; dump reads it
// again.
func dump[T any](read func() ([]T, error)) ([]T, error) {
	return retry(read, func(err error) bool {
		return errors.Is(err, netlink.ErrDumpInterrupted) || kernel.IsTransient(err)
	})
}

// inconsistent reports whether an error means that lists read one after the other are
// inconsistent.
func inconsistent(err error) bool { return errors.Is(err, errChanged) }

func (n *Netlink) dumpLinks() ([]netlink.Link, error) { return dump(n.handle.LinkList) }

// dumpAddresses reads the addresses of a link, or of all if link is nil.
func (n *Netlink) dumpAddresses(link netlink.Link) ([]netlink.Addr, error) {
	return dump(func() ([]netlink.Addr, error) { return n.handle.AddrList(link, netlink.FAMILY_ALL) })
}

func (n *Netlink) snapshot() (snapshot, error) {
	snap := snapshot{}
	if err := n.readDummyLink(&snap); err != nil {
		return snapshot{}, err
	}
	var err error
	if snap.rules, err = n.rules(); err != nil {
		return snapshot{}, err
	}
	if snap.routes, err = n.routes(); err != nil {
		return snapshot{}, err
	}
	return snap, nil
}

// readDummyLink fails if a link of another type has the name: Apply could neither use it nor
// add its own.
func (n *Netlink) readDummyLink(snap *snapshot) error {
	link, err := n.linkByName(DummyLink)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	if link.Type() != "dummy" {
		return fmt.Errorf("link %s is a %s, not a dummy: remove it: %w", DummyLink, link.Type(), unix.EEXIST)
	}
	snap.dummyLink = true
	addrs, err := n.dumpAddresses(link)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		p := prefix(a.IPNet)
		wrongScope := p.Addr().Is4() && a.Scope != int(n.scope)
		snap.addresses = append(snap.addresses, dummyAddress{p, wrongScope})
	}
	return nil
}

// rules reads the rules of both families.
func (n *Netlink) rules() ([]rawRule, error) {
	var out []rawRule
	for _, f := range ip.Families {
		rules, err := n.rawRules(f)
		if err != nil {
			return nil, err
		}
		out = append(out, rules...)
	}
	return out, nil
}

// rawRules reads the rules of a family in the kernel's order. A kernel without IPv6 has no
// rules of that family.
func (n *Netlink) rawRules(f ip.Family) ([]rawRule, error) {
	rules, err := dump(func() ([]netlink.Rule, error) { return n.handle.RuleList(int(f.AF())) })
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil
	}
	out := make([]rawRule, len(rules))
	for i, r := range rules {
		out[i] = rawRule{rule(f, r), r.Protocol}
	}
	return out, err
}

// rule converts a rule. The library does not report a rule's action: a goto has a target,
// and a rule of ours without a table is a nop.
func rule(f ip.Family, r netlink.Rule) Rule {
	out := Rule{
		Family:   f,
		Priority: r.Priority,
		From:     prefix(r.Src).Masked(), // neither iproute2 nor the kernel masks it
		To:       prefix(r.Dst).Masked(),
		IIf:      r.IifName,
		OIf:      r.OifName,
		Mark:     r.Mark,
		Table:    r.Table,
		Invert:   r.Invert,
	}
	if r.Mask != nil {
		out.Mask = *r.Mask
	}
	switch {
	case r.Goto >= 0:
		out.Action, out.Target, out.Table = Goto, r.Goto, 0
	case r.Table == 0 && r.Protocol == Protocol:
		out.Action = Nop
	case r.Table == 0:
		out.Other = true
	}
	out.Other = out.Other || r.Tos != 0 || r.TunID != 0 || r.Flow > 0 ||
		r.SuppressIfgroup >= 0 || r.SuppressPrefixlen >= 0 || r.IPProto != 0 ||
		r.Sport != nil || r.Dport != nil || r.UIDRange != nil
	return out
}

// routes reads our own routes. Routes of other programs may be on links that are just being
// created, which would make a read fail.
func (n *Netlink) routes() ([]foundRoute, error) {
	names, err := n.linkNames()
	if err != nil {
		return nil, err
	}
	ours := func(r netlink.Route) bool { return r.Protocol == Protocol && delivers(r) }
	return n.routesWith(names, ours)
}

func (n *Netlink) linkNames() (map[int]string, error) {
	links, err := n.dumpLinks()
	if err != nil {
		return nil, err
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	return names, nil
}

// routesWith reads the wanted routes of all tables that the kernel uses. There is at least
// one local route for each VIP, so unwanted routes are dropped while they are read.
func (n *Netlink) routesWith(names map[int]string, wanted func(netlink.Route) bool) ([]foundRoute, error) {
	var out []foundRoute
	for _, f := range ip.Families {
		found, err := dump(func() ([]foundRoute, error) { return n.dumpRoutes(f, names, wanted) })
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
	}
	return out, nil
}

func delivers(r netlink.Route) bool { return r.Type == unix.RTN_UNICAST || r.Type == unix.RTN_LOCAL }

// dumpRoutes converts each route while it is read: the library's are four times as large.
func (n *Netlink) dumpRoutes(f ip.Family, names map[int]string, wanted func(netlink.Route) bool) ([]foundRoute, error) {
	var out []foundRoute
	var unknown error
	err := n.handle.RouteListFilteredIter(int(f.AF()), &netlink.Route{}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
		if !wanted(r) {
			return true
		}
		routes, err := convert(f, r, names)
		if err != nil && unknown == nil {
			unknown = err
		}
		out = append(out, routes...)
		return true
	})
	if err != nil {
		return nil, err
	}
	return out, unknown
}

// convert returns a route for each next hop whose link is up, or one reject or throw route. An
// unknown link means that the links changed after they were read.
func convert(f ip.Family, r netlink.Route, names map[int]string) ([]foundRoute, error) {
	dst := prefix(r.Dst)
	if !dst.IsValid() {
		dst = netip.PrefixFrom(f.Unspecified(), 0)
	}
	if t := routeTypes[r.Type]; t != 0 {
		return []foundRoute{{Route{Family: f, Table: r.Table, Dst: dst, Metric: r.Priority, Type: t}, false}}, nil
	}
	var out []foundRoute
	for _, hop := range hopsOf(r) {
		if hop.Flags&unix.RTNH_F_DEAD != 0 {
			continue
		}
		if hop.LinkIndex == 0 {
			continue // of a nexthop object (nexthop_compat_mode is 0), whose link the kernel does not report here
		}
		name, ok := names[hop.LinkIndex]
		if !ok {
			return nil, fmt.Errorf("route on unknown link %d: %w", hop.LinkIndex, errChanged)
		}
		route := Route{
			Family: f,
			Table:  r.Table,
			Dst:    dst,
			Link:   name,
			Via:    gateway(hop),
			Src:    address(r.Src),
			Local:  r.Type == unix.RTN_LOCAL,
			Metric: r.Priority,
		}
		out = append(out, foundRoute{route, r.Protocol == Protocol})
	}
	for i := range out {
		out[i].Multipath = len(out) > 1
	}
	return out, nil
}

func hopsOf(r netlink.Route) []*netlink.NexthopInfo {
	if len(r.MultiPath) > 0 {
		return r.MultiPath
	}
	return []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw, Via: r.Via, Flags: r.Flags}}
}

// gateway returns the gateway of a next hop; an IPv4 route may have an IPv6 one.
func gateway(hop *netlink.NexthopInfo) netip.Addr {
	if via, ok := hop.Via.(*netlink.Via); ok {
		return address(via.Addr)
	}
	return address(hop.Gw)
}

func address(a net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(a)
	return addr.Unmap()
}

func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(address(n.IP), bits)
}
