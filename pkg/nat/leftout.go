package nat

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// LeftOut is a rule that iptables or the kernel refuses. It is omitted so that the rest
// of its table can be written.
type LeftOut struct {
	Chain Chain
	Rule  Rule
	// Instead is the rule that replaces it, or "".
	Instead Rule
	// Guard reports that Rule ends its chain for some packets, and that the rules which
	// these packets must not reach are omitted, too; see adapt.
	Guard bool
	// Opens reports that Rule drops or rejects packets, itself or by the chain it jumps
	// to. Without it these packets pass.
	Opens bool
	Err   error
}

// leftOut knows which rules are refused, and what was written without them.
type leftOut struct {
	refused map[Table]map[Rule]verdict
	wanted  map[Chain][]Rule // chains with omitted rules, as desired
	jumps   map[Jump]verdict // omitted jumps
	probed  time.Time
}

// verdict is why a rule is refused, and its accepted replacement.
type verdict struct {
	err     error
	instead Rule
}

// probePeriod is the minimum time between two attempts to write refused rules: a module
// may have been installed meanwhile.
const probePeriod = 20 * time.Second

// probeChain is the chain in which rules are tried. It has our prefix, so that the next
// process removes one that a crash has left.
const probeChain = "KUBE-IPVS-PROBE"

// adapt returns the changes without refused rules.
func (l *leftOut) adapt(changes []Change) []Change {
	if len(l.refused) == 0 {
		return changes
	}
	var out []Change
	for _, c := range changes {
		if _, refused := l.jumpRefused(c); refused {
			continue
		}
		if c.Op == WriteChain {
			c.Rules = l.adaptChain(c.Chain, c.Rules, changes)
		}
		out = append(out, c)
	}
	return out
}

func (l *leftOut) jumpRefused(c Change) (verdict, bool) {
	if c.Op != InsertJump && c.Op != AppendJump || len(c.Rules) != 1 {
		return verdict{}, false
	}
	v, refused := l.refused[c.Chain.Table][c.Rules[0]]
	return v, refused
}

