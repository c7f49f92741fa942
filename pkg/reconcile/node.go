package reconcile

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// nodeSections is the desired and the cached state that only the node owns, with the sections
// that compare them. It writes through kernel.
type nodeSections struct {
	*serviceTables
	kernel Kernel

	input nodeInput
	// planned is what the plan of the node was computed from last; see plan.Relevant.
	planned plan.Node
	node    nodeState
	cached  cachedState // the node's state in the kernel

	kubeProxyErr  error                      // why kube-proxy's nftables tables could not be read last
	sectionWrites int                        // number of writes that changed the cached state
	staleRoutes   map[routing.Route]struct{} // routes of an earlier configuration
	possibleJumps []nat.Jump                 // see possibleJumps
	markUses      []nat.MarkUse              // iptables rules of other programs that use marks
	translations  []nat.SourceTranslation    // iptables rules of other programs that translate sources
	nativeMarks   []nft.MarkUse              // nftables rules of other programs that do either
	nativeErr     error                      // why nativeMarks could not be read last
	seen          map[ip.Family]nat.State    // the rules as last observed
}

// cachedState is the cached state of the sections.
type cachedState struct {
	link    bool
	rules   map[routing.Rule]struct{}
	routes  map[routing.Route]struct{} // those that claim no VIP; see plan.NodePlan.Routes
	sysctls sysctl.State
	nat     map[ip.Family]nat.State

	loopback  nft.Loopback
	kubeProxy nft.KubeProxy
	leftovers leftovers
}

// forgetParameters forgets the kernel parameters of new interfaces: an earlier one may have had
// the same name, and the parameters that it had are gone. It reports whether any was known.
func (c *cachedState) forgetParameters(before, after []routing.Link) bool {
	known := len(c.sysctls)
	for i := range after {
		link := &after[i]
		at, found := slices.BinarySearchFunc(before, link.Index, func(l routing.Link, index int) int { return cmp.Compare(l.Index, index) })
		if found && before[at].Name == link.Name {
			continue
		}
		for _, family := range ip.Families {
			of := sysctl.LinkKey(family, link.Name, "")
			maps.DeleteFunc(c.sysctls, func(key, _ string) bool { return strings.HasPrefix(key, of) })
		}
	}
	return len(c.sysctls) < known
}

// forgetGateways forgets the routes of each table and family without a default route. The kernel
// deletes a family's routes over an interface that is set down or, for IPv4, loses its last address,
// without a message. It reports whether any was known.
func (c *cachedState) forgetGateways(defaults []routing.Route) bool {
	known := len(c.routes)
	maps.DeleteFunc(c.routes, func(route routing.Route, _ struct{}) bool {
		return !slices.ContainsFunc(defaults, func(d routing.Route) bool { return d.Family == route.Family && d.Table == route.Table })
	})
	return len(c.routes) < known
}

func newNodeSections(t *serviceTables, kernel Kernel) *nodeSections {
	return &nodeSections{
		serviceTables: t,
		kernel:        kernel,
		node:          nodeState{own: ownedState{owner: nodeOwner}},
		cached:        cachedState{rules: map[routing.Rule]struct{}{}, routes: map[routing.Route]struct{}{}, sysctls: sysctl.State{}, nat: map[ip.Family]nat.State{}},
	}
}

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
// has been programmed, and ForeignMarks, Translations and Refuses, which the Reconciler reads.
//
// changed are the facts that differ from those before. SetNode returns the Services whose desired
// state depends on one of them; Set must be called for these again.
func (r *Reconciler) SetNode(n plan.Node, changed plan.Deps) (affected []types.NamespacedName) {
	n.Bound, n.Uses, n.Demanding, n.Started = r.input.Bound, r.input.Uses, r.input.Demanding, r.input.Started
	n.ForeignMarks, n.Translations, n.Refuses = r.input.ForeignMarks, r.input.Translations, r.input.Refuses
	if r.input.known {
		parameters := r.cached.forgetParameters(r.input.Inventory.Links, n.Inventory.Links)
		gateways := r.cached.forgetGateways(n.Inventory.Defaults)
		r.node.dirty = r.node.dirty || parameters || gateways
	}
	r.input = nodeInput{Node: n, known: true, stale: true}
	if changed == 0 {
		return nil // the start of a pod, for example, must not cost time for each Service
	}
	for o := range r.owned.All() {
		if o.deps.AffectedBy(changed) {
			affected = append(affected, o.owner.Name)
		}
	}
	return affected
}

