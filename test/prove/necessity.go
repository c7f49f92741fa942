//go:build prove

package prove

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Need is the evidence that a rule, an edit of it, an order or a set member is needed.
type Need struct {
	Tried, Needed int    // copies, in all subjects and environments
	By            string // a class that needs it
	Reached       bool   // some packet takes another path through the rules, or is changed otherwise, with the same result
	Costs         bool   // some packet is matched against more rules or conditions, with the same result
}

// contradicts returns why the kind of reason of an exception is wrong, or "".
func (n *Need) contradicts(e *Exception) string {
	switch {
	case e.Why == "performance" && !n.Costs:
		return "no packet is matched against more rules or conditions"
	case e.Why == "equivalent" && !n.Reached:
		return "no packet reaches the rule"
	case (e.Why == "no class" || e.Why == "excluded") && n.Reached:
		return "a packet reaches the rule"
	}
	return ""
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

// needsOther reports whether some class needs another member of the set of a member.
func (y *Necessity) needsOther(member string) bool {
	setOf := func(key string) string {
		_, set, _ := strings.Cut(key, " in ")
		set, _, _ = strings.Cut(set, " of ")
		return set
	}
	for key, n := range y.Members {
		if n.Needed > 0 && setOf(key) == setOf(member) {
			return true
		}
	}
	return false
}

// need returns the entry of a key, and whether there is nothing to try: it is known to be needed, or
// new where only known ones are tried.
func (y *Necessity) need(m map[string]*Need, key string, known bool) (n *Need, shown bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if m[key] == nil && known {
		return nil, true
	}
	if m[key] == nil {
		m[key] = &Need{}
	}
	return m[key], m[key].Needed > 0
}

// note records a try.
func (y *Necessity) note(n *Need, e effect) {
	y.mu.Lock()
	defer y.mu.Unlock()
	n.Tried++
	n.Reached, n.Costs = n.Reached || e.reached, n.Costs || e.costs
	if e.by != "" {
		n.Needed++
		n.By = cmp.Or(n.By, e.by)
	}
}

// costs reports whether a try has shown that packets are matched against more rules or conditions.
func (y *Necessity) costs(n *Need) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	return n.Costs
}

