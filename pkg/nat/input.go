package nat

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// RestoreInput is the text that iptables-restore --noflush is given for the
// changes of one family, a block for each table that they touch. existing has the rules of
// the base chains that jumps are inserted into or deleted from:
//
//	*nat
//	:KUBE-SERVICES - [0:0]          creates or flushes each chain to be written or
//	:OLD - [0:0]                    deleted, before a rule refers to it
//	-A KUBE-SERVICES -j RETURN
//	-D PREROUTING -j OLD            jumps, in the order of the changes; one -D for
//	-D PREROUTING -j KUBE-SERVICES  each copy, as one too many would be an error
//	-I PREROUTING 1 -j KUBE-SERVICES     with its place
//	-X OLD
//	COMMIT
//
// Each block takes effect as a whole or not at all.
func RestoreInput(changes []Change, existing map[Chain][]Rule) string {
	var b strings.Builder
	for _, t := range tables(changes) {
		fmt.Fprintf(&b, "*%s\n", t)
		tableInput(&b, ofTable(changes, t), existing)
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func tableInput(b *strings.Builder, changes []Change, existing map[Chain][]Rule) {
	for _, c := range changes {
		if !c.isJump() {
			fmt.Fprintf(b, ":%s - [0:0]\n", c.Chain.Name)
		}
	}
	for _, c := range changes {
		if c.Op == WriteChain {
			for _, r := range c.Rules {
				fmt.Fprintf(b, "-A %s %s\n", c.Chain.Name, r)
			}
		}
	}
	jumpInput(b, changes, existing)
	for _, c := range changes {
		if c.Op == DeleteChain {
			fmt.Fprintf(b, "-X %s\n", c.Chain.Name)
		}
	}
}

// jumpInput follows the effect of its lines on the chains, because positions depend on the lines
// before, and the same changes may insert and delete a jump.
func jumpInput(b *strings.Builder, changes []Change, existing map[Chain][]Rule) {
	now := maps.Clone(existing)
	if now == nil {
		now = map[Chain][]Rule{}
	}
	for _, c := range changes {
		if !c.isJump() {
			continue
		}
		r, rules := c.Rules[0], slices.Clone(now[c.Chain])
		at := c.place(rules)
		for i := slices.Index(rules, r); i >= 0; i = slices.Index(rules, r) {
			fmt.Fprintf(b, "-D %s %s\n", c.Chain.Name, r)
			rules = slices.Delete(rules, i, i+1)
			if i < at {
				at--
			}
		}
		switch c.Op {
		case InsertJump:
			fmt.Fprintf(b, "-I %s %d %s\n", c.Chain.Name, at+1, r)
			rules = slices.Insert(rules, at, r)
		case AppendJump:
			fmt.Fprintf(b, "-A %s %s\n", c.Chain.Name, r)
			rules = append(rules, r)
		}
		now[c.Chain] = rules
	}
}

// place returns the index in a chain's rules at which InsertJump inserts; see Change.
func (c Change) place(rules []Rule) int {
	last := -1
	for i, r := range rules {
		if slices.Contains(c.After, r) {
			last = i
		}
	}
	if last >= 0 {
		return last + 1
	}
	return max(0, slices.IndexFunc(rules, func(r Rule) bool { return slices.Contains(c.Before, r) }))
}

// tables returns the tables that the changes affect.
func tables(changes []Change) []Table {
	var out []Table
	for _, c := range changes {
		out = append(out, c.Chain.Table)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func ofTable(changes []Change, t Table) []Change {
	var out []Change
	for _, c := range changes {
		if c.Chain.Table == t {
			out = append(out, c)
		}
	}
	return out
}
