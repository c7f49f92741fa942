package routing

import (
	"net"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzWatch: any message of the kernel's is sorted, and nothing but a change of
// what is looked at leads to a call.
func FuzzWatch(f *testing.F) {
	link := make([]byte, unix.SizeofIfInfomsg)
	f.Add(uint16(unix.RTM_NEWLINK), append(link, 11, 0, 3, 0, 'k', 'u', 'b', 'e', '-', 'i', 0, 0))
	f.Add(uint16(unix.RTM_DELADDR), make([]byte, unix.SizeofIfAddrmsg))
	f.Add(uint16(unix.RTM_DELROUTE), make([]byte, unix.SizeofRtMsg))
	f.Add(uint16(unix.RTM_DELRULE), []byte{})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		w := newWatcher()
		w.dummyLink = 7
		w.message(syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data})
		if (kind < unix.RTM_NEWLINK || kind > unix.RTM_DELRULE) && len(w.inventory)+len(w.own) > 0 {
			t.Errorf("a message of type %d led to a call", kind)
		}
	})
}

// FuzzReplies: what the library gives of routes and rules is turned into values that
// can be told in words, or refused. Messages are left out: the library panics over an
// attribute that is not padded (netlink 1.3.1), as all of the kernel's are.
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
