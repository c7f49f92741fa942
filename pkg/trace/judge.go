package trace

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxEvaluations limits how often a connection is evaluated with different assumptions about
// what is in doubt: all combinations of eight doubts.
const maxEvaluations = 255

// Explain follows a connection through a node. Its steps assume that rules which
// cannot be evaluated do not match. If the outcome depends on that, or rules that may drop packets cannot be
// read, the verdict is Undecided.
func Explain(n *Node, q Question) Explanation {
	e := &Evaluator{}
	x := e.Explain(n, q)
	j := judge{e: &Evaluator{Quiet: true, rules: e.rules}, node: n, question: q, expected: x.Verdict.Outcome, tried: map[string]bool{}}
	if found, why := j.differs(map[string]bool{}, x.Doubts); found {
		x.Verdict = Verdict{Undecided, fmt.Sprintf("%s, but %s", x.Verdict, why)}
	}
	if len(n.Unread) > 0 {
		x.Doubts = append(x.Doubts, n.Unread...)
		if x.Verdict.Outcome != Dropped && x.Verdict.Outcome != Refused && x.Verdict.Outcome != Undecided {
			x.Verdict = Verdict{Undecided, fmt.Sprintf("%s, but there are rules that cannot be read", x.Verdict)}
		}
	}
	x.fill()
	return x
}

// fill makes missing lists empty, so that JSON has no null.
func (x *Explanation) fill() {
	x.Steps = append([]Step{}, x.Steps...)
	for i := range x.RealServers {
		r := &x.RealServers[i]
		r.Request, r.Reply = append([]Step{}, r.Request...), append([]Step{}, r.Reply...)
	}
}

// judge looks for assumptions that change the outcome of a connection.
type judge struct {
	e        *Evaluator
	node     *Node
	question Question
	expected Outcome
	tried    map[string]bool // combinations of assumptions
}

// differs reports whether the outcome changes if one or more doubts are assumed in addition to
// those in assume. why names these assumptions and the other outcome.
func (j *judge) differs(assume map[string]bool, doubts []string) (found bool, why string) {
	for _, d := range doubts {
		next := maps.Clone(assume)
		next[d] = true
		names := strings.Join(slices.Sorted(maps.Keys(next)), "; ")
		if j.tried[names] {
			continue
		}
		if len(j.tried) == maxEvaluations {
			return true, "too many rules are not evaluated"
		}
		j.tried[names] = true
		j.e.assume = next
		x := j.e.Explain(j.node, j.question)
		if x.Verdict.Outcome != j.expected {
			return true, fmt.Sprintf("%s if this applies: %s", x.Verdict.Outcome, names)
		}
		if found, why := j.differs(next, x.Doubts); found {
			return true, why
		}
	}
	return false, ""
}