// effect is what a change of a node does to the probes that may notice it.
type effect struct {
	by             string // a probe whose result differs, or ""
	reached, costs bool   // see Need
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

// matches records what the probes of a subject matched in an environment.
type matches struct {
	*Subject
	probes  []probe
	e       trace.Evaluator
	env     string
	known   bool // only what other environments have tried is tried
	node    *trace.Node
	before  []outcome // by probe
	places  hits[place]
	nears   hits[near]
	members hits[member]
	some    []int // probes that take different paths
	ids     map[place]uint16
	passed  []place // by the probe that is evaluated
}

// outcome is the result of a probe.
type outcome struct {
	result     string // "" if it is in doubt
	path       string // the rules that matched
	conditions int    // and rules that the packets were matched against
}

// evaluate follows a probe through a node.
func (m *matches) evaluate(n *trace.Node, i int) outcome {
	m.passed = m.passed[:0]
	conditions := m.e.Evaluated
	out := outcome{result: m.probes[i].follow(&m.e, n)}
	out.conditions = m.e.Evaluated - conditions
	path := make([]byte, 0, 2*len(m.passed))
	for _, at := range m.passed {
		id, ok := m.ids[at]
		if !ok {
			id = uint16(len(m.ids))
			m.ids[at] = id
		}
		path = binary.BigEndian.AppendUint16(path, id)
		if out.result != "" && limitsSegments(n, at) {
			out.result += ", segments limited"
		}
	}
	out.path = string(path)
	return out
}

// limitsSegments reports whether a rule limits the size of a connection's segments.
func limitsSegments(n *trace.Node, at place) bool {
	return at.table == nat.Mangle && strings.Contains(string(n.Ruleset[at.table].Chains[at.chain][at.index]), "-j TCPMSS ")
}

// shows returns the effect of a change of the node on the given probes.
func (m *matches) shows(changed *trace.Node, probes ...[]int) (out effect) {
	for _, i := range slices.Concat(probes...) {
		x, before := m.evaluate(changed, i), m.before[i]
		if x.result == "" || before.result == "" {
			continue
		}
		if x.result != before.result {
			out.by = fmt.Sprintf("%s, %s: %s", m.Subject, m.env, m.probes[i])
			return out
		}
		out.reached = out.reached || x.path != before.path
		out.costs = out.costs || x.conditions > before.conditions
	}
	return out
}

// Check removes and edits each rule, removes each set member, and swaps neighboring
// rules, in every environment. It skips changes that have already shown a need.
func (y *Necessity) Check(s *Subject) error {
	var all sync.WaitGroup
	check := func(env string, node *trace.Node, probes []probe, known bool) {
		if node == nil {
			return // it does not apply
		}
		all.Go(func() {
			m := s.match(env, node, probes)
			m.known = known
			for table, contents := range m.node.Ruleset {
				for chain, rules := range contents.Chains {
					y.chain(m, place{table, chain, 0}, rules)
				}
			}
			y.members(m)
		})
	}
	probes := s.probes()
	for _, env := range Environments {
		check(env.Name, env.change(s.Node), probes, false)
	}
	all.Wait()
	open := s.openConnections()
	left, err := s.afterEndpointsLeft()
	if err != nil {
		return err
	}
	check("the endpoints have left, connections are open", left, open, true)
	check("the address of the primary interface is absent, connections are open", s.withoutAddress(), slices.Concat(probes, open), true)
	all.Wait()
	return nil
}

func (y *Necessity) chain(m *matches, at place, rules []nat.Rule) {
	for index, rule := range rules {
		if at.index = index; !ours(at.chain, rule) {
			continue
		}
		y.rule(m, at, rule)
		if (m.env == Environments[0].Name || m.known) && index+1 < len(rules) && ours(at.chain, rules[index+1]) {
			y.order(m, at, rule, rules[index+1])
		}
	}
}

// rule removes a rule, and tries all edits of it.
func (y *Necessity) rule(m *matches, at place, rule nat.Rule) {
	text := fmt.Sprintf("%s -A %s %s", at.table, at.chain, m.normal(rule))
	if n, shown := y.need(y.Rules, text, m.known); !shown {
		without := withChain(m.node, at.table, at.chain, func(r []nat.Rule) []nat.Rule { return slices.Delete(r, at.index, at.index+1) })
		y.note(n, m.shows(without, m.places[at]))
	}
	for _, e := range edits(rule) {
		n, shown := y.need(y.Edits, text+": "+m.normalText(e.what), m.known)
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
		effect := m.shows(edited, m.places[at], close)
		if effect.by == "" && !effect.costs && !y.costs(n) {
			effect.costs = m.shows(edited, m.some).costs
		}
		effect.reached = effect.reached || e.condition < 0 && len(m.places[at]) > 0
		y.note(n, effect)
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
		if !m.known {
			y.Apart++ // only one environment counts
		}
		return
	}
	n, shown := y.need(y.Orders, fmt.Sprintf("%s -A %s %s, then %s", at.table, at.chain, m.normal(first), m.normal(second)), m.known)
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
		if m.probes[i].follow(&e, without); is {
			return true
		}
	}
	return false
}

