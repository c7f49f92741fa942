package apply

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/loopback"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// nodePart is the wanted node-wide part, and whether it is to be compared
// with the kernel.
type nodePart struct {
	plan.NodePart
	dirty bool
	sets  map[string]ipset.Set
}

// SetNode makes a part the wanted one for the node.
func (a *Applier) SetNode(part plan.NodePart) {
	a.clientsRerouted(a.node.Members, part.Members)
	setAll(&a.members, nodeOwner, a.node.Members, part.Members, unmarked)
	a.node = nodePart{NodePart: part, dirty: true, sets: map[string]ipset.Set{}}
	for _, s := range part.Sets {
		a.node.sets[s.Name] = s
	}
	o := own(&part)
	a.rules.Store(&o)
}

// Concerns tells whether a change of a chain may be one of what SetNode was given.
// It may be called while other methods run.
func (a *Applier) Concerns(c nat.Chain) bool {
	own := a.rules.Load()
	return own != nil && (own.Concerns(c) || a.kernel.Loopback != nil && c.Table == loopback.Table)
}

func (a *Applier) setNamed(name string) ipset.Set {
	if s, ok := a.node.sets[name]; ok {
		return s
	}
	return ipset.Set{Name: name}
}

// flushNode brings the node-wide part up, each step before those that need
// it: rules match sets, and a mark is looked up only once its rule is there.
func (f *flush) flushNode() {
	if !f.node.dirty {
		return
	}
	before := len(f.problems)
	f.flushSysctls()
	f.flushLink()
	f.flushSets()
	f.flushRules(routing.AddRule)
	f.kernel.Routing.Guard(f.node.Rules)
	f.flushLoopback()
	f.findCurrent()
	if f.rulesServe() {
		f.flushMangle()
	} else {
		f.flushNAT()
		f.current = true // what stands from now on is ours, and may grow
	}
	f.flushRules(routing.DeleteRule)
	f.deleteStrays()
	f.removeKubeProxysTables()
	f.removeLeftovers()
	f.node.dirty = len(f.problems) > before || f.replacesLater()
}

func (f *flush) flushSysctls() {
	settle(sysctl.Diff(f.have.sysctls, f.node.Sysctls), f.kernel.Sysctl.Apply,
		func(c sysctl.Change) { f.have.sysctls[c.Key] = c.Value },
		func(_ sysctl.Change, err error) { f.fail(nil, err) })
}

func (f *flush) flushLink() {
	if f.have.link {
		return
	}
	settle([]routing.Change{{Op: routing.AddLink}}, f.kernel.Routing.Apply,
		func(routing.Change) { f.have.link = true },
		func(_ routing.Change, err error) { f.fail(nil, err) })
}

// flushSets creates the sets that are missing, and takes away what an earlier
// process has left of growing one.
func (f *flush) flushSets() {
	var changes []ipset.Change
	for _, s := range f.node.Sets {
		if _, there := f.have.sets[s.Name]; !there {
			changes = append(changes, ipset.Change{Op: ipset.CreateSet, Set: s})
		}
	}
	for name, left := range f.have.sets {
		if _, wanted := f.node.sets[name]; !wanted {
			changes = append(changes, ipset.Change{Op: ipset.DestroySet, Set: left.Set})
		}
	}
	settle(changes, f.kernel.IPSet.Apply, func(c ipset.Change) {
		if c.Op == ipset.DestroySet {
			delete(f.have.sets, c.Set.Name)
			return
		}
		f.have.sets[c.Set.Name] = ipset.Contents{Set: c.Set, Entries: map[ipset.Entry]uint32{}}
		f.foundSet(c.Set.Name)
	}, func(c ipset.Change, err error) {
		f.fail(nil, err)
		if c.Op == ipset.CreateSet {
			f.lost[c.Set.Name] = true
		}
	})
}

// foundSet has the members of a set written that could not be created before.
func (a *Applier) foundSet(name string) {
	if !a.lost[name] {
		return
	}
	delete(a.lost, name)
	for m := range a.members.stuck {
		if m.Set == name {
			a.members.mark(m)
		}
	}
}

