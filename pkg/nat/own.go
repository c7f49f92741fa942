package nat

import (
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Owned defines what is ours in a ruleset: chains by name, and the rules of base chains
// (PREROUTING, INPUT, …) that jump to them. Rules in other programs' chains that jump
// to ours are not ours; the portmap CNI plugin has such rules, to KUBE-MARK-MASQ.
type Owned struct {
	Chains []Chain
	// Prefixes are prefixes of names. Every chain with such a name is ours, in both
	// families and all tables in use; an undesired one is a leftover of an earlier
	// version. No other program may use the prefixes: "KUBE-" would include kubelet's
	// chains.
	Prefixes []string
	// Jumps are the desired jumps and those that may become desired. They are checked where a base
	// chain cannot be listed (see Unread), and only those with Moves count as displaced.
	Jumps []Jump
}

// jumpsOf returns the desired jumps of a family.
func (o Owned) jumpsOf(family ip.Family) []Jump {
	return slices.DeleteFunc(slices.Clone(o.Jumps), func(j Jump) bool { return j.Chain.Family != family })
}

func (o Owned) has(c Chain) bool {
	if isBase(c.Name) {
		return false
	}
	hasPrefix := func(prefix string) bool { return strings.HasPrefix(c.Name, prefix) }
	return slices.Contains(o.Chains, c) || slices.ContainsFunc(o.Prefixes, hasPrefix)
}

// baseChains are the chains of the kernel.
var baseChains = map[Table][]string{
	NAT:    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	Filter: {"INPUT", "FORWARD", "OUTPUT"},
	Mangle: {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	Raw:    {"PREROUTING", "OUTPUT"},
}

// isBase checks only the name: iptables does not allow creating other chains with these
// names.
func isBase(name string) bool { return slices.Contains(baseChains[Mangle], name) }

// state returns our part of a family's ruleset. If stays returns true for a chain, no jump in
// it is misplaced behind foreign rules. state also returns the base chains in which jumps with
// Moves follow a rule that can keep packets from them.
func (o Owned) state(family ip.Family, rules ruleset, stays func(Chain) bool) (State, map[Chain]bool) {
	s := State{Chains: map[Chain][]Rule{}}
	displaced := map[Chain]bool{}
	for _, name := range slices.Sorted(maps.Keys(baseChains)) {
		t := rules[name]
		for _, chain := range t.names() {
			c := Chain{Family: family, Table: name, Name: chain}
			switch {
			case o.has(c):
				s.Chains[c] = t.chains[chain]
				continue
			case isBase(chain):
				if o.sortJumps(&s, c, t, stays(c)) {
					displaced[c] = true
				}
			}
			others := o.others(t.chains[chain], c)
			s.Marks = append(s.Marks, markUses(c, others)...)
			s.Translations = append(s.Translations, sourceTranslations(c, others)...)
		}
	}
	return s, displaced
}

// others returns the rules that do not jump to our chains.
func (o Owned) others(rules []Rule, c Chain) []Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool { return o.has(Jump{Chain: c, Rule: r}.To()) })
}

// sortJumps adds the jumps of a base chain to the state. Rules of other programs before
// a jump matter only if it has Moves and they can keep packets from it. It reports whether
// there are such a jump and such a rule.
func (o Owned) sortJumps(s *State, c Chain, t *table, stays bool) (displaced bool) {
	blocked, seen := false, map[string]bool{} // blocked: packets may not reach this point
	for _, r := range t.chains[c.Name] {
		j := Jump{Chain: c, Rule: r}
		if !o.has(j.To()) {
			blocked = blocked || t.decides(r, seen)
			continue
		}
		overtaken := blocked && o.moves(c, r)
		displaced = displaced || overtaken
		if overtaken && !stays || slices.Contains(s.Jumps, j) {
			s.Misplaced = append(s.Misplaced, j)
		} else {
			s.Jumps = append(s.Jumps, j)
		}
	}
	if blocked && slices.ContainsFunc(o.Jumps, func(j Jump) bool { return j.Behind == c }) {
		s.Decided = append(s.Decided, c)
	}
	// If no jump with Moves is there, possibly because the chain is contested (Jump.Sees), any
	// rule that can keep packets from later rules counts.
	ours := slices.ContainsFunc(byChain(slices.Concat(s.Jumps, s.Misplaced))[c], func(r Rule) bool { return o.moves(c, r) })
	if stays && (displaced || blocked && !ours) {
		s.Contested = append(s.Contested, c)
	}
	return displaced
}

