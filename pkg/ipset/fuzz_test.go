package ipset

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzListings: what the kernel says is read, or refused with an error; a member
// that is read can be told in words.
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