// adaptChain omits the refused rules of a chain. A refused rule that ends the chain for
// its packets keeps them from the rules after it. Without it these would match packets
// that they are not meant for, so they are omitted too, except those that drop, reject
// or end the chain themselves: a filter that has lost an exception stays closed, and
// nothing is masqueraded or marked by mistake.
func (l *leftOut) adaptChain(c Chain, rules []Rule, changes []Change) []Rule {
	var out []Rule
	unguarded := false
	for _, r := range rules {
		v, refused := l.refused[c.Table][r]
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
func (l *leftOut) note(changes []Change) {
	for _, c := range changes {
		if c.isJump() && len(c.Rules) == 1 {
			delete(l.jumps, c.jump())
			if v, refused := l.jumpRefused(c); refused {
				if l.jumps == nil {
					l.jumps = map[Jump]verdict{}
				}
				l.jumps[c.jump()] = v
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

// complete replaces chains of a state by the desired ones if everything that can be
// written exists, and returns what is omitted from them.
func (l *leftOut) complete(s *State, wanted []Jump) {
	all := l.allWanted()
	defer l.completeJumps(s, wanted) // when the chains are complete
	for _, c := range sortedChains(l.wanted) {
		rules := l.wanted[c]
		if standing, there := s.Chains[c]; !there || !slices.Equal(standing, l.adaptChain(c, rules, all)) {
			continue
		}
		s.Chains[c] = rules
		for _, r := range rules {
			if v, refused := l.refused[c.Table][r]; refused {
				s.LeftOut = append(s.LeftOut, LeftOut{
					Chain: c, Rule: r, Instead: v.instead, Err: v.err,
					Guard: isGuard(r) && v.instead == "", Opens: drops(c, r, all) && v.instead == "",
				})
			}
		}
	}
}

// completeJumps adds omitted jumps that are wanted.
func (l *leftOut) completeJumps(s *State, wanted []Jump) {
	if len(l.jumps) == 0 {
		return
	}
	for i, j := range wanted {
		v, out := l.jumps[Jump{Chain: j.Chain, Rule: j.Rule}]
		if _, still := l.refused[j.Chain.Table][j.Rule]; !out || !still {
			continue
		}
		s.LeftOut = append(s.LeftOut, LeftOut{Chain: j.Chain, Rule: j.Rule, Err: v.err, Opens: drops(j.Chain, j.Rule, s.writes())})
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

func (l *leftOut) allWanted() []Change {
	var out []Change
	for _, c := range sortedChains(l.wanted) {
		out = append(out, Change{Op: WriteChain, Chain: c, Rules: l.wanted[c]})
	}
	return out
}

// find tries the rules of a table's changes and records the refused ones. It reports
// whether it found any that was not known.
func (l *leftOut) find(b backend, t Table, changes []Change, err error) bool {
	if !mayBeRule(err) {
		return false
	}
	var rules []Rule
	for _, c := range changes {
		if c.Op != WriteChain && c.Op != InsertJump && c.Op != AppendJump {
			continue
		}
		for _, r := range c.Rules {
			if _, known := l.refused[t][r]; !known && !slices.Contains(rules, r) {
				rules = append(rules, r)
			}
		}
	}
	defer removeProbe(b, t)
	if probe(b, t, []Rule{"-j RETURN"}) != nil {
		return false // the table cannot be written at all
	}
	return l.add(b, t, refusedOf(b, t, rules))
}

// add records refused rules, and finds replacements for them.
func (l *leftOut) add(b backend, t Table, refused map[Rule]error) bool {
	for r, err := range refused {
		v := verdict{err: err}
		if plain := strings.TrimSuffix(string(r), " --random-fully"); plain != string(r) && probe(b, t, []Rule{Rule(plain)}) == nil {
			v.instead = Rule(plain)
		}
		if l.refused == nil {
			l.refused = map[Table]map[Rule]verdict{}
		}
		if l.refused[t] == nil {
			l.refused[t] = map[Rule]verdict{}
		}
		l.refused[t][r] = v
	}
	return len(refused) > 0
}

// again tries refused rules, at most every probePeriod, and forgets those that are
// accepted now: the next comparison writes them.
func (l *leftOut) again(b backend, now time.Time) {
	if len(l.refused) == 0 || now.Sub(l.probed) < probePeriod {
		return
	}
	l.probed = now
	for t, known := range l.refused {
		var rules []Rule
		for r := range known {
			rules = append(rules, r)
		}
		still := refusedOf(b, t, rules)
		removeProbe(b, t)
		for _, r := range rules {
			if _, refused := still[r]; !refused {
				delete(known, r)
			}
		}
		if len(known) == 0 {
			delete(l.refused, t)
		}
	}
}

// mayBeRule reports whether a single rule may have caused an error. Other errors pass,
// or concern every rule.
func mayBeRule(err error) bool {
	var r *refusal
	return errors.As(err, &r) && !kernel.IsTransient(err) && !kernel.IsPermission(err) &&
		!errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOSPC)
}

// refusedOf tries rules together, and halves of them as long as they are refused. A
// rule whose attempt fails for another reason counts as refused: it is tried again
// later.
func refusedOf(b backend, t Table, rules []Rule) map[Rule]error {
	if len(rules) == 0 {
		return nil
	}
	err := probe(b, t, rules)
	if err == nil {
		return nil
	}
	if len(rules) == 1 {
		return map[Rule]error{rules[0]: err}
	}
	out := refusedOf(b, t, rules[:len(rules)/2])
	for r, err := range refusedOf(b, t, rules[len(rules)/2:]) {
		if out == nil {
			out = map[Rule]error{}
		}
		out[r] = err
	}
	return out
}

// probe writes rules to a chain that no packet traverses. It replaces jumps to other
// chains, which may not exist, by RETURN.
func probe(b backend, t Table, rules []Rule) error {
	var in strings.Builder
	fmt.Fprintf(&in, "*%s\n:%s - [0:0]\n", t, probeChain)
	for _, r := range rules {
		fmt.Fprintf(&in, "-A %s %s\n", probeChain, withoutJump(r))
	}
	in.WriteString("COMMIT\n")
	return b.restore(in.String())
}

func removeProbe(b backend, t Table) {
	// The next comparison removes what remains.
	_ = b.restore(fmt.Sprintf("*%[1]s\n:%[2]s - [0:0]\n-X %[2]s\nCOMMIT\n", t, probeChain))
}

// withoutJump replaces a target that is a chain. Here, names of chains contain a hyphen
// and names of extensions do not.
func withoutJump(r Rule) Rule {
	to := target(r)
	if !strings.Contains(to, "-") {
		return r
	}
	return Rule(strings.TrimSuffix(string(r), "-j "+to) + "-j RETURN")
}
