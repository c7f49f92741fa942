package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

type value struct {
	key     int
	version int
}

// TestIndexIsAMap compares an Index with a map, under random changes. Few hashes cause many
// collisions.
func TestIndexIsAMap(t *testing.T) {
	for name, hash := range map[string]func(int) uint64{
		"few hashes": func(k int) uint64 { return uint64(k % 7) },
		"few tags":   func(k int) uint64 { return uint64(k) << 3 },
		"all":        func(k int) uint64 { return uint64(k) * 0x9e3779b97f4a7c15 },
	} {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			x, want := New(hash, func(v *value) int { return v.key }), map[int]*value{}
			for step := range 20_000 {
				key := random.IntN(500)
				grows := step/2500%2 == 0
				switch {
				case random.IntN(5) == 0 || grows:
					v := &value{key, step}
					x.Put(v)
					want[key] = v
				default:
					x.Delete(key)
					delete(want, key)
				}
				if x.Get(key) != want[key] || x.Len() != len(want) {
					t.Fatalf("step %d: key %d is %v of %d, want %v of %d", step, key, x.Get(key), x.Len(), want[key], len(want))
				}
			}
			all := map[int]*value{}
			for v := range x.All() {
				all[v.key] = v
			}
			if !maps.Equal(all, want) {
				t.Errorf("%d values, want %d", len(all), len(want))
			}
		})
	}
}

func TestIndexShrinks(t *testing.T) {
	x := New(func(k int) uint64 { return uint64(k) * 0x9e3779b97f4a7c15 }, func(v *value) int { return v.key })
	if x.Get(1) != nil {
		t.Error("an empty index has a value")
	}
	x.Delete(1)
	for i := range 10_000 {
		x.Put(&value{key: i})
	}
	if n := len(slices.Collect(x.Some(1 << 20))); n != 10_000 {
		t.Errorf("all slots have %d values", n)
	}
	if n := len(slices.Collect(x.Some(100))); n > 100 {
		t.Errorf("100 slots have %d values", n)
	}
	for i := range 9_990 {
		x.Delete(i)
	}
	if x.Len() != 10 || len(x.slots) > 2*shrinkAbove {
		t.Errorf("%d values in %d slots", x.Len(), len(x.slots))
	}
}

func TestIndexOfNames(t *testing.T) {
	x := OfNames(func(n *types.NamespacedName) types.NamespacedName { return *n })
	for i := range 100 {
		x.Put(&types.NamespacedName{Namespace: fmt.Sprint(i % 3), Name: fmt.Sprint(i)})
	}
	name := types.NamespacedName{Namespace: "1", Name: "7"}
	if got := x.Get(name); got == nil || *got != name {
		t.Errorf("got %v, want %v", got, name)
	}
	if got := x.Get(types.NamespacedName{Namespace: "7", Name: "1"}); got != nil {
		t.Errorf("got %v, want none", got)
	}
}
