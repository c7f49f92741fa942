package trace

import (
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
)

// member looks up a packet in a set as "--match-set NAME FIELDS" does, and returns the
// member and its mark. known is false if the set does not exist, or was not read in full.
func (n *Node) member(name, fields string, p *packet) (mark uint32, entry ipset.Entry, is, known bool) {
	read(n, setKey(name))
	set, known := n.Sets[name]
	if !known || set.Partial {
		return 0, entry, false, false
	}
	var fieldsOf [3]netip.AddrPort // sets have no more
	at := fieldsOf[:0]
	for field := range strings.SplitSeq(fields, ",") {
		if field == "src" {
			at = append(at, p.src)
		} else {
			at = append(at, p.dst)
		}
	}
	if p.protocol == ICMP || p.protocol == ICMPv6 {
		// Sets of ports store ICMP types under ICMP's number, which our sets do not
		// use.
		if set.Type == ipset.BitmapPort || len(at) > 1 {
			return 0, entry, false, true
		}
	}
	last := at[len(at)-1].Addr()
	entry = ipset.Entry{Addr: at[0].Addr()}
	if len(at) > 1 {
		entry.Port, entry.Protocol = at[1].Port(), p.protocol
	}
	switch set.Type {
	case ipset.BitmapPort:
		entry = ipset.Entry{Port: at[0].Port()}
	case ipset.HashNet:
		read(n, memberKey{name, ipset.Entry{}})
		entry, is = within(set, ipset.Entry{}, last)
		return 0, entry, is, true
	case ipset.HashIPPortNet:
		read(n, memberKey{name, entry})
		entry, is = within(set, entry, last)
		return 0, entry, is, true
	case ipset.HashIPPortIP:
		entry.Addr2 = last
	}
	read(n, memberKey{name, entry})
	mark, is = set.Entries[entry]
	return mark, entry, is, true
}

// within searches all members and returns the one with the longest prefix, as the
// kernel does.
func within(set ipset.Contents, front ipset.Entry, a netip.Addr) (best ipset.Entry, is bool) {
	for e := range set.Entries {
		net := e.Net
		e.Net = netip.Prefix{}
		if e == front && net.Contains(a) && (!is || net.Bits() > best.Net.Bits()) {
			e.Net = net
			best, is = e, true
		}
	}
	return best, is
}

// HasMember reports whether a set contains a member for a source and destination, in
// the directions of "--match-set".
func (n *Node) HasMember(set, fields string, protocol ip.Protocol, src, dst netip.AddrPort) bool {
	_, _, is, _ := n.member(set, fields, &packet{protocol: protocol, src: src, dst: dst})
	return is
}
