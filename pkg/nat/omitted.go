package nat

import (
	"slices"
	"time"
)

// OmittedRule is a rule that iptables or the kernel refuses. It is omitted so that the rest
// of its table can be written.
type OmittedRule struct {
	Chain Chain
	Rule  Rule
	// Instead is the rule written in its place, or "".
	Instead Rule
	// Guard reports that Rule ends its chain for some packets. The rules that these
	// packets must not reach are omitted, too; see adaptChain.
	Guard bool
	// Opens reports that Rule drops or rejects packets, itself or by the chain it jumps
	// to. While it is omitted, these packets pass.
	Opens bool
	// Lacks is the part of Rule that is missing: an extension such as "-m set" or
	// "-j MARK", with its options if only these are refused, a set as "set NAME", or the
	// whole rule.
	Lacks string
	Err   error
}

// omissions records which rules are refused, and what was written without them.
type omissions struct {
	missing map[Table]missing
	wanted  map[Chain][]Rule  // desired rules of chains with omitted rules
	jumps   map[Jump]struct{} // omitted jumps
	probed  time.Time
}

// verdict is why a rule is refused, and its accepted replacement.
type verdict struct {
	lacks   part
	err     error
	instead Rule
}

func (l *omissions) verdict(t Table, r Rule) (verdict, bool) { return l.missing[t].verdict(r) }

// adapt returns the changes without refused rules.
func (l *omissions) adapt(changes []Change) []Change {
	if len(l.missing) == 0 {
		return changes
	}
	var out []Change
	added := map[Jump]bool{}
	for _, c := range changes {
		if l.jumpRefused(c) {
			continue
		}
		switch {
		case c.Op == WriteChain:
			c.Rules = l.adaptChain(c.Chain, c.Rules, changes)
		case c.isJump() && len(c.Rules) == 1:
			c.Rules, c.After, c.Before = l.written(c.Chain.Table, c.Rules), l.written(c.Chain.Table, c.After), l.written(c.Chain.Table, c.Before)
			added[c.jump()] = added[c.jump()] || c.Op != DeleteJump
		}
		out = append(out, c)
	}
	// Do not delete a jump that is also added: an earlier process wrote it without its comment.
	return slices.DeleteFunc(out, func(c Change) bool { return c.Op == DeleteJump && len(c.Rules) == 1 && added[c.jump()] })
}

// written returns the rules with those that were written instead of refused ones.
func (l *omissions) written(t Table, rules []Rule) []Rule {
	out := slices.Clone(rules)
	for i, r := range rules {
		if v, _ := l.verdict(t, r); v.instead != "" {
			out[i] = v.instead
		}
	}
	return out
}

// jumpRefused reports whether a jump is omitted.
func (l *omissions) jumpRefused(c Change) bool {
	if c.Op != InsertJump && c.Op != AppendJump || len(c.Rules) != 1 {
		return false
	}
	v, refused := l.verdict(c.Chain.Table, c.Rules[0])
	return refused && v.instead == ""
}

// restoreJumps replaces jumps that were written instead of desired ones by the desired ones, in
// the observed rules, so that Diff sees no difference.
func (l *omissions) restoreJumps(rules ruleset, wanted []Jump) {
	for _, j := range wanted {
		t := rules[j.Chain.Table]
		v, _ := l.verdict(j.Chain.Table, j.Rule)
		if t == nil || v.instead == "" {
			continue
		}
		for i, r := range t.chains[j.Chain.Name] {
			if r == v.instead {
				t.chains[j.Chain.Name][i] = j.Rule
			}
		}
	}
}

// adaptChain omits the refused rules of a chain. A refused rule that ends the chain for
// its packets keeps them from the rules after it. Without it these would match packets
// that they are not meant for, so they are omitted too, except those that drop, reject
// or end the chain themselves: a filter that has lost an exception stays closed, and
// nothing is masqueraded or marked by mistake.
func (l *omissions) adaptChain(c Chain, rules []Rule, changes []Change) []Rule {
	var out []Rule
	unguarded := false
	for _, r := range rules {
		v, refused := l.verdict(c.Table, r)
		switch {
		case refused && v.instead != "":
			out = append(out, v.instead)
		case refused:
			unguarded = unguarded || isGuard(r)
		case !unguarded || isGuard(r) || drops(c, r, changes):
			out = append(out, r)
		}
	}
	return out
}

