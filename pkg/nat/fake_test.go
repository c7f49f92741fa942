package nat

import (
	"errors"
	"strings"
	"testing"
	"time"

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
				t.Errorf("the ruleset changed:\n%s", f.Save())
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
	f, now := NewFake(ip.IPv4), time.Now()
	f.engine.now = func() time.Time { return now }
	f.HasSet = func(name string) bool { return name == "KUBE-THERE" }
	f.Refuse = func(c Change) error {
		if c.Chain.Table == Mangle {
			return unix.ENOMEM
		}
		return nil
	}
	s := subjectOf(f)
	want := s.wanted()
	want.Chains[s.chain(NAT, "KUBE-SERVICES")] = []Rule{"-m set --match-set KUBE-THERE dst -m set ! --match-set KUBE-ABSENT src -j RETURN"}
	failures := f.Apply(Diff(State{}, want))
	if left := s.observe(t).Omitted; len(failures) != 2 || len(left) != 1 || !errors.Is(left[0].Err, unix.ENOENT) {
		t.Fatalf("%d failures, want the 2 of mangle: %v; left out %v, want the rule with an absent set", len(failures), failures, left)
	}
	for _, failure := range failures {
		if !errors.Is(failure, unix.ENOMEM) || failure.Change.Chain.Table != Mangle {
			t.Errorf("%v, want ENOMEM of mangle", failure)
		}
	}
	f.Refuse = nil
	s.reach(t, want)
	quiet := f.Restores()
	s.reach(t, want)
	if f.Restores() != quiet {
		t.Errorf("%d restores without changes", f.Restores()-quiet)
	}
	// A refused rule is retried later, and written when it is accepted.
	f.HasSet = nil
	for range 2 {
		now = now.Add(probePeriod)
		s.reach(t, want)
		if left := s.observe(t).Omitted; len(left) > 0 || !strings.Contains(f.Save(), "KUBE-ABSENT") || strings.Contains(f.Save(), probeChain) {
			t.Errorf("left out %v of\n%s", left, f.Save())
		}
	}
	f.FailObserve = func() error { return unix.EINTR }
	saves := f.Saves()
	if state, err := f.Observe(s.own()); !errors.Is(err, unix.EINTR) || state.Chains != nil {
		t.Errorf("Observe = %v, %v, want EINTR alone", state, err)
	}
	if failures := f.Apply(Diff(want, State{})); len(failures) == 0 || !errors.Is(failures[0], unix.EINTR) {
		t.Errorf("Apply without a read = %v, want EINTR", failures)
	}
	if f.Saves() == saves {
		t.Error("reads are not counted")
	}
}

// TestRaceWithAnotherProgram has another program act between the read and the write of
// Apply.
func TestRaceWithAnotherProgram(t *testing.T) {
	f := NewFake(ip.IPv4)
	s := subjectOf(f)
	s.reach(t, s.wanted())
	s.must(t, "*nat\n-I PREROUTING 1 -j ACCEPT\nCOMMIT\n")
	changes := Diff(s.observe(t), s.wanted())
	calls := 0
	race := raceBackend{fakeBackend{f, nil}, func() {
		if calls++; calls == 1 {
			s.must(t, "*nat\n-D PREROUTING "+string(first)+"\nCOMMIT\n")
		}
	}}
	if failures := f.engine.apply(race, changes); len(failures) > 0 {
		t.Fatal(failures)
	}
	if left := Diff(s.observe(t), s.wanted()); len(left) > 0 {
		t.Errorf("remaining changes: %v", left)
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

// again returns the same ruleset as another process sees it.
func (f *Fake) again() *Fake {
	return &Fake{HasSet: f.HasSet, Lacks: f.Lacks, engine: engine{family: f.engine.family, now: f.engine.now}, rules: f.rules}
}
