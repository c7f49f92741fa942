package ipset

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzListings: a message of the kernel is parsed, or rejected with an error; a parsed
// member can be formatted.
func FuzzListings(f *testing.F) {
	member := entryAttr(HashIPPort, Entry{Addr: netip.MustParseAddr("10.96.0.1"), Port: 443, Protocol: ip.TCP}, 0)
	list := nl.NewRtAttr(nl.IPSET_ATTR_ADT|nested, nil)
	list.AddChild(member)
	message := []byte{unix.AF_INET, 0, 0, 0}
	for _, a := range []*nl.RtAttr{
		nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated("KUBE-CLUSTER-IP")),
		nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated("hash:ip,port")),
		nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, []byte{unix.AF_INET}), list,
	} {
		message = append(message, a.Serialize()...)
	}
	if sets, err := parseListings([][]byte{message}); err != nil || len(sets) != 1 || len(sets[0].Entries) != 1 {
		f.Fatalf("the seed is read as %+v, %v", sets, err)
	}
	f.Add(message, message)
	f.Add(message[:20], []byte{})
	f.Fuzz(func(_ *testing.T, first, second []byte) {
		sets, err := parseListings([][]byte{first, second})
		if err != nil {
			return
		}
		for _, s := range sets {
			for e := range s.Entries {
				_ = e.String()
			}
		}
	})
}

// TestParsingMembersDoesNotAllocate: with 44,125 Services there are twice as many
// members, and every comparison reads all of them.
func TestParsingMembersDoesNotAllocate(t *testing.T) {
	const members = 1000
	list := nl.NewRtAttr(nl.IPSET_ATTR_ADT|nested, nil)
	for i := range members {
		list.AddChild(entryAttr(HashIPPort, Entry{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 443, Protocol: ip.TCP}, 0))
	}
	data := list.Serialize()[unix.SizeofRtAttr:]
	set := listing{Contents: Contents{Set: Set{Type: HashIPPort, Family: ip.IPv4}, Entries: map[Entry]uint32{}}}
	read := func() {
		if err := set.parseMembers(data); err != nil || len(set.Entries) != members {
			t.Fatalf("%d members: %v", len(set.Entries), err)
		}
	}
	read()
	if n := testing.AllocsPerRun(10, read); n > members/100 {
		t.Errorf("%.0f allocations for %d members", n, members)
	}
}