// isGuard reports whether a rule ends its chain without changing the packet.
func isGuard(r Rule) bool {
	to := target(r)
	return to == "RETURN" || to == "ACCEPT"
}

// drops reports whether a rule drops or rejects, or jumps to a chain that does.
func drops(c Chain, r Rule, changes []Change) bool {
	switch to := target(r); to {
	case "DROP", "REJECT":
		return true
	default:
		for _, d := range changes {
			if d.Op == WriteChain && d.Chain == (Chain{c.Family, c.Table, to}) && c.Name != to {
				return slices.ContainsFunc(d.Rules, func(r Rule) bool { return drops(d.Chain, r, changes) })
			}
		}
	}
	return false
}

// note records the desired chains in which rules are omitted, and the omitted jumps.
func (l *omissions) note(changes []Change) {
	for _, c := range changes {
		if c.isJump() && len(c.Rules) == 1 {
			delete(l.jumps, c.jump())
			if l.jumpRefused(c) {
				if l.jumps == nil {
					l.jumps = map[Jump]struct{}{}
				}
				l.jumps[c.jump()] = struct{}{}
			}
			continue
		}
		delete(l.wanted, c.Chain)
		if c.Op == WriteChain && !slices.Equal(l.adaptChain(c.Chain, c.Rules, changes), c.Rules) {
			if l.wanted == nil {
				l.wanted = map[Chain][]Rule{}
			}
			l.wanted[c.Chain] = c.Rules
		}
	}
}

// complete makes a chain that contains all of its desired rules that can be written look
// like the desired chain, so that Diff does not write it again. It adds the missing rules
// to State.Omitted.
func (l *omissions) complete(s *State, wanted []Jump) {
	all := l.allWanted()
	defer l.completeJumps(s, wanted) // when the chains are complete
	for _, c := range sortedChains(l.wanted) {
		rules := l.wanted[c]
		if existing, ok := s.Chains[c]; !ok || !slices.Equal(existing, l.adaptChain(c, rules, all)) {
			continue
		}
		s.Chains[c] = rules
		for _, r := range rules {
			if v, refused := l.verdict(c.Table, r); refused {
				s.Omitted = append(s.Omitted, OmittedRule{
					Chain: c, Rule: r, Instead: v.instead, Lacks: string(v.lacks), Err: v.err,
					Guard: isGuard(r) && v.instead == "", Opens: drops(c, r, all) && v.instead == "",
				})
			}
		}
	}
}

// completeJumps adds omitted jumps that are wanted.
func (l *omissions) completeJumps(s *State, wanted []Jump) {
	if len(l.jumps) == 0 {
		return
	}
	for i, j := range wanted {
		_, out := l.jumps[Jump{Chain: j.Chain, Rule: j.Rule}]
		v, refused := l.verdict(j.Chain.Table, j.Rule)
		if !out || !refused {
			continue
		}
		s.Omitted = append(s.Omitted, OmittedRule{Chain: j.Chain, Rule: j.Rule, Lacks: string(v.lacks), Err: v.err, Opens: drops(j.Chain, j.Rule, s.writes())})
		at := len(s.Jumps)
		for _, next := range wanted[i+1:] {
			if k := slices.Index(s.Jumps, Jump{Chain: next.Chain, Rule: next.Rule}); k >= 0 && next.Chain == j.Chain {
				at = k
				break
			}
		}
		s.Jumps = slices.Insert(s.Jumps, at, Jump{Chain: j.Chain, Rule: j.Rule})
	}
}

// writes returns the changes that would write the chains of a state.
func (s *State) writes() []Change {
	var out []Change
	for c, rules := range s.Chains {
		out = append(out, Change{Op: WriteChain, Chain: c, Rules: rules})
	}
	return out
}

func (l *omissions) allWanted() []Change {
	var out []Change
	for _, c := range sortedChains(l.wanted) {
		out = append(out, Change{Op: WriteChain, Chain: c, Rules: l.wanted[c]})
	}
	return out
}
