package kubeproxy

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// subject is the fake or the kernel, with kube-proxy's tables in both families.
type subject interface {
	Observe() (State, error)
	Apply([]Change) []Failure
}

var subjects = map[string]func(t *testing.T) subject{
	"fake": func(*testing.T) subject { return NewFake(State{ip.IPv4: true, ip.IPv6: true}) },
}

func TestTables(t *testing.T) {
	for name, make := range subjects {
		t.Run(name, func(t *testing.T) {
			s := make(t)
			observe := func(want State) {
				t.Helper()
				got, err := s.Observe()
				if diff := cmp.Diff(want, got); err != nil || diff != "" {
					t.Errorf("%v\n%s", err, diff)
				}
			}
			apply := func(changes []Change) {
				t.Helper()
				if failures := s.Apply(changes); len(failures) > 0 {
					t.Error(failures)
				}
			}
			observe(State{ip.IPv4: true, ip.IPv6: true})
			apply([]Change{{ip.IPv6}})
			observe(State{ip.IPv4: true})
			apply([]Change{{ip.IPv6}}) // is gone, which succeeds
			apply(State{ip.IPv4: true}.Removals())
			observe(State{})
		})
	}
}
