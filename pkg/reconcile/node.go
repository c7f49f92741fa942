package reconcile

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// nodeState is the desired state of the node. dirty says that the kernel may differ from it.
type nodeState struct {
	plan.NodePlan
	dirty bool
	sets  map[string]ipset.Set
	own   ownedState // the members that the node wants
}

// nodeInput is what the plan of the node is computed from.
type nodeInput struct {
	plan.Node
	known bool // by SetNode
	stale bool // plan again, even if the sets in use are the same
	// warnings are those about the node; nil if they must be computed again. See Status.
	warnings []string
}

// SetNode replaces what is known of the node. The next Load or Flush computes the node's
// desired state from it. It ignores Bound, Uses, Demanding and Started of n, which depend on what
// has been programmed, and ForeignMarks, which the Reconciler reads.
func (r *Reconciler) SetNode(n plan.Node) {
	n.Bound, n.Uses, n.Demanding, n.Started = r.input.Bound, r.input.Uses, r.input.Demanding, r.input.Started
	n.ForeignMarks = r.input.ForeignMarks
	if r.input.known {
		r.forgetParameters(r.input.Inventory.Links, n.Inventory.Links)
		r.forgetGateways(n.Inventory.Defaults)
	}
	r.input = nodeInput{Node: n, known: true, stale: true}
}

// forgetParameters forgets the kernel parameters of new interfaces: an earlier one may have had
// the same name, and the parameters that it had are gone.
func (r *Reconciler) forgetParameters(before, after []routing.Link) {
	for i := range after {
		link := &after[i]
		at, found := slices.BinarySearchFunc(before, link.Index, func(l routing.Link, index int) int { return cmp.Compare(l.Index, index) })
		if found && before[at].Name == link.Name {
			continue
		}
		for _, family := range ip.Families {
			of := sysctl.LinkKey(family, link.Name, "")
			maps.DeleteFunc(r.cached.sysctls, func(key, _ string) bool {
				is := strings.HasPrefix(key, of)
				r.node.dirty = r.node.dirty || is
				return is
			})
		}
	}
}

// forgetGateways forgets the routes of each table and family without a default route. The kernel
// deletes a family's routes over an interface that is set down or, for IPv4, loses its last address,
// without a message.
func (r *Reconciler) forgetGateways(defaults []routing.Route) {
	maps.DeleteFunc(r.cached.routes, func(route routing.Route, _ struct{}) bool {
		missing := !slices.ContainsFunc(defaults, func(d routing.Route) bool { return d.Family == route.Family && d.Table == route.Table })
		r.node.dirty = r.node.dirty || missing
		return missing
	})
}

// planNode computes the desired state of the node if what it depends on has changed: what is
// known of the node, or the sets in use. It reports whether the desired state has changed.
func (r *Reconciler) planNode() bool {
	in := &r.input
	if !in.known || !in.stale && maps.Equal(r.uses, in.Uses) {
		return false
	}
	in.stale, in.warnings, in.Uses = false, nil, r.uses
	desired := plan.ForNode(r.cfg, &in.Node)
	in.Bound = plan.MergeBindings(in.Bound, desired.Bound)
	if reflect.DeepEqual(desired, r.node.NodePlan) {
		return false
	}
	r.setNode(desired)
	return true
}

// nodeWarnings returns what cannot work on this node or conflicts with another program, as
// plan.Warnings does.
func (r *Reconciler) nodeWarnings() []string {
	if in := &r.input; in.known && in.warnings == nil {
		foreign := plan.Foreign{Marks: r.markUses, Sysctls: r.cached.sysctls, Rules: r.seen, Unseen: r.unseen()}
		in.warnings = append([]string{}, plan.Warnings(r.cfg, &in.Node, &r.node.NodePlan, foreign)...)
	}
	return r.input.warnings
}

// setNode replaces the desired state of the node.
func (r *Reconciler) setNode(desired plan.NodePlan) {
	if !slices.Equal(desired.Watched, r.node.Watched) {
		r.compareSoon(time.Now(), extent{}) // their values are read with the rest of the kernel
	}
	r.clientsRerouted(r.node.Members, desired.Members)
	own := r.node.own
	r.setMembers(&own, desired.Members)
	r.node = nodeState{NodePlan: desired, dirty: true, sets: map[string]ipset.Set{}, own: own}
	for _, s := range desired.Sets {
		r.node.sets[s.Name] = s
	}
}

