//go:build e2e

package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// iptablesRule is a rule in iptables-save syntax.
type iptablesRule struct {
	table, chain string
	number       int    // position in its chain, from 1
	text         string // what follows "-A CHAIN "
}

// variant returns the name of the figures without the rule. It omits comments, because
// several rules have the same one.
func (r iptablesRule) variant() string {
	words := strings.Split(r.text, `"`)
	for i := 1; i < len(words); i += 2 {
		words[i] = "…"
	}
	text := strings.ReplaceAll(strings.Join(words, ""), "-m comment --comment … ", "")
	return fmt.Sprintf("without %s %s %s", r.table, r.chain, text)
}

var baseChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// iptablesRules returns the rules of base chains, or of all chains.
func (b *testbed) iptablesRules(all bool) []iptablesRule {
	var rules []iptablesRule
	var table string
	numbers := map[string]int{}
	for line := range strings.Lines(b.node.Exec("iptables-save")) {
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
			rules = append(rules, iptablesRule{table, chain, numbers[chain], text})
		}
	}
	return rules
}

// without calls a function while a rule is removed.
func (b *testbed) without(r iptablesRule, do func()) {
	head := "iptables -w -t " + r.table
	b.node.Exec("sh", "-c", fmt.Sprintf("%s -D %s %d", head, r.chain, r.number))
	do()
	b.node.Exec("sh", "-c", fmt.Sprintf("%s -I %s %d %s", head, r.chain, r.number, r.text))
}

// ablation measures the subject without each of its rules, one at a time, and then while
// it removes more and more of them.
func (c *counting) ablation() {
	if c.subject.program == nil {
		return
	}
	how := os.Getenv("INSTRUCTIONS_ABLATION")
	c.figures.Drop(func(f Figure) bool { return f.Subject == c.subject.name && f.World == c.world.name && isAblation(f) })
	c.measure("", c.paths())
	if how != "tables" {
		for _, r := range c.iptablesRules(how == "rules") {
			c.without(r, func() { c.measure(r.variant(), c.paths()) })
		}
		// Shows how much the figures drift during this measurement.
		c.measure("without nothing, again", c.paths())
	}
	// The second route lookup of replies. The measured exchanges do not need it.
	const reroute = "/proc/sys/net/ipv4/vs/snat_reroute"
	before := strings.TrimSpace(c.node.Exec("cat", reroute))
	c.node.Exec("sh", "-c", "echo 0 >"+reroute)
	c.measure(withoutPrefix+"snat_reroute", c.paths())
	c.node.Exec("sh", "-c", "echo "+before+" >"+reroute)
	without := "without"
	for _, part := range []struct{ name, command string }{
		{"rules in mangle", "iptables -w -t mangle -F"},
		{"in raw", "iptables -w -t raw -F"},
		{"in filter", "iptables -w -t filter -F"},
		{"in nat", "iptables -w -t nat -F"},
		{"base chains", "nft flush ruleset"},
		{"policy rules", "ip rule show | grep -v -e '^0:' -e '^32766:' -e '^32767:' | cut -d : -f 1 | while read p; do ip rule del pref $p; done"},
		{"kernel parameters", "cd /proc/sys/net/ipv4/vs; echo 1 >snat_reroute; for f in conn_reuse_mode expire_nodest_conn expire_quiescent_template sloppy_tcp; do echo 0 >$f; done"},
	} {
		c.node.Exec("sh", "-c", part.command)
		without += ", " + part.name
		c.measure(strings.Replace(without, "without, ", withoutPrefix, 1), c.paths())
	}
}

// change is a modification of a node that costs or saves instructions.
type change struct {
	name     string
	subjects []string
	do, undo []string // commands
	check    func(*counting)
}

var changes = slices.Concat(untrackedChanges, parameterChanges)