// planNode computes the desired state of the node if what it depends on has changed: what is
// known of the node, or the sets in use. It reports whether the desired state has changed.
func (r *Reconciler) planNode() bool {
	in := &r.input
	if !in.known || !in.stale && maps.Equal(r.sets.uses, in.Uses) {
		return false
	}
	in.stale, in.warnings, in.Uses = false, nil, r.sets.uses
	// A pod that starts rarely changes the plan, and computing it is most of what its start costs here.
	relevant := plan.Relevant(r.cfg, &in.Node)
	if reflect.DeepEqual(relevant, r.planned) {
		return false
	}
	r.planned = relevant
	desired := plan.ForNode(r.cfg, &in.Node)
	r.possibleJumps = possibleJumps(r.cfg, in.Node)
	in.Bound = plan.MergeBindings(in.Bound, desired.Bound)
	if reflect.DeepEqual(desired, r.node.NodePlan) {
		return false
	}
	r.setNode(desired)
	return true
}

// possibleJumps returns the jumps that a node has if all its sets are in use. An observation needs
// them before the sets in use are known, to report which jumps other programs' rules affect.
func possibleJumps(cfg *plan.Config, n plan.Node) []nat.Jump {
	n.Uses = nil
	return plan.ForNode(cfg, &n).NAT.Jumps
}

// nodeWarnings returns what cannot work on this node or conflicts with another program, as
// plan.Warnings does.
func (ns *nodeSections) nodeWarnings() []string {
	if in := &ns.input; in.known && in.warnings == nil {
		foreign := plan.Foreign{Marks: ns.markUses, Native: ns.nativeMarks, Sysctls: ns.cached.sysctls, Rules: ns.seen, Unseen: ns.unseen()}
		in.warnings = append([]string{}, plan.Warnings(ns.cfg, &in.Node, &ns.node.NodePlan, foreign)...)
	}
	return ns.input.warnings
}

// setNode replaces the desired state of the node.
func (r *Reconciler) setNode(desired plan.NodePlan) {
	if !slices.Equal(desired.Watched, r.node.Watched) {
		r.compareSoon(time.Now(), extent{}) // their values are read with the rest of the kernel
	}
	if r.pruning { // flows survive a restart
		r.flows.addRerouted(r.node.Members, desired.Members)
	}
	own := r.node.own
	r.setMembers(&own, desired.Members)
	r.node = nodeState{NodePlan: desired, dirty: true, sets: map[string]ipset.Set{}, own: own}
	for _, s := range desired.Sets {
		r.node.sets[s.Name] = s
	}
}

// Concerns returns a function that reports whether a changed chain may contain rules of ours, on any
// node. The function may be called concurrently.
func Concerns(cfg *plan.Config) func(nat.Chain) bool {
	bare := plan.ForNode(cfg, &plan.Node{})
	own := ownedRules(&bare, nil)
	return func(c nat.Chain) bool { return own.Concerns(c) || c.Table == nft.Table }
}

// flushNode reconciles the sections, each before those that depend on it: rules match sets,
// and a mark has no effect before its policy rule exists. The policy rules of an earlier
// configuration stay as long as its chains, which set the marks. The chains wait while others' rules
// serve; see stage. In stage beside, those of mangle wait only until a Service is known; see mangle.
func (f *flush) flushNode() {
	before := len(f.problems)
	f.flushAll(f.ns.sysctls(), f.ns.link(), f.ns.setSection(), f.ns.gatewaysToAdd(), f.ns.rulesToAdd())
	f.ns.kernel.Routing.Guard(f.ns.node.Rules)
	f.flushAll(f.ns.loopback())
	f.detectCurrentRules()
	if s := f.ns.stage(); s.othersServe() {
		if f.t.owned.Len() > 0 && s == beside {
			f.flushAll(f.ns.mangle()...)
		}
	} else {
		f.members.add() // those that the rules need: the node's own and, after holding, all
		f.vips.claimAgain(f.ns.staleRoutes)
		if s == adding {
			// A killed process may have left placeholder rules, which drop packets that need
			// rules of table mangle. The placeholders stay until the mangle rules are written.
			f.flushAll(f.ns.mangle()...)
		}
		f.flushAll(f.ns.chains()...)
		f.t.rulesCurrent = true // from now on the rules in the kernel are the plan's
		f.flushAll(f.ns.staleRules(), f.ns.staleGateways())
	}
	f.nodeFailed = len(f.problems) > before
	f.ns.node.dirty = f.nodeFailed || f.hasDeferredRemovals()
}

// deleteReplaced deletes earlier rules, routes and tables once every Service is served without them.
func (f *flush) deleteReplaced() {
	if !f.t.pruning || !f.ns.node.dirty {
		return
	}
	before := len(f.problems)
	f.flushAll(f.ns.routesToDelete(), f.ns.staleRules(), f.ns.staleGateways(), f.ns.kubeProxyTables())
	f.flushAll(f.ns.leftovers()...)
	f.ns.node.dirty = f.nodeFailed || len(f.problems) > before || f.hasDeferredRemovals()
}