// Concerns returns a function that reports whether a change of a chain may affect the desired
// state of any node. It may be called concurrently.
func Concerns(cfg *plan.Config) func(nat.Chain) bool {
	bare := plan.ForNode(cfg, &plan.Node{})
	own := ownedRules(&bare)
	return func(c nat.Chain) bool { return own.Concerns(c) || c.Table == nft.Table }
}

func (r *Reconciler) setNamed(name string) ipset.Set {
	if s, ok := r.node.sets[name]; ok {
		return s
	}
	return ipset.Set{Name: name}
}

// flushNode reconciles the sections, each before those that depend on it: rules match sets,
// and a mark has no effect before its policy rule exists. The policy rules of an earlier
// configuration stay as long as its chains, which set the marks.
func (f *flush) flushNode() {
	if !f.node.dirty {
		return
	}
	before := len(f.problems)
	f.flushAll(f.sysctls(), f.link(), f.setSection(), f.gatewaysToAdd(), f.rulesToAdd())
	f.kernel.Routing.Guard(f.node.Rules)
	f.flushAll(f.loopback())
	f.detectCurrentRules()
	if f.otherRulesServe() {
		if f.owned.Len() > 0 && !f.waitsForPrune() {
			f.flushAll(f.mangle()...)
		}
	} else {
		f.addMembers() // those that the rules need: the node's own and, after waitsForPrune, all
		f.claimAgain()
		if !f.pruning {
			// A killed process may have left placeholder rules, which drop packets that need
			// rules of table mangle. They stay until those are written.
			f.flushAll(f.mangle()...)
		}
		f.flushAll(f.chains()...)
		f.rulesCurrent = true // from now on the rules in the kernel are the plan's
		f.flushAll(f.staleRules(), f.staleGateways())
	}
	f.nodeFailed = len(f.problems) > before
	f.node.dirty = f.nodeFailed || f.hasDeferredRemovals()
	f.noteOmissions(time.Now())
}

// deleteReplaced deletes what served instead of our rules and claims, now that every Service is
// served without it.
func (f *flush) deleteReplaced() {
	if !f.pruning || !f.node.dirty {
		return
	}
	before := len(f.problems)
	f.flushAll(f.routesToDelete(), f.staleRules(), f.staleGateways(), f.kubeProxyTables())
	f.flushAll(f.leftovers()...)
	f.node.dirty = f.nodeFailed || len(f.problems) > before || f.hasDeferredRemovals()
}

// nodeDifferences returns how many of the node's objects are missing or stale.
func (r *Reconciler) nodeDifferences() int {
	sections := append(r.chains(), r.sysctls(), r.link(), r.loopback(), r.setSection(), r.gatewaysToAdd(), r.rulesToAdd(), r.staleRules(), r.staleGateways(), r.routesToDelete())
	if r.pruning {
		sections = append(sections, r.leftovers()...)
	}
	n := differences(sections)
	for _, set := range r.sets.list {
		if set.failed {
			n-- // known, and tried again by each flush
		}
	}
	return n
}

func (r *Reconciler) sysctls() nodeSection {
	return section[sysctl.Change]{
		diff:  func() []sysctl.Change { return sysctl.Diff(r.cached.sysctls, r.node.Sysctls) },
		write: r.kernel.writeSysctls,
		done:  perChange(func(c sysctl.Change) { r.cached.sysctls[c.Key] = c.Value }),
	}
}

func (r *Reconciler) link() nodeSection {
	return section[routing.Change]{
		diff: func() []routing.Change {
			if r.cached.link {
				return nil
			}
			return []routing.Change{{Op: routing.AddLink}}
		},
		write: r.kernel.writeRouting,
		done:  perChange(func(routing.Change) { r.cached.link = true }),
	}
}

