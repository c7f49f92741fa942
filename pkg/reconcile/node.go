package reconcile

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// nodePart is the desired state of the node, and whether it may differ from the kernel.
type nodePart struct {
	plan.NodePlan
	dirty bool
	sets  map[string]ipset.Set
	own   ownedPart // its members
}

// SetNode replaces the desired state of the node.
func (a *Reconciler) SetNode(part plan.NodePlan) {
	a.clientsRerouted(a.node.Members, part.Members)
	own := a.node.own
	a.setMembers(&own, part.Members)
	a.node = nodePart{NodePlan: part, dirty: true, sets: map[string]ipset.Set{}, own: own}
	for _, s := range part.Sets {
		a.node.sets[s.Name] = s
	}
	o := ownedRules(&part)
	a.rules.Store(&o)
}

// Concerns reports whether a change of a chain may affect the node's desired state. It may
// be called concurrently with other methods.
func (a *Reconciler) Concerns(c nat.Chain) bool {
	own := a.rules.Load()
	return own != nil && (own.Concerns(c) || a.kernel.Loopback != nil && c.Table == nft.Table)
}

func (a *Reconciler) setNamed(name string) ipset.Set {
	if s, ok := a.node.sets[name]; ok {
		return s
	}
	return ipset.Set{Name: name}
}

// flushNode reconciles the node-wide state, each step before those that depend on it: rules
// match sets, and a mark has no effect before its policy rule exists.
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
	f.detectCurrentRules()
	if f.otherRulesServe() {
		f.flushMangle()
	} else {
		f.flushNAT()
		f.rulesCurrent = true // from now on the rules in the kernel are the plan's
	}
	f.flushRules(routing.DeleteRule)
	f.deleteStaleRoutes()
	f.removeKubeProxyTables()
	f.removeLeftovers()
	f.node.dirty = len(f.problems) > before || f.hasDeferredRemovals()
}

func (f *flush) flushSysctls() {
	applyChanges(sysctl.Diff(f.cached.sysctls, f.node.Sysctls), f.kernel.writeSysctls,
		func(c sysctl.Change) { f.cached.sysctls[c.Key] = c.Value },
		func(_ sysctl.Change, err error) { f.fail(nil, err) })
}

func (f *flush) flushLink() {
	if f.cached.link {
		return
	}
	applyChanges([]routing.Change{{Op: routing.AddLink}}, f.kernel.writeRouting,
		func(routing.Change) { f.cached.link = true },
		func(_ routing.Change, err error) { f.fail(nil, err) })
}

// flushSets creates missing sets, and destroys temporary sets that an earlier process left
// while it resized a set.
func (f *flush) flushSets() {
	var changes []ipset.Change
	for _, s := range f.node.Sets {
		if !f.sets.get(s.Name).exists {
			changes = append(changes, ipset.Change{Op: ipset.CreateSet, Set: s})
		}
	}
	for _, left := range f.sets.list {
		if _, wanted := f.node.sets[left.name]; left.exists && !wanted {
			changes = append(changes, ipset.Change{Op: ipset.DestroySet, Set: left.set})
		}
	}
	applyChanges(changes, f.kernel.writeSets, func(c ipset.Change) {
		if c.Op == ipset.DestroySet {
			f.loseSet(c.Set.Name)
			return
		}
		set := f.sets.get(c.Set.Name)
		set.set, set.exists = c.Set, true
		f.retryMembersOf(set)
	}, func(c ipset.Change, err error) {
		f.fail(nil, err)
		if c.Op == ipset.CreateSet {
			f.sets.get(c.Set.Name).failed = true
		}
	})
}

// retryMembersOf makes the members of a set dirty that could not be created before.
func (a *Reconciler) retryMembersOf(set *setState) {
	if !set.failed {
		return
	}
	set.failed = false
	for key, m := range a.members.stuck {
		if a.sets.list[key.set] == set {
			a.members.markDirty(m)
		}
	}
}

