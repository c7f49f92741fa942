//go:build e2e

package nat

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// init adds both variants of iptables to the implementations that the tests of this
// package run against.
func init() {
	for _, variant := range []Variant{NFT, Legacy} {
		for _, family := range ip.Families {
			subjects[variant.String()+" "+family.String()] = func(t *testing.T) subject {
				return realSubject(t, family, variant)
			}
		}
	}
}

func realSubject(t *testing.T, family ip.Family, variant Variant) subject {
	t.Helper()
	namespace(t)
	return openSubject(t, family, variant)
}

func openSubject(t *testing.T, family ip.Family, variant Variant) subject {
	t.Helper()
	real, err := Open(family, variant)
	if err != nil {
		t.Fatal(err)
	}
	return subject{family, real.Observe, real.Apply, real.restore, func() subject { return openSubject(t, family, variant) }, variant == Legacy}
}

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

func TestNew(t *testing.T) {
	for _, family := range ip.Families {
		if _, err := New(family); err != nil {
			t.Error(err)
		}
	}
}

// TestChoose puts rules of both back ends and kubelet's chains into the kernel.
func TestChoose(t *testing.T) {
	for name, test := range map[string]struct {
		commands string
		want     Variant
	}{
		"nothing":             {"true", NFT},
		"kubelet's in legacy": {"iptables-nft -w -A INPUT -j ACCEPT; iptables-legacy -w -t mangle -N KUBE-KUBELET-CANARY", Legacy},
		"kubelet's in nft":    {"iptables-legacy -w -A INPUT -j ACCEPT; ip6tables-nft -w -t mangle -N KUBE-IPTABLES-HINT", NFT},
		"more in legacy":      {"iptables-nft -w -A INPUT -j ACCEPT; for i in 1 2; do ip6tables-legacy -w -A INPUT -j ACCEPT; done", Legacy},
	} {
		t.Run(name, func(t *testing.T) {
			namespace(t)
			if out, err := exec.Command("sh", "-c", test.commands).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if got, err := Choose(); err != nil || got.Use != test.want || !got.HasOther || got.Unseen {
				t.Errorf("%v: %+v, want %s", err, got, test.want)
			}
		})
	}
}

// iptables-save omits a table in which nft has written a rule that iptables does not
// know. That must not be taken for an empty table: our part of it is still read and
// written. Base chains that nft has created are no problem.
func TestTableWithRulesOfNFT(t *testing.T) {
	s := realSubject(t, ip.IPv4, NFT)
	own := s.own()
	own.Jumps = s.wanted().Jumps
	for c := range s.wanted().Chains {
		own.Chains = append(own.Chains, c) // none is found by its prefix
	}
	reach := func() {
		t.Helper()
		have, err := s.Observe(own)
		if err != nil {
			t.Fatal(err)
		}
		if failures := s.Apply(Diff(have, s.wanted())); len(failures) > 0 {
			t.Fatal(failures)
		}
		if have, err = s.Observe(own); err != nil || len(Diff(have, s.wanted())) > 0 || len(have.Unread) != 1 || have.Unread[0].Table != NAT {
			t.Fatalf("%v; %+v", err, have)
		}
	}
	s.reach(t, s.wanted())
	nft(t, "add chain ip nat other { type nat hook prerouting priority 3; }")
	nft(t, "add rule ip nat other ct mark 1 accept")
	s.reach(t, s.wanted())
	nft(t, "add rule ip nat PREROUTING ct mark 2 accept")
	nft(t, "add rule ip nat KUBE-MARK-MASQ ct mark 1 accept")
	reach()
	for name, command := range map[string]string{
		"jump":  "iptables-nft -w -t nat -D PREROUTING " + string(first),
		"chain": "iptables-nft -w -t nat -F KUBE-SERVICES",
	} {
		if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
		if have, err := s.Observe(own); err != nil || len(Diff(have, s.wanted())) == 0 {
			t.Errorf("%s: its removal is not observed: %v", name, err)
		}
		reach()
	}
	if have, err := s.again().Observe(Owned{}); err != nil || len(have.Unread) != 1 {
		t.Errorf("%v; %+v", err, have)
	}
	if out, err := exec.Command("nft", "list", "chain", "ip", "nat", "PREROUTING").CombinedOutput(); err != nil || strings.Count(string(out), "jump") != 2 {
		t.Errorf("%v: want two jumps in\n%s", err, out)
	}
}

