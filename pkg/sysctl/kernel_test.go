//go:build e2e

package sysctl

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// namespace moves the test into a new network namespace. The thread is never unlocked, so
// that it and the namespace end with the test.
func namespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("new network namespace: %v", err)
	}
}

func TestKernelParameters(t *testing.T) {
	namespace(t)
	p := New()
	for _, key := range []string{
		"net/ipv4/ip_forward",
		LinkKey(ip.IPv4, "all", "src_valid_mark"),
		LinkKey(ip.IPv4, "lo", "rp_filter"),
		LinkKey(ip.IPv6, "all", "forwarding"),
	} {
		for _, value := range []string{"1", "0"} {
			if failures := p.Apply([]Change{{key, value}}); len(failures) > 0 {
				t.Fatal(failures)
			}
			have, err := p.Observe([]string{key})
			if err != nil || have[key] != value {
				t.Errorf("%s = %v, %v, want %s", key, have, err, value)
			}
		}
	}
}

func TestKernelRefuses(t *testing.T) {
	namespace(t)
	for _, c := range []struct {
		change Change
		number unix.Errno
	}{
		{Change{"net/ipv4/conf/absent0/rp_filter", "1"}, unix.ENOENT},
		{Change{"net/ipv4/ip_forward", "many"}, unix.EINVAL},
	} {
		failures := New().Apply([]Change{c.change})
		if len(failures) != 1 || !errors.Is(failures[0], c.number) {
			t.Errorf("%s: %v, want %v", c.change, failures, c.number)
		}
	}
}
