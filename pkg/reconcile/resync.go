package reconcile

import (
	"maps"
	"net/netip"
	"slices"
	"time"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// keysPerStep is how many keys one step of a resync compares. Comparing everything takes a
// quarter of a second with tens of thousands of Services; changes must not wait that long.
const keysPerStep = 512

// resync replaces the cached state of what Services own with the observed state, except for keys
// written since the observation began. Then it compares the whole cache with the desired state, and
// makes what differs dirty. Comparing everything, not only what changed, also catches keys that a
// bug in the incremental path missed.
//
// Set and Flush may be called between its steps. Flush repairs what was found so far.
type resync struct {
	t            *serviceTables
	node         *nodeState
	seen         *observation
	stepSize     int
	marksChanged bool // members that map fwmarks to addresses differed from the cache
	differences  int
	passes       []pass // those that have not begun
	items, next  int    // of the current pass: the number of its items, and the next one
	do           func(item int)
}

// pass is a loop of a resync. It lists its items when it begins, and returns their number
// and what to do with one.
type pass func() (items int, do func(item int))

// runResync runs a resync to its end, and returns the number of differences found.
func (r *Reconciler) runResync(o *observation) int {
	d := r.beginResync(o)
	for d.step() {
	}
	return d.end()
}

// beginResync begins a resync. It replaces the cached state of the sections at once; the steps
// do the rest. No observation may begin before resync.end.
func (r *Reconciler) beginResync(o *observation) *resync {
	if o.writes != r.sectionWrites {
		// The observed state of the sections may be older than a write. Changes derived from it may
		// then be wrong, so another comparison follows soon.
		r.compareSoon(time.Now(), extent{rules: true, routing: true})
	}
	r.node.dirty = true
	r.cached.sysctls = o.sysctls
	if o.extent.rules {
		r.takeRules(o)
	}
	d := &resync{t: r.serviceTables, node: &r.node, seen: o, stepSize: keysPerStep}
	if o.extent.routing {
		r.takeRouting(o)
	}
	if o.extent.sets {
		d.takeSets()
	}
	d.passes = d.allPasses()
	d.differences = r.nodeDifferences()
	return d
}

// takeRules caches the observed rules of iptables and nftables.
func (ns *nodeSections) takeRules(o *observation) {
	ns.cached.nat = o.nat
	ns.seen = maps.Clone(o.nat)
	ns.cached.loopback = o.loopback
	if ns.kubeProxyErr = o.kubeProxyErr; o.kubeProxyErr == nil {
		ns.cached.kubeProxy = o.kubeProxy
	}
	ns.cached.leftovers = o.leftovers
	ns.markUses, ns.translations = nil, nil
	for _, family := range ns.cfg.Families {
		ns.markUses = append(ns.markUses, o.nat[family].Marks...)
		ns.translations = append(ns.translations, o.nat[family].Translations...)
		ns.recordRefusedDemands(o.nat[family].Omitted)
	}
	if ns.nativeErr = o.nativeErr; o.nativeErr == nil {
		ns.nativeMarks = o.native
	}
	ns.setForeign()
}

// setForeign updates what the node knows of other programs' rules: ForeignMarks, Translations and
// Refuses.
func (ns *nodeSections) setForeign() {
	marks, translations := map[ip.Family][]uint32{}, map[ip.Family][]netip.Prefix{}
	for _, u := range ns.markUses {
		marks[u.Chain.Family] = append(marks[u.Chain.Family], u.Values()...)
	}
	for _, t := range ns.translations {
		translations[t.Chain.Family] = append(translations[t.Chain.Family], t.From)
	}
	for _, u := range ns.nativeMarks {
		for _, family := range ns.cfg.Families {
			if u.Affects(family) {
				marks[family] = append(marks[family], u.Values...)
				if u.Translates {
					translations[family] = append(translations[family], netip.Prefix{})
				}
			}
		}
	}
	for family, values := range marks {
		slices.Sort(values)
		marks[family] = slices.Compact(values)
	}
	for family, from := range translations {
		slices.SortFunc(from, netip.Prefix.Compare)
		translations[family] = slices.Compact(from)
	}
	if refuses := plan.Refuses(ns.seen, ns.nativeMarks); !maps.Equal(refuses, ns.input.Refuses) {
		ns.input.Refuses, ns.input.stale = refuses, true
	}
	if !maps.EqualFunc(marks, ns.input.ForeignMarks, slices.Equal) || !maps.EqualFunc(translations, ns.input.Translations, slices.Equal) {
		ns.input.ForeignMarks, ns.input.Translations, ns.input.stale = marks, translations, true
	}
}

func (ns *nodeSections) takeRouting(o *observation) {
	ns.cached.link = o.routing.DummyLink
	ns.cached.rules = maps.Clone(o.routing.Rules)
	if ns.cached.rules == nil {
		ns.cached.rules = map[routing.Rule]struct{}{}
	}
	maps.DeleteFunc(ns.cached.rules, func(rule routing.Rule, _ struct{}) bool { return !servesFamily(ns.cfg, rule.Family) })
	ns.vips.wrongScope = o.routing.WrongScope
	ns.staleRoutes, ns.cached.routes = o.staleRoutes, o.gateways
}

// takeSets records which sets exist.
func (d *resync) takeSets() {
	for _, set := range d.t.sets.list {
		if _, there := d.seen.sets[set.name]; set.exists && !there {
			d.t.members.clearCachedSet(set.name)
			d.marksChanged = true // it may be plan.Local, whose members carry the marks
		}
	}
	for name, is := range d.seen.sets {
		d.t.members.setCachedSet(is.Set)
		if isDemand(name) && len(is.Entries) > 0 {
			d.t.sets.demand(name)
		}
	}
}

// step compares the next keys. It returns false when all are compared.
func (d *resync) step() bool {
	for left := d.stepSize; left > 0; left-- {
		for d.next == d.items {
			if len(d.passes) == 0 {
				return false
			}
			d.items, d.do = d.passes[0]()
			d.next, d.passes = 0, d.passes[1:]
		}
		d.do(d.next)
		d.next++
	}
	return true
}

// end ends a resync, complete or not, and returns the number of differences found.
func (d *resync) end() int {
	d.t.servers.endObserve()
	d.t.members.endObserve()
	d.t.vips.endObserve()
	if !d.t.allocator.restored && len(d.passes) == 0 && d.next == d.items {
		d.t.allocator.restore(d.t.marks.used())
	}
	return d.differences
}

// allPasses returns the passes in order. All that was observed is taken before anything is
// compared.
func (d *resync) allPasses() []pass {
	var observed, compared []pass
	if d.seen.extent.sets {
		observed, compared = d.setPasses(), []pass{overTable(&d.t.members.table, d.compareMember)}
	}
	if d.seen.extent.servers {
		observed = append(observed, d.serverPasses()...)
		compared = append(compared, overTable(&d.t.servers.table, d.compareServer))
	}
	if d.seen.extent.routing {
		observed = append(observed, overMap(d.seen.vips, d.takeVIP), overTable(&d.t.vips.table, d.dropMissingVIP))
		compared = append(compared, overTable(&d.t.vips.table, d.compareVIP))
	}
	return append(observed, compared...)
}

// setPasses take the observed sets, and drop from the cache what the kernel does not have. They
// precede serverPasses, because members prove which virtual servers are ours.
func (d *resync) setPasses() []pass {
	var passes []pass
	for name, is := range d.seen.sets {
		if isDemand(name) {
			continue // rules add its members
		}
		passes = append(passes, overMap(is.Entries, func(e ipset.Entry, mark uint32) {
			d.takeMember(plan.Member{Set: name, Entry: e}, mark)
		}))
	}
	return append(passes,
		overTable(&d.t.members.table, d.dropMissingMember),
		func() (int, func(int)) { return 1, func(int) { d.updateMarks() } })
}

// serverPasses take the observed virtual servers, and drop from the cache what the kernel does
// not have.
func (d *resync) serverPasses() []pass {
	return []pass{
		overMap(d.seen.servers, d.takeServer),
		overTable(&d.t.servers.table, d.dropMissingServer),
		overMap(d.t.marks.retired, d.dropMissingRetired),
		overMap(d.t.servers.foreign, d.dropMissingForeign),
	}
}

// overMap returns a pass over the entries of a map, which may change meanwhile.
func overMap[K comparable, V any](m map[K]V, do func(K, V)) pass {
	return func() (int, func(int)) {
		keys := slices.AppendSeq(make([]K, 0, len(m)), maps.Keys(m))
		return len(keys), func(i int) {
			if v, there := m[keys[i]]; there {
				do(keys[i], v)
			}
		}
	}
}

// overTable returns a pass over the records of a table.
func overTable[K comparable, W, C any](t *table[K, W, C], do func(*record[K, W, C])) pass {
	return func() (int, func(int)) {
		list := t.list()
		return len(list), func(i int) { do(list[i]) }
	}
}

func (d *resync) takeMember(full plan.Member, mark uint32) {
	if !d.t.sets.get(full.Set).exists {
		return // destroyed meanwhile
	}
	m := d.t.members.get(d.t.sets.key(full))
	if m.exists && m.cached == mark || m.written {
		return
	}
	d.marksChanged = d.marksChanged || m.cached != mark
	d.t.members.setCached(m, mark)
	d.t.marks.indexDrainEntry(full, true)
}

// dropMissingMember drops a member from the cache that the kernel does not have.
func (d *resync) dropMissingMember(m *member) {
	if !m.exists || m.written {
		return
	}
	full := d.t.sets.member(m.key)
	if _, there := d.seen.sets[full.Set].Entries[full.Entry]; !there {
		d.marksChanged = d.marksChanged || m.cached != 0
		d.t.members.clearCached(m)
	}
}

// updateMarks rebuilds inLocal if any mark changed.
func (d *resync) updateMarks() {
	if d.marksChanged {
		d.t.indexMarks()
	}
}

// compareMember compares the desired and the cached state of a member. It skips the members of a
// set that is not desired, because the set is destroyed as a whole.
func (d *resync) compareMember(m *member) {
	if !m.wanted() {
		if _, known := d.node.sets[d.t.sets.list[m.key.set].name]; !known || !d.t.pruning {
			return
		}
	}
	want, desired := d.t.desiredMember(m)
	compared(d, &d.t.members.table, m, desired != m.exists || desired && m.cached != want)
}

func (d *resync) takeServer(key ipvs.Key, is ipvs.Service) {
	s := d.t.servers.get(key)
	if s.written || s.exists && s.cached.settings == unique.Make(is.VirtualServer) && s.cached.equals(is.RealServers) {
		s.cached.place = is.Place
		return
	}
	if !s.exists {
		if !s.wanted() && !d.t.ours(key) {
			d.t.servers.foreign[key] = is
			d.t.servers.release(s)
			return
		}
		delete(d.t.servers.foreign, key)
	}
	d.t.servers.setCached(s, newCached(is))
}

func (d *resync) dropMissingServer(s *server) {
	if _, there := d.seen.servers[s.key]; !there && !s.written && s.exists {
		d.t.clearCachedServer(s)
	}
}

// dropMissingRetired forgets a retired virtual server that is missing together with its drain
// entry. If only the entry is missing, it is added again.
func (d *resync) dropMissingRetired(fwm, address ipvs.Key) {
	if !d.t.servers.exists(fwm) && !d.t.members.exists(d.t.sets.key(drainEntry(fwm, address))) {
		delete(d.t.marks.retired, fwm)
	}
}

func (d *resync) dropMissingForeign(key ipvs.Key, _ ipvs.Service) {
	if _, there := d.seen.servers[key]; !there {
		delete(d.t.servers.foreign, key)
	}
}

func (d *resync) compareServer(s *server) {
	if !s.wanted() && !d.t.pruning {
		return
	}
	differs := s.exists
	switch want := d.t.desiredIn(s); {
	case want != nil:
		differs = len(d.t.serverChanges(s, want)) > 0
	case d.t.mustRetire(s):
		differs = len(d.t.retireChanges(s)) > 0
	}
	compared(d, &d.t.servers.table, s, differs)
}

// takeVIP caches an observed VIP. A desired address that kube-proxy added, with another scope,
// is treated as missing, so that it is added again.
func (d *resync) takeVIP(key plan.VIP, _ struct{}) {
	v := d.t.vips.get(key)
	if v.written {
		return
	}
	if _, wrong := d.t.vips.wrongScope[key.Addr]; wrong && v.wanted() && key.Claim == plan.ClaimAddress {
		d.t.vips.clearCached(v)
	} else {
		d.t.vips.setCached(v, struct{}{})
	}
}

func (d *resync) dropMissingVIP(v *vipRecord) {
	if _, there := d.seen.vips[v.key]; !there && !v.written {
		d.t.vips.clearCached(v)
	}
}

func (d *resync) compareVIP(v *vipRecord) {
	if desired := d.t.vips.desired(v); desired || d.t.pruning {
		compared(d, &d.t.vips.table, v, desired != v.exists)
	}
}

// compared makes a record dirty or clean, and counts each difference once.
func compared[K comparable, W, C any](d *resync, t *table[K, W, C], r *record[K, W, C], differs bool) {
	known := r.dirty
	if t.compared(r, differs); r.dirty && !known {
		d.differences++
	}
}
