package loopback

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// subject is an implementation under test, and a way to spoil a family's rules as
// another program would.
type subject struct {
	Observe func() (State, error)
	Apply   func([]Change) []Failure
	spoil   func(ip.Family)
}

// subjects make the implementations; the end-to-end tests add the real one.
var subjects = map[string]func(*testing.T) subject{
	"fake": func(*testing.T) subject {
		f := NewFake()
		return subject{f.Observe, f.Apply, f.Spoil}
	},
}

func (s subject) observe(t *testing.T) State {
	t.Helper()
	have, err := s.Observe()
	if err != nil {
		t.Fatal(err)
	}
	return have
}

// reach makes want stand, and sees that nothing is left to do.
func (s subject) reach(t *testing.T, want State) {
	t.Helper()
	if failures := s.Apply(Diff(s.observe(t), want)); len(failures) > 0 {
		t.Fatal(failures)
	}
	if have := s.observe(t); !maps.Equal(have, want) {
		t.Fatalf("%v, want %v", have, want)
	}
}

func TestReach(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")
	for name, open := range subjects {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			both := State{ip.IPv4: {0x4000, v4}, ip.IPv6: {0x4000, v6}}
			for _, want := range []State{
				{}, {ip.IPv4: {0x4000, v4}}, both, both,
				{ip.IPv4: {0x2, v4.Next()}, ip.IPv6: {0x4000, v6}}, {ip.IPv6: {0x4000, v6}}, {},
			} {
				s.reach(t, want)
			}
			s.reach(t, both)
			for _, f := range ip.Families {
				s.spoil(f)
				if changes := Diff(s.observe(t), both); len(changes) != 1 || changes[0].Family != f {
					t.Errorf("%s is spoiled, and the changes are %v", f, changes)
				}
				s.reach(t, both)
			}
			if failures := s.Apply([]Change{{ip.IPv4, Exchange{}}, {ip.IPv4, Exchange{}}}); len(failures) > 0 {
				t.Errorf("deleted twice: %v", failures)
			}
		})
	}
}

func TestUnsoundChanges(t *testing.T) {
	for name, open := range subjects {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			for _, bad := range []Change{
				{ip.IPv4, Exchange{0x4000, netip.MustParseAddr("127.0.0.1")}},
				{ip.IPv4, Exchange{0x4000, netip.MustParseAddr("fd00::1")}},
				{ip.IPv6, Exchange{0x4000, netip.MustParseAddr("fe80::1%eth0")}},
				{ip.IPv4, Exchange{0x4000, netip.Addr{}}},
				{ip.IPv4, Exchange{0, netip.MustParseAddr("10.0.0.1")}},
			} {
				if failures := s.Apply([]Change{bad}); len(failures) != 1 || !errors.Is(failures[0], unix.EINVAL) {
					t.Errorf("%+v: %v, want EINVAL", bad, failures)
				}
			}
			s.reach(t, State{})
		})
	}
}

// FuzzParse: a text of others is never taken for our rules with nonsense in them.
func FuzzParse(f *testing.F) {
	f.Add(`comment "mark 0x4000 source 10.0.0.1" comment "mark 0x4000 source 10.0.0.1"`)
	f.Add(`comment "`)
	f.Fuzz(func(t *testing.T, text string) {
		if e := parse(text); e != (Exchange{}) && strings.Count(text, `comment "`) != 2 {
			t.Errorf("%q is read as %+v", text, e)
		}
	})
}
