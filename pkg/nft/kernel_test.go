//go:build e2e

package nft

import (
	"fmt"
	"maps"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

func init() {
	loopbacks["nft"] = func(t *testing.T) loopback {
		namespace(t)
		l, err := NewLoopbackRules()
		if err != nil {
			t.Fatal(err)
		}
		return loopback{l.Observe, l.Apply, func(f ip.Family) {
			if out, err := exec.Command("nft", "flush", "chain", string(familyOf(f)), Table, "answer").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}}
	}
	proxyTables["nft"] = func(t *testing.T) tables {
		namespace(t)
		k, err := NewKubeProxyTables()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range []string{"ip", "ip6"} {
			text := strings.ReplaceAll("table FAMILY kube-proxy {\n chain nat-prerouting { type nat hook prerouting priority dstnat; tcp dport 80 counter; }\n}\ntable FAMILY others {}\n", "FAMILY", family)
			if _, stderr, err := program.Run("nft", text, "-f", "-"); err != nil {
				t.Fatalf("%v: %s", err, stderr)
			}
		}
		return k
	}
}

// namespace moves the test into a new network namespace. The thread is never unlocked,
// so that it ends with the test and the namespace with it.
func namespace(t *testing.T) {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("new network namespace: %v", err)
	}
}

// A change is one transaction of the kernel: packets never see half a table.
func TestOneTransaction(t *testing.T) {
	namespace(t)
	l, err := NewLoopbackRules()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []Exchange{{0x4000, ip.IPv4.Unspecified().Next()}, {0x2, ip.IPv4.Unspecified().Next()}, {}} {
		before, errBefore := generation.Last()
		failures := l.Apply([]LoopbackChange{{ip.IPv4, e}})
		after, errAfter := generation.Last()
		if len(failures) > 0 || errBefore != nil || errAfter != nil || after != before+1 {
			t.Errorf("%v: %v, transactions %d to %d, %v %v", e, failures, before, after, errBefore, errAfter)
		}
	}
}

// TestReadMarks reads rules as nft prints them. Those of qos may drop forwarded packets, those of the
// other tables not.
func TestReadMarks(t *testing.T) {
	namespace(t)
	const text = `table inet qos {
	map addresses { type ipv4_addr : mark; elements = { 10.0.0.1 : 0x77 } }
	chain pre { type filter hook prerouting priority -150; policy accept;
		meta mark set 0x20 comment "video"
		meta mark set meta mark and 0xffffff9f or 0x40
		meta mark { 1-2, 0x10-0x1f } drop
		meta mark vmap { 0x60 : accept, 0x61 : drop }
		meta mark set tcp dport map { 80 : 0x5, 443 : 0x6 }
		meta mark set ip saddr map @addresses
		tcp dport 99 accept
	}
}
table ip vpn { chain out { ct mark & 0xf000 == 0x3000 accept; meta mark & 0x8 != 0 accept
}
}
table ip6 kube-proxy { chain masq { meta mark set 0x4000
}
}
table ip kube-ipvs { chain answer { meta mark set 0x8000
}
}
table ip filter { chain INPUT { type filter hook input priority 0; meta mark 0x10000 accept
}
}
table inet plain { chain in { type filter hook input priority 0; tcp dport 22 accept
}
}
`
	if _, stderr, err := program.Run("nft", text, "-f", "-"); err != nil {
		t.Fatalf("%v: %s", err, stderr)
	}
	uses, err := MarkReader{}.Observe()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, u := range uses {
		got[u.Chain.String()+": "+u.Rule] = fmt.Sprintf("%#x bits %#x refuses %t", u.Values, u.Bits, u.Refuses)
	}
	want := map[string]string{
		`inet qos pre: `: "[] bits 0x0 refuses true",
		`inet qos pre: meta mark set 0x00000020 comment "video"`:                          "[0x20] bits 0x20 refuses false",
		`inet qos pre: meta mark set meta mark & 0xffffffdf | 0x00000040`:                 "[0x40] bits 0x60 refuses false",
		`inet qos pre: meta mark { 0x00000001-0x00000002, 0x00000010/28 } drop`:           "[0x1 0x2 0x10] bits 0x13 refuses false",
		`inet qos pre: meta mark vmap { 0x00000060 : accept, 0x00000061 : drop }`:         "[0x60 0x61] bits 0x61 refuses false",
		`inet qos pre: meta mark set tcp dport map { 80 : 0x00000005, 443 : 0x00000006 }`: "[0x5 0x6] bits 0x7 refuses false",
		`ip vpn out: ct mark & 0x0000f000 == 0x00003000 accept`:                           "[0x3000] bits 0xf000 refuses false",
		`ip vpn out: meta mark & 0x00000008 != 0x00000000 accept`:                         "[0x8] bits 0x8 refuses false",
	}
	if !maps.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", lines(got), lines(want))
	}
}

func lines(m map[string]string) string {
	var out []string
	for key, value := range m {
		out = append(out, "  "+key+" -> "+value)
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}