func nft(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("nft", command).CombinedOutput(); err != nil {
		t.Fatalf("nft %s: %v: %s", command, err, out)
	}
}

// TestWatch has other programs change rules of iptables and nftables.
func TestWatch(t *testing.T) {
	namespace(t)
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	ctx, cancel := context.WithCancel(t.Context())
	asked, changed, ended := make(chan Chain, 1000), make(chan struct{}, 1000), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, see namespace
		if err := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- err
			return
		}
		ended <- Watcher{}.Watch(ctx, func(c Chain) bool {
			asked <- c
			return c.Name == "OURS" || c.Name == "THEIRS"
		}, func() { changed <- struct{}{} })
	}()
	select {
	case <-changed:
	case err := <-ended:
		t.Fatal(err)
	}
	for _, step := range []struct {
		command string
		want    Chain
	}{
		{"iptables-nft -w -t nat -N KUBE-X; iptables-nft -w -t nat -A KUBE-X -j RETURN", Chain{ip.IPv4, NAT, "KUBE-X"}},
		{"iptables-nft -w -t nat -I PREROUTING 1 -j KUBE-X", Chain{ip.IPv4, NAT, "PREROUTING"}},
		{"ip6tables-nft -w -t filter -A INPUT -j ACCEPT", Chain{ip.IPv6, Filter, "INPUT"}},
		{"iptables-nft -w -t nat -F KUBE-X", Chain{ip.IPv4, NAT, "KUBE-X"}},
		{"iptables-nft -w -t nat -F PREROUTING", Chain{ip.IPv4, NAT, "PREROUTING"}},
		{"iptables-nft -w -t nat -X KUBE-X", Chain{ip.IPv4, NAT, "KUBE-X"}},
		{"nft add table ip6 filter2; nft delete table ip6 filter2", Chain{ip.IPv6, "filter2", ""}},
		{"nft add table inet other; nft delete table inet other; nft flush ruleset", Chain{ip.IPv6, Filter, ""}},
	} {
		if out, err := exec.Command("sh", "-c", step.command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", step.command, err, out)
		}
		for deadline := time.After(10 * time.Second); ; {
			select {
			case got := <-asked:
				if got.Table == "other" {
					t.Errorf("reported %v, whose family has no iptables", got)
				}
				if got != step.want {
					continue
				}
			case <-deadline:
				t.Errorf("%s: %v is not reported", step.command, step.want)
			}
			break
		}
	}
	ours, err := Open(ip.IPv4, NFT)
	if err != nil {
		t.Fatal(err)
	}
	if err := ours.restore("*nat\n:OURS -\n-A OURS -j RETURN\nCOMMIT\n*filter\n:OURS -\n-A OURS -j RETURN\nCOMMIT\n"); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("iptables-nft", "-w", "-t", "nat", "-A", "OUTPUT", "-j", "OURS").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for c := (Chain{}); c.Name != "OUTPUT"; {
		select {
		case c = <-asked:
		case <-time.After(10 * time.Second):
			t.Fatal("the change after our own is not reported")
		}
	}
	if len(changed) > 0 {
		t.Error("reported a change that does not concern us, or one of this process")
	}
	// While our rules are written, another program writes, in a process that the messages
	// do not distinguish from ours.
	err = generation.Change(1, func() error {
		for _, chain := range []string{"OURS", "THEIRS"} {
			if _, text, err := program.Run("iptables-nft-restore", "*nat\n:"+chain+" -\n-A "+chain+" -p tcp -j RETURN\nCOMMIT\n", "--noflush"); err != nil {
				return fmt.Errorf("%w: %s", err, text)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(10 * time.Second):
		t.Error("another program's change during our own is not reported")
	}
	cancel()
	if err := <-ended; err != context.Canceled {
		t.Errorf("ended with %v", err)
	}
}
