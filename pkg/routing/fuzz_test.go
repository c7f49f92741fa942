package routing

import (
	"net"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzWatch: any message of the kernel is handled, and only changes of watched state
// cause calls.
func FuzzWatch(f *testing.F) {
	link := make([]byte, unix.SizeofIfInfomsg)
	f.Add(uint16(unix.RTM_NEWLINK), append(link, 11, 0, 3, 0, 'k', 'u', 'b', 'e', '-', 'i', 0, 0))
	f.Add(uint16(unix.RTM_DELADDR), make([]byte, unix.SizeofIfAddrmsg))
	f.Add(uint16(unix.RTM_DELROUTE), make([]byte, unix.SizeofRtMsg))
	f.Add(uint16(unix.RTM_DELRULE), []byte{})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		w := newWatcher(&cache{})
		w.dummyLink = 7
		w.message(syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data})
		if (kind < unix.RTM_NEWLINK || kind > unix.RTM_DELRULE) && len(w.inventory)+len(w.removed) > 0 {
			t.Errorf("a message of type %d caused a call", kind)
		}
	})
}

// FuzzReplies: the library's routes and rules are converted to values that can be formatted,
// or rejected. Messages are not fuzzed: the library panics on an attribute without padding
// (netlink 1.3.1), and all attributes of the kernel have it.
func FuzzReplies(f *testing.F) {
	f.Add([]byte{10, 0, 0, 0}, []byte{10, 0, 0, 1}, 8, 254, 1, uint32(1), uint32(1))
	f.Add([]byte(net.ParseIP("fd00::")), []byte{}, 64, 0, 2, uint32(0), uint32(0))
	f.Add([]byte{1, 2, 3}, []byte{1}, -1, -1, -1, uint32(0xffffffff), uint32(0))
	f.Fuzz(func(t *testing.T, dst, via []byte, bits, table, index int, mark, mask uint32) {
		to := &net.IPNet{IP: dst, Mask: net.CIDRMask(bits, 8*len(dst))}
		for _, family := range ip.Families {
			r := netlink.NewRule()
			r.Src, r.Table, r.Mark, r.Mask = to, table, mark, &mask
			_ = rule(family, *r).String()
			routes, err := convert(family, netlink.Route{Dst: to, Gw: via, Src: via, Table: table, LinkIndex: index}, map[int]string{1: "eth0"})
			if (err != nil) != (index != 1) {
				t.Errorf("a route by link %d: %v", index, err)
			}
			for _, found := range routes {
				if found.Dst.Addr().Is4In6() || !found.Dst.IsValid() && len(dst) == 0 {
					t.Errorf("a route to %s", found.Dst)
				}
				_ = found.Route.String()
			}
		}
	})
}
