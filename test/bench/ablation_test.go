//go:build e2e

package bench

import (
	"fmt"
	"slices"
	"strings"
)

// rule is one of iptables' rules, as iptables-save writes it.
type rule struct {
	family, table, chain string
	number               int    // in its chain, from 1
	text                 string // what follows "-A CHAIN "
}

func (r rule) String() string { return fmt.Sprintf("%s %s: %s", r.table, r.chain, r.text) }

var baseChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// iptablesRules returns the rules of base chains, or of all chains.
func (g *ground) iptablesRules(family string, all bool) []rule {
	var rules []rule
	var table string
	numbers := map[string]int{}
	for line := range strings.Lines(g.node.Exec(family + "-save")) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "*"); ok {
			table = name
			clear(numbers)
		}
		text, ok := strings.CutPrefix(line, "-A ")
		if !ok {
			continue
		}
		chain, text, _ := strings.Cut(text, " ")
		numbers[chain]++
		if all || slices.Contains(baseChains, chain) {
			rules = append(rules, rule{family, table, chain, numbers[chain], text})
		}
	}
	return rules
}

// without does something while a rule is not there.
func (g *ground) without(r rule, do func()) {
	head := fmt.Sprintf("%s -w -t %s", r.family, r.table)
	g.node.Exec("sh", "-c", fmt.Sprintf("%s -D %s %d", head, r.chain, r.number))
	do()
	g.node.Exec("sh", "-c", fmt.Sprintf("%s -I %s %d %s", head, r.chain, r.number, r.text))
}

// ablation measures the subject again without each of its rules, one at a time, and
// then without any.
func (g *ground) ablation(name string, all bool, table *instructionTable) {
	for _, r := range g.iptablesRules("iptables", all) {
		g.without(r, func() { g.measureAll(name+" without "+r.String(), false, table) })
	}
	for _, t := range []string{"raw", "mangle", "nat", "filter"} {
		g.node.Exec("iptables", "-w", "-t", t, "-F")
		g.measureAll(name+" without all up to "+t, false, table)
	}
}
