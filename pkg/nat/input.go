package nat

import (
	"fmt"
	"slices"
	"strings"
)

// Copies counts the existing copies of jumps in a ruleset.
type Copies map[Jump]int

// RestoreInput is the text that iptables-restore --noflush is given for the
// changes of one family, a block for each table that they touch:
//
//	*nat
//	:KUBE-SERVICES - [0:0]          creates or flushes each chain to be written or
//	:OLD - [0:0]                    deleted, before a rule refers to it
//	-A KUBE-SERVICES -j RETURN
//	-D PREROUTING -j OLD            jumps, in the order of the changes; one -D for
//	-D PREROUTING -j KUBE-SERVICES  each copy, as one too many would be an error
//	-I PREROUTING 1 -j KUBE-SERVICES
//	-X OLD
//	COMMIT
//
// Each block takes effect as a whole or not at all.
func RestoreInput(changes []Change, copies Copies) string {
	var b strings.Builder
	for _, t := range tables(changes) {
		fmt.Fprintf(&b, "*%s\n", t)
		tableInput(&b, ofTable(changes, t), copies)
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func tableInput(b *strings.Builder, changes []Change, copies Copies) {
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
	jumpInput(b, changes, copies)
	for _, c := range changes {
		if c.Op == DeleteChain {
			fmt.Fprintf(b, "-X %s\n", c.Chain.Name)
		}
	}
}

// jumpInput counts copies itself, because the same changes may insert and delete a jump.
func jumpInput(b *strings.Builder, changes []Change, copies Copies) {
	existing := Copies{}
	for _, c := range changes {
		if !c.isJump() {
			continue
		}
		j := c.jump()
		n, ok := existing[j]
		if !ok {
			n = copies[j]
		}
		for range n {
			fmt.Fprintf(b, "-D %s %s\n", j.Chain.Name, j.Rule)
		}
		existing[j] = 0
		switch c.Op {
		case InsertJump:
			fmt.Fprintf(b, "-I %s 1 %s\n", j.Chain.Name, j.Rule)
			existing[j] = 1
		case AppendJump:
			fmt.Fprintf(b, "-A %s %s\n", j.Chain.Name, j.Rule)
			existing[j] = 1
		}
	}
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
