package nat

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestFakeRefusesAsTheKernel(t *testing.T) {
	for name, test := range map[string]struct {
		input  string
		number unix.Errno
	}{
		"no table":           {"*none\nCOMMIT\n", unix.ENOENT},
		"no COMMIT":          {"*nat\n", unix.EINVAL},
		"no chain":           {"*nat\n-A NONE -j RETURN\nCOMMIT\n", unix.ENOENT},
		"no target":          {"*nat\n-A OUTPUT -j NONE\nCOMMIT\n", unix.ENOENT},
		"jump to base chain": {"*nat\n-A OUTPUT -j INPUT\nCOMMIT\n", unix.ENOENT},
		"wrong table":        {"*filter\n-A OUTPUT -j MASQUERADE\nCOMMIT\n", unix.EINVAL},
		"no such rule":       {"*nat\n-D OUTPUT -j RETURN\nCOMMIT\n", unix.ENOENT},
		"beyond the end":     {"*nat\n-I OUTPUT 2 -j RETURN\nCOMMIT\n", unix.E2BIG},
		"chain in use":       {"*nat\n:A - [0:0]\n-A OUTPUT -j A\n-X A\nCOMMIT\n", unix.EMLINK},
		"chain not empty":    {"*nat\n:A - [0:0]\n-A A -j RETURN\n-X A\nCOMMIT\n", unix.ENOTEMPTY},
		"base chain":         {"*nat\n-X OUTPUT\nCOMMIT\n", unix.EINVAL},
		"loop":               {"*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A B -g A\nCOMMIT\n", unix.ELOOP},
		"name":               {"*nat\n:-A - [0:0]\nCOMMIT\n", unix.EINVAL},
		"command":            {"*nat\n-Z OUTPUT\nCOMMIT\n", unix.EINVAL},
		"command alone":      {"*nat\n-F\nCOMMIT\n", unix.EINVAL},
		"quotation":          {"*nat\n-A OUTPUT -m comment --comment \"x\nCOMMIT\n", unix.EINVAL},
	} {
		t.Run(name, func(t *testing.T) {
			f := NewFake(ip.IPv4)
			before := f.Save()
			if err := f.Restore(test.input); !errors.Is(err, test.number) {
				t.Errorf("%v, want %v", err, test.number)
			}
			if f.Save() != before {
				t.Errorf("something is changed:\n%s", f.Save())
			}
		})
	}
}

func TestFakeKeepsPolicies(t *testing.T) {
	f := NewFake(ip.IPv4)
	if err := f.Restore("*filter\n:INPUT DROP [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n"); err != nil {
		t.Fatal(err)
	}
	if got := f.Save(); !strings.Contains(got, ":INPUT DROP [0:0]\n") || !strings.Contains(got, "-A INPUT -j ACCEPT\n") {
		t.Error(got)
	}
}

func TestFakeHooksAndCounters(t *testing.T) {
	f := NewFake(ip.IPv4)
	f.HasSet = func(name string) bool { return name == "KUBE-THERE" }
	f.Refuse = func(c Change) error {
		if c.Chain.Table == Mangle {
			return unix.ENOMEM
		}
		return nil
	}
	s := subject{ip.IPv4, f.Observe, f.Apply, f.Restore}
	want := s.wanted()
	want.Chains[s.chain(NAT, "KUBE-SERVICES")] = []Rule{"-m set --match-set KUBE-THERE dst -m set ! --match-set KUBE-ABSENT src -j RETURN"}
	failures := f.Apply(Diff(State{}, want))
	if len(failures) != 7 {
		t.Fatalf("%d failures, want 2 of mangle and 5 of nat: %v", len(failures), failures)
	}
	for _, failure := range failures {
		number := unix.ENOENT
		if failure.Change.Chain.Table == Mangle {
			number = unix.ENOMEM
		}
		if !errors.Is(failure, number) {
			t.Errorf("%v, want %v", failure, number)
		}
	}
	if f.Restores() != 4 {
		t.Errorf("%d restores, want 1 of all tables and 3 of one", f.Restores())
	}
	f.HasSet, f.Refuse = nil, nil
	s.reach(t, want)
	f.FailObserve = func() error { return unix.EINTR }
	saves := f.Saves()
	if state, err := f.Observe(s.own()); !errors.Is(err, unix.EINTR) || state.Chains != nil {
		t.Errorf("Observe = %v, %v, want EINTR alone", state, err)
	}
	if failures := f.Apply(Diff(want, State{})); len(failures) == 0 || !errors.Is(failures[0], unix.EINTR) {
		t.Errorf("Apply without a read = %v, want EINTR", failures)
	}
	if f.Saves() == saves || !f.RandomFully() {
		t.Error("reads are not counted, or --random-fully is missing")
	}
}

// Apply must live with another program that acts between its read and its
// write.
func TestRaceWithAnotherProgram(t *testing.T) {
	f := NewFake(ip.IPv4)
	s := subject{ip.IPv4, f.Observe, f.Apply, f.Restore}
	s.reach(t, s.wanted())
	s.must(t, "*nat\n-I PREROUTING 1 -j ACCEPT\nCOMMIT\n")
	changes := Diff(s.observe(t), s.wanted())
	calls := 0
	race := raceBackend{fakeBackend{f, nil}, func() {
		if calls++; calls == 1 {
			s.must(t, "*nat\n-D PREROUTING "+string(portals)+"\nCOMMIT\n")
		}
	}}
	if failures := apply(race, ip.IPv4, changes); len(failures) > 0 {
		t.Fatal(failures)
	}
	if left := Diff(s.observe(t), s.wanted()); len(left) > 0 {
		t.Errorf("left to do: %v", left)
	}
}

type raceBackend struct {
	fakeBackend
	before func()
}

func (b raceBackend) restore(input string) error {
	b.before()
	return b.fakeBackend.restore(input)
}
