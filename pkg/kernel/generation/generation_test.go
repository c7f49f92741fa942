package generation

import (
	"slices"
	"testing"
)

// A transaction counts as ours only if the kernel made as many as we did, so that none of
// another program can be among them.
func TestGenerations(t *testing.T) {
	var g generations
	now := uint32(40)
	generation := func() (uint32, error) { return now, nil }
	var told []uint32
	tell := func(n uint32) { g.decide(n, func() { told = append(told, n) }) }
	commit := func(n int) {
		for range n {
			now++
			tell(now)
		}
	}
	change := func(transactions int, run func()) {
		if err := g.change(transactions, generation, func() error { run(); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name string
		do   func()
		want []uint32
	}{
		{"another program's", func() { commit(1) }, []uint32{41}},
		{"ours", func() { change(2, func() { commit(2) }) }, nil},
		{"told late", func() { change(1, func() { now++ }); tell(now) }, nil},
		{"another program's among ours", func() { change(1, func() { commit(2) }) }, []uint32{45, 46}},
		{"another program's in place of ours", func() { change(2, func() { commit(1) }) }, []uint32{47}},
		{"two of ours at once", func() { change(2, func() { change(1, func() { commit(1) }); commit(1) }) }, []uint32{48, 49}},
		{"ours again", func() { change(1, func() { commit(1) }) }, nil},
		{"another program's after ours", func() { change(1, func() { commit(1) }); commit(1) }, []uint32{52}},
	} {
		told = nil
		test.do()
		if !slices.Equal(told, test.want) {
			t.Errorf("%s: reported %v, want %v", test.name, told, test.want)
		}
	}
	change(1, func() { commit(1) })
	old := now
	for range keptGenerations {
		change(1, func() { commit(1) })
	}
	if told = nil; len(g.own) != keptGenerations {
		t.Errorf("%d are kept", len(g.own))
	}
	if tell(old); len(told) != 1 {
		t.Error("the oldest is still remembered")
	}
}