// nodeDifferences returns how many of the node's objects are missing or stale.
func (ns *nodeSections) nodeDifferences() int {
	sections := append(ns.chains(), ns.sysctls(), ns.link(), ns.loopback(), ns.setSection(), ns.gatewaysToAdd(), ns.rulesToAdd(), ns.staleRules(), ns.staleGateways(), ns.routesToDelete())
	if ns.pruning {
		sections = append(sections, ns.leftovers()...)
	}
	n := differences(sections)
	for _, set := range ns.sets.list {
		if set.failed {
			n-- // known, and tried again by each flush
		}
	}
	return n
}

func (ns *nodeSections) sysctls() nodeSection {
	return section[sysctl.Change]{
		diff:  func() []sysctl.Change { return sysctl.Diff(ns.cached.sysctls, ns.node.Sysctls) },
		write: ns.kernel.writeSysctls,
		done:  perChange(func(c sysctl.Change) { ns.cached.sysctls[c.Key] = c.Value }),
	}
}

func (ns *nodeSections) link() nodeSection {
	return section[routing.Change]{
		diff: func() []routing.Change {
			if ns.cached.link {
				return nil
			}
			return []routing.Change{{Op: routing.AddLink}}
		},
		write: ns.kernel.writeRouting,
		done:  perChange(func(routing.Change) { ns.cached.link = true }),
	}
}

// setSection creates missing sets, and destroys temporary sets that an earlier process left
// when it ended while it resized a set.
func (ns *nodeSections) setSection() nodeSection {
	return section[ipset.Change]{diff: ns.diffSets, write: ns.kernel.writeSets, done: ns.setsWritten}
}

func (ns *nodeSections) diffSets() []ipset.Change {
	var changes []ipset.Change
	for _, s := range ns.node.Sets {
		if !ns.sets.get(s.Name).exists {
			changes = append(changes, ipset.Change{Op: ipset.CreateSet, Set: s})
		}
	}
	for _, left := range ns.sets.list {
		if _, wanted := ns.node.sets[left.name]; left.exists && !wanted {
			changes = append(changes, ipset.Change{Op: ipset.DestroySet, Set: left.set})
		}
	}
	return changes
}

// setsWritten updates the cached state after sets were created or destroyed.
func (ns *nodeSections) setsWritten(changes []ipset.Change, failures []ipset.Failure) {
	succeeded(changes, failures, func(i int) {
		c := changes[i]
		if c.Op == ipset.DestroySet {
			ns.members.clearCachedSet(c.Set.Name)
			return
		}
		ns.members.setCachedSet(c.Set)
	}, func(i int, _ error) {
		if changes[i].Op == ipset.CreateSet {
			ns.sets.get(changes[i].Set.Name).failed = true
			if isDemand(changes[i].Set.Name) {
				ns.sets.demand(changes[i].Set.Name) // no rule can add members
			}
		}
	})
}

// rulesToAdd are the missing policy rules.
func (ns *nodeSections) rulesToAdd() nodeSection {
	return ns.policyRules(routing.AddRule, func() []routing.Rule {
		return slices.DeleteFunc(slices.Clone(ns.node.Rules), func(rule routing.Rule) bool { _, there := ns.cached.rules[rule]; return there })
	})
}

// staleRules are the policy rules that are not desired. Those that still serve stay for now.
func (ns *nodeSections) staleRules() nodeSection {
	return ns.policyRules(routing.DeleteRule, func() []routing.Rule {
		return slices.DeleteFunc(slices.Collect(maps.Keys(ns.cached.rules)), func(rule routing.Rule) bool {
			return slices.Contains(ns.node.Rules, rule) || ns.stillServes(rule)
		})
	})
}

// gatewaysToAdd are the missing routes of gateways. They precede the policy rules that look up
// their tables.
func (ns *nodeSections) gatewaysToAdd() nodeSection {
	return ns.routes(routing.AddRoute, func() []routing.Route {
		return slices.DeleteFunc(slices.Clone(ns.node.Routes), func(route routing.Route) bool { _, there := ns.cached.routes[route]; return there })
	}, func(route routing.Route) {
		maps.DeleteFunc(ns.cached.routes, func(o routing.Route, _ struct{}) bool { return o.Key() == route.Key() })
		ns.cached.routes[route] = struct{}{}
	})
}

// staleGateways are the routes of gateways that are not desired.
func (ns *nodeSections) staleGateways() nodeSection {
	return ns.routes(routing.DeleteRoute, func() []routing.Route {
		stale := slices.DeleteFunc(slices.Collect(maps.Keys(ns.cached.routes)), func(route routing.Route) bool { return slices.Contains(ns.node.Routes, route) })
		slices.SortFunc(stale, func(a, b routing.Route) int { return cmp.Compare(a.String(), b.String()) })
		return stale
	}, func(route routing.Route) { delete(ns.cached.routes, route) })
}

