//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Subject is one kernel with its classes, its oracle, and the same node under
// kube-proxy.
type Subject struct {
	Scenario     *Scenario
	Family       ip.Family
	Node         *trace.Node
	Peer         *trace.Node
	Oracle       *Oracle
	Classes      []*Class
	Wants        []Want
	Combinations int // of atoms, before merging
	evaluator    trace.Evaluator
	peers        []*trace.Explanation // without other programs, by class
	right        []bool               // undisturbed, by class
	passes       []map[trace.Point]bool
	bound        []bool // to an interface by reply routing, by class
}

// NewSubject programs a scenario and enumerates its classes.
func NewSubject(s *Scenario, family ip.Family) (*Subject, error) {
	p, err := NewProduct(s)
	if err != nil {
		return nil, err
	}
	return p.Subject(family)
}

// Subject returns the current state of the kernel as a Subject.
func (p *Product) Subject(family ip.Family) (*Subject, error) {
	s := &Subject{Scenario: p.scenario, Family: family, Oracle: NewOracle(p.scenario, family)}
	s.evaluator.Quiet = true
	var err error
	if s.Node, err = p.Observed(family); err != nil {
		return nil, err
	}
	if s.Peer, err = KubeProxy(p.scenario, family); err != nil {
		return nil, err
	}
	s.Classes, s.Combinations = Classes(s.Node, s.Oracle)
	s.Wants = make([]Want, len(s.Classes))
	for i, c := range s.Classes {
		s.Wants[i] = s.Oracle.Want(c)
	}
	return s, nil
}

func (s *Subject) String() string { return fmt.Sprintf("%s %s", s.Scenario.Name, s.Family) }

// Failure is a class with a wrong result.
type Failure struct {
	Subject string
	Class   *Class
	Got     string
	Want    Want
	Path    string // through the rules
	When    string // what other programs did, or what was written last
	// Beside another program:
	Ours, Peer string // summaries of the results of kube-ipvs and kube-proxy
	Bound      bool   // reply routing binds the connection to an interface
}

func (f Failure) String() string {
	text := fmt.Sprintf("%s: %s\n", f.Subject, f.Class)
	if f.When != "" {
		text += fmt.Sprintf("  when: %s\n", f.When)
	}
	text += fmt.Sprintf("  got:  %s\n  want: %s\n  because %s\n", f.Got, f.Want, f.Want.Sentence)
	if f.Peer != "" {
		text += fmt.Sprintf("  kube-ipvs: %s\n  kube-proxy: %s\n  bound to an interface: %t\n", f.Ours, f.Peer, f.Bound)
	}
	return text
}

// cannotJudge returns the doubts of an evaluation, or "". A result in doubt proves nothing.
func cannotJudge(x *trace.Explanation) string {
	if len(x.Doubts) == 0 {
		return ""
	}
	return "cannot be judged: " + strings.Join(x.Doubts, "; ")
}

// Check evaluates every class.
func (s *Subject) Check() []Failure {
	var out []Failure
	for i, c := range s.Classes {
		x := s.evaluator.Explain(s.Node, c.Question)
		what := cmp.Or(cannotJudge(&x), s.Oracle.Judge(c, &x, s.Wants[i]))
		if !slices.Contains(s.Wants[i].Fates, MayAny) {
			what = cmp.Or(what, leftover(&c.Question, &x))
		}
		if what != "" {
			out = append(out, Failure{Subject: s.String(), Class: c, Got: what, Want: s.Wants[i], Path: s.path(s.Node, c, nil)})
		}
	}
	return out
}

// leftover reports a request that leaves with one of our marks. The mark would route it,
// and a tunnel copies the mark to its own packets, which would be masqueraded as well. A
// pod that reaches itself stays on this node. Table nat, which clears the bit, does not
// see packets that conntrack cannot assign.
func leftover(c *trace.Question, x *trace.Explanation) string {
	if c.State == trace.Invalid {
		return ""
	}
	for _, r := range x.RealServers {
		if r.Mark&ownMarks != 0 && r.LeavesBy != "lo" && netip.MustParseAddrPort(r.RealServer).Addr() != c.From {
			return fmt.Sprintf("to %s: leaves with the mark %#x", r.RealServer, r.Mark)
		}
	}
	return ""
}

// ownMarks are our marks that have no meaning beyond the node.
var ownMarks = func() uint32 {
	cfg := scenario.DefaultConfig()
	return cfg.MasqueradeMark | cfg.LocalMark.Value | cfg.VIPs.Mark
}()

// path formats a class's path through the rules.
func (s *Subject) path(n *trace.Node, c *Class, interfere func(trace.Point, *uint32, *uint32)) string {
	e := trace.Evaluator{Interfere: interfere}
	x := e.Explain(n, c.Question)
	var b strings.Builder
	_ = x.Write(&b)
	return b.String()
}

// Summary returns the part of a result that is visible outside the node, and to tunnels.
func Summary(x *trace.Explanation) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", x.Verdict.Outcome, x.Link)
	if x.SeenSource != "" {
		b.WriteString(" as " + x.SeenSource)
	}
	for i := range x.RealServers {
		r := &x.RealServers[i]
		fmt.Fprintf(&b, "; %s %d by %s as %s back %s: %s", r.RealServer, r.Weight, r.LeavesBy, r.SeenSource, r.ReplyLeavesBy, r.Verdict.Outcome)
		if r.Mark&ownMarks != 0 {
			b.WriteString(" marked")
		}
	}
	return b.String()
}

// withRules returns a node with other rules in one table.
func withRules(n *trace.Node, table nat.Table, change func(nat.Contents) nat.Contents) *trace.Node {
	out := *n
	out.Ruleset = maps.Clone(n.Ruleset)
	contents := n.Ruleset[table]
	contents.Chains, contents.Policies = maps.Clone(contents.Chains), maps.Clone(contents.Policies)
	out.Ruleset[table] = change(contents)
	return &out
}

// withChain returns a node with other rules in one chain.
func withChain(n *trace.Node, table nat.Table, chain string, change func([]nat.Rule) []nat.Rule) *trace.Node {
	return withRules(n, table, func(c nat.Contents) nat.Contents {
		if c.Chains == nil {
			c.Chains = map[string][]nat.Rule{}
		}
		c.Chains[chain] = change(slices.Clone(c.Chains[chain]))
		return c
	})
}
