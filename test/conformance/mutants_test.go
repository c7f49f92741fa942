//go:build e2e

package conformance

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// mutant is a mutated kube-ipvs on a node of its own.
type mutant struct {
	*side
	mutation Mutation
	caught   bool
}

// TestMutations runs one sequence with kube-proxy, kube-ipvs and all mutants of `make
// mutations`. Only the unmodified kube-ipvs may pass.
func TestMutations(t *testing.T) {
	dir := filepath.Join(os.Getenv("LAB_CACHE"), "mutants")
	if os.Getenv("MUTATIONS") == "" {
		t.Skip("make mutations builds what this needs")
	}
	b := newBench(t)
	var mutants []*mutant
	for i, mutation := range Mutations {
		m := &mutant{side: newSide(t, "mutant"+strconv.Itoa(i)), mutation: mutation}
		m.startKubeIPVS(filepath.Join(dir, strconv.Itoa(i)))
		mutants = append(mutants, m)
	}
	for _, m := range mutants {
		must(t, m.passed())
		m.demandInternal()
	}
	for i, step := range sequences(t)["every-kind"] {
		began := time.Now()
		unexpected, err := b.step(step, func(*Difference) {})
		must(t, err)
		if len(unexpected) > 0 {
			t.Fatalf("step %d: the unbroken one: %v", i, unexpected)
		}
		theirs, err := b.kubeProxy.read()
		must(t, err)
		for _, m := range mutants {
			if d := m.look(t, b, theirs, began); d != nil {
				t.Logf("step %d: caught: %s: %s", i, m.mutation.Name, d)
				m.caught = true
				m.stop()
			}
		}
	}
	for _, m := range mutants {
		if !m.caught {
			t.Errorf("NOT CAUGHT: %s", m.mutation.Name)
		}
	}
}

// look compares a mutant that is not detected yet with kube-proxy. It returns nil if they
// agree.
func (m *mutant) look(t *testing.T, b *bench, theirs *Kernel, began time.Time) *Diff {
	if m.caught {
		return nil
	}
	ours, err := b.settled(m.side, began)
	must(t, err)
	differs, err := b.compare(theirs, ours)
	must(t, err)
	for _, d := range differs {
		if Allowed(b.world, d) == nil {
			return &d
		}
	}
	return nil
}
