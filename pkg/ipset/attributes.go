package ipset

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Flags of an attribute's type, as ints.
const (
	nested   = int(nl.NLA_F_NESTED)
	netOrder = int(nl.NLA_F_NET_BYTEORDER)
)

// Constants of <linux/netfilter/ipset/ip_set.h> that the library lacks.
const flagNoMatch = 1 << 2 // IPSET_FLAG_NOMATCH of a member

// wholeMark is the mask with which a member's mark is written to a packet.
const wholeMark = 0xffffffff

func nameAttr(name string) *nl.RtAttr {
	return nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(name))
}

// entryAttr encodes a member. The set's type determines its attributes.
func entryAttr(t Type, e Entry, mark uint32) *nl.RtAttr {
	data := nl.NewRtAttr(nl.IPSET_ATTR_DATA|nested, nil)
	switch t {
	case HashNet:
		data.AddChild(addrAttr(nl.IPSET_ATTR_IP, e.Net.Addr()))
		data.AddRtAttr(nl.IPSET_ATTR_CIDR, nl.Uint8Attr(uint8(e.Net.Bits())))
	case HashIP, HashIPPort, HashIPPortMark, HashIPPortIP, HashIPPortNet:
		data.AddChild(addrAttr(nl.IPSET_ATTR_IP, e.Addr))
	}
	switch t {
	case HashIPPortIP:
		data.AddChild(addrAttr(nl.IPSET_ATTR_IP2, e.Addr2))
	case HashIPPortNet:
		data.AddChild(addrAttr(nl.IPSET_ATTR_IP2, e.Net.Addr()))
		// Always sent: without it the kernel assumes a host prefix.
		data.AddRtAttr(nl.IPSET_ATTR_CIDR2, nl.Uint8Attr(uint8(e.Net.Bits())))
	}
	switch t {
	case HashIPPort, HashIPPortMark, HashIPPortIP, HashIPPortNet:
		data.AddRtAttr(nl.IPSET_ATTR_PROTO, nl.Uint8Attr(uint8(e.Protocol)))
		data.AddRtAttr(nl.IPSET_ATTR_PORT|netOrder, nl.BEUint16Attr(e.Port))
	case BitmapPort:
		data.AddRtAttr(nl.IPSET_ATTR_PORT|netOrder, nl.BEUint16Attr(e.Port))
	}
	if mark != 0 {
		data.AddRtAttr(nl.IPSET_ATTR_SKBMARK|netOrder, binary.BigEndian.AppendUint64(nil, uint64(mark)<<32|wholeMark))
	}
	return data
}

func addrAttr(attribute int, a netip.Addr) *nl.RtAttr {
	family := nl.IPSET_ATTR_IPADDR_IPV4
	if ip.Of(a) == ip.IPv6 {
		family = nl.IPSET_ATTR_IPADDR_IPV6
	}
	attr := nl.NewRtAttr(attribute|nested, nil)
	attr.AddRtAttr(family|netOrder, a.AsSlice())
	return attr
}

// parseListings parses the messages of a dump. A set with many members takes several
// messages; only the first one has its type.
func parseListings(messages [][]byte) ([]listing, error) {
	var sets []listing
	for _, message := range messages {
		if len(message) < nl.SizeofNfgenmsg {
			return nil, malformed("message", message)
		}
		var attributes attributes
		if err := attributes.parse(message[nl.SizeofNfgenmsg:]); err != nil {
			return nil, err
		}
		if attributes[nl.IPSET_ATTR_TYPENAME] != nil {
			set, err := parseHeader(&attributes)
			if err != nil {
				return nil, err
			}
			sets = append(sets, set)
		}
		if members := attributes[nl.IPSET_ATTR_ADT]; members != nil {
			if len(sets) == 0 {
				return nil, malformed("members without a set", members)
			}
			if err := sets[len(sets)-1].parseMembers(members); err != nil {
				return nil, err
			}
		}
	}
	return sets, nil
}

func parseHeader(a *attributes) (listing, error) {
	set := listing{Contents: Contents{Entries: map[Entry]uint32{}}}
	set.Name = unix.ByteSliceToString(a[nl.IPSET_ATTR_SETNAME])
	set.Type = Type(unix.ByteSliceToString(a[nl.IPSET_ATTR_TYPENAME]))
	if family := a[nl.IPSET_ATTR_FAMILY]; len(family) == 1 {
		set.Family = map[uint8]ip.Family{unix.AF_INET: ip.IPv4, unix.AF_INET6: ip.IPv6}[family[0]]
	}
	options := new(attributes)
	if err := options.parse(a[nl.IPSET_ATTR_DATA]); err != nil {
		return listing{}, err
	}
	set.maxElem = number(options[nl.IPSET_ATTR_MAXELEM])
	set.Partial = options[nl.IPSET_ATTR_NETMASK] != nil
	set.count = -1
	if elements := options[nl.IPSET_ATTR_ELEMENTS]; elements != nil {
		set.count = int(number(elements))
	}
	if number(options[nl.IPSET_ATTR_CADT_FLAGS])&nl.IPSET_FLAG_WITH_SKBINFO != 0 && set.Type+withMarks == HashIPPortMark {
		set.Type = HashIPPortMark
	}
	return set, nil
}