var parameterChanges = []change{
	{name: "net.ipv4.vs.snat_reroute=0", subjects: []string{floorName, KubeIPVS},
		do: []string{"echo 0 >/proc/sys/net/ipv4/vs/snat_reroute"}, undo: []string{"echo 1 >/proc/sys/net/ipv4/vs/snat_reroute"}},
	{name: "net.ipv4.vs.run_estimation=0", subjects: []string{floorName, KubeIPVS},
		do: []string{"echo 0 >/proc/sys/net/ipv4/vs/run_estimation"}, undo: []string{"echo 1 >/proc/sys/net/ipv4/vs/run_estimation"}},
	baseChain("raw PREROUTING", "prerouting", "raw"), baseChain("raw OUTPUT", "output", "raw"),
	baseChain("mangle PREROUTING", "prerouting", "mangle"), baseChain("mangle INPUT", "input", "mangle"),
	baseChain("mangle FORWARD", "forward", "mangle"), baseChain("mangle OUTPUT", "output", "mangle"),
	baseChain("mangle POSTROUTING", "postrouting", "mangle"),
	baseChain("filter INPUT", "input", "filter"), baseChain("filter FORWARD", "forward", "filter"), baseChain("filter OUTPUT", "output", "filter"),
	baseChain("nat PREROUTING", "prerouting", "dstnat"), baseChain("nat OUTPUT", "output", "-100"),
	ruleInInput("-m set ! --match-set ablation dst", "a set match in filter INPUT"),
	ruleInInput("-m mark --mark 0x8000/0x8000", "a mark match in filter INPUT"),
	ruleInInput("-m conntrack ! --ctstate RELATED,ESTABLISHED", "a conntrack match in filter INPUT"),
	// This is last because a network namespace that once had a policy rule looks up
	// routes by rules from then on (fib_has_custom_rules in net/ipv4/fib_rules.c).
	{name: "a policy rule by mark", subjects: []string{Direct, floorName},
		do: []string{"ip rule add pref 99 fwmark 0x1/0x1 lookup 80080"}, undo: []string{"ip rule del pref 99"}},
	{name: "the same, deleted again", subjects: []string{Direct, floorName}},
}

// baseChain returns a change that adds an empty base chain, as iptables would.
func baseChain(name, hook, priority string) change {
	kind := "filter"
	if strings.HasPrefix(name, "nat ") {
		kind = "nat"
	}
	if name == "mangle OUTPUT" {
		kind = "route"
	}
	return change{
		name: "an empty base chain, " + name, subjects: []string{floorName},
		do:   []string{"nft add table ip ablation", fmt.Sprintf("nft 'add chain ip ablation x { type %s hook %s priority %s; }'", kind, hook, priority)},
		undo: []string{"nft delete table ip ablation"},
	}
}

// ruleInInput returns a change that adds a rule, with its base chain, against which every
// packet to a VIP is matched.
func ruleInInput(match, name string) change {
	return change{
		name: name + ", with its base chain", subjects: []string{floorName},
		do:   []string{"ipset create -exist ablation hash:ip,port", "iptables -w -A INPUT " + strings.ReplaceAll(match, "ablation dst", "ablation dst,dst") + " -j ACCEPT"},
		undo: []string{"nft delete table ip filter"},
	}
}

// variants measures the subject again with each change.
func (c *counting) variants() {
	c.measure("", c.paths())
	for _, change := range changes {
		if !slices.Contains(change.subjects, c.subject.name) || !chosenChange(change.name) {
			continue
		}
		for _, command := range change.do {
			c.node.Exec("sh", "-c", command)
		}
		c.measure(change.name, c.paths())
		if change.check != nil {
			change.check(c)
		}
		for _, command := range change.undo {
			c.node.Exec("sh", "-c", command)
		}
	}
}

// chosenChange reports whether INSTRUCTIONS_VARIANTS, "1" or the beginning of names, selects a
// change.
func chosenChange(name string) bool {
	which := os.Getenv("INSTRUCTIONS_VARIANTS")
	return which == "1" || strings.HasPrefix(name, which)
}

// hairpin reports whether the endpoint reaches itself by the cluster IP.
func (c *counting) hairpin() {
	p := clusterIPPath
	p.name, p.from = "a pod that reaches itself", fromServer
	_, err := c.instructions(p, workloads[0], false)
	fmt.Printf("instructions: %s, %s: %v\n", c.subject.name, p.name, err)
}
