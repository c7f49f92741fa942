//go:build e2e

package loopback

import (
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
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
		return subject{n.Observe, n.Apply, func(f ip.Family) {
			if out, err := exec.Command("nft", "flush", "chain", words[f].family, Table, "answer").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}}
	}
}
