package ip

import (
	"net/netip"
	"testing"
)

// A packed address is the same address, and has the same order.
func TestPacked(t *testing.T) {
	list := []netip.Addr{{}}
	for _, s := range []string{
		"0.0.0.0", "10.0.0.1", "10.0.0.2", "10.1.0.1", "255.255.255.255", "::", "::1", "::ffff:10.0.0.1", "fd00::1", "fd00:0:0:1::",
	} {
		list = append(list, netip.MustParseAddr(s))
	}
	for _, a := range list {
		if got := Pack(a).Addr(); got != a {
			t.Errorf("%s becomes %s", a, got)
		}
		for _, b := range list {
			if got, want := Pack(a).Compare(Pack(b)), a.Compare(b); got != want {
				t.Errorf("%s and %s: %d, want %d", a, b, got, want)
			}
			if (Pack(a) == Pack(b)) != (a == b) {
				t.Errorf("%s and %s: equal %v", a, b, Pack(a) == Pack(b))
			}
		}
	}
	if got := Pack(netip.MustParseAddr("fe80::1%eth0")).Addr(); got != netip.MustParseAddr("fe80::1") {
		t.Errorf("with a zone: %s", got)
	}
}
