//go:build e2e

package kubeproxy

import (
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

func init() {
	subjects["nft"] = func(t *testing.T) subject {
		// The thread is never unlocked, so that it ends with the test and its
		// namespace with it.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Fatalf("new network namespace: %v", err)
		}
		n, err := New()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range []string{"ip", "ip6"} {
			text := strings.ReplaceAll("table FAMILY kube-proxy {\n chain nat-prerouting { type nat hook prerouting priority dstnat; tcp dport 80 counter; }\n}\ntable FAMILY others {}\n", "FAMILY", family)
			if _, stderr, err := program.Run("nft", text, "-f", "-"); err != nil {
				t.Fatalf("%v: %s", err, stderr)
			}
		}
		return n
	}
}