// flushRules adds missing policy rules, or deletes stale ones.
func (f *flush) flushRules(op routing.Op) {
	want := map[routing.Rule]struct{}{}
	for _, r := range f.node.Rules {
		want[r] = struct{}{}
	}
	from, in := want, f.cached.rules
	if op == routing.DeleteRule {
		from, in = f.cached.rules, want
	}
	var changes []routing.Change
	for r := range from {
		if _, both := in[r]; !both && !(op == routing.DeleteRule && f.leadsToStaleRoutes(r)) {
			changes = append(changes, routing.Change{Op: op, Rule: r})
		}
	}
	// The kernel keeps rules of one priority in the order of their addition.
	slices.SortFunc(changes, func(a, b routing.Change) int { return cmp.Compare(a.String(), b.String()) })
	applyChanges(changes, f.kernel.writeRouting, func(c routing.Change) {
		if op == routing.AddRule {
			f.cached.rules[c.Rule] = struct{}{}
		} else {
			delete(f.cached.rules, c.Rule)
		}
	}, func(_ routing.Change, err error) { f.fail(nil, err) })
}

// flushLoopback runs before the rules that set the marks its table matches.
func (f *flush) flushLoopback() {
	if f.kernel.Loopback == nil {
		return
	}
	want := f.node.Loopback
	failures := f.kernel.writeLoopback(nft.DiffLoopback(f.cached.loopback, want))
	for _, failure := range failures {
		f.fail(nil, failure)
	}
	if len(failures) == 0 {
		f.cached.loopback = want
	}
}

// flushNAT rewrites the rules that differ. It first adds the members they need, which are
// the node's own. After a refusal the state of the rules is unknown; the observation that
// follows an error reads it.
func (f *flush) flushNAT() {
	f.addMembers()
	for family, k := range f.kernel.NAT {
		want := ofFamily(f.node.NAT, family)
		changes := nat.Diff(f.cached.nat[family], want)
		if len(changes) == 0 {
			continue
		}
		failures := f.kernel.writeNAT(k, changes)
		for _, failure := range failures {
			f.fail(nil, failure)
		}
		if len(failures) == 0 {
			f.sourcesReplaced(f.cached.nat[family], want)
			f.cached.nat[family] = nat.After(f.cached.nat[family], want)
		}
	}
}

// flushMangle writes only the chains of table mangle, and deletes none. They do not conflict
// with rules of kube-proxy that still serve. They are needed as soon as a virtual server has
// all endpoints: under externalTrafficPolicy Local they direct external clients to
// node-local endpoints.
func (f *flush) flushMangle() {
	for family, k := range f.kernel.NAT {
		have := f.cached.nat[family]
		want := ofTable(ofFamily(f.node.NAT, family), nat.Mangle)
		changes := slices.DeleteFunc(nat.Diff(ofTable(have, nat.Mangle), want), func(c nat.Change) bool {
			return c.Op == nat.DeleteChain || c.Op == nat.DeleteJump
		})
		if len(changes) == 0 {
			continue
		}
		failures := f.kernel.writeNAT(k, changes)
		for _, failure := range failures {
			f.fail(nil, failure)
		}
		if len(failures) == 0 {
			f.cached.nat[family] = join(have, want)
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
	out.Jumps, out.Misplaced = of(s.Jumps), of(s.Misplaced)
	return out
}

// join returns s with the chains of more written into it; the jumps of more come first.
func join(s, more nat.State) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}, Jumps: slices.Clone(more.Jumps), Misplaced: s.Misplaced, Open: s.Open}
	maps.Copy(out.Chains, s.Chains)
	maps.Copy(out.Chains, more.Chains)
	for _, j := range s.Jumps {
		if !slices.Contains(out.Jumps, j) {
			out.Jumps = append(out.Jumps, j)
		}
	}
	return out
}

// ownedRules returns which chains are ours: those that the plan may write, and those that an
// earlier version, or kube-proxy, has left.
func ownedRules(part *plan.NodePlan) nat.Owned {
	o := nat.Owned{Prefixes: append([]string{"KUBE-IPVS-"}, iptablesModePrefixes...), Chains: slices.Clone(part.Chains), Jumps: part.NAT.Jumps}
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
