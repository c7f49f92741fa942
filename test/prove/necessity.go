//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Environments are nodes with different foreign rules, in which our rules take effect.
// Our rules keep their positions.
var Environments = []struct {
	Name   string
	change func(*trace.Node) *trace.Node
}{
	{"no other rules", func(n *trace.Node) *trace.Node { return n }},
	{"policies of DROP", func(n *trace.Node) *trace.Node {
		return withRules(n, nat.Filter, func(c nat.Contents) nat.Contents {
			c.Policies["INPUT"], c.Policies["FORWARD"] = "DROP", "DROP"
			// The proxy writes these jumps once a policy drops; see nat.State.Open.
			const health = nat.Rule(`-m comment --comment "kubernetes health check service ports" -j KUBE-NODE-PORT`)
			if _, written := c.Chains["KUBE-NODE-PORT"]; written && !slices.Contains(c.Chains["INPUT"], health) {
				c.Chains["INPUT"] = append(slices.Clone(c.Chains["INPUT"]), health) // after our others
			}
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
	{"marks of others from the start", func(n *trace.Node) *trace.Node {
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			n = withChain(n, nat.Raw, chain, func(rules []nat.Rule) []nat.Rule {
				return slices.Insert(rules, 0, "-j MARK --set-xmark 0x100000/0xfff00000", "-j CONNMARK --set-xmark 0x100000/0xfff00000")
			})
		}
		return n
	}},
	// Without such rules, the node is as in "no other rules", and the environment shows nothing.
	{"our policy rules for marks are missing", func(n *trace.Node) *trace.Node {
		out := *n
		out.Rules = slices.DeleteFunc(slices.Clone(n.Rules), func(r routing.Rule) bool { return r.Own && r.Priority == scenario.DefaultConfig().SNAT.Priority })
		if len(out.Rules) == len(n.Rules) {
			return nil
		}
		return &out
	}},
	{"marks of others in INPUT", func(n *trace.Node) *trace.Node {
		return withChain(n, nat.Filter, "INPUT", func(rules []nat.Rule) []nat.Rule {
			return append(rules, "-j MARK --set-xmark 0x100000/0xfff00000")
		})
	}},
}

// Need is the evidence that a rule, an edit of it, an order or a set member is needed.
type Need struct {
	Tried, Needed int    // copies, in all subjects and environments
	By            string // a class that needs it
}

// Necessity collects evidence from all subjects.
type Necessity struct {
	mu      sync.Mutex
	Rules   map[string]*Need // removed
	Edits   map[string]*Need // narrower, wider or negated conditions, other marks
	Orders  map[string]*Need // swapped neighbors, if some packet matches both
	Members map[string]*Need // removed, by subject
	Apart   int              // neighbors that have the same effect, or that no packet matches both
}

// NewNecessity returns an empty Necessity.
func NewNecessity() *Necessity {
	return &Necessity{Rules: map[string]*Need{}, Edits: map[string]*Need{}, Orders: map[string]*Need{}, Members: map[string]*Need{}}
}

// need returns the entry of a key, and whether it is known to be needed.
func (y *Necessity) need(m map[string]*Need, key string) (n *Need, shown bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if m[key] == nil {
		m[key] = &Need{}
	}
	return m[key], m[key].Needed > 0
}

// note records a try. by is the class whose result changed, or "".
func (y *Necessity) note(n *Need, by string) {
	y.mu.Lock()
	defer y.mu.Unlock()
	n.Tried++
	if by != "" {
		n.Needed++
		n.By = cmp.Or(n.By, by)
	}
}

// hits are the classes that matched a rule or a member.
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

// normal identifies a rule by its text, independent of interfaces, addresses and
// families.
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
		case "--match-set", "--map-set", "--add-set":
			words[i] = strings.Replace(words[i], "KUBE-6-", "KUBE-", 1)
		}
		words[i] = strings.NewReplacer("ipv6-icmp", "icmp", "icmpv6", "icmp", "icmp6", "icmp").Replace(words[i])
	}
	return strings.Join(words, " ")
}

var addressText = regexp.MustCompile(`(-s|-d) [0-9a-f.:/]+`)
var linkText = regexp.MustCompile(`(-i|-o) [^ "]+`)

