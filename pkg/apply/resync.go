package apply

import (
	"iter"
	"maps"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// keysPerStep is how many keys one step of a resync compares. Comparing everything takes a
// quarter of a second with tens of thousands of Services; changes must not wait that long.
const keysPerStep = 512

// Adoption is a resync: it replaces the cached state with the observed state, except for
// keys written since the observation began, and marks what differs from the desired state.
// Set and Flush may be called between its steps, and repair what was found so far.
//
// It first replaces the cached state with the observed state, key by key, then compares the
// whole cache with the desired state. Comparing everything, not only what changed, also
// catches keys that a bug in the incremental path missed.
type Adoption struct {
	*Applier
	seen         *Observation
	stepSize     int
	marksChanged bool // members that map fwmarks to addresses differed from the cache
	differences  int
	next         func() (struct{}, bool)
	stop         func()
}

// Adopt runs a resync to its end, and returns the number of differences found.
func (a *Applier) Adopt(o *Observation) int {
	d := a.BeginAdopt(o)
	for d.Step() {
	}
	return d.End()
}

// BeginAdopt replaces the node's cached state at once, and leaves the rest to the steps of
// the returned Adoption. No observation may begin before Adoption.End.
func (a *Applier) BeginAdopt(o *Observation) *Adoption {
	a.node.dirty = true
	a.cached.sysctls = o.sysctls
	if o.parts.Rules {
		a.takeRules(o)
	}
	d := &Adoption{Applier: a, seen: o, stepSize: keysPerStep}
	if o.parts.State {
		a.takeRouting(o)
		d.takeSets()
	}
	d.differences = a.nodeDifferences()
	d.next, d.stop = iter.Pull(d.steps)
	return d
}

// takeRules replaces the part of the cached state that iptables and nft list.
func (a *Applier) takeRules(o *Observation) {
	a.cached.nat = o.nat
	a.seen = maps.Clone(o.nat)
	a.cached.loopback = o.loopback
	a.cached.kubeProxy = o.kubeProxy
	a.cached.leftovers = o.leftovers
	a.marks = nil
	for _, family := range a.cfg.Families {
		a.marks = append(a.marks, o.nat[family].Marks...)
	}
}

func (a *Applier) takeRouting(o *Observation) {
	a.cached.link = o.routing.DummyLink
	a.cached.rules = maps.Clone(o.routing.Rules)
	if a.cached.rules == nil {
		a.cached.rules = map[routing.Rule]struct{}{}
	}
	maps.DeleteFunc(a.cached.rules, func(r routing.Rule, _ struct{}) bool { return !servesFamily(a.cfg, r.Family) })
	a.wrongScope = o.routing.Misbound
	a.staleRoutes = o.staleRoutes
}

// takeSets records which sets exist. takeMembers compares their members.
func (d *Adoption) takeSets() {
	for name := range d.cached.sets {
		if _, there := d.seen.sets[name]; !there {
			delete(d.cached.sets, name)
			d.marksChanged = true // it may be plan.Local, whose members carry the marks
		}
	}
	for name, is := range d.seen.sets {
		entries := d.cached.sets[name].Entries
		if entries == nil {
			entries = make(map[ipset.Entry]uint32, len(is.Entries))
		}
		d.cached.sets[name] = ipset.Contents{Set: is.Set, Entries: entries}
	}
}

// Step compares the next keys. It returns false when all are compared.
func (d *Adoption) Step() bool {
	_, more := d.next()
	return more
}

// End ends a resync, finished or not, and returns the number of differences found.
func (d *Adoption) End() int {
	d.stop()
	d.touched = nil
	return d.differences
}

// steps does all the work and yields after every stepSize keys. The sets come first, because
// their members say which virtual servers are ours.
func (d *Adoption) steps(yield func(struct{}) bool) {
	if !d.seen.parts.State {
		return
	}
	compared := 0
	proceed := func() bool {
		compared++
		return compared%d.stepSize != 0 || yield(struct{}{})
	}
	_ = d.takeMembers(proceed) &&
		each(d.seen.servers, proceed, d.observedServer) &&
		each(d.cached.servers, proceed, d.cachedServer) &&
		each(d.foreign, proceed, d.cachedForeign) &&
		each(d.seen.vips, proceed, d.observedVIP) &&
		each(d.cached.vips, proceed, d.cachedVIP) &&
		each(d.members.desired, proceed, d.compareMember) &&
		each(d.servers.desired, proceed, d.compareServer) &&
		each(d.vips.desired, proceed, d.compareVIP)
}

// each calls do for each entry of a map until proceed returns false. The map may change
// meanwhile.
func each[K comparable, V any](m map[K]V, proceed func() bool, do func(K, V)) bool {
	for k, v := range m {
		do(k, v)
		if !proceed() {
			return false
		}
	}
	return true
}

// takeMembers compares the members of all sets, then updates the index of fwmarks if any
// mark changed.
func (d *Adoption) takeMembers(proceed func() bool) bool {
	for name, is := range d.seen.sets {
		there := func(e ipset.Entry, mark uint32) { d.observedMember(plan.Member{Set: name, Entry: e}, mark) }
		cached := func(e ipset.Entry, _ uint32) { d.cachedMember(plan.Member{Set: name, Entry: e}, is.Entries) }
		if !each(is.Entries, proceed, there) || !each(d.cached.sets[name].Entries, proceed, cached) {
			return false
		}
	}
	if d.marksChanged {
		d.indexMarks()
	}
	return true
}

func (d *Adoption) observedMember(m plan.Member, mark uint32) {
	set, known := d.cached.sets[m.Set]
	was, there := set.Entries[m.Entry]
	if _, written := d.touched.members[m]; !known || there && was == mark || written {
		return
	}
	set.Entries[m.Entry] = mark
	d.indexRecord(m, true)
	d.marksChanged = d.marksChanged || was != mark
}

// cachedMember drops a member from the cache that the kernel does not have, and compares
// members without an owner. A set that is not desired is destroyed as a whole.
func (d *Adoption) cachedMember(m plan.Member, seen map[ipset.Entry]uint32) {
	_, there := seen[m.Entry]
	if _, written := d.touched.members[m]; !there && !written {
		entries := d.cached.sets[m.Set].Entries
		d.marksChanged = d.marksChanged || entries[m.Entry] != 0
		delete(entries, m.Entry)
	}
	if _, known := d.node.sets[m.Set]; known && d.pruning && len(d.members.desired[m]) == 0 {
		d.compareMember(m, nil)
	}
}

func (d *Adoption) compareMember(m plan.Member, _ []desired[uint32]) {
	want, wanted := d.wantMember(m)
	have, there := d.cached.sets[m.Set].Entries[m.Entry]
	setDirty(d, &d.members, m, wanted != there || wanted && have != want)
}

func (d *Adoption) observedServer(key ipvs.Key, is ipvs.Service) {
	was, there := d.cached.servers[key]
	if there && was.VirtualServer == is.VirtualServer && maps.Equal(was.RealServers, is.RealServers) {
		return
	}
	if _, written := d.touched.servers[key]; written {
		return
	}
	if !there {
		if _, wanted := d.servers.want(key); !wanted && !d.ours(key) {
			d.foreign[key] = is
			return
		}
		delete(d.foreign, key)
	}
	d.cached.setServer(key, is, len(was.RealServers))
}

func (d *Adoption) cachedServer(key ipvs.Key, _ ipvs.Service) {
	_, there := d.seen.servers[key]
	if _, written := d.touched.servers[key]; !there && !written {
		d.cached.deleteServer(key)
	}
	if d.pruning && len(d.servers.desired[key]) == 0 {
		d.compareServer(key, nil)
	}
}

func (d *Adoption) cachedForeign(key ipvs.Key, _ ipvs.Service) {
	if _, there := d.seen.servers[key]; !there {
		delete(d.foreign, key)
	}
}

func (d *Adoption) compareServer(key ipvs.Key, _ []desired[*plan.VirtualServer]) {
	f := &flush{Applier: d.Applier}
	vs, wanted := d.wantServer(key)
	_, there := d.cached.servers[key]
	if d.mustDrain(key) {
		setDirty(d, &d.servers, key, len(f.retireChanges(key)) > 0)
		return
	}
	setDirty(d, &d.servers, key, !wanted && there || wanted && !f.upToDate(key, vs) && len(f.serverChanges(key, vs)) > 0)
}

// observedVIP caches an observed VIP. A desired address that is bound with kube-proxy's
// scope is treated as missing, so that it is bound again.
func (d *Adoption) observedVIP(vip plan.VIP, _ struct{}) {
	_, wanted := d.vips.want(vip)
	_, wrongScope := d.wrongScope[vip.Addr]
	if _, written := d.touched.vips[vip]; written {
		return
	}
	if wrongScope && wanted && vip.Claim == plan.ClaimAddress {
		delete(d.cached.vips, vip)
	} else {
		d.cached.vips[vip] = struct{}{}
	}
}

func (d *Adoption) cachedVIP(vip plan.VIP, _ struct{}) {
	_, there := d.seen.vips[vip]
	if _, written := d.touched.vips[vip]; !there && !written {
		delete(d.cached.vips, vip)
	}
	if d.pruning && len(d.vips.desired[vip]) == 0 {
		d.compareVIP(vip, nil)
	}
}

func (d *Adoption) compareVIP(vip plan.VIP, _ []desired[struct{}]) {
	_, wanted := d.vips.want(vip)
	_, there := d.cached.vips[vip]
	setDirty(d, &d.vips, vip, wanted != there)
}

// setDirty marks a key dirty or clean, and counts each difference once.
func setDirty[K comparable, V any](d *Adoption, t *table[K, V], key K, differs bool) {
	_, known := t.dirty[key]
	t.setDirty(key, differs)
	if _, dirty := t.dirty[key]; dirty && !known {
		d.differences++
	}
}
