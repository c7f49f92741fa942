// Package nat programs iptables: the chains that mark, masquerade, accept and reject
// Service traffic, in the tables raw, mangle, nat and filter.
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

// Rule is a rule's text without "-A CHAIN", exactly as iptables-save prints it, so that
// written and observed rules can be compared. A lab test checks this form for each rule
// of the plan, with the nft and the legacy back end.
type Rule string

// Jump is a rule of ours in a base chain (PREROUTING, INPUT, …). When the first jumps of a chain
// are written, they precede all other rules, except those with Append. Later ones are written
// beside them. Jumps stay in the given order, those with Moves first.
type Jump struct {
	Chain Chain
	Rule  Rule
	// Moves reports that packets which do not reach the jump fare worse than under kube-proxy. Such
	// a jump is moved to the head of its chain if a foreign rule can keep packets from it. Any
	// other jump stays behind rules that are inserted before it, as under kube-proxy. Observe does
	// not set it.
	Moves bool
	// Append puts the jump after ours and all rules that exist when it is written, so
	// that it decides only if no other rule has. Observe does not set it.
	Append bool
	// Accepts reports that the jump's chain only accepts packets. Such a jump is written
	// only where a policy or another program's rule may drop them; see State.Open.
	// Observe does not set it.
	Accepts bool
	// Sees, if set, is a base chain in which our jumps must see all packets of a connection;
	// otherwise the jump does more harm than good. It is not written while that chain is
	// contested; see State.Contested. Observe does not set it.
	Sees Chain
	// Behind, if set, is a base chain in which our jumps may not see all packets. The jump
	// makes up for them in another table. It and its chain, to which no other jump leads, are
	// written only while a foreign rule of that chain decides about packets, even if ours
	// precede it now; see State.Decided. Observe does not set it.
	Behind Chain
}

// To returns the chain that the rule jumps to.
func (j Jump) To() Chain { return Chain{j.Chain.Family, j.Chain.Table, target(j.Rule)} }

// State is our part of the ruleset: our chains with all their rules, and jumps to them.
type State struct {
	Chains map[Chain][]Rule
	Jumps  []Jump // in order, each once; then those with Append
	// Misplaced are other observed jumps to our chains: duplicates, and those with Moves that
	// follow a foreign rule which can keep packets from them. The same jump may occur more than
	// once. A desired state has none.
	Misplaced []Jump
	// Omitted are rules of Chains that are omitted because they are refused. Contested
	// are chains in which jumps with Moves stay, or would stay, behind rules that can keep packets
	// from them, because another program keeps moving those to the head. Unread are tables
	// of which only our part could be read. A desired state has none of these.
	Omitted   []OmittedRule
	Contested []Chain
	Unread    []Unread
	// Decided are the chains of Jump.Behind with a foreign rule that can keep packets from the
	// rules after it. A desired state has none.
	Decided []Chain
	// Overtaken are chains in which a jump with Append precedes a foreign rule that decides about
	// packets. Yielded are those in which there is no such jump, because another program keeps
	// appending its rules too. A desired state has none of these.
	Overtaken []Chain
	Yielded   []Chain
	// Open are base chains of table filter that accept every packet except what our
	// own rules refuse: their policy is ACCEPT, and no foreign rule decides about
	// packets. It is empty where rule changes are not watched. A desired state has
	// none.
	Open []Chain
	// Refusing are base chains, of those that forwarded packets pass before they are translated or
	// without that, whose policy or foreign rules may drop packets, and those of tables that cannot
	// be listed. A desired state has none.
	Refusing []Chain
	// Marks are the observed foreign rules that use marks. A desired state has none.
	Marks []MarkUse
	// Translations are the observed foreign rules that translate sources. A desired state has none.
	Translations []SourceTranslation
}

// Unread is a table that iptables cannot list because it contains a rule of nft(8). Our
// part of it is read chain by chain.
type Unread struct {
	Table Table
	Why   string
}

// Op is what a Change does.
type Op uint8

// The operations. Those of one Apply take effect atomically per table.
const (
	WriteChain  Op = iota + 1 // create the chain if necessary, and replace its rules
	DeleteChain               // flush and remove
	InsertJump                // at the head of the chain or beside other jumps, once
	AppendJump                // at its end, once
	DeleteJump                // all copies
)

var opNames = map[Op]string{
	WriteChain:  "write chain",
	DeleteChain: "delete chain",
	InsertJump:  "insert jump",
	AppendJump:  "append jump",
	DeleteJump:  "delete jump",
}

// String returns the name of the operation.
func (o Op) String() string { return opNames[o] }

// Change is one operation on a chain or on a jump.
type Change struct {
	Op    Op
	Chain Chain
	Rules []Rule // of WriteChain: all rules; of a jump: the one
	// After and Before are the place of InsertJump: directly behind the last rule of After that
	// exists. If none does, directly before the first rule of Before. If none of these exists
	// either, it is the head of the chain. Before may contain the jump itself.
	After, Before []Rule
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

// Failure is a change that the kernel or iptables refused.
type Failure = kernel.Failure[Change]
