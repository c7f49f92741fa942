package routing

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// The rules of a node, and ours in their places.
func localRule(priority int) rawRule {
	return rawRule{Rule{Priority: priority, Table: 255}, unix.RTPROT_KERNEL}
}

func jumpRule(priority, target int) rawRule {
	return rawRule{Rule{Priority: priority, Mark: 4, Mask: 4, Action: Goto, Target: target}, Protocol}
}

func nopRule(priority int) rawRule {
	return rawRule{Rule{Priority: priority, Action: Nop}, Protocol}
}

var skipping = []string{"0: fwmark 0x4/0x4 goto 1", "0: lookup 255", "1: nop"}

// skipCases are states of a node, written as steps from a new node, with the expected
// rules with and without the SkipLocal rule.
var skipCases = map[string]struct {
	steps      []step
	with, left []string
	refused    bool
}{
	"fresh":                    {with: skipping, left: []string{"0: lookup 255"}},
	"in its place":             {steps: []step{add(nopRule(1)), add(jumpRule(0, 1)), add(localRule(0)), del(localRule(0))}, with: skipping, left: []string{"0: lookup 255"}},
	"crash after the nop":      {steps: []step{add(nopRule(1))}, with: skipping, left: []string{"0: lookup 255"}},
	"crash after the jump":     {steps: []step{add(nopRule(1)), add(jumpRule(0, 1))}, with: skipping, left: []string{"0: lookup 255"}},
	"crash with two locals":    {steps: []step{add(nopRule(1)), add(jumpRule(0, 1)), add(localRule(0))}, with: skipping, left: []string{"0: lookup 255"}},
	"the jump alone":           {steps: []step{add(jumpRule(0, 1))}, with: skipping, left: []string{"0: lookup 255"}},
	"two locals without ours":  {steps: []step{add(localRule(0))}, with: skipping, left: []string{"0: lookup 255"}},
	"an earlier configuration": {steps: []step{add(nopRule(1)), add(marked(8, jumpRule(0, 1))), add(localRule(0)), del(localRule(0))}, with: skipping, left: []string{"0: lookup 255"}},
	"local moved before": {
		steps: []step{add(localRule(20)), del(localRule(0)), add(lookup(10, 101)), add(lookup(21, 102))},
		with:  []string{"10: lookup 101", "19: fwmark 0x4/0x4 goto 21", "20: lookup 255", "21: lookup 102", "21: nop"},
		left:  []string{"10: lookup 101", "20: lookup 255", "21: lookup 102"},
	},
	"local moved meanwhile": {
		steps: []step{add(nopRule(1)), add(jumpRule(0, 1)), add(localRule(0)), del(localRule(0)), add(lookup(10, 101)), add(localRule(20)), del(localRule(0))},
		with:  []string{"10: lookup 101", "19: fwmark 0x4/0x4 goto 21", "20: lookup 255", "21: nop"},
		left:  []string{"10: lookup 101", "20: lookup 255"},
	},
	"local moved back": {
		steps: []step{add(localRule(20)), add(nopRule(21)), add(jumpRule(19, 21)), add(localRule(0)), del(localRule(20))},
		with:  skipping, left: []string{"0: lookup 255"},
	},
	"another program's rule behind local": {
		steps: []step{add(lookup(0, 101))}, refused: true,
		with: []string{"0: lookup 255", "0: lookup 101"}, left: []string{"0: lookup 255", "0: lookup 101"},
	},
	"no local": {steps: []step{del(localRule(0))}, refused: true},
	"local at two priorities": {
		steps: []step{add(localRule(20))}, refused: true,
		with: []string{"0: lookup 255", "20: lookup 255"}, left: []string{"0: lookup 255", "20: lookup 255"},
	},
}

// take executes steps, for IPv4.
func take(s stack, steps []step) {
	for _, step := range steps {
		step.rule.Family = ip.IPv4
		do := s.addRaw
		if step.del {
			do = s.deleteRaw
		}
		if err := do(step.rule); err != nil {
			panic(err)
		}
	}
}

type step struct {
	rule rawRule
	del  bool
}

func add(r rawRule) step { return step{rule: r} }
func del(r rawRule) step { return step{rule: r, del: true} }

func marked(mark uint32, r rawRule) rawRule {
	r.Mark, r.Mask = mark, mark
	return r
}

func lookup(priority, table int) rawRule {
	return rawRule{Rule{Priority: priority, Table: table}, unix.RTPROT_STATIC}
}

func (s subject) prepare(t *testing.T, f ip.Family, steps []step) {
	t.Helper()
	for _, step := range steps {
		step.rule.Family = f
		do := s.stack.addRaw
		if step.del {
			do = s.stack.deleteRaw
		}
		if err := do(step.rule); err != nil {
			t.Fatal(step, err)
		}
	}
}

