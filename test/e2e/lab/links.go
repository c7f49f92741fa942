package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Link adds an interface to the namespace and brings it up.
func (n *Namespace) Link(link netlink.Link) {
	n.lab.t.Helper()
	n.lab.must(n.netlink.LinkAdd(link), "%s: add %s %s", n.Name, link.Type(), link.Attrs().Name)
	n.Up(link.Attrs().Name)
}

// bridge adds a bridge with its own hardware address. Otherwise it has the lowest address
// of its ports, which may change when a port is added; packets of neighbors to the
// previous address are then lost until they resolve it again.
func (n *Namespace) bridge(name string) {
	n.lab.t.Helper()
	n.lab.bridges++
	address := binary.BigEndian.AppendUint32([]byte{0x02, 0xbb}, uint32(n.lab.bridges))
	n.Link(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: address}})
}

// filterBridges makes packets that are bridged between pods pass the node's netfilter, or
// replies to a Service's clients would not be translated back.
func (l *Lab) filterBridges() { l.root.Exec("modprobe", "br_netfilter") }

// Up brings an interface up.
func (n *Namespace) Up(name string) {
	n.lab.t.Helper()
	n.lab.must(n.netlink.LinkSetUp(n.link(name)), "%s: set %s up", n.Name, name)
}

// Down takes an interface down.
func (n *Namespace) Down(name string) {
	n.lab.t.Helper()
	n.lab.must(n.netlink.LinkSetDown(n.link(name)), "%s: set %s down", n.Name, name)
}

// Address adds addresses, such as "10.0.0.1/24", to an interface.
func (n *Namespace) Address(name string, addresses ...string) {
	n.lab.t.Helper()
	link := n.link(name)
	for _, prefix := range n.lab.prefixes(addresses) {
		address := &netlink.Addr{IPNet: ipNet(prefix)}
		if prefix.Addr().Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		n.lab.must(n.netlink.AddrAdd(link, address), "%s: add %s to %s", n.Name, prefix, name)
	}
}

// MAC returns an interface's hardware address.
func (n *Namespace) MAC(name string) net.HardwareAddr {
	n.lab.t.Helper()
	return n.link(name).Attrs().HardwareAddr
}

// Neighbour fixes the hardware address behind an IP address.
func (n *Namespace) Neighbour(name string, address netip.Addr, mac net.HardwareAddr) {
	n.lab.t.Helper()
	err := n.netlink.NeighSet(&netlink.Neigh{
		LinkIndex: n.link(name).Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: address.AsSlice(), HardwareAddr: mac,
	})
	n.lab.must(err, "%s: neighbour %s on %s", n.Name, address, name)
}

func (n *Namespace) link(name string) netlink.Link {
	n.lab.t.Helper()
	link, err := n.netlink.LinkByName(name)
	n.lab.must(err, "%s: interface %s", n.Name, name)
	return link
}

// Route adds (or replaces) routes, written as for ip-route(8), with the words
// local, blackhole, via, dev, src, table, metric, scope and onlink.
func (n *Namespace) Route(routes ...string) {
	n.lab.t.Helper()
	for _, text := range routes {
		route, err := n.parseRoute(strings.Fields(text))
		n.lab.must(err, "%s: route %q", n.Name, text)
		n.lab.must(n.netlink.RouteReplace(route), "%s: route %q", n.Name, text)
	}
}

var routeTypes = map[string]int{
	"local": unix.RTN_LOCAL, "blackhole": unix.RTN_BLACKHOLE, "unreachable": unix.RTN_UNREACHABLE,
}

func (n *Namespace) parseRoute(words []string) (*netlink.Route, error) {
	route := &netlink.Route{}
	if kind, ok := routeTypes[words[0]]; ok {
		route.Type, words = kind, words[1:]
	}
	if len(words) == 0 {
		return nil, fmt.Errorf("no destination")
	}
	destination := words[0]
	for words = words[1:]; len(words) > 0; words = words[1:] {
		if words[0] == "onlink" {
			route.Flags |= unix.RTNH_F_ONLINK
			continue
		}
		if len(words) < 2 {
			return nil, fmt.Errorf("%s needs a value", words[0])
		}
		if err := n.setRoute(route, words[0], words[1]); err != nil {
			return nil, err
		}
		words = words[1:]
	}
	return route, setDestination(route, destination)
}