// routes is a section of routes that are added or deleted.
func (ns *nodeSections) routes(op routing.Op, differ func() []routing.Route, done func(routing.Route)) nodeSection {
	return section[routing.Change]{
		diff: func() []routing.Change {
			var changes []routing.Change
			for _, route := range differ() {
				changes = append(changes, routing.Change{Op: op, Route: route})
			}
			return changes
		},
		write: ns.kernel.writeRouting,
		done:  perChange(func(c routing.Change) { done(c.Route) }),
	}
}

func (ns *nodeSections) policyRules(op routing.Op, differ func() []routing.Rule) nodeSection {
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
		write: ns.kernel.writeRouting,
		done: perChange(func(c routing.Change) {
			if op == routing.AddRule {
				ns.cached.rules[c.Rule] = struct{}{}
			} else {
				delete(ns.cached.rules, c.Rule)
			}
		}),
	}
}

// loopback is the nftables table for node ports on the loopback address. It precedes the rules
// that set the marks it matches.
func (ns *nodeSections) loopback() nodeSection {
	return section[nft.LoopbackChange]{
		diff: func() []nft.LoopbackChange {
			if ns.kernel.Loopback == nil {
				return nil
			}
			return nft.DiffLoopback(ns.cached.loopback, ns.node.Loopback)
		},
		write: ns.kernel.writeLoopback,
		done:  whole[nft.LoopbackChange](func() { ns.cached.loopback = ns.node.Loopback }),
	}
}

// chains are the rules of iptables, a section for each family.
func (ns *nodeSections) chains() []nodeSection {
	var sections []nodeSection
	for family, k := range ns.kernel.NAT {
		want := ofFamily(ns.node.NAT, family)
		sections = append(sections, ns.natSection(k,
			func() []nat.Change { return nat.Diff(ns.cached.nat[family], want) },
			func() {
				ns.flows.addReplaced(ns.cached.nat[family], want, ns.input.Inventory.Links)
				ns.cached.nat[family] = nat.After(ns.cached.nat[family], want)
			}))
	}
	return sections
}

// mangle writes only the chains of table mangle, and deletes none. They do not conflict with
// rules of kube-proxy that still serve, and the virtual servers, which are written next, need
// them: under externalTrafficPolicy Local they separate internal from external clients. They are
// written only once a Service is known. Until then the earlier rules serve alone, and need their
// own mangle chains, whose marks they read.
func (ns *nodeSections) mangle() []nodeSection {
	var sections []nodeSection
	for family, k := range ns.kernel.NAT {
		want := ofTable(ofFamily(ns.node.NAT, family), nat.Mangle)
		if len(ns.staleRoutes) > 0 {
			// An earlier configuration's mark leads to its VIPs. The chains that set it stay
			// until all VIPs have routes for the mark of this one.
			maps.DeleteFunc(want.Chains, func(c nat.Chain, _ []nat.Rule) bool { return ns.cached.nat[family].Chains[c] != nil })
		}
		sections = append(sections, ns.natSection(k,
			func() []nat.Change {
				return slices.DeleteFunc(nat.Diff(ofTable(ns.cached.nat[family], nat.Mangle), want), func(c nat.Change) bool {
					return c.Op == nat.DeleteChain || c.Op == nat.DeleteJump
				})
			},
			func() { ns.cached.nat[family] = join(ns.cached.nat[family], want) }))
	}
	return sections
}

func (ns *nodeSections) natSection(k NAT, diff func() []nat.Change, done func()) nodeSection {
	return section[nat.Change]{
		diff: diff, done: whole[nat.Change](done),
		write: func(changes []nat.Change) []nat.Failure { return ns.kernel.writeNAT(k, changes) },
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
	out.Overtaken, out.Yielded, out.Unread = s.Overtaken, s.Yielded, s.Unread
	return out
}

// join returns s with the chains of more written into it; the jumps of more come first.
func join(s, more nat.State) nat.State {
	out := nat.State{Chains: map[nat.Chain][]nat.Rule{}, Jumps: slices.Clone(more.Jumps), Misplaced: s.Misplaced, Open: s.Open, Contested: s.Contested, Decided: s.Decided, Overtaken: s.Overtaken, Yielded: s.Yielded, Unread: s.Unread}
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
// earlier version, or kube-proxy, has left. possible are jumps besides those of the plan.
func ownedRules(desired *plan.NodePlan, possible []nat.Jump) nat.Owned {
	o := nat.Owned{
		Prefixes: plan.ReplacedPrefixes, Chains: slices.Clone(desired.Chains),
		Jumps: slices.Concat(desired.NAT.Jumps, slices.DeleteFunc(slices.Clone(possible), func(j nat.Jump) bool { return slices.Contains(desired.NAT.Jumps, j) })),
	}
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
