package routing

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// A rule with the action SkipLocal is kept in the kernel as three rules, of
// which the middle one is the kernel's own:
//
//	0: from all fwmark 0x4/0x4 goto 1   (protocol 81)
//	0: from all lookup local            (protocol kernel)
//	1: from all nop                     (protocol 81)
//
// The kernel inserts a rule behind those of equal priority, so at priority 0
// ours can only come first if the local rule is added again behind it, before
// the one in front is deleted. There is a rule for table local at every moment.
// Where table local is looked up at another priority (AWS VPC CNI moves it to
// 20 for security groups of pods), ours stand one below and one above it.
//
// A goto whose target is missing matches nothing (net/core/fib_rules.c,
// fib_rules_lookup). So after a crash between any two steps marked packets
// find table local, as without the rule, and the next Apply goes on from what
// stands.

// rawRule is one of the kernel's rules, with who made it.
type rawRule struct {
	Rule
	protocol uint8
}

// part reports whether a rule is one that we add for an exemption.
func (r rawRule) part() bool {
	return r.protocol == Protocol && (r.Action == Goto || r.Action == Nop)
}

// localRule reports whether a rule looks table local up for all packets.
func (r rawRule) localRule() bool {
	return r.Rule == Rule{Family: r.Family, Priority: r.Priority, Table: unix.RT_TABLE_LOCAL}
}

// frame is where the parts of an exemption belong.
type frame struct {
	local        rawRule // the first rule of table local
	before, next int     // the priorities of goto and nop
}

// frameOf returns EBUSY where table local cannot be skipped without a change
// of what other programs' rules mean.
func frameOf(rules []rawRule) (frame, error) {
	first := slices.IndexFunc(rules, rawRule.localRule)
	if first < 0 {
		return frame{}, fmt.Errorf("no policy rule looks up table local for all packets: %w", unix.EBUSY)
	}
	local := rules[first]
	for i, r := range rules {
		switch {
		case r.localRule() && r.Priority != local.Priority:
			return frame{}, fmt.Errorf("table local is looked up at priorities %d and %d: %w", local.Priority, r.Priority, unix.EBUSY)
		case r.Priority == local.Priority && !r.localRule() && !r.part() && (i > first || r.Priority > 0):
			return frame{}, fmt.Errorf("the rule %q of another program has the priority of table local: %w", r.Rule, unix.EBUSY)
		}
	}
	return frame{local: local, before: max(local.Priority-1, 0), next: local.Priority + 1}, nil
}

// jump and target are the two parts that we add.
func (f frame) jump(r Rule) Rule {
	return Rule{Family: f.local.Family, Priority: f.before, IIf: r.IIf, Mark: r.Mark, Mask: r.Mask, Action: Goto, Target: f.next}
}

func (f frame) target() Rule {
	return Rule{Family: f.local.Family, Priority: f.next, Action: Nop}
}

// exemptions turns the parts among a family's rules into what State tells: a
// rule for each mark that skips table local, and one that is Stray if anything
// is left over.
func exemptions(rules []rawRule) []Rule {
	parts := slices.Clone(rules)
	parts = slices.DeleteFunc(parts, func(r rawRule) bool { return !r.part() })
	if len(parts) == 0 {
		return nil
	}
	stray := Rule{Family: parts[0].Family, Action: SkipLocal, Stray: true}
	f, err := frameOf(rules)
	if err != nil {
		return []Rule{stray}
	}
	var out []Rule
	left := false
	for _, r := range parts {
		if f.holds(rules, r) {
			if r.Action == Goto {
				out = append(out, Rule{Family: r.Family, IIf: r.IIf, Mark: r.Mark, Mask: r.Mask, Action: SkipLocal})
			}
		} else {
			left = true
		}
	}
	if left || len(out) == 0 {
		out = append(out, stray)
	}
	return out
}

// holds reports whether a part is in its place: a goto before all local rules
// and with a target of ours, or that target.
func (f frame) holds(rules []rawRule, part rawRule) bool {
	if part.Action == Nop {
		return part.Rule == f.target()
	}
	at := slices.Index(rules, part)
	return part.Rule == f.jump(part.Rule) && at < slices.IndexFunc(rules, rawRule.localRule) &&
		slices.Contains(rules, rawRule{f.target(), Protocol})
}

// skipLocal puts an exemption into its place.
func skipLocal(s stack, want Rule) error {
	lock := s.orderLock()
	lock.Lock()
	defer lock.Unlock()
	rules, err := s.rawRules(want.Family)
	if err != nil {
		return err
	}
	f, err := frameOf(rules)
	if err != nil {
		return err
	}
	for _, r := range []Rule{f.target(), f.jump(want)} {
		part := rawRule{r, Protocol}
		if slices.Contains(rules, part) {
			continue
		}
		if err := s.addRaw(part); err != nil {
			return err
		}
	}
	return f.orderLocal(s, true)
}

// orderSteps ends a fight with another program over the order of the rules.
const orderSteps = 16

// orderLocal deletes the local rules that stand before a jump of ours, except
// the last one of all. With add, it adds one behind in that case. It reads the
// rules before each step, as another program may have moved the local rule.
func (f frame) orderLocal(s stack, add bool) error {
	for range orderSteps {
		rules, err := s.rawRules(f.local.Family)
		if err != nil {
			return err
		}
		before, behind := f.locals(rules)
		switch {
		case behind > 0 && len(before) == 0, len(before) > 0 && behind == 0 && !add:
			return nil
		case behind == 0:
			err = s.addRaw(f.local)
		default: // the kernel deletes the first of several
			err = unless(kernel.IsNotExist, s.deleteRaw(before[0]))
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("another program keeps changing the rule of table local: %w", unix.EBUSY)
}

// locals returns the local rules before the last jump of ours, and counts
// those behind it.
func (f frame) locals(rules []rawRule) (before []rawRule, behind int) {
	for i, r := range rules {
		if !r.localRule() || r.Priority != f.local.Priority {
			continue
		}
		if slices.ContainsFunc(rules[i:], f.isJump) {
			before = append(before, r)
		} else {
			behind++
		}
	}
	return before, behind
}

func (f frame) isJump(r rawRule) bool {
	return r.part() && r.Action == Goto && r.Priority == f.before
}

// endSkipLocal removes an exemption, or with Stray what belongs to none. It
// leaves one rule of table local where it finds one or two.
func endSkipLocal(s stack, end Rule) error {
	lock := s.orderLock()
	lock.Lock()
	defer lock.Unlock()
	rules, err := s.rawRules(end.Family)
	if err != nil {
		return err
	}
	f, err := frameOf(rules)
	known := err == nil
	if known {
		if err := f.orderLocal(s, false); err != nil {
			return err
		}
	}
	var gone []rawRule
	targets := false // whether a jump stays, which needs its target
	for _, r := range rules {
		switch {
		case !r.part():
		case end.Stray && !(known && f.holds(rules, r)), !end.Stray && r.Action == Goto && r.Mark == end.Mark && r.Mask == end.Mask && r.IIf == end.IIf:
			gone = append(gone, r)
		case r.Action == Goto:
			targets = true
		case !targets: // a nop comes after the jumps to it
			gone = append(gone, r)
		}
	}
	for _, r := range gone {
		if err := unless(kernel.IsNotExist, s.deleteRaw(r)); err != nil {
			return err
		}
	}
	return nil
}