// rulesBelowMain returns a family's rules except the default ones.
func (s subject) rulesBelowMain(t *testing.T, f ip.Family) []string {
	t.Helper()
	rules, err := s.stack.rawRules(f)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, r := range rules {
		if r.Priority < 32766 {
			out = append(out, strings.TrimPrefix(r.String(), f.String()+" rule "))
			if r.localRule() && r.protocol != unix.RTPROT_KERNEL {
				t.Errorf("table local is looked up by a rule of protocol %d", r.protocol)
			}
		}
	}
	return out
}

// TestSkipLocal changes each state to one with the rule and to one without it. In both cases
// it also stops after each step, as a crash would, and continues.
func TestSkipLocal(t *testing.T) {
	for name, test := range skipCases {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s subject) {
				for _, f := range ip.Families {
					s.prepare(t, f, test.steps)
					rule := Rule{Family: f, Action: SkipLocal, Mark: 4, Mask: 4}
					want, without := empty(), empty()
					want.Rules = set(rule)
					for crash := range 8 {
						s.crashing(t, want, crash, test.refused)
					}
					if diff := cmp.Diff(test.with, s.rulesBelowMain(t, f)); diff != "" {
						t.Errorf("%s rules (-want +got):\n%s", f, diff)
					}
					if _, ok := s.observe(t).Rules[rule]; ok == test.refused {
						t.Errorf("observed %v", s.observe(t).Rules)
					}
					for crash := range 8 {
						s.crashing(t, without, crash, false)
					}
					if diff := cmp.Diff(test.left, s.rulesBelowMain(t, f)); diff != "" {
						t.Errorf("%s rules without ours (-want +got):\n%s", f, diff)
					}
					if left := s.observe(t).Rules; len(left) > 0 {
						t.Errorf("still ours: %v", left)
					}
				}
			})
		})
	}
}

// TestSkipLocalCrashes starts each crash from the same state.
func TestSkipLocalCrashes(t *testing.T) {
	for name, test := range skipCases {
		for crash := range 8 {
			if test.refused {
				continue
			}
			t.Run(name, func(t *testing.T) {
				each(t, func(t *testing.T, s subject) {
					s.prepare(t, ip.IPv4, test.steps)
					want := empty()
					want.Rules = set(Rule{Family: ip.IPv4, Action: SkipLocal, Mark: 4, Mask: 4})
					for _, to := range []struct {
						state State
						rules []string
					}{{want, test.with}, {empty(), test.left}} {
						s.crashing(t, to.state, crash, false)
						s.crashing(t, to.state, 99, false)
						if diff := cmp.Diff(to.rules, s.rulesBelowMain(t, ip.IPv4)); diff != "" {
							t.Errorf("crash after %d steps (-want +got):\n%s", crash, diff)
						}
					}
				})
			})
		}
	}
}

// crashing applies changes until the given number of rules is written. It checks that
// table local is looked up after each step, if it was before.
func (s subject) crashing(t *testing.T, want State, steps int, refused bool) {
	t.Helper()
	looksUp := func(f ip.Family) bool {
		rules, _ := s.stack.rawRules(f)
		return slices.ContainsFunc(rules, rawRule.localRule)
	}
	before := map[ip.Family]bool{ip.IPv4: looksUp(ip.IPv4), ip.IPv6: looksUp(ip.IPv6)}
	c := &crashingStack{stack: s.stack, left: steps, check: func() {
		for f, was := range before {
			if was && !looksUp(f) {
				t.Errorf("no %s rule of table local", f)
			}
		}
	}}
	for _, failure := range apply(c, Diff(s.observe(t), want)) {
		if !errors.Is(failure, errCrash) && !(refused && errors.Is(failure, unix.EBUSY)) {
			t.Error(failure)
		}
	}
}

var errCrash = errors.New("crash")

type crashingStack struct {
	stack
	left  int
	check func()
}

func (c *crashingStack) step(do func(rawRule) error, r rawRule) error {
	if c.left == 0 {
		return errCrash
	}
	c.left--
	defer c.check()
	return do(r)
}

func (c *crashingStack) addRaw(r rawRule) error    { return c.step(c.stack.addRaw, r) }
func (c *crashingStack) deleteRaw(r rawRule) error { return c.step(c.stack.deleteRaw, r) }

func TestSkipLocalInvalid(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		for _, c := range []Change{
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Action: SkipLocal}},
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Action: SkipLocal, Leftover: true}},
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Action: SkipLocal, Mark: 4, Mask: 4, Priority: 1}},
			{Op: AddRule, Rule: Rule{Action: SkipLocal, Mark: 4, Mask: 4}},
			{Op: AddRule, Rule: Rule{Family: ip.IPv4, Action: Nop, Priority: 1}},
			{Op: DeleteRule, Rule: Rule{Family: ip.IPv4, Action: Goto, Target: 2, Priority: 1}},
		} {
			if failures := s.Apply([]Change{c}); len(failures) != 1 || !errors.Is(failures[0], unix.EINVAL) {
				t.Errorf("%s: %v", c, failures)
			}
		}
	})
}