// normalText does the same for the text of an edit.
func (s *Subject) normalText(what string) string {
	what = addressText.ReplaceAllString(what, "$1 PREFIX")
	what = linkText.ReplaceAllString(what, "$1 LINK")
	return strings.NewReplacer("ipv6-icmp", "icmp", "icmpv6", "icmp", "KUBE-6-", "KUBE-").Replace(what)
}

// ours reports whether a rule is ours.
func ours(chain string, rule nat.Rule) bool {
	return strings.HasPrefix(chain, "KUBE-") || strings.Contains(string(rule), "-j KUBE-")
}

// near is a rule that only one condition prevented from matching.
type near struct {
	place
	condition int
}

// matches records what the classes of a subject matched in an environment.
type matches struct {
	*Subject
	e       trace.Evaluator
	env     string
	node    *trace.Node
	before  []string // summaries, by class
	places  hits[place]
	nears   hits[near]
	members hits[member]
}

// shows returns a class whose result differs on a changed node, or "".
func (m *matches) shows(changed *trace.Node, classes ...[]int) string {
	for _, i := range slices.Concat(classes...) {
		x := m.e.Explain(changed, m.Classes[i].Question)
		if len(x.Doubts) == 0 && Summary(&x) != m.before[i] {
			return fmt.Sprintf("%s, %s: %s", m.Subject, m.env, m.Classes[i])
		}
	}
	return ""
}

// Check removes and edits each rule, removes each set member, and swaps neighboring
// rules, in every environment. It skips changes that have already shown a need.
func (y *Necessity) Check(s *Subject) {
	var all sync.WaitGroup
	s = s.withBound()
	for _, env := range Environments {
		node := env.change(s.Node)
		if node == nil {
			continue // it does not apply
		}
		all.Go(func() {
			m := s.match(env.Name, node)
			for table, contents := range m.node.Ruleset {
				for chain, rules := range contents.Chains {
					y.chain(m, place{table, chain, 0}, rules)
				}
			}
			y.members(m)
		})
	}
	all.Wait()
}

// withBound returns the subject with more classes: connections of the node whose program has
// bound an address of another interface, or a loopback address. No oracle judges them, but a
// rule is needed if it changes their result.
func (s *Subject) withBound() *Subject {
	out := *s
	out.Classes = slices.Clone(s.Classes)
	for _, c := range s.Classes {
		if c.In != "" || c.target.svc == nil {
			continue
		}
		others := 0
		for _, l := range s.Node.Links {
			for _, a := range l.Addresses {
				from := a.Prefix.Addr()
				if ip.Of(from) != s.Family || from == c.From || from.IsLinkLocalUnicast() || others > 0 && !from.IsLoopback() {
					continue
				}
				if !from.IsLoopback() {
					others++
				}
				q := c.Question
				q.From, q.SourceFixed = from, true
				out.Classes = append(out.Classes, &Class{q, c.target})
			}
		}
	}
	return &out
}

func (y *Necessity) chain(m *matches, at place, rules []nat.Rule) {
	for index, rule := range rules {
		if at.index = index; !ours(at.chain, rule) {
			continue
		}
		y.rule(m, at, rule)
		if m.env == Environments[0].Name && index+1 < len(rules) && ours(at.chain, rules[index+1]) {
			y.order(m, at, rule, rules[index+1])
		}
	}
}

// rule removes a rule, and tries all edits of it.
func (y *Necessity) rule(m *matches, at place, rule nat.Rule) {
	text := fmt.Sprintf("%s -A %s %s", at.table, at.chain, m.normal(rule))
	if n, shown := y.need(y.Rules, text); !shown {
		without := withChain(m.node, at.table, at.chain, func(r []nat.Rule) []nat.Rule { return slices.Delete(r, at.index, at.index+1) })
		y.note(n, m.shows(without, m.places[at]))
	}
	for _, e := range edits(rule) {
		n, shown := y.need(y.Edits, text+": "+m.normalText(e.what))
		if shown {
			continue
		}
		var close []int
		if e.condition >= 0 {
			close = m.nears[near{at, e.condition}]
		}
		edited := withChain(m.node, at.table, at.chain, func(r []nat.Rule) []nat.Rule {
			r[at.index] = e.rule
			return r
		})
		y.note(n, m.shows(edited, m.places[at], close))
	}
}

