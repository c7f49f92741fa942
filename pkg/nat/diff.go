package nat

import (
	"cmp"
	"maps"
	"slices"
)

// Diff returns the changes from have to want: write chains, insert or append jumps,
// delete jumps, delete chains; each sorted by family, table and name. Jumps to be
// inserted at the head of one chain are in reverse order.
//
// A jump that exists stays where it is, unless it is misplaced or our jumps are in another order.
// If another program keeps inserting rules before jumps with Moves, this never ends: the caller
// must limit it.
//
// Jumps with Append are appended again if they are overtaken, and not desired in a chain where we
// have yielded; see State.Overtaken. Jumps that only accept packets are not desired in an open
// chain, nor are those that must see all packets of a contested chain, nor those that make up for a
// chain in which only our rules decide; see State.Open, Jump.Sees and Jump.Behind.
func Diff(have, want State) []Change {
	want.Jumps, want.Chains = needed(have, want)
	changes := writes(have, want)
	inserts, deletes := jumps(have, want)
	changes = append(changes, inserts...)
	changes = append(changes, deletes...)
	for _, c := range sortedChains(have.Chains) {
		if _, ok := want.Chains[c]; !ok {
			changes = append(changes, Change{Op: DeleteChain, Chain: c})
		}
	}
	return changes
}

// After returns the state after Diff's changes.
func After(have, want State) State {
	want.Jumps, want.Chains = needed(have, want)
	want.Open, want.Contested, want.Decided, want.Yielded, want.Unread = have.Open, have.Contested, have.Decided, have.Yielded, have.Unread
	return want
}

// needed returns the jumps and chains that are desired in a ruleset; see Diff. The chain of a
// jump with Behind is desired only with the jump: it may be the only one of its table, and the
// first chain of a table makes the kernel send packets through that table.
func needed(have, want State) ([]Jump, map[Chain][]Rule) {
	chains := want.Chains
	jumps := slices.DeleteFunc(slices.Clone(want.Jumps), func(j Jump) bool {
		if j.Behind != (Chain{}) && !slices.Contains(have.Decided, j.Behind) {
			chains = maps.Clone(chains)
			delete(chains, j.To())
			return true
		}
		if j.Append && slices.Contains(have.Yielded, j.Chain) {
			return true
		}
		return j.Accepts && slices.Contains(have.Open, j.Chain) || slices.Contains(have.Contested, j.Sees)
	})
	return jumps, chains
}

func writes(have, want State) []Change {
	var changes []Change
	for _, c := range sortedChains(want.Chains) {
		if rules, ok := have.Chains[c]; !ok || !slices.Equal(rules, want.Chains[c]) {
			changes = append(changes, Change{Op: WriteChain, Chain: c, Rules: want.Chains[c]})
		}
	}
	return changes
}

func jumps(have, want State) (inserts, deletes []Change) {
	heads, misplaced := byChain(have.Jumps), byChain(have.Misplaced)
	first, last := byChain(atEnd(want.Jumps, false)), byChain(atEnd(want.Jumps, true))
	moving := byChain(slices.DeleteFunc(slices.Clone(want.Jumps), func(j Jump) bool { return !j.Moves || slices.Contains(have.Contested, j.Chain) }))
	all := map[Chain][]Rule{}
	for _, m := range []map[Chain][]Rule{heads, misplaced, first, last} {
		for c := range m {
			all[c] = nil
		}
	}
	for _, c := range sortedChains(all) {
		existing := slices.Concat(heads[c], misplaced[c])
		p := placement{chain: c, have: unwanted(heads[c], last[c]), misplaced: misplaced[c], moving: moving[c]}
		inserts = append(inserts, p.inserts(first[c], have.isUnread(c))...)
		for _, r := range notLast(existing, first[c], last[c], slices.Contains(have.Overtaken, c)) {
			inserts = append(inserts, Change{Op: AppendJump, Chain: c, Rules: []Rule{r}})
		}
		for _, r := range unwanted(existing, slices.Concat(first[c], last[c])) {
			deletes = append(deletes, Change{Op: DeleteJump, Chain: c, Rules: []Rule{r}})
		}
	}
	return inserts, deletes
}