// flushRules adds policy rules that are missing, or deletes those that are
// not wanted.
func (f *flush) flushRules(op routing.Op) {
	want := map[routing.Rule]struct{}{}
	for _, r := range f.node.Rules {
		want[r] = struct{}{}
	}
	from, in := want, f.have.rules
	if op == routing.DeleteRule {
		from, in = f.have.rules, want
	}
	var changes []routing.Change
	for r := range from {
		if _, both := in[r]; !both && !(op == routing.DeleteRule && f.leadsToStrays(r)) {
			changes = append(changes, routing.Change{Op: op, Rule: r})
		}
	}
	// The kernel keeps rules of one priority in the order in which they came.
	slices.SortFunc(changes, func(a, b routing.Change) int { return cmp.Compare(a.String(), b.String()) })
	settle(changes, f.kernel.Routing.Apply, func(c routing.Change) {
		if op == routing.AddRule {
			f.have.rules[c.Rule] = struct{}{}
		} else {
			delete(f.have.rules, c.Rule)
		}
	}, func(_ routing.Change, err error) { f.fail(nil, err) })
}

// flushLoopback comes before the rules that mark what it is for.
func (f *flush) flushLoopback() {
	if f.kernel.Loopback == nil {
		return
	}
	want := f.node.Loopback
	failures := f.kernel.Loopback.Apply(loopback.Diff(f.have.loopback, want))
	for _, failure := range failures {
		f.fail(nil, failure)
	}
	if len(failures) == 0 {
		f.have.loopback = want
	}
}

// flushNAT rewrites the rules that differ. The members that they need at once
// are the node's own. After a refusal it is not known what stands; the
// observation that follows an error tells.
func (f *flush) flushNAT() {
	f.addMembers()
	for family, k := range f.kernel.NAT {
		want := ofFamily(f.node.NAT, family)
		changes := nat.Diff(f.have.nat[family], want)
		if len(changes) == 0 {
			continue
		}
		failures := k.Apply(changes)
		for _, failure := range failures {
			f.fail(nil, failure)
		}
		if len(failures) == 0 {
			f.sourcesReplaced(f.have.nat[family], want)
			f.have.nat[family] = want
		}
	}
}

// flushMangle writes the chains of table mangle alone, and takes none away. They
// do not stand in the way of rules that serve, and are needed as soon as a virtual
// server has all endpoints: under externalTrafficPolicy Local they lead who comes
// from outside to those of this node.
func (f *flush) flushMangle() {
	for family, k := range f.kernel.NAT {
		have := f.have.nat[family]
		want := ofTable(ofFamily(f.node.NAT, family), nat.Mangle)
		changes := slices.DeleteFunc(nat.Diff(ofTable(have, nat.Mangle), want), func(c nat.Change) bool {
			return c.Op == nat.DeleteChain || c.Op == nat.DeleteJump
		})
		if len(changes) == 0 {
			continue
		}
		failures := k.Apply(changes)
		for _, failure := range failures {
			f.fail(nil, failure)
		}
		if len(failures) == 0 {
			f.have.nat[family] = join(have, want)
		}
	}
}

func ofTable(s nat.State, table nat.Table) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}}
	for c, rules := range s.Chains {
		if c.Table == table {
			out.Chains[c] = rules
		}
	}
	of := func(jumps []nat.Jump) []nat.Jump {
		return slices.DeleteFunc(slices.Clone(jumps), func(j nat.Jump) bool { return j.Chain.Table != table })
	}
	out.Jumps, out.Stray = of(s.Jumps), of(s.Stray)
	return out
}

// join is a state with another written into it, whose jumps then come first.
func join(s, more nat.State) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}, Jumps: slices.Clone(more.Jumps), Stray: s.Stray}
	maps.Copy(out.Chains, s.Chains)
	maps.Copy(out.Chains, more.Chains)
	for _, j := range s.Jumps {
		if !slices.Contains(out.Jumps, j) {
			out.Jumps = append(out.Jumps, j)
		}
	}
	return out
}

// own says which chains are ours: those that the plan may write, and those that
// an earlier version, or kube-proxy, has left.
func own(part *plan.NodePart) nat.Own {
	o := nat.Own{Prefixes: append([]string{"KUBE-IPVS-"}, iptablesModes...), Chains: slices.Clone(part.Chains), Jumps: part.NAT.Jumps}
	for c := range part.NAT.Chains {
		if !slices.Contains(o.Chains, c) {
			o.Chains = append(o.Chains, c)
		}
	}
	return o
}

func ofFamily(s nat.State, family ip.Family) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}}
	for c, rules := range s.Chains {
		if c.Family == family {
			out.Chains[c] = rules
		}
	}
	for _, j := range s.Jumps {
		if j.Chain.Family == family {
			out.Jumps = append(out.Jumps, j)
		}
	}
	return out
}