// order swaps a rule with the next one. If no packet matches both, or both have the same
// effect, either order is right.
func (y *Necessity) order(m *matches, at place, first, second nat.Rule) {
	next := at
	next.index++
	_, one := parts(first)
	_, other := parts(second)
	if join(nil, one) == join(nil, other) || !m.both(at, next) {
		y.Apart++ // only one environment is tried
		return
	}
	n, shown := y.need(y.Orders, fmt.Sprintf("%s -A %s %s, then %s", at.table, at.chain, m.normal(first), m.normal(second)))
	if !shown {
		swapped := withChain(m.node, at.table, at.chain, func(r []nat.Rule) []nat.Rule {
			r[at.index], r[next.index] = r[next.index], r[at.index]
			return r
		})
		y.note(n, m.shows(swapped, m.places[at], m.places[next]))
	}
}

// both reports whether some packet that matches a rule would also match the next one.
func (m *matches) both(at, next place) bool {
	without := withChain(m.node, at.table, at.chain, func(r []nat.Rule) []nat.Rule {
		r[at.index] = "-m mark ! --mark 0x0/0x0" // never
		return r
	})
	is := false
	e := trace.Evaluator{Quiet: true, Matched: func(t nat.Table, chain string, index int) { is = is || next == place{t, chain, index} }}
	for _, i := range m.places[at] {
		if e.Explain(without, m.Classes[i].Question); is {
			return true
		}
	}
	return false
}

// match evaluates all classes, and records what each matched.
func (s *Subject) match(env string, n *trace.Node) *matches {
	m := &matches{Subject: s, e: trace.Evaluator{Quiet: true}, env: env, node: n, before: make([]string, len(s.Classes)), places: hits[place]{}, nears: hits[near]{}, members: hits[member]{}}
	e := trace.Evaluator{Quiet: true}
	for i, c := range s.Classes {
		e.Matched = func(t nat.Table, chain string, index int) { m.places.add(place{t, chain, index}, i) }
		e.Near = func(t nat.Table, chain string, index, condition int) {
			m.nears.add(near{place{t, chain, index}, condition}, i)
		}
		e.Member = func(set string, entry ipset.Entry) { m.members.add(member{set, entry}, i) }
		x := e.Explain(n, c.Question)
		m.before[i] = Summary(&x)
	}
	return m
}

// members removes each member of the family's sets.
func (y *Necessity) members(m *matches) {
	for name, set := range m.node.Sets {
		if strings.HasPrefix(name, "KUBE-6-") != (m.Family.Bits() > 32) && set.Type != ipset.BitmapPort {
			continue
		}
		for e := range set.Entries {
			n, shown := y.need(y.Members, fmt.Sprintf("%s in %s of %s", e, strings.Replace(name, "KUBE-6-", "KUBE-", 1), m.Subject))
			if shown {
				continue
			}
			without := set
			without.Entries = maps.Clone(set.Entries)
			delete(without.Entries, e)
			changed := *m.node
			changed.Sets = maps.Clone(m.node.Sets)
			changed.Sets[name] = without
			y.note(n, cmp.Or(m.shows(&changed, m.members[member{name, e}]), m.showsAlike(&changed, name, e)))
		}
	}
}

// showsAlike tests another member of the set instead: members that nothing distinguishes
// share one class.
func (m *matches) showsAlike(changed *trace.Node, set string, e ipset.Entry) string {
	for other, classes := range m.members {
		if other.set != set {
			continue
		}
		for _, i := range classes {
			q := m.Classes[i].Question
			switch {
			case e.Addr.IsValid() && q.To.Addr() != other.entry.Addr, e.Addr2.IsValid() || e.Net.IsValid():
				continue
			case e.Addr.IsValid():
				q.To = netip.AddrPortFrom(e.Addr, q.To.Port())
			}
			if e.Port != 0 {
				q.To = netip.AddrPortFrom(q.To.Addr(), e.Port)
			}
			q.Protocol = cmp.Or(e.Protocol, q.Protocol)
			before, after := m.e.Explain(m.node, q), m.e.Explain(changed, q)
			if Summary(&before) != Summary(&after) {
				return fmt.Sprintf("%s, %s: as %s", m.Subject, m.env, m.Classes[i])
			}
		}
	}
	return ""
}

// Unneeded returns what no class has shown to be needed.
func Unneeded(m map[string]*Need) []string {
	var out []string
	for key, n := range m {
		if n.Needed == 0 {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}
