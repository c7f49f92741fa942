// Package nat programs the iptables chains that mark, masquerade, accept and
// reject service traffic. (They stand in the tables nat, filter and mangle;
// the package is named for what they are for.)
package nat

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Table is an iptables table.
type Table string

// The tables in use.
const (
	NAT    Table = "nat"
	Filter Table = "filter"
	Mangle Table = "mangle"
	Raw    Table = "raw"
)

// Chain names a chain.
type Chain struct {
	Family ip.Family
	Table  Table
	Name   string
}

func (c Chain) String() string { return fmt.Sprintf("%s %s/%s", c.Family, c.Table, c.Name) }

// Rule is a rule's text without "-A CHAIN", in exactly the form in which
// iptables-save prints it, so that what was written and what is read back
// compare as they are. A lab test holds each rule of the plan to that form,
// on both the nft and the legacy back end.
type Rule string

// Jump is a rule of ours in a chain that is not ours (PREROUTING, INPUT, …).
// Jumps stand at the chain's head, those of one chain in the order given.
type Jump struct {
	Chain Chain
	Rule  Rule
	// Last has it stand behind ours and behind every rule that was there when it
	// was put there: it has a say only where nobody else has said anything.
	// Observe does not tell it.
	Last bool
}

// To is the chain that it leads to.
func (j Jump) To() Chain { return Chain{j.Chain.Family, j.Chain.Table, target(j.Rule)} }

// State is what we own of the ruleset: chains of ours with all their rules,
// and jumps to them.
type State struct {
	Chains map[Chain][]Rule
	Jumps  []Jump // those that all packets of their chain come to, in its order, each once; then those that are Last
	// Stray are the other jumps to chains of ours that Observe found: second
	// copies, and those behind a rule of another program that can keep packets
	// from them. The same jump can be there more than once. A wanted state has
	// none.
	Stray []Jump
	// LeftOut are rules of Chains that do not stand, as they are refused.
	// Contested are chains in which our jumps stay behind rules that can keep
	// packets from them, as another program moves these to the head again and
	// again. Unread are tables of which only what is ours could be read. A wanted
	// state has none of these.
	LeftOut   []LeftOut
	Contested []Chain
	Unread    []Unread
	// Marks are the rules of others that have to do with marks, as Observe met
	// them. A wanted state has none.
	Marks []MarkUse
}

// Unread is a table that iptables cannot list, as a rule that nft(8) made is in it.
// What is ours is read from it chain by chain.
type Unread struct {
	Table Table
	Why   string
}

// Op is what a Change does.
type Op uint8

// The operations. Those of one Apply take effect together in each table.
const (
	WriteChain  Op = iota + 1 // create if absent, and replace all rules
	DeleteChain               // flush and remove
	InsertJump                // at the head of the chain, once
	AppendJump                // at its end, once
	DeleteJump                // every copy of it
)

var opNames = map[Op]string{
	WriteChain:  "write chain",
	DeleteChain: "delete chain",
	InsertJump:  "insert jump",
	AppendJump:  "append jump",
	DeleteJump:  "delete jump",
}

// String names the operation.
func (o Op) String() string { return opNames[o] }

// Change is one operation on a chain or on a jump.
type Change struct {
	Op    Op
	Chain Chain
	Rules []Rule // WriteChain: all rules; of a jump: the one
}

func (c Change) jump() Jump { return Jump{Chain: c.Chain, Rule: c.Rules[0]} }

func (c Change) isJump() bool { return c.Op >= InsertJump && c.Op <= DeleteJump }

func (c Change) String() string {
	switch c.Op {
	case WriteChain:
		return fmt.Sprintf("write chain %s (%d rules)", c.Chain, len(c.Rules))
	case DeleteChain:
		return fmt.Sprintf("delete chain %s", c.Chain)
	case InsertJump:
		return fmt.Sprintf("insert into %s: %s", c.Chain, c.Rules)
	case AppendJump:
		return fmt.Sprintf("append to %s: %s", c.Chain, c.Rules)
	case DeleteJump:
		return fmt.Sprintf("delete from %s: %s", c.Chain, c.Rules)
	}
	return fmt.Sprintf("unknown operation %d on %s", c.Op, c.Chain)
}

// Failure is a change that the kernel, or iptables, refused.
type Failure = kernel.Failure[Change]