// setSection creates missing sets, and destroys temporary sets that an earlier process left
// when it ended while it resized a set.
func (r *Reconciler) setSection() nodeSection {
	return section[ipset.Change]{diff: r.diffSets, write: r.kernel.writeSets, done: r.setsWritten}
}

func (r *Reconciler) diffSets() []ipset.Change {
	var changes []ipset.Change
	for _, s := range r.node.Sets {
		if !r.sets.get(s.Name).exists {
			changes = append(changes, ipset.Change{Op: ipset.CreateSet, Set: s})
		}
	}
	for _, left := range r.sets.list {
		if _, wanted := r.node.sets[left.name]; left.exists && !wanted {
			changes = append(changes, ipset.Change{Op: ipset.DestroySet, Set: left.set})
		}
	}
	return changes
}

// setsWritten updates the cached state after sets were created or destroyed.
func (r *Reconciler) setsWritten(changes []ipset.Change, failures []ipset.Failure) {
	succeeded(changes, failures, func(i int) {
		c := changes[i]
		if c.Op == ipset.DestroySet {
			r.clearCachedSet(c.Set.Name)
			return
		}
		r.setCachedSet(c.Set)
	}, func(i int, _ error) {
		if changes[i].Op == ipset.CreateSet {
			r.sets.get(changes[i].Set.Name).failed = true
			if isDemand(changes[i].Set.Name) {
				r.demand(changes[i].Set.Name) // no rule can add members
			}
		}
	})
}

// rulesToAdd are the missing policy rules.
func (r *Reconciler) rulesToAdd() nodeSection {
	return r.policyRules(routing.AddRule, func() []routing.Rule {
		return slices.DeleteFunc(slices.Clone(r.node.Rules), func(rule routing.Rule) bool { _, there := r.cached.rules[rule]; return there })
	})
}

// staleRules are the policy rules that are not desired. Those that still serve stay for now.
func (r *Reconciler) staleRules() nodeSection {
	return r.policyRules(routing.DeleteRule, func() []routing.Rule {
		return slices.DeleteFunc(slices.Collect(maps.Keys(r.cached.rules)), func(rule routing.Rule) bool {
			return slices.Contains(r.node.Rules, rule) || r.stillServes(rule)
		})
	})
}

// gatewaysToAdd are the missing routes of gateways. They precede the policy rules that look up
// their tables.
func (r *Reconciler) gatewaysToAdd() nodeSection {
	return r.routes(routing.AddRoute, func() []routing.Route {
		return slices.DeleteFunc(slices.Clone(r.node.Routes), func(route routing.Route) bool { _, there := r.cached.routes[route]; return there })
	}, func(route routing.Route) {
		maps.DeleteFunc(r.cached.routes, func(o routing.Route, _ struct{}) bool { return o.Key() == route.Key() })
		r.cached.routes[route] = struct{}{}
	})
}

// staleGateways are the routes of gateways that are not desired.
func (r *Reconciler) staleGateways() nodeSection {
	return r.routes(routing.DeleteRoute, func() []routing.Route {
		stale := slices.DeleteFunc(slices.Collect(maps.Keys(r.cached.routes)), func(route routing.Route) bool { return slices.Contains(r.node.Routes, route) })
		slices.SortFunc(stale, func(a, b routing.Route) int { return cmp.Compare(a.String(), b.String()) })
		return stale
	}, func(route routing.Route) { delete(r.cached.routes, route) })
}

// routes is a section of routes that are added or deleted.
func (r *Reconciler) routes(op routing.Op, differ func() []routing.Route, done func(routing.Route)) nodeSection {
	return section[routing.Change]{
		diff: func() []routing.Change {
			var changes []routing.Change
			for _, route := range differ() {
				changes = append(changes, routing.Change{Op: op, Route: route})
			}
			return changes
		},
		write: r.kernel.writeRouting,
		done:  perChange(func(c routing.Change) { done(c.Route) }),
	}
}

