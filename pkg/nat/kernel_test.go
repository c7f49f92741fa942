//go:build e2e

package nat

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// init adds both variants of iptables to the implementations that every test
// of behaviour runs against.
func init() {
	for _, variant := range []string{"-nft", "-legacy"} {
		for _, family := range ip.Families {
			subjects["iptables"+variant+" "+family.String()] = func(t *testing.T) subject {
				return realSubject(t, family, variant)
			}
		}
	}
}

func realSubject(t *testing.T, family ip.Family, variant string) subject {
	t.Helper()
	namespace(t)
	real, err := find(family, variant)
	if err != nil {
		t.Fatal(err)
	}
	return subject{family, real.Observe, real.Apply, real.restore}
}

// namespace puts the test into a network namespace of its own. The thread is
// never unlocked, so that it ends with the test and the namespace with it.
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

func TestNew(t *testing.T) {
	for _, family := range ip.Families {
		real, err := New(family)
		if err != nil {
			t.Fatal(err)
		}
		if !real.RandomFully() {
			t.Errorf("%s: %s lacks --random-fully", family, real.restoreCmd)
		}
	}
}

// A rule of nftables in a table of iptables' name hides that table from
// iptables-save, which must not be taken for an empty table.
func TestTableMadeWithNFT(t *testing.T) {
	s := realSubject(t, ip.IPv4, "-nft")
	s.reach(t, s.wanted())
	cmd := exec.Command("nft", "add", "chain", "ip", "nat", "x", "{", "type", "nat", "hook", "prerouting", "priority", "3;", "}")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	state, err := s.Observe(s.own())
	if err == nil || state.Chains != nil {
		t.Errorf("Observe = %v, %v, want an error", state, err)
	}
	t.Log(err)
}
