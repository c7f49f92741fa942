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

// A rule that nft made in a chain of iptables, of a kind that iptables does
// not know, makes iptables-save leave its whole table out; this must not be
// taken for an empty table. Base chains that nft made do no harm.
func TestTableWithRulesOfNFT(t *testing.T) {
	s := realSubject(t, ip.IPv4, "-nft")
	s.reach(t, s.wanted())
	nft(t, "add chain ip nat other { type nat hook prerouting priority 3; }")
	nft(t, "add rule ip nat other ct mark 1 accept")
	s.reach(t, s.wanted())
	nft(t, "add rule ip nat KUBE-MARK-MASQ ct mark 1 accept")
	state, err := s.Observe(s.own())
	if err == nil || state.Chains != nil {
		t.Errorf("Observe = %v, %v, want an error alone", state, err)
	}
	t.Log(err)
}

func nft(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("nft", command).CombinedOutput(); err != nil {
		t.Fatalf("nft %s: %v: %s", command, err, out)
	}
}
