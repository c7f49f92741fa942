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

// state picks what is ours out of a whole ruleset of a family.
func (o Own) state(family ip.Family, rules ruleset) State {
	s := State{Chains: map[Chain][]Rule{}}
	for _, table := range slices.Sorted(maps.Keys(baseChains)) {
		for _, name := range rules[table].names() {
			c := Chain{Family: family, Table: table, Name: name}
			switch {
			case o.has(c):
				s.Chains[c] = rules[table].chains[name]
				continue
			case isBase(name):
				o.sortJumps(&s, c, rules[table].chains[name])
			}
			s.Marks = append(s.Marks, markUses(c, rules[table].chains[name])...)
		}
	}
	return s
}

// sortJumps adds the jumps in a base chain to the state, told apart by where
// they stand.
func (o Own) sortJumps(s *State, c Chain, rules []Rule) {
	head := true
	for _, r := range rules {
		j := Jump{Chain: c, Rule: r}
		switch ours := o.has(j.To()); {
		case !ours:
			head = false
		case head && !slices.Contains(s.Jumps, j):
			s.Jumps = append(s.Jumps, j)
		default:
			s.Stray = append(s.Stray, j)
		}
	}
}
