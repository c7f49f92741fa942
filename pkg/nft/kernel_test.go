//go:build e2e

package nft

import (
	"os/exec"
	"runtime"
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