// ends returns the base chains of desired jumps with Append in which we have yielded, as yields
// reports, and those in which such a jump is overtaken; see State.Overtaken.
func (o Owned) ends(rules ruleset, yields func(Chain) bool) (yielded, overtaken map[Chain]bool) {
	yielded, overtaken = map[Chain]bool{}, map[Chain]bool{}
	for _, last := range o.Jumps {
		c := last.Chain
		t := rules[c.Table]
		if !last.Append || t == nil {
			continue
		}
		if yields(c) {
			yielded[c] = true
			continue
		}
		list := t.chains[c.Name]
		at := slices.IndexFunc(list, func(r Rule) bool { return o.appends(c, r) })
		if at >= 0 && slices.ContainsFunc(o.others(list[at:], c), t.decidesAtAll) {
			overtaken[c] = true
		}
	}
	return yielded, overtaken
}

// decidesAtAll reports whether another program's rule of a base chain decides about packets,
// except kubelet's.
func (t *table) decidesAtAll(r Rule) bool {
	return target(r) != kubeletsFirewall && t.decides(r, map[string]bool{})
}

// appends reports whether a rule is a desired jump with Append.
func (o Owned) appends(c Chain, r Rule) bool {
	return slices.ContainsFunc(o.Jumps, func(j Jump) bool { return j.Chain == c && j.Rule == r && j.Append })
}

// moves reports whether a rule is a desired jump with Moves.
func (o Owned) moves(c Chain, r Rule) bool {
	return slices.ContainsFunc(o.Jumps, func(j Jump) bool { return j.Chain == c && j.Rule == r && j.Moves })
}

// open returns the base chains of table filter that are open; see State.Open. A chain
// that does not exist is open.
func (o Owned) open(family ip.Family, rules ruleset) []Chain {
	t := rules[Filter]
	if t == nil {
		t = newTable()
	}
	var out []Chain
	for _, name := range baseChains[Filter] {
		c := Chain{Family: family, Table: Filter, Name: name}
		policy := t.policies[name]
		decides := slices.ContainsFunc(o.others(t.chains[name], c), t.decidesAtAll)
		if (policy == "" || policy == "ACCEPT") && !decides {
			out = append(out, c)
		}
	}
	return out
}

// forwarding are the base chains that forwarded packets pass, except those of table nat.
var forwarding = map[Table][]string{
	Raw: {"PREROUTING"}, Mangle: {"PREROUTING", "FORWARD", "POSTROUTING"}, Filter: {"FORWARD"},
}

// refusing returns the base chains that may drop forwarded packets; see State.Refusing.
func (o Owned) refusing(family ip.Family, rules ruleset, unread []Unread) []Chain {
	var out []Chain
	for _, table := range slices.Sorted(maps.Keys(forwarding)) {
		unlisted := slices.ContainsFunc(unread, func(u Unread) bool { return u.Table == table })
		for _, name := range forwarding[table] {
			c := Chain{Family: family, Table: table, Name: name}
			if unlisted || rules[table] != nil && rules[table].mayRefuse(name, o.others(rules[table].chains[name], c)) {
				out = append(out, c)
			}
		}
	}
	return out
}

// mayRefuse reports whether a base chain may drop packets by its policy or one of the rules.
func (t *table) mayRefuse(chain string, rules []Rule) bool {
	policy, seen := t.policies[chain], map[string]bool{}
	return policy != "" && policy != "ACCEPT" || slices.ContainsFunc(rules, func(r Rule) bool { return t.refuses(r, seen) })
}

// kubeletsFirewall is kubelet's chain on every node. It drops only packets from other
// hosts to loopback addresses.
const kubeletsFirewall = "KUBE-FIREWALL"
