//go:build prove

package prove

import (
	"cmp"
	"maps"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// TestOnDemand compares rules on demand with rules that are written at once. Each class of
// new connections either has the same result, or is dropped after a placeholder rule has added
// an address to a set, or, under externalTrafficPolicy Local, then gets the node-local endpoints,
// as under kube-proxy. Once the rules are written, it has the same result. While they are
// being written, it has the result from before or from after; in particular, no packet is
// refused.
func TestOnDemand(t *testing.T) {
	demanded := map[plan.SetName]int{}
	for _, s := range scenarios(t, true) {
		for _, f := range s.Config.Families {
			checkDemands(t, s, f, demanded)
		}
	}
	// Node ports of loopback addresses need rules of nftables, which the evaluator does not know.
	for _, set := range []plan.SetName{plan.DemandedVIPs, plan.DemandedInternal} {
		if demanded[set] == 0 {
			t.Errorf("no class adds a member to %s", set)
		}
	}
}

// checkDemands adds the number of added members to demanded, by set.
func checkDemands(t *testing.T, s *Scenario, f ip.Family, demanded map[plan.SetName]int) {
	t.Helper()
	later := s.clone()
	later.Node.OnDemand = true
	want, err := NewSubject(s, f)
	if err != nil {
		t.Fatal(err)
	}
	p, err := NewProduct(later)
	if err != nil {
		t.Fatal(err)
	}
	awaiting, err := p.Subject(f)
	if err != nil {
		t.Fatal(err)
	}
	unmarked := s.clone()
	unmarked.Config.LocalMark = plan.LocalMark{}
	asKubeProxy, err := NewSubject(unmarked, f)
	if err != nil {
		t.Fatal(err)
	}
	classes := map[string]*Class{}
	for _, c := range slices.Concat(want.Classes, awaiting.Classes) {
		if c.State == "" || c.State == trace.New {
			classes[c.String()] = c // others belong to connections, which do not exist yet
		}
	}
	type added struct {
		set   string
		entry ipset.Entry
	}
	adds := map[added]bool{}
	before, after := map[string]string{}, map[string]string{}
	for name, c := range classes {
		var these []added
		e := trace.Evaluator{Quiet: true, Added: func(set string, entry ipset.Entry) { these = append(these, added{set, entry}) }}
		now, then := e.Explain(awaiting.Node, c.Question), e.Explain(want.Node, c.Question)
		before[name], after[name] = Summary(&now), Summary(&then)
		if doubt := cmp.Or(cannotJudge(&now), cannotJudge(&then)); doubt != "" {
			t.Errorf("%s %s: %s: %s", s.Name, f, name, doubt)
		}
		for _, a := range these {
			adds[a] = true
		}
		// A packet with a VIP as its source that leaves the node again was not for this node.
		forwarded := now.Verdict.Outcome == trace.Unserved && then.Verdict.Outcome == trace.Unserved && now.Link == then.Link && want.Oracle.isVIP(c.From)
		if f == ip.IPv6 && c.In != "" && want.Oracle.isVIP(c.From) && len(these) > 0 {
			continue // IPv6 has no reverse-path check; the reply to the first packet stays on the node
		}
		if asks := slices.ContainsFunc(these, func(a added) bool { return a.set == plan.DemandedInternal.In(f) }); asks {
			x := e.Explain(asKubeProxy.Node, c.Question)
			if got := Summary(&x); got == before[name] {
				continue
			}
		}
		if before[name] != after[name] && !forwarded && (now.Verdict.Outcome != trace.Dropped || len(these) == 0) {
			t.Errorf("%s %s: %s\n  awaiting: %s, adds %v\n  at once:  %s\n%s", s.Name, f, name, before[name], these, after[name], awaiting.path(awaiting.Node, c, nil))
		}
	}
	for a := range adds {
		for _, d := range plan.Demands {
			if d.Set.In(f) == a.set {
				demanded[d.Set]++
			}
		}
	}
	if len(adds) == 0 {
		return
	}
	for when, write := range map[string]func(*Product) error{"running": (*Product).Look, "restarted": (*Product).Start} {
		p, err := NewProduct(later)
		if err != nil {
			t.Fatal(err)
		}
		for a := range adds {
			p.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: ipset.Set{Name: a.set, Type: ipset.HashIP, Family: f}, Entry: a.entry}})
		}
		r := &running{Product: p}
		between, _, err := r.watch(f, func() error { return write(p) })
		if err != nil {
			t.Fatal(err)
		}
		end, err := p.Observed(f)
		if err != nil {
			t.Fatal(err)
		}
		e := trace.Evaluator{Quiet: true}
		failed := map[string]bool{}
		for i, n := range append(between, end) {
			for _, name := range slices.Sorted(maps.Keys(classes)) {
				x := e.Explain(n, classes[name].Question)
				if got := Summary(&x); got != after[name] && (i == len(between) || got != before[name]) && !failed[name] {
					failed[name] = true
					t.Errorf("%s %s: %s: %s\n  in state %d of %d: %s\n  before: %s\n  after:  %s", s.Name, f, when, name, i+1, len(between)+1, got, before[name], after[name])
				}
			}
		}
	}
}
