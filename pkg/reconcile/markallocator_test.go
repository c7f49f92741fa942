package reconcile

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// vipKey returns port 80 of 203.0.113.n.
func vipKey(n byte) ipvs.Key {
	return ipvs.Key{Protocol: ip.TCP, Addr: netip.AddrFrom4([4]byte{203, 0, 113, n}), Port: 80}
}

func all(ip.Family, uint32) bool { return true }

// three has three fwmarks: 0xb, 0xd and 0xf.
func three() *markAllocator {
	return newMarkAllocator(&plan.Config{MasqueradeMark: 0x4000, LocalMark: plan.LocalMark{Value: 0x9, Mask: 0xf}})
}

func TestLowestFreeFWMark(t *testing.T) {
	n := three()
	a, b, c := owner("a", 0).Name, owner("b", 0).Name, owner("c", 0).Name
	check := func(who types.NamespacedName, keys []ipvs.Key, want ...uint32) {
		t.Helper()
		got, err := n.assign(who, keys, all)
		if err != nil {
			t.Error(err)
		}
		for i, key := range keys {
			if got[key] != want[i] {
				t.Errorf("%s of %s has index %d, want %d", key, who, got[key], want[i])
			}
		}
	}
	check(a, []ipvs.Key{vipKey(1), vipKey(2)}, 1, 2)
	check(b, []ipvs.Key{vipKey(2)}, 2) // a conflict, but the same address and port
	check(a, []ipvs.Key{vipKey(2)}, 2)
	check(c, []ipvs.Key{vipKey(3)}, 3) // 1 is still in the kernel
	if _, err := n.assign(c, []ipvs.Key{vipKey(3), vipKey(4)}, all); err == nil || !strings.Contains(err.Error(), "TCP 203.0.113.4:80: all 3 IPv4 fwmarks") {
		t.Errorf("without a free fwmark: %v", err)
	}
	if got := n.release(func(ipvs.Key, uint32) bool { return true }); got != nil {
		t.Errorf("%s can have a fwmark that the kernel still uses", got)
	}
	if got := n.release(func(ipvs.Key, uint32) bool { return false }); len(got) != 1 || got[0] != c {
		t.Errorf("%s can have the freed fwmark, want %s", got, c)
	}
	check(c, []ipvs.Key{vipKey(3), vipKey(4)}, 3, 1)
	check(b, nil)
	check(a, []ipvs.Key{vipKey(2)}, 2) // a still wants it, b no longer exists
}

// A fwmark virtual server of one family does not take the number in the other.
func TestFamiliesShareNoFWMarks(t *testing.T) {
	n := three()
	six := func(n byte) ipvs.Key {
		return ipvs.Key{Protocol: ip.TCP, Addr: netip.AddrFrom16([16]byte{0: 0xfd, 15: n}), Port: 80}
	}
	keys := []ipvs.Key{vipKey(1), six(1), vipKey(2), six(2), vipKey(3), six(3)}
	got, err := n.assign(owner("a", 0).Name, keys, all)
	if err != nil {
		t.Fatal(err)
	}
	for i, key := range keys {
		if want := uint32(i/2 + 1); got[key] != want {
			t.Errorf("%s has index %d, want %d", key, got[key], want)
		}
	}
	n.assign(owner("a", 0).Name, keys[1:], all)
	n.release(func(ipvs.Key, uint32) bool { return false })
	if got, err := n.assign(owner("b", 0).Name, []ipvs.Key{vipKey(4)}, all); err != nil || got[vipKey(4)] != 1 {
		t.Errorf("the freed index is %d, %v, want 1", got[vipKey(4)], err)
	}
	if _, err := n.assign(owner("c", 0).Name, []ipvs.Key{six(4)}, all); err == nil || !strings.Contains(err.Error(), "all 3 IPv6 fwmarks") {
		t.Errorf("a fourth of IPv6: %v", err)
	}
}

func TestFWMarksInTheKernelAreKept(t *testing.T) {
	n := three()
	n.restore(map[ipvs.Key]uint32{
		vipKey(1): 0x400d,            // index 2, masqueraded
		vipKey(2): 0xd, vipKey(3): 1, // the same fwmark, and none of the mask
	})
	got, err := n.assign(owner("a", 0).Name, []ipvs.Key{vipKey(3), vipKey(1), vipKey(2)}, func(_ ip.Family, index uint32) bool { return index != 1 })
	if err == nil {
		t.Error("index 1 belongs to another key")
	}
	if want := (map[ipvs.Key]uint32{vipKey(1): 2, vipKey(3): 3}); !cmp.Equal(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("fwmarks %v, want %v", got, want)
	}
}
