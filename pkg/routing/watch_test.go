package routing

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// TestDummyLinkReplacedUnseen: kube-ipvs0 is deleted and added again while messages are dropped,
// as happens with thousands of addresses. Later deletions of its addresses are reported.
func TestDummyLinkReplacedUnseen(t *testing.T) {
	vip := netip.MustParseAddr("10.96.0.1")
	deleted := func(link uint32) syscall.NetlinkMessage {
		data := binary.NativeEndian.AppendUint32([]byte{unix.AF_INET, 32, 0, 0}, link)
		return syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: unix.RTM_DELADDR}, Data: nlmsg.AppendAttr(data, unix.IFA_LOCAL, vip.AsSlice())}
	}
	w, index := newWatcher(&cache{}), int32(4)
	w.lookup = func() int32 { return index }
	for _, link := range []int32{4, 9} {
		index = link
		w.dropped()
		w.take()
		w.message(deleted(uint32(link)))
		removals, _ := w.take()
		if diff := cmp.Diff([]Removal{{Addr: vip}}, removals, byValue); diff != "" {
			t.Errorf("with index %d: %s", link, diff)
		}
	}
}
