//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Environments are what other rules a node may have, in which ours show what they
// are for. In each the rules of ours stand where they stood.
var Environments = []struct {
	Name   string
	change func(*trace.Node) *trace.Node
}{
	{"no other rules", func(n *trace.Node) *trace.Node { return n }},
	{"policies of DROP", func(n *trace.Node) *trace.Node {
		return withRules(n, nat.Filter, func(c nat.Contents) nat.Contents {
			c.Policies["INPUT"], c.Policies["FORWARD"] = "DROP", "DROP"
			// The proxy writes this jump once a policy drops; see nat.State.Open.
			const accept = nat.Rule(`-m comment --comment "kubernetes service traffic" -j KUBE-IPVS-ACCEPT`)
			if _, written := c.Chains["KUBE-IPVS-ACCEPT"]; written && !slices.Contains(c.Chains["INPUT"], accept) {
				c.Chains["INPUT"] = append(slices.Clone(c.Chains["INPUT"]), accept)
			}
			return c
		})
	}},
	{"hostPorts of every number", func(n *trace.Node) *trace.Node {
		to := "192.0.2.250"
		if n.Family.Bits() > 32 {
			to = "2001:db8::250"
		}
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			n = withChain(n, nat.NAT, chain, func(rules []nat.Rule) []nat.Rule {
				return append(rules, nat.Rule("-m addrtype --dst-type LOCAL -j DNAT --to-destination "+to))
			})
		}
		return n
	}},
	{"another program's masquerading", func(n *trace.Node) *trace.Node {
		return withChain(n, nat.NAT, "POSTROUTING", func(rules []nat.Rule) []nat.Rule { return append(rules, "-j MASQUERADE") })
	}},
	{"marks of others in INPUT", func(n *trace.Node) *trace.Node {
		return withChain(n, nat.Filter, "INPUT", func(rules []nat.Rule) []nat.Rule {
			return append(rules, "-j MARK --set-xmark 0x100000/0xfff00000")
		})
	}},
}

// ruleKey names a rule of ours by its text. Those of several interfaces, families
// or configurations are one.
type ruleKey struct {
	table nat.Table
	chain string
	text  string
}

func (k ruleKey) String() string { return fmt.Sprintf("%s -A %s %s", k.table, k.chain, k.text) }

// Need says how a rule or a set showed that it is needed.
type Need struct {
	Tried, Needed int    // copies, in all subjects
	By            string // a class that needs it
}

// Necessity gathers over subjects.
type Necessity struct {
	Rules   map[ruleKey]*Need
	Sets    map[string]*Need // members by the set's name
	Unused  map[string][]string
	Swaps   int // neighbours that were swapped
	Ordered int // those that some class distinguishes
}

// NewNecessity is empty.
func NewNecessity() *Necessity {
	return &Necessity{Rules: map[ruleKey]*Need{}, Sets: map[string]*Need{}, Unused: map[string][]string{}}
}

// hits are the classes that met a rule or a member.
type hits[K comparable] map[K][]int

func (h hits[K]) add(k K, class int) {
	if list := h[k]; len(list) == 0 || list[len(list)-1] != class {
		h[k] = append(list, class)
	}
}

type place struct {
	table nat.Table
	chain string
	index int
}

type member struct {
	set   string
	entry ipset.Entry
}

// normal makes one text of those of several interfaces and addresses.
func (s *Subject) normal(rule nat.Rule) string {
	words, _ := nat.Words(string(rule))
	for i := 1; i < len(words); i++ {
		switch words[i-1] {
		case "-i", "-o":
			words[i] = "LINK"
		case "-s", "-d":
			words[i] = "PREFIX"
		case "--to-source":
			words[i] = "ADDRESS"
		case "--match-set", "--map-set":
			words[i] = strings.Replace(words[i], "KUBE-6-", "KUBE-", 1)
		}
		words[i] = strings.NewReplacer("ipv6-icmp", "icmp", "icmpv6", "icmp", "icmp6", "icmp").Replace(words[i])
	}
	return strings.Join(words, " ")
}

