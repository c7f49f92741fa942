//go:build prove

package prove

import (
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// TestResultsOfMoments evaluates every class and open connection in every state of some changes,
// and compares the results with those that are taken over from other states.
func TestResultsOfMoments(t *testing.T) {
	evaluated, all := 0, 0
	for i, u := range allChanges(scenarios(t, false)) {
		if i%96 != 0 {
			continue
		}
		for _, f := range u.scenario.Config.Families {
			c := compareStates(t, u, f)
			seen := map[*result]bool{}
			for _, m := range c.moments {
				for k, class := range c.classes {
					got := c.result(m, k)
					seen[got] = true
					want := c.evaluator.Explain(m.node, class.Question)
					if Summary(&got.Explanation) != Summary(&want) || cannotJudge(&got.Explanation) != cannotJudge(&want) {
						t.Errorf("%s: %s: %s: %s, want %s", c, u.Name, class, Summary(&got.Explanation), Summary(&want))
					}
				}
				for k, o := range c.opened {
					got := c.continued(m, k)
					seen[got] = true
					if want := c.evaluator.Continue(m.node, o.Connection); got.Verdict != want {
						t.Errorf("%s: %s: %s: %s, want %s", c, u.Name, o.Class, got.Verdict, want)
					}
				}
				all += len(c.classes) + len(c.opened)
			}
			evaluated += len(seen)
		}
	}
	if evaluated > all/2 {
		t.Errorf("%d of %d results are evaluated, want less than half", evaluated, all)
	}
	t.Logf("%d of %d results are evaluated", evaluated, all)
}

// compareStates makes a change, and returns its states.
func compareStates(t *testing.T, u scenarioChange, f ip.Family) *comparison {
	t.Helper()
	from, to, _ := u.sides(u.scenario)
	r, err := begin(from, to, u.Update)
	if err != nil {
		t.Fatal(err)
	}
	before, err := r.Observed(f)
	if err != nil {
		t.Fatal(err)
	}
	between, _, err := r.watch(f, r.change)
	if err != nil {
		t.Fatal(err)
	}
	after, err := r.Observed(f)
	if err != nil {
		t.Fatal(err)
	}
	c := newComparison(from, to, f, before, after)
	for _, n := range between {
		c.add(n)
	}
	return c
}
