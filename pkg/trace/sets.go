package trace

import (
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
)

// member looks a packet up in a set, as "--match-set NAME FIELDS" does, and
// gives the mark that the member carries. known is false for a set that is not
// there, or of a type that is not ours.
func (n *Node) member(name, fields string, p *packet) (mark uint32, is, known bool) {
	set, known := n.Sets[name]
	if !known {
		return 0, false, false
	}
	var at []netip.AddrPort
	for _, field := range strings.Split(fields, ",") {
		if field == "src" {
			at = append(at, p.src)
		} else {
			at = append(at, p.dst)
		}
	}
	last := at[len(at)-1].Addr()
	entry := ipset.Entry{Addr: at[0].Addr()}
	if len(at) > 1 {
		entry.Port, entry.Protocol = at[1].Port(), p.protocol
	}
	switch set.Type {
	case ipset.BitmapPort:
		entry = ipset.Entry{Port: at[0].Port()}
	case ipset.HashNet:
		return 0, within(set, ipset.Entry{}, last), true
	case ipset.HashIPPortNet:
		return 0, within(set, entry, last), true
	case ipset.HashIPPortIP:
		entry.Addr2 = last
	}
	mark, is = set.Entries[entry]
	return mark, is, true
}

// within goes through all members: who asks this, asks once.
func within(set ipset.Contents, front ipset.Entry, a netip.Addr) bool {
	for e := range set.Entries {
		net := e.Net
		e.Net = netip.Prefix{}
		if e == front && net.Contains(a) {
			return true
		}
	}
	return false
}
