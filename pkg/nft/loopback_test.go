package nft

import (
	"errors"
	"maps"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// loopback is an implementation under test, with the means to change a family's rules as
// another program would.
type loopback struct {
	Observe func() (Loopback, error)
	Apply   func([]LoopbackChange) []LoopbackFailure
	spoil   func(ip.Family)
}

// loopbacks create the implementations; the end-to-end tests add the real one.
var loopbacks = map[string]func(*testing.T) loopback{
	"fake": func(*testing.T) loopback {
		f := NewFakeLoopback()
		return loopback{f.Observe, f.Apply, f.Spoil}
	},
}

func (s loopback) observe(t *testing.T) Loopback {
	t.Helper()
	have, err := s.Observe()
	if err != nil {
		t.Fatal(err)
	}
	return have
}

// reach applies what leads to want, and checks that no change remains.
func (s loopback) reach(t *testing.T, want Loopback) {
	t.Helper()
	if failures := s.Apply(DiffLoopback(s.observe(t), want)); len(failures) > 0 {
		t.Fatal(failures)
	}
	if have := s.observe(t); !maps.Equal(have, want) {
		t.Fatalf("%v, want %v", have, want)
	}
}

func TestLoopbackRules(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")
	for name, open := range loopbacks {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			both := Loopback{ip.IPv4: {0x4000, v4}, ip.IPv6: {0x4000, v6}}
			for _, want := range []Loopback{
				{}, {ip.IPv4: {0x4000, v4}}, both, both,
				{ip.IPv4: {0x2, v4.Next()}, ip.IPv6: {0x4000, v6}}, {ip.IPv6: {0x4000, v6}}, {},
			} {
				s.reach(t, want)
			}
			s.reach(t, both)
			for _, f := range ip.Families {
				s.spoil(f)
				if changes := DiffLoopback(s.observe(t), both); len(changes) != 1 || changes[0].Family != f {
					t.Errorf("%s is spoiled, and the changes are %v", f, changes)
				}
				s.reach(t, both)
			}
			if failures := s.Apply([]LoopbackChange{{ip.IPv4, Exchange{}}, {ip.IPv4, Exchange{}}}); len(failures) > 0 {
				t.Errorf("deleting again: %v", failures)
			}
		})
	}
}

func TestInvalidChanges(t *testing.T) {
	for name, open := range loopbacks {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			for _, bad := range []LoopbackChange{
				{ip.IPv4, Exchange{0x4000, netip.MustParseAddr("127.0.0.1")}},
				{ip.IPv4, Exchange{0x4000, netip.MustParseAddr("fd00::1")}},
				{ip.IPv6, Exchange{0x4000, netip.MustParseAddr("fe80::1%eth0")}},
				{ip.IPv4, Exchange{0x4000, netip.Addr{}}},
				{ip.IPv4, Exchange{0, netip.MustParseAddr("10.0.0.1")}},
			} {
				if failures := s.Apply([]LoopbackChange{bad}); len(failures) != 1 || !errors.Is(failures[0], unix.EINVAL) {
					t.Errorf("%+v: %v, want EINVAL", bad, failures)
				}
			}
			s.reach(t, Loopback{})
		})
	}
}

// Each family's table is replaced in one transaction, which knftables' own fake accepts.
func TestTransaction(t *testing.T) {
	for _, f := range ip.Families {
		fake := knftables.NewFake(familyOf(f), Table)
		for _, e := range []Exchange{{0x4000, f.Unspecified().Next().Next()}, {}} {
			tx := fake.NewTransaction()
			replaceTable(tx, LoopbackChange{f, e}.fill())
			if err := fake.Run(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
			rules, err := fake.ListRules(t.Context(), "")
			if e == (Exchange{}) {
				if !knftables.IsNotFound(err) {
					t.Errorf("%v, %v; want no table", rules, err)
				}
			} else if got := exchangeOf(rules); err != nil || got != e {
				t.Errorf("%v, %v; want %v", got, err, e)
			}
		}
	}
}

// FuzzComment: a foreign comment is never parsed as ours with other values.
func FuzzComment(f *testing.F) {
	f.Add("mark 0x4000 source 10.0.0.1")
	f.Add("mark 0x4000 source ")
	f.Fuzz(func(t *testing.T, comment string) {
		if e := parseComment(comment); e != (Exchange{}) && e.comment() != comment {
			t.Errorf("%q is read as %+v", comment, e)
		}
	})
}
