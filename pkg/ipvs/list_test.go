package ipvs

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

const heading = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
`

func TestParseList(t *testing.T) {
	got, err := parseList(strings.NewReader(heading + `TCP  0A600001:01BB rr persistent 10800 FFFFFFFF
  -> C0000201:192B      Masq    1      3          7         
  -> C0000202:192B      Masq    0      0          0         
UDP  0A600002:0035 rr ops 
FWM  00000007 rr 
  -> C0000209:0050      Masq    1      0          0         
SCTP  [fd00:0010:0000:0000:0000:0000:0000:0001]:0050 mh 
  -> [fd00:0244:0000:0000:0000:0000:0000:0002]:1F90      Masq    65535  0          0         
`))
	if err != nil {
		t.Fatal(err)
	}
	dest := netip.MustParseAddrPort
	want := map[Key]map[netip.AddrPort]RealServer{
		key(ip.TCP, "10.96.0.1:443"):    {dest("192.0.2.1:6443"): {Weight: 1}, dest("192.0.2.2:6443"): {}},
		key(ip.UDP, "10.96.0.2:53"):     {},
		key(ip.SCTP, "[fd00:10::1]:80"): {dest("[fd00:244::2]:8080"): {Weight: 65535}},
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
		t.Error(d)
	}
}

// An unreadable list returns nothing.
func TestParseListRefuses(t *testing.T) {
	for _, line := range []string{
		"TCP", "TCP  0A600001", "TCP  0A600001:1BBBB rr", "TCP  [fd00::1:0050 rr", "TCP  0A60000100:01BB rr", "TCP  none:01BB rr",
		"TCP  0A600001:01BB rr\n  -> C0000201:192B      Masq", "TCP  0A600001:01BB rr\n  -> C0000201:192B      Masq    x      0  0",
		"TCP  0A600001:01BB rr\n  -> C00002010:192B      Masq    1      0  0", "",
	} {
		if got, err := parseList(strings.NewReader(heading + line + "\n")); err == nil {
			t.Errorf("%q is read as %v", line, got)
		}
	}
}

// Virtual servers that the list omits are requested one by one.
func TestUnlistedAreRequested(t *testing.T) {
	f := NewFake()
	want := State{
		tcp1: service("rr", "192.0.2.1:80"), tcp2: service("rr", "192.0.2.2:80"), mark(ip.IPv4, 7): service("rr", "192.0.2.3:80"),
		tcp6: service("rr", "[2001:db8::1]:80"), // the list is only read if there is an IPv6 virtual server
	}
	mustApply(t, &f.client, Diff(nil, want))
	for name, unlisted := range map[string]func(Key) bool{
		"all listed": nil, "one": func(k Key) bool { return k == tcp2 }, "none listed": func(Key) bool { return true },
	} {
		f.Unlisted = unlisted
		got, err := f.Observe()
		if err != nil || got.String() != want.String() {
			t.Errorf("%s: %v, %s want %s", name, err, got, want)
		}
	}
}
