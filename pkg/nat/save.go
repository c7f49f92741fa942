package nat

import (
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// ruleset holds all tables of a family.
type ruleset map[Table]*table

// table holds a table's chains, including base chains, by name.
type table struct {
	chains   map[string][]Rule
	policies map[string]string // of base chains
}

func newTable() *table {
	return &table{chains: map[string][]Rule{}, policies: map[string]string{}}
}

// names returns the chains in a fixed order. A nil table has none.
func (t *table) names() []string {
	if t == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(t.chains))
}

// parseSave parses the output of iptables-save. Unknown lines and an end within a table
// are errors: a partial ruleset must not be taken for a complete one.
func parseSave(text string) (ruleset, error) {
	rules, unread, err := parsePartly(text)
	if err == nil && len(unread) > 0 {
		err = unread[0].err()
	}
	if err != nil {
		return nil, err
	}
	return rules, nil
}

// parsePartly is like parseSave, but returns the tables that iptables-save cannot list
// instead of an error.
func parsePartly(text string) (ruleset, []Unread, error) {
	p := saveParser{rules: ruleset{}}
	for number, line := range savedLines(text) {
		if err := p.line(strings.TrimSuffix(line, "\r")); err != nil {
			return nil, nil, fmt.Errorf("iptables-save, line %d: %w", number, err)
		}
	}
	if p.table != nil {
		return nil, nil, fmt.Errorf("iptables-save: output ends before the COMMIT of table %s", p.name)
	}
	return p.rules, p.unread, nil
}

// savedLines returns the lines of iptables-save with their numbers, from 1. A rule whose comment
// contains line breaks is one line, with the number of its first: iptables-save prints a
// comment as it is. A rule whose quote never ends is one line as well: the match string prints
// backslashes as they are, also before a quote.
func savedLines(text string) iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		lines := strings.Split(text, "\n")
		for i := 0; i < len(lines); i++ {
			first, line := i, lines[i]
			if strings.HasPrefix(line, "-A ") {
				last := i
				var q quotes
				for q.scan(line); q.quoted && last+1 < len(lines); {
					last++
					q.scan("\n" + lines[last])
				}
				if !q.quoted {
					i, line = last, strings.Join(lines[first:last+1], "\n")
				}
			}
			if !yield(first+1, line) {
				return
			}
		}
	}
}

func (u Unread) err() error {
	return fmt.Errorf("table %s has a rule, written by nft, that iptables cannot read (%s); move such rules to a table with another name", u.Table, u.Why)
}

type saveParser struct {
	rules  ruleset
	name   Table
	table  *table // nil outside tables
	unread []Unread
}

func (p *saveParser) line(line string) error {
	switch {
	case line == "":
		return nil
	case line[0] == '#':
		p.comment(line)
		return nil
	case line[0] == '*':
		return p.begin(Table(line[1:]))
	case p.table == nil:
		return fmt.Errorf("%q is outside of any table", line)
	case line[0] == ':':
		return p.chain(line[1:])
	case strings.HasPrefix(line, "-A "):
		return p.rule(line[len("-A "):])
	case line == "COMMIT":
		p.table = nil
		return nil
	}
	return fmt.Errorf("unexpected line %q", line)
}

// comment evaluates the one comment that matters: iptables-nft prints it instead of a
// table that contains a rule of nft(8) it cannot show, and still exits with 0.
func (p *saveParser) comment(line string) {
	if m := incompatible.FindStringSubmatch(line); m != nil && baseChains[Table(m[1])] != nil {
		p.unread = append(p.unread, Unread{Table: Table(m[1]), Why: strings.TrimPrefix(line, "# ")})
	}
}

var incompatible = regexp.MustCompile("^# Table `(.*)' is incompatible")

func (p *saveParser) begin(name Table) error {
	if p.table != nil {
		return fmt.Errorf("table %s begins inside table %s", name, p.name)
	}
	if name == "" || p.rules[name] != nil {
		return fmt.Errorf("table %q has no name, or appears twice", name)
	}
	p.name, p.table = name, newTable()
	p.rules[name] = p.table
	return nil
}

// chain parses "NAME POLICY [packets:bytes]"; the policy is "-" unless the chain is a
// base chain.
func (p *saveParser) chain(line string) error {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return fmt.Errorf("chain %q, want a name, a policy and counters", line)
	}
	name, policy := fields[0], fields[1]
	if _, ok := p.table.chains[name]; ok {
		return fmt.Errorf("chain %s appears twice", name)
	}
	p.table.chains[name] = nil
	if policy != "-" {
		p.table.policies[name] = policy
	}
	return nil
}

func (p *saveParser) rule(line string) error {
	name, rule, _ := strings.Cut(line, " ")
	rules, ok := p.table.chains[name]
	if !ok {
		return fmt.Errorf("rule of chain %q, which is not declared", name)
	}
	p.table.chains[name] = append(rules, Rule(strings.TrimSpace(rule)))
	return nil
}

// render prints the ruleset as iptables-save does.
func (rs ruleset) render() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(rs)) {
		t := rs[name]
		fmt.Fprintf(&b, "*%s\n", name)
		for _, chain := range t.names() {
			policy := t.policies[chain]
			if policy == "" {
				policy = "-"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", chain, policy)
		}
		for _, chain := range t.names() {
			for _, r := range t.chains[chain] {
				fmt.Fprintln(&b, strings.TrimSuffix("-A "+chain+" "+string(r), " "))
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}