// ours reports whether a rule is one of ours.
func ours(chain string, rule nat.Rule) bool {
	return strings.HasPrefix(chain, "KUBE-") || strings.Contains(string(rule), "-j KUBE-")
}

// Check removes each rule and each member of the subject, and swaps neighbours, in
// every environment.
func (y *Necessity) Check(s *Subject) {
	for _, env := range Environments {
		y.check(s, env.Name, env.change(s.Node))
	}
}

func (y *Necessity) check(s *Subject, env string, n *trace.Node) {
	before, places, members := s.baseline(n)
	changed := func(m *trace.Node, classes []int) (int, bool) {
		for _, i := range classes {
			x := s.evaluator.Explain(m, s.Classes[i].Question)
			if Summary(&x) != before[i] {
				return i, true
			}
		}
		return 0, false
	}
	for table, contents := range n.Ruleset {
		for chain, rules := range contents.Chains {
			for index, rule := range rules {
				if !ours(chain, rule) {
					continue
				}
				key := ruleKey{table, chain, s.normal(rule)}
				need := y.Rules[key]
				if need == nil {
					need = &Need{}
					y.Rules[key] = need
				}
				need.Tried++
				met := places[place{table, chain, index}]
				without := withChain(n, table, chain, func(r []nat.Rule) []nat.Rule { return slices.Delete(r, index, index+1) })
				if by, is := changed(without, met); is {
					need.Needed++
					need.By = cmp.Or(need.By, fmt.Sprintf("%s, %s: %s", s, env, s.Classes[by]))
				}
				if index+1 < len(rules) && ours(chain, rules[index+1]) && env == Environments[0].Name {
					y.Swaps++
					swapped := withChain(n, table, chain, func(r []nat.Rule) []nat.Rule {
						r[index], r[index+1] = r[index+1], r[index]
						return r
					})
					if _, is := changed(swapped, slices.Concat(met, places[place{table, chain, index + 1}])); is {
						y.Ordered++
					}
				}
			}
		}
	}
	y.members(s, env, n, members, changed)
}

// baseline evaluates all classes, and notes what each met.
func (s *Subject) baseline(n *trace.Node) (before []string, places hits[place], members hits[member]) {
	places, members = hits[place]{}, hits[member]{}
	before = make([]string, len(s.Classes))
	e := trace.Evaluator{Quiet: true}
	for i, c := range s.Classes {
		e.Matched = func(t nat.Table, chain string, index int) { places.add(place{t, chain, index}, i) }
		e.Member = func(set string, entry ipset.Entry) { members.add(member{set, entry}, i) }
		x := e.Explain(n, c.Question)
		before[i] = Summary(&x)
	}
	return before, places, members
}

func (y *Necessity) members(s *Subject, env string, n *trace.Node, met hits[member], changed func(*trace.Node, []int) (int, bool)) {
	for name, set := range n.Sets {
		if strings.HasPrefix(name, "KUBE-6-") != (s.Family.Bits() > 32) && set.Type != ipset.BitmapPort {
			continue
		}
		short := strings.Replace(name, "KUBE-6-", "KUBE-", 1)
		need := y.Sets[short]
		if need == nil {
			need = &Need{}
			y.Sets[short] = need
		}
		for e := range set.Entries {
			if env == Environments[0].Name {
				need.Tried++
			}
			without := set
			without.Entries = maps.Clone(set.Entries)
			delete(without.Entries, e)
			m := *n
			m.Sets = maps.Clone(n.Sets)
			m.Sets[name] = without
			key := fmt.Sprintf("%s %s in %s", s, e, short)
			if by, is := changed(&m, met[member{name, e}]); is {
				if need.By == "" {
					need.By = fmt.Sprintf("%s, %s: %s", s, env, s.Classes[by])
				}
				y.Unused[key] = append(y.Unused[key], env)
			}
		}
	}
}

// Unneeded lists the rules of which no copy is needed anywhere.
func (y *Necessity) Unneeded() []string {
	var out []string
	for key, need := range y.Rules {
		if need.Needed == 0 {
			out = append(out, key.String())
		}
	}
	slices.Sort(out)
	return out
}
