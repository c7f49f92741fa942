//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Foreign is an action of another program on the node: writes to marks at one hook, or a
// rule that accepts early.
type Foreign struct {
	Name string
	// Interfere writes marks at a hook; nil for rules.
	At        trace.Point
	Interfere func(trace.Point, *uint32, *uint32)
	// Rules changes the node; nil for marks.
	Rules func(*trace.Node) *trace.Node
}

// markWrites are writes that real programs make.
var markWrites = []struct {
	name string
	do   func(mark, connmark *uint32)
}{
	{"sets 0x100000/0xfff00000 (Calico's Felix)", func(m, _ *uint32) { *m = *m&^0xfff00000 | 0x100000 }},
	{"sets bit 0x80 (AWS VPC CNI, Cilium)", func(m, _ *uint32) { *m |= 0x80 }},
	{"overwrites the whole mark with 0x80", func(m, _ *uint32) { *m = 0x80 }},
	{"overwrites the whole mark with 0", func(m, _ *uint32) { *m = 0 }},
	{"overwrites the whole connection mark with 0x80", func(_, c *uint32) { *c = 0x80 }},
	{"restores the whole mark from the connection", func(m, c *uint32) { *m = *c }},
}

// baseChains are the chains in which other programs may have rules.
var baseChains = []struct {
	table nat.Table
	chain string
}{
	{nat.Raw, "PREROUTING"}, {nat.Raw, "OUTPUT"},
	{nat.Mangle, "PREROUTING"}, {nat.Mangle, "INPUT"}, {nat.Mangle, "FORWARD"}, {nat.Mangle, "OUTPUT"}, {nat.Mangle, "POSTROUTING"},
	{nat.NAT, "PREROUTING"}, {nat.NAT, "OUTPUT"}, {nat.NAT, "POSTROUTING"},
	{nat.Filter, "INPUT"}, {nat.Filter, "FORWARD"}, {nat.Filter, "OUTPUT"},
}

// Foreigns returns every write at every hook, and a rule that accepts everything, at the
// head and after our jumps, in every base chain.
func Foreigns(points []trace.Point) []Foreign {
	var out []Foreign
	for _, at := range points {
		for _, w := range markWrites {
			out = append(out, Foreign{
				Name: fmt.Sprintf("%s: a program %s", at, w.name), At: at,
				Interfere: func(p trace.Point, mark, connmark *uint32) {
					if p == at {
						w.do(mark, connmark)
					}
				},
			})
		}
	}
	for _, c := range baseChains {
		for _, head := range []bool{true, false} {
			where := map[bool]string{true: "the head", false: "the end"}[head]
			out = append(out, Foreign{
				Name: fmt.Sprintf("a rule at %s of %s %s accepts everything", where, c.table, c.chain),
				Rules: func(n *trace.Node) *trace.Node {
					return withChain(n, c.table, c.chain, func(rules []nat.Rule) []nat.Rule {
						if head {
							return slices.Insert(rules, 0, "-j ACCEPT")
						}
						return append(rules, "-j ACCEPT")
					})
				},
			})
		}
	}
	return out
}

// Points returns the hooks that packets of the classes pass. It also records which classes
// pass each of them, and which of their connections are bound to an interface.
func (s *Subject) Points() []trace.Point {
	all := map[trace.Point]bool{}
	s.passes, s.bound = make([]map[trace.Point]bool, len(s.Classes)), make([]bool, len(s.Classes))
	e := trace.Evaluator{Quiet: true}
	for i, c := range s.Classes {
		s.passes[i] = map[trace.Point]bool{}
		if !s.disturbable(i) {
			continue
		}
		e.Interfere = func(p trace.Point, _, connmark *uint32) {
			all[p], s.passes[i][p] = true, true
			s.bound[i] = s.bound[i] || *connmark&s.Scenario.Config.SNAT.Mark != 0
		}
		e.Explain(s.Node, c.Question)
	}
	return slices.SortedFunc(maps.Keys(all), func(a, b trace.Point) int { return strings.Compare(a.String(), b.String()) })
}

// CheckForeign evaluates every class beside another program. The result must be right, or no
// worse than kube-proxy's.
func (s *Subject) CheckForeign(f Foreign) (failures []Failure, judged int) {
	node, peer := s.Node, s.Peer
	if f.Rules != nil {
		node, peer = f.Rules(node), f.Rules(peer)
	}
	s.evaluator.Interfere = f.Interfere
	defer func() { s.evaluator.Interfere = nil }()
	for i, c := range s.Classes {
		if !s.disturbable(i) || f.Interfere != nil && !s.passes[i][f.At] {
			continue
		}
		judged++
		x := s.evaluator.Explain(node, c.Question)
		what := cmp.Or(cannotJudge(&x), s.Oracle.Judge(c, &x, s.Wants[i]))
		if what == "" || s.asPeer(i, &x, s.undisturbed(i)) {
			continue
		}
		disturbed := s.evaluator.Explain(peer, c.Question)
		if s.asPeer(i, &x, &disturbed) {
			continue
		}
		failures = append(failures, Failure{
			Subject: s.String(), Class: c, Got: what, Want: s.Wants[i], When: f.Name,
			Path: s.path(node, c, f.Interfere), Ours: Summary(&x), Peer: Summary(&disturbed), Bound: s.bound[i],
		})
	}
	return failures, judged
}

// disturbable reports whether the oracle requires a result of a class, and the class has it
// without other programs.
func (s *Subject) disturbable(i int) bool {
	if s.right == nil {
		s.right = make([]bool, len(s.Classes))
		e := trace.Evaluator{Quiet: true}
		for i, c := range s.Classes {
			if slices.Contains(s.Wants[i].Fates, MayAny) {
				continue
			}
			x := e.Explain(s.Node, c.Question)
			s.right[i] = len(x.Doubts) == 0 && s.Oracle.Judge(c, &x, s.Wants[i]) == ""
		}
	}
	return s.right[i]
}

func (s *Subject) undisturbed(i int) *trace.Explanation {
	if s.peers == nil {
		s.peers = make([]*trace.Explanation, len(s.Classes))
	}
	if s.peers[i] == nil {
		e := trace.Evaluator{Quiet: true}
		x := e.Explain(s.Peer, s.Classes[i].Question)
		s.peers[i] = &x
	}
	return s.peers[i]
}

// asPeer reports whether the result of a class equals kube-proxy's. If kube-proxy does not
// serve the class, other results without service count as equal, except that a packet for a
// Service reaches a process of the node. A result in doubt equals none.
func (s *Subject) asPeer(i int, x, peer *trace.Explanation) bool {
	if len(x.Doubts)+len(peer.Doubts) > 0 {
		return false
	}
	ours, theirs := fateOf(x), fateOf(peer)
	switch {
	case ours != MustAnswer && theirs != MustAnswer:
		return ours == theirs || ours != MustReach || s.Classes[i].target.svc == nil
	case ours != theirs:
		return false
	}
	seen := map[string]string{}
	for _, r := range peer.RealServers {
		seen[r.RealServer] = r.SeenSource
	}
	for _, r := range x.RealServers {
		as, has := seen[r.RealServer]
		if r.Weight > 0 && (!has || as != r.SeenSource && !(s.isNode(as) && s.isNode(r.SeenSource))) {
			return false
		}
	}
	return len(x.RealServers) == len(peer.RealServers)
}

func (s *Subject) isNode(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && s.Oracle.nodes[a]
}
