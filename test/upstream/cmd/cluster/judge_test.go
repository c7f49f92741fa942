package main

import "testing"

func TestAtOnce(t *testing.T) {
	for _, test := range []struct {
		parallel    uint
		nodes, want int
	}{
		{parallel: 0, nodes: 2, want: 2},
		{parallel: 0, nodes: 3, want: 2},
		{parallel: 0, nodes: 6, want: 1},
		{parallel: 3, nodes: 6, want: 3},
	} {
		j := judgement{parallel: test.parallel}
		if got := j.atOnce(test.nodes); got != test.want {
			t.Errorf("-parallel %d on %d nodes: %d specs at once, not %d", test.parallel, test.nodes, got, test.want)
		}
	}
}