// placement decides where jumps of one base chain are inserted.
type placement struct {
	chain     Chain
	have      []Rule // our jumps in the chain, in order, each once; also old ones, but none with Append
	misplaced []Rule
	moving    []Rule // desired jumps that are moved to the head if they are misplaced
}

// inserts returns the changes that add the jumps of want that are missing, misplaced or out of order.
// The others stay. A jump is inserted beside those that stay, so that rules of other programs before
// them precede it too, as if it had always existed. It is inserted at the head if the chain has no
// jump of ours, or if the jump is in moving and none that precedes it stays. In a chain that cannot
// be listed, no place is known: all are inserted at the head if one is missing.
func (p placement) inserts(want []Rule, unread bool) []Change {
	isMoving := func(r Rule) bool { return slices.Contains(p.moving, r) }
	stay := inOrder(p.have, want)
	if unread && len(stay) < len(want) {
		p.have, stay = nil, nil
	}
	var atHead, beside []Change
	for i, r := range want {
		insert := Change{Op: InsertJump, Chain: p.chain, Rules: []Rule{r}}
		switch stays := slices.Contains(stay, r); {
		case stays && !slices.Contains(p.misplaced, r):
			continue
		case stays: // and has copies
			insert.Before = []Rule{r}
		case !containsAny(want[:i], stay) && (isMoving(r) || len(p.have) == 0):
			atHead = append(atHead, insert)
			continue
		default:
			insert.After, insert.Before = want[:i], p.have
		}
		beside = append(beside, insert)
	}
	slices.Reverse(atHead)
	return append(atHead, beside...)
}

// inOrder returns rules of have that are in want, in the order of want.
func inOrder(have, want []Rule) []Rule {
	var out []Rule
	last := -1
	for _, r := range have {
		if at := slices.Index(want, r); at > last {
			out, last = append(out, r), at
		}
	}
	return out
}

// containsAny reports whether two lists have a rule in common.
func containsAny(rules, others []Rule) bool {
	return slices.ContainsFunc(rules, func(r Rule) bool { return slices.Contains(others, r) })
}

// isUnread reports whether a chain's table cannot be listed.
func (s State) isUnread(c Chain) bool {
	return slices.ContainsFunc(s.Unread, func(u Unread) bool { return u.Table == c.Table })
}

// notLast returns all of last, unless each of them exists once, in this order, after
// those of first, and is not overtaken.
func notLast(existing, first, last []Rule, overtaken bool) []Rule {
	if overtaken {
		return last
	}
	ours := slices.DeleteFunc(slices.Clone(existing), func(r Rule) bool { return !slices.Contains(first, r) && !slices.Contains(last, r) })
	at := slices.IndexFunc(ours, func(r Rule) bool { return slices.Contains(last, r) })
	if at >= 0 && slices.Equal(ours[at:], last) {
		return nil
	}
	return last
}

// unwanted returns each rule that is not in want, once.
func unwanted(rules, want []Rule) []Rule {
	var out []Rule
	for _, r := range rules {
		if !slices.Contains(want, r) && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

func atEnd(jumps []Jump, last bool) []Jump {
	return slices.DeleteFunc(slices.Clone(jumps), func(j Jump) bool { return j.Append != last })
}

func byChain(jumps []Jump) map[Chain][]Rule {
	m := map[Chain][]Rule{}
	for _, j := range jumps {
		m[j.Chain] = append(m[j.Chain], j.Rule)
	}
	return m
}

func sortedChains[V any](m map[Chain]V) []Chain {
	return slices.SortedFunc(maps.Keys(m), Chain.Compare)
}

// Compare orders chains by family, table and name.
func (c Chain) Compare(other Chain) int {
	return cmp.Or(
		cmp.Compare(c.Family, other.Family),
		cmp.Compare(c.Table, other.Table),
		cmp.Compare(c.Name, other.Name),
	)
}
