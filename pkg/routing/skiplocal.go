package routing

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// The kernel stores a rule with the action SkipLocal as three rules; the middle one is the
// kernel's own:
//
//	0: from all fwmark 0x4/0x4 goto 1   (protocol 81)
//	0: from all lookup local            (protocol kernel)
//	1: from all nop                     (protocol 81)
//
// The kernel inserts a rule after those of equal priority. So at priority 0 ours can only
// come first if the local rule is added again behind it, before the one in front is deleted.
// A rule for table local exists at every moment. If table local is looked up at another
// priority (AWS VPC CNI moves it to 20 for security groups of pods), our rules are one below
// and one above it.
//
// A goto whose target is missing matches nothing (net/core/fib_rules.c, fib_rules_lookup).
// So after a crash between any two steps marked packets are routed by table local, as
// without the rule, and the next Apply continues from the existing rules.

// rawRule is one of the kernel's rules, with the routing protocol that identifies its
// creator.
type rawRule struct {
	Rule
	protocol uint8
}

// part reports whether we added a rule as part of a SkipLocal rule.
func (r rawRule) part() bool {
	return r.protocol == Protocol && (r.Action == Goto || r.Action == Nop)
}

// localRule reports whether a rule looks up table local for all packets.
func (r rawRule) localRule() bool {
	return r.Rule == Rule{Family: r.Family, Priority: r.Priority, Table: TableLocal}
}

// frame is where the parts of a SkipLocal rule belong.
type frame struct {
	local        rawRule // the first rule of table local
	before, next int     // the priorities of goto and nop
}

// frameOf returns EBUSY if table local cannot be skipped without changing the meaning of
// other programs' rules.
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

// jump and target return the two parts that we add.
func (f frame) jump(r Rule) Rule {
	return Rule{Family: f.local.Family, Priority: f.before, IIf: r.IIf, Mark: r.Mark, Mask: r.Mask, Action: Goto, Target: f.next}
}

func (f frame) target() Rule {
	return Rule{Family: f.local.Family, Priority: f.next, Action: Nop}
}

// exemptions combines the parts among a family's rules into the rules of State: a
// SkipLocal rule for each mark that skips table local, and one with Leftover if any part
// is left over.
func exemptions(rules []rawRule) []Rule {
	parts := slices.Clone(rules)
	parts = slices.DeleteFunc(parts, func(r rawRule) bool { return !r.part() })
	if len(parts) == 0 {
		return nil
	}
	stray := Rule{Family: parts[0].Family, Action: SkipLocal, Leftover: true}
	f, err := frameOf(rules)
	if err != nil {
		return []Rule{stray}
	}
	var out []Rule
	left := false
	for _, r := range parts {
		if f.inPlace(rules, r) {
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

// inPlace reports whether a part is in its place: a goto before all local rules whose target
// exists, or that target.
func (f frame) inPlace(rules []rawRule, part rawRule) bool {
	if part.Action == Nop {
		return part.Rule == f.target()
	}
	at := slices.Index(rules, part)
	return part.Rule == f.jump(part.Rule) && at < slices.IndexFunc(rules, rawRule.localRule) &&
		slices.Contains(rules, rawRule{f.target(), Protocol})
}

// skipLocal adds the parts of a SkipLocal rule in their places.
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

// orderSteps limits how many rules orderLocal writes while another program changes their
// order.
const orderSteps = 16

// orderLocal deletes the local rules before a jump of ours, except the last local rule of
// all; with add, it first adds one behind the jumps in that case. It reads the rules before
// each step, as another program may have moved the local rule.
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
			err = ignore(kernel.IsNotExist, s.deleteRaw(before[0]))
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("another program keeps changing the rule of table local: %w", unix.EBUSY)
}

// locals returns the local rules before the last jump of ours, and counts those behind it.
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

// endSkipLocal removes a SkipLocal rule or, with Leftover, the parts that belong to none. It
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
	targets := false // a jump stays, so its target must stay
	for _, r := range rules {
		switch {
		case !r.part():
		case end.Leftover && !(known && f.inPlace(rules, r)), !end.Leftover && r.Action == Goto && r.Mark == end.Mark && r.Mask == end.Mask && r.IIf == end.IIf:
			gone = append(gone, r)
		case r.Action == Goto:
			targets = true
		case !targets: // a nop; it comes after the jumps to it
			gone = append(gone, r)
		}
	}
	for _, r := range gone {
		if err := ignore(kernel.IsNotExist, s.deleteRaw(r)); err != nil {
			return err
		}
	}
	return nil
}
