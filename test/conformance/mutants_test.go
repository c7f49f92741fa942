//go:build e2e

package conformance

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// mutant is a broken kube-ipvs on a node of its own.
type mutant struct {
	*side
	mutation Mutation
	caught   string // how; "" so far
}

// TestMutations plays one sequence to kube-proxy, kube-ipvs and all that
// `make mutations` has broken. Only the unbroken one may pass.
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
	}
	for i, step := range sequences(t)["every-kind"] {
		began := time.Now()
		unexpected, err := b.step(step, func(*Difference) {})
		must(t, err)
		if len(unexpected) > 0 {
			t.Fatalf("step %d: the unbroken one: %v", i, unexpected)
		}
		for _, m := range mutants {
			must(t, m.look(b, i, began))
		}
	}
	for _, m := range mutants {
		if m.caught == "" {
			t.Errorf("NOT CAUGHT: %s", m.mutation.Name)
		} else {
			t.Logf("caught: %s: %s", m.mutation.Name, m.caught)
		}
	}
}

// look compares one that is not caught yet with kube-proxy.
func (m *mutant) look(b *bench, step int, began time.Time) error {
	if m.caught != "" {
		return nil
	}
	if err := m.await(b.marker(), began); err != nil {
		return err
	}
	diffs, err := compare(b.kubeProxy, m.side)
	if err != nil {
		return err
	}
	for _, d := range diffs {
		if Allowed(b.world, d) == nil {
			m.caught = "step " + strconv.Itoa(step) + ": " + d.String()
			m.stop()
			return nil
		}
	}
	return nil
}