func (n *Namespace) setRoute(route *netlink.Route, word, value string) (err error) {
	switch word {
	case "via":
		route.Gw, err = parseIP(value)
	case "src":
		route.Src, err = parseIP(value)
	case "table":
		route.Table, err = parseTable(value)
	case "metric":
		route.Priority, err = strconv.Atoi(value)
	case "scope":
		scopes := map[string]netlink.Scope{"link": unix.RT_SCOPE_LINK, "host": unix.RT_SCOPE_HOST, "global": unix.RT_SCOPE_UNIVERSE}
		scope, ok := scopes[value]
		if !ok {
			return fmt.Errorf("unknown scope %q", value)
		}
		route.Scope = scope
	case "dev":
		var link netlink.Link
		if link, err = n.netlink.LinkByName(value); err == nil {
			route.LinkIndex = link.Attrs().Index
			if route.Gw == nil && route.Type == 0 {
				route.Scope = unix.RT_SCOPE_LINK
			}
		}
	default:
		return fmt.Errorf("unknown word %q", word)
	}
	return err
}

// setDestination fills in the destination; "default" takes its family from the
// gateway.
func setDestination(route *netlink.Route, text string) error {
	if text == "default" {
		prefix := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if route.Gw != nil && route.Gw.To4() == nil {
			prefix = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		route.Dst = ipNet(prefix)
		return nil
	}
	prefix, err := parsePrefix(text)
	route.Dst = ipNet(prefix)
	return err
}

// Rule adds policy routing rules, written as for ip-rule(8), with the words
// pref, from, to, fwmark, iif and lookup.
func (n *Namespace) Rule(rules ...string) {
	n.lab.t.Helper()
	for _, text := range rules {
		rule, err := parseRule(strings.Fields(text))
		n.lab.must(err, "%s: rule %q", n.Name, text)
		n.lab.must(n.netlink.RuleAdd(rule), "%s: rule %q", n.Name, text)
	}
}

func parseRule(words []string) (*netlink.Rule, error) {
	rule := netlink.NewRule()
	if len(words)%2 != 0 {
		return nil, fmt.Errorf("a word without a value")
	}
	for ; len(words) > 0; words = words[2:] {
		if err := setRule(rule, words[0], words[1]); err != nil {
			return nil, err
		}
	}
	rule.Family = unix.AF_INET
	for _, selector := range []*net.IPNet{rule.Src, rule.Dst} {
		if selector != nil && selector.IP.To4() == nil {
			rule.Family = unix.AF_INET6
		}
	}
	return rule, nil
}

func setRule(rule *netlink.Rule, word, value string) (err error) {
	switch word {
	case "pref":
		rule.Priority, err = strconv.Atoi(value)
	case "from", "to":
		var prefix netip.Prefix
		if prefix, err = parsePrefix(value); err != nil {
			return err
		}
		if word == "from" {
			rule.Src = ipNet(prefix)
		} else {
			rule.Dst = ipNet(prefix)
		}
	case "fwmark":
		rule.Mark, rule.Mask, err = parseMark(value)
	case "iif":
		rule.IifName = value
	case "lookup":
		rule.Table, err = parseTable(value)
	default:
		return fmt.Errorf("unknown word %q", word)
	}
	return err
}

// parseMark parses "0x4000/0x4000", or "0x4000" for the whole mark.
func parseMark(text string) (mark uint32, mask *uint32, err error) {
	value, bits, masked := strings.Cut(text, "/")
	parsed, err := strconv.ParseUint(value, 0, 32)
	if err != nil || !masked {
		return uint32(parsed), nil, err
	}
	parsedMask, err := strconv.ParseUint(bits, 0, 32)
	narrow := uint32(parsedMask)
	return uint32(parsed), &narrow, err
}

func parseTable(text string) (int, error) {
	names := map[string]int{"main": unix.RT_TABLE_MAIN, "local": unix.RT_TABLE_LOCAL, "default": unix.RT_TABLE_DEFAULT}
	if table, ok := names[text]; ok {
		return table, nil
	}
	return strconv.Atoi(text)
}

func parseIP(text string) (net.IP, error) {
	address, err := netip.ParseAddr(text)
	return address.AsSlice(), err
}

// ipNet keeps the host part of the address, as addresses of interfaces require.
func ipNet(prefix netip.Prefix) *net.IPNet {
	address := prefix.Addr()
	return &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(prefix.Bits(), address.BitLen())}
}

// connect creates a veth pair between two namespaces, with both ends up.
func (n *Namespace) connect(name string, peer *Namespace, peerName string) {
	n.lab.t.Helper()
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name},
		PeerName:      peerName,
		PeerNamespace: netlink.NsFd(peer.file),
	}
	n.lab.must(n.netlink.LinkAdd(veth), "connect %s %s to %s %s", n.Name, name, peer.Name, peerName)
	n.steer(name)
	peer.steer(peerName)
	n.Up(name)
	peer.Up(peerName)
}

// whole reads a list again as long as it changes during the read.
func whole[T any](list func() ([]T, error)) ([]T, error) {
	for {
		out, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
}
