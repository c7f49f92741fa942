package ipset

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzListings checks that a member that was parsed from a message of the kernel is the one
// that is written to the kernel. Otherwise another member would be deleted.
func FuzzListings(f *testing.F) {
	addr, addr2, prefix := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.244.1.5"), netip.MustParsePrefix("10.0.0.0/8")
	families := map[Type]byte{HashIP: unix.AF_INET, HashNet: unix.AF_INET, HashIPPort: unix.AF_INET, HashIPPortIP: unix.AF_INET, HashIPPortNet: unix.AF_INET}
	var message []byte
	for kind, e := range map[Type]Entry{
		HashIP:        {Addr: addr},
		HashNet:       {Net: prefix},
		HashIPPort:    {Addr: addr, Port: 443, Protocol: ip.TCP},
		HashIPPortIP:  {Addr: addr, Port: 443, Protocol: ip.UDP, Addr2: addr2},
		HashIPPortNet: {Addr: addr, Port: 443, Protocol: ip.SCTP, Net: prefix},
		BitmapPort:    {Port: 30080},
	} {
		list := nl.NewRtAttr(nl.IPSET_ATTR_ADT|nested, nil)
		list.AddChild(entryAttr(kind, e, 0))
		message = []byte{unix.AF_INET, 0, 0, 0}
		for _, a := range []*nl.RtAttr{
			nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated("KUBE-CLUSTER-IP")),
			nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated(string(kind))),
			nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, []byte{families[kind]}), list,
		} {
			message = append(message, a.Serialize()...)
		}
		if sets, err := parseListings([][]byte{message}); err != nil || len(sets) != 1 || !maps.Equal(sets[0].Entries, map[Entry]uint32{e: 0}) {
			f.Fatalf("the seed of %s is read as %+v, %v", kind, sets, err)
		}
		f.Add(message, message)
	}
	f.Add(message[:20], []byte{})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		sets, err := parseListings([][]byte{first, second})
		if err != nil {
			return
		}
		for _, s := range sets {
			for e, mark := range s.Entries {
				again := listing{Contents: Contents{Set: s.Set}}
				err := again.parseMembers(entryAttr(s.Type, e, mark).Serialize())
				if got, ok := again.Entries[e]; err != nil || !ok || got != mark {
					t.Errorf("%s is read as %s, written as %v, %v", s.Type, withMark(e, mark), again.Entries, err)
				}
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