func (r *Reconciler) policyRules(op routing.Op, differ func() []routing.Rule) nodeSection {
	return section[routing.Change]{
		diff: func() []routing.Change {
			var changes []routing.Change
			for _, rule := range differ() {
				changes = append(changes, routing.Change{Op: op, Rule: rule})
			}
			// The kernel keeps rules of one priority in the order of their addition.
			slices.SortFunc(changes, func(a, b routing.Change) int { return cmp.Compare(a.String(), b.String()) })
			return changes
		},
		write: r.kernel.writeRouting,
		done: perChange(func(c routing.Change) {
			if op == routing.AddRule {
				r.cached.rules[c.Rule] = struct{}{}
			} else {
				delete(r.cached.rules, c.Rule)
			}
		}),
	}
}

// loopback is the nftables table for node ports on the loopback address. It precedes the rules
// that set the marks it matches.
func (r *Reconciler) loopback() nodeSection {
	return section[nft.LoopbackChange]{
		diff: func() []nft.LoopbackChange {
			if r.kernel.Loopback == nil {
				return nil
			}
			return nft.DiffLoopback(r.cached.loopback, r.node.Loopback)
		},
		write: r.kernel.writeLoopback,
		done:  whole[nft.LoopbackChange](func() { r.cached.loopback = r.node.Loopback }),
	}
}

// chains are the rules of iptables, a section for each family.
func (r *Reconciler) chains() []nodeSection {
	var sections []nodeSection
	for family, k := range r.kernel.NAT {
		want := ofFamily(r.node.NAT, family)
		sections = append(sections, r.natSection(k,
			func() []nat.Change { return nat.Diff(r.cached.nat[family], want) },
			func() {
				r.sourcesReplaced(r.cached.nat[family], want)
				r.cached.nat[family] = nat.After(r.cached.nat[family], want)
			}))
	}
	return sections
}

// mangle writes only the chains of table mangle, and deletes none. They do not conflict with
// rules of kube-proxy that still serve, and the virtual servers, which are written next, need
// them: under externalTrafficPolicy Local they separate internal from external clients. They are
// written only once a Service is known. Until then the earlier rules serve alone, and need their
// own mangle chains, whose marks they read.
func (r *Reconciler) mangle() []nodeSection {
	var sections []nodeSection
	for family, k := range r.kernel.NAT {
		want := ofTable(ofFamily(r.node.NAT, family), nat.Mangle)
		if len(r.staleRoutes) > 0 {
			// An earlier configuration's mark leads to its VIPs. The chains that set it stay
			// until all VIPs have routes for the mark of this one.
			maps.DeleteFunc(want.Chains, func(c nat.Chain, _ []nat.Rule) bool { return r.cached.nat[family].Chains[c] != nil })
		}
		sections = append(sections, r.natSection(k,
			func() []nat.Change {
				return slices.DeleteFunc(nat.Diff(ofTable(r.cached.nat[family], nat.Mangle), want), func(c nat.Change) bool {
					return c.Op == nat.DeleteChain || c.Op == nat.DeleteJump
				})
			},
			func() { r.cached.nat[family] = join(r.cached.nat[family], want) }))
	}
	return sections
}

func (r *Reconciler) natSection(k NAT, diff func() []nat.Change, done func()) nodeSection {
	return section[nat.Change]{
		diff: diff, done: whole[nat.Change](done),
		write: func(changes []nat.Change) []nat.Failure { return r.kernel.writeNAT(k, changes) },
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
	out.Jumps, out.Misplaced, out.Contested, out.Decided = of(s.Jumps), of(s.Misplaced), s.Contested, s.Decided
	out.Overtaken, out.Yielded = s.Overtaken, s.Yielded
	return out
}

// join returns s with the chains of more written into it; the jumps of more come first.
func join(s, more nat.State) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}, Jumps: slices.Clone(more.Jumps), Misplaced: s.Misplaced, Open: s.Open, Contested: s.Contested, Decided: s.Decided, Overtaken: s.Overtaken, Yielded: s.Yielded}
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
func ownedRules(desired *plan.NodePlan) nat.Owned {
	o := nat.Owned{Prefixes: append([]string{plan.OwnPrefix}, plan.IPTablesModePrefixes...), Chains: slices.Clone(desired.Chains), Jumps: desired.NAT.Jumps}
	for c := range desired.NAT.Chains {
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
