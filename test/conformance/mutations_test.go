package conformance

import (
	"os"
	"path/filepath"
	"testing"
)

// Every mutation must apply to the current source of the plan.
func TestMutationsApply(t *testing.T) {
	for _, m := range Mutations {
		source, err := os.ReadFile(filepath.Join("../../pkg/plan", m.File))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Apply(string(source)); err != nil {
			t.Error(err)
		}
	}
	m := Mutation{Old: "a"}
	for _, source := range []string{"", "a a"} {
		if _, err := m.Apply(source); err == nil {
			t.Errorf("%q is taken", source)
		}
	}
}
