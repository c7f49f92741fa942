package nat

import (
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Own tells what of a ruleset is ours: chains by their name, and with them
// the rules of the kernel's own chains (PREROUTING, INPUT, …) whose target is
// such a chain. Rules of other programs' chains that jump to one of ours are
// not ours; the portmap CNI plugin has such, to KUBE-MARK-MASQ.
type Own struct {
	Chains []Chain
	// Prefixes are beginnings of names. Every chain so named is ours, of
	// either family and in each of the tables in use: it is left from an
	// earlier plan if it is not wanted now. Nothing of somebody else's may be
	// named so: "KUBE-" would take kubelet's chains.
	Prefixes []string
	// Jumps are those that are wanted. They are looked for where a base chain
	// cannot be listed (see Unread), and those that are Last are not displaced.
	Jumps []Jump
}

func (o Own) has(c Chain) bool {
	if isBase(c.Name) {
		return false
	}
	hasPrefix := func(prefix string) bool { return strings.HasPrefix(c.Name, prefix) }
	return slices.Contains(o.Chains, c) || slices.ContainsFunc(o.Prefixes, hasPrefix)
}

// baseChains are the chains of the kernel, where packets enter a table.
var baseChains = map[Table][]string{
	NAT:    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	Filter: {"INPUT", "FORWARD", "OUTPUT"},
	Mangle: {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	Raw:    {"PREROUTING", "OUTPUT"},
}

// isBase goes by name alone: the kernel has no chain of these names that is
// not a base chain, as iptables lets nobody make one.
func isBase(name string) bool { return slices.Contains(baseChains[Mangle], name) }

// state picks what is ours out of a whole ruleset of a family. Jumps of a chain
// that stays says so of are taken for being at its head. It also returns the
// base chains in which ours stand behind a rule that can keep packets from them.
func (o Own) state(family ip.Family, rules ruleset, stays func(Chain) bool) (State, map[Chain]bool) {
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
			s.Marks = append(s.Marks, markUses(c, o.others(t.chains[chain], c))...)
		}
	}
	return s, displaced
}

// others are the rules that are no jumps to a chain of ours.
func (o Own) others(rules []Rule, c Chain) []Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool { return o.has(Jump{Chain: c, Rule: r}.To()) })
}

// sortJumps adds the jumps in a base chain to the state. One behind rules of
// other programs is as good as at the head, unless these can keep packets from
// it. It reports whether such a rule stands before one of ours.
func (o Own) sortJumps(s *State, c Chain, t *table, stays bool) (displaced bool) {
	kept, seen := false, map[string]bool{} // kept: packets may not come here
	for _, r := range t.chains[c.Name] {
		j := Jump{Chain: c, Rule: r}
		switch ours := o.has(j.To()); {
		case !ours:
			kept = kept || t.decides(r, seen)
			continue
		case (!kept || stays) && !slices.Contains(s.Jumps, j):
			s.Jumps = append(s.Jumps, j)
		default:
			s.Stray = append(s.Stray, j)
		}
		last := slices.Contains(o.Jumps, Jump{Chain: c, Rule: r, Last: true})
		if kept && stays && !last && !slices.Contains(s.Contested, c) {
			s.Contested = append(s.Contested, c)
		}
		displaced = displaced || kept && !last
	}
	return displaced
}