// maxExpected limits the members for which memory is allocated in advance.
const maxExpected = 1 << 20

// parseMembers adds the members of one message. It skips exceptions ("nomatch"), which
// are not members, and members of types that are not used here.
func (l *listing) parseMembers(data []byte) error {
	used, err := l.fields()
	if err != nil {
		l.Partial = true
		return nil
	}
	if len(l.Entries) == 0 {
		l.Entries = make(map[Entry]uint32, min(max(l.count, 0), maxExpected))
	}
	var attributes attributes
	for len(data) > 0 {
		_, member, rest, err := nlmsg.NextAttribute(data)
		if err != nil {
			return malformed("list of members", data)
		}
		data = rest
		if member == nil {
			break
		}
		if err := attributes.parse(member); err != nil {
			return err
		}
		if number(attributes[nl.IPSET_ATTR_CADT_FLAGS])&flagNoMatch != 0 {
			l.Partial = true
			continue
		}
		entry, err := parseEntry(l.Type, used, &attributes)
		if err != nil {
			return err
		}
		l.Entries[entry] = parseMark(attributes[nl.IPSET_ATTR_SKBMARK])
	}
	return nil
}

// number returns a 32-bit attribute, or 0 if it is missing.
func number(data []byte) uint32 {
	if len(data) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(data)
}

// parseMark ignores a mark with another mask: it is not ours.
func parseMark(data []byte) uint32 {
	if len(data) != 8 || uint32(binary.BigEndian.Uint64(data)) != wholeMark {
		return 0
	}
	return uint32(binary.BigEndian.Uint64(data) >> 32)
}

func parseEntry(t Type, used fields, attributes *attributes) (e Entry, err error) {
	if used.addr {
		if e.Addr, err = parseAddr(attributes[nl.IPSET_ATTR_IP]); err != nil {
			return e, err
		}
	}
	if used.addr2 {
		if e.Addr2, err = parseAddr(attributes[nl.IPSET_ATTR_IP2]); err != nil {
			return e, err
		}
	}
	if used.port {
		if len(attributes[nl.IPSET_ATTR_PORT]) != 2 {
			return e, malformed("port", attributes[nl.IPSET_ATTR_PORT])
		}
		e.Port = binary.BigEndian.Uint16(attributes[nl.IPSET_ATTR_PORT])
	}
	if used.protocol {
		if len(attributes[nl.IPSET_ATTR_PROTO]) != 1 {
			return e, malformed("protocol", attributes[nl.IPSET_ATTR_PROTO])
		}
		e.Protocol = ip.Protocol(attributes[nl.IPSET_ATTR_PROTO][0])
	}
	switch {
	case !used.net:
	case t == HashNet:
		e.Net, err = parseNet(attributes[nl.IPSET_ATTR_IP], attributes[nl.IPSET_ATTR_CIDR])
	default:
		e.Net, err = parseNet(attributes[nl.IPSET_ATTR_IP2], attributes[nl.IPSET_ATTR_CIDR2])
	}
	return e, err
}

// parseNet assumes a host prefix if there is no length.
func parseNet(address, length []byte) (netip.Prefix, error) {
	addr, err := parseAddr(address)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits := addr.BitLen()
	if len(length) == 1 {
		bits = int(length[0])
	}
	return netip.PrefixFrom(addr, bits), nil
}

func parseAddr(data []byte) (netip.Addr, error) {
	kind, value, _, err := nlmsg.NextAttribute(data)
	if err != nil {
		return netip.Addr{}, malformed("address", data)
	}
	switch kind & nl.NLA_TYPE_MASK {
	case nl.IPSET_ATTR_IPADDR_IPV4, nl.IPSET_ATTR_IPADDR_IPV6:
		if addr, ok := netip.AddrFromSlice(value); ok {
			return addr, nil
		}
	}
	return netip.Addr{}, malformed("address", data)
}

// attributes holds values by type, without the flags of the type; nil if there is none.
// Higher types are not used here. An array spares an allocation for each member.
type attributes [32][]byte

func (m *attributes) parse(data []byte) error {
	*m = attributes{}
	for rest := data; len(rest) > 0; {
		kind, value, next, err := nlmsg.NextAttribute(rest)
		if err != nil {
			return malformed("list of attributes", data)
		}
		if kind &= nl.NLA_TYPE_MASK; value != nil && int(kind) < len(m) {
			m[kind] = value
		}
		rest = next
	}
	return nil
}

// malformed returns the error for a response that violates the protocol.
func malformed(what string, data []byte) error {
	return fmt.Errorf("the kernel sent a malformed %s % x: %w", what, data, syscall.EBADMSG)
}