// match evaluates all probes, and records what each matched. Of probes that take the same path, it
// records one for each rule, condition and member.
func (s *Subject) match(env string, n *trace.Node, probes []probe) *matches {
	m := &matches{
		Subject: s, probes: probes, env: env, node: n, before: make([]outcome, len(probes)),
		places: hits[place]{}, nears: hits[near]{}, members: hits[member]{}, ids: map[place]uint16{},
	}
	var nears []near
	var members []member
	m.e = trace.Evaluator{
		Quiet:   true,
		Matched: func(t nat.Table, chain string, index int) { m.passed = append(m.passed, place{t, chain, index}) },
		Near: func(t nat.Table, chain string, index, condition int) {
			nears = append(nears, near{place{t, chain, index}, condition})
		},
		Member: func(set string, entry ipset.Entry) { members = append(members, member{set, entry}) },
	}
	paths := map[string]int{}
	nearsOf, membersOf := map[onPath[near]]bool{}, map[onPath[member]]bool{}
	for i := range probes {
		nears, members = nears[:0], members[:0]
		m.before[i] = m.evaluate(n, i)
		name := fmt.Sprintf("%s %s %s %d %s", m.before[i].result, probes[i].In, probes[i].State, probes[i].Protocol, m.before[i].path)
		path, known := paths[name]
		if !known {
			path = len(paths)
			paths[name] = path
			if len(m.some) < 50 && strings.Contains(m.before[i].result, ";") { // through IPVS
				m.some = append(m.some, i)
			}
			for _, at := range m.passed {
				m.places.add(at, i)
			}
		}
		for _, at := range nears {
			addOne(m.nears, nearsOf, path, at, i)
		}
		for _, at := range members {
			addOne(m.members, membersOf, path, at, i)
		}
	}
	m.e.Near, m.e.Member = nil, nil
	return m
}

// onPath is something that a class of a path matched.
type onPath[K comparable] struct {
	path int
	what K
}

// addOne records a probe, unless one of the same path is recorded.
func addOne[K comparable](h hits[K], seen map[onPath[K]]bool, path int, what K, class int) {
	if at := (onPath[K]{path, what}); !seen[at] {
		seen[at] = true
		h.add(what, class)
	}
}

// members removes each member of the family's sets.
func (y *Necessity) members(m *matches) {
	for name, set := range m.node.Sets {
		if strings.HasPrefix(name, "KUBE-6-") != (m.Family.Bits() > 32) && set.Type != ipset.BitmapPort {
			continue
		}
		general := strings.Replace(name, "KUBE-6-", "KUBE-", 1)
		if len(set.Entries) > 0 && !m.known {
			unmatched, _ := y.need(y.Members, "any member in "+general+", which no rule matches", false)
			used := ""
			if m.usesSet(name) {
				used = m.String()
			}
			y.note(unmatched, effect{by: used})
		}
		if !m.usesSet(name) {
			continue
		}
		for e := range set.Entries {
			n, shown := y.need(y.Members, fmt.Sprintf("%s in %s of %s", e, general, m.Subject), m.known)
			if shown {
				continue
			}
			without := set
			without.Entries = maps.Clone(set.Entries)
			delete(without.Entries, e)
			changed := *m.node
			changed.Sets = maps.Clone(m.node.Sets)
			changed.Sets[name] = without
			by := m.shows(&changed, m.members[member{name, e}])
			by.by = cmp.Or(by.by, m.showsAlike(&changed, name, e))
			y.note(n, by)
		}
	}
}

// usesSet reports whether a rule matches a set.
func (m *matches) usesSet(name string) bool {
	for _, contents := range m.node.Ruleset {
		for _, rules := range contents.Chains {
			if slices.ContainsFunc(rules, func(r nat.Rule) bool { return strings.Contains(string(r), "-set "+name+" ") }) {
				return true
			}
		}
	}
	return false
}

// showsAlike tests another member of the set instead: members that nothing distinguishes
// share one class.
func (m *matches) showsAlike(changed *trace.Node, set string, e ipset.Entry) string {
	for other, probes := range m.members {
		if other.set != set {
			continue
		}
		for _, i := range probes {
			if m.probes[i].open != nil || m.probes[i].answered {
				continue
			}
			q := m.probes[i].Question
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
				return fmt.Sprintf("%s, %s: as %s", m.Subject, m.env, m.probes[i])
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
