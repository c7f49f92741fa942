package apply

import (
	"iter"
	"maps"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// keysAtOnce is how much of an observation a step of an adoption compares: with
// tens of thousands of Services all of it takes a quarter of a second, for which no
// change is to wait.
const keysAtOnce = 512

// Adoption takes an observation for what the kernel has, but for what was written
// since that began, and marks what differs from what is wanted. Between its steps Set
// and Flush may be called, and repair what was found so far.
//
// First it makes what is thought of the kernel what was seen, key by key, and then
// compares all of that with all that is wanted: what the loop has lost sight of by a
// mistake of ours is found as well.
type Adoption struct {
	*Applier
	seen        *Observation
	atOnce      int
	marksMoved  bool // members that say what a mark leads to were not as thought
	differences int
	next        func() (struct{}, bool)
	stop        func()
}

// Adopt takes an observation at once, and gives the number of differences found.
func (a *Applier) Adopt(o *Observation) int {
	d := a.BeginAdopt(o)
	for d.Step() {
	}
	return d.End()
}

// BeginAdopt takes what there is once for the node, and leaves the rest to the
// adoption's steps. No observation may begin until it has ended.
func (a *Applier) BeginAdopt(o *Observation) *Adoption {
	a.node.dirty = true
	a.have.sysctls = o.sysctls
	if o.parts.Rules {
		a.takeRules(o)
	}
	d := &Adoption{Applier: a, seen: o, atOnce: keysAtOnce}
	if o.parts.State {
		a.takeRouting(o)
		d.takeSets()
	}
	d.differences = a.nodeDifferences()
	d.next, d.stop = iter.Pull(d.pieces)
	return d
}

// takeRules takes what programs have read.
func (a *Applier) takeRules(o *Observation) {
	a.have.nat = o.nat
	a.seen = maps.Clone(o.nat)
	a.have.loopback = o.loopback
	a.have.kubeProxy = o.kubeProxy
	a.have.leftovers = o.leftovers
	a.marks = nil
	for _, family := range a.cfg.Families {
		a.marks = append(a.marks, o.nat[family].Marks...)
	}
}

func (a *Applier) takeRouting(o *Observation) {
	a.have.link = o.routing.DummyLink
	a.have.rules = maps.Clone(o.routing.Rules)
	if a.have.rules == nil {
		a.have.rules = map[routing.Rule]struct{}{}
	}
	maps.DeleteFunc(a.have.rules, func(r routing.Rule, _ struct{}) bool { return !serves(a.cfg, r.Family) })
	a.misbound = o.routing.Misbound
	a.strays = o.strays
}

// takeSets says which sets there are; what is in them comes later.
func (d *Adoption) takeSets() {
	for name := range d.have.sets {
		if _, there := d.seen.sets[name]; !there {
			delete(d.have.sets, name)
			d.marksMoved = true // should it be the one that carries them
		}
	}
	for name, is := range d.seen.sets {
		entries := d.have.sets[name].Entries
		if entries == nil {
			entries = make(map[ipset.Entry]uint32, len(is.Entries))
		}
		d.have.sets[name] = ipset.Contents{Set: is.Set, Entries: entries}
	}
}

// Step compares some of what was observed. It is false when all of it has been.
func (d *Adoption) Step() bool {
	_, more := d.next()
	return more
}

// End ends an adoption, before its time if need be, and gives the number of
// differences found.
func (d *Adoption) End() int {
	d.stop()
	d.touched = nil
	return d.differences
}

// pieces does all the work, and stops now and then. The sets come first: by them it
// is known whose a virtual server is.
func (d *Adoption) pieces(yield func(struct{}) bool) {
	if !d.seen.parts.State {
		return
	}
	looked := 0
	goOn := func() bool {
		looked++
		return looked%d.atOnce != 0 || yield(struct{}{})
	}
	_ = d.takeMembers(goOn) &&
		each(d.seen.servers, goOn, d.serverThere) &&
		each(d.have.servers, goOn, d.serverThought) &&
		each(d.foreign, goOn, d.foreignThought) &&
		each(d.seen.vips, goOn, d.vipThere) &&
		each(d.have.vips, goOn, d.vipThought) &&
		each(d.members.claims, goOn, d.memberClaimed) &&
		each(d.servers.claims, goOn, d.serverClaimed) &&
		each(d.vips.claims, goOn, d.vipClaimed)
}

// each goes through a map, which may change meanwhile, as long as it is to go on.
func each[K comparable, V any](m map[K]V, goOn func() bool, do func(K, V)) bool {
	for k, v := range m {
		do(k, v)
		if !goOn() {
			return false
		}
	}
	return true
}

// takeMembers takes what the sets hold. What carries marks tells what these lead to.
func (d *Adoption) takeMembers(goOn func() bool) bool {
	for name, is := range d.seen.sets {
		there := func(e ipset.Entry, mark uint32) { d.memberThere(plan.Member{Set: name, Entry: e}, mark) }
		thought := func(e ipset.Entry, _ uint32) { d.memberThought(plan.Member{Set: name, Entry: e}, is.Entries) }
		if !each(is.Entries, goOn, there) || !each(d.have.sets[name].Entries, goOn, thought) {
			return false
		}
	}
	if d.marksMoved {
		d.indexMarks()
	}
	return true
}

func (d *Adoption) memberThere(m plan.Member, mark uint32) {
	set, known := d.have.sets[m.Set]
	was, there := set.Entries[m.Entry]
	if _, written := d.touched.members[m]; !known || there && was == mark || written {
		return
	}
	set.Entries[m.Entry] = mark
	d.noteRecord(m, true)
	d.marksMoved = d.marksMoved || was != mark
}

// memberThought compares what nobody wants. A set that is not wanted goes as a whole.
func (d *Adoption) memberThought(m plan.Member, seen map[ipset.Entry]uint32) {
	_, there := seen[m.Entry]
	if _, written := d.touched.members[m]; !there && !written {
		entries := d.have.sets[m.Set].Entries
		d.marksMoved = d.marksMoved || entries[m.Entry] != 0
		delete(entries, m.Entry)
	}
	if _, known := d.node.sets[m.Set]; known && d.swept && len(d.members.claims[m]) == 0 {
		d.memberClaimed(m, nil)
	}
}

func (d *Adoption) memberClaimed(m plan.Member, _ []claim[uint32]) {
	want, wanted := d.wantMember(m)
	have, there := d.have.sets[m.Set].Entries[m.Entry]
	compared(d, &d.members, m, wanted != there || wanted && have != want)
}

func (d *Adoption) serverThere(key ipvs.Key, is ipvs.Service) {
	was, there := d.have.servers[key]
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
	d.have.setServer(key, is, len(was.RealServers))
}

func (d *Adoption) serverThought(key ipvs.Key, _ ipvs.Service) {
	_, there := d.seen.servers[key]
	if _, written := d.touched.servers[key]; !there && !written {
		d.have.deleteServer(key)
	}
	if d.swept && len(d.servers.claims[key]) == 0 {
		d.serverClaimed(key, nil)
	}
}

func (d *Adoption) foreignThought(key ipvs.Key, _ ipvs.Service) {
	if _, there := d.seen.servers[key]; !there {
		delete(d.foreign, key)
	}
}

func (d *Adoption) serverClaimed(key ipvs.Key, _ []claim[*plan.VirtualServer]) {
	f := &flush{Applier: d.Applier}
	vs, wanted := d.wantServer(key)
	_, there := d.have.servers[key]
	if d.outlives(key) {
		compared(d, &d.servers, key, len(f.retireChanges(key)) > 0)
		return
	}
	compared(d, &d.servers, key, !wanted && there || wanted && !f.stands(key, vs) && len(f.serverChanges(key, vs)) > 0)
}

// vipThere takes an address that is bound as kube-proxy does for none, if it is wanted:
// it is to be bound anew.
func (d *Adoption) vipThere(vip plan.VIP, _ struct{}) {
	_, wanted := d.vips.want(vip)
	_, misbound := d.misbound[vip.Addr]
	if _, written := d.touched.vips[vip]; written {
		return
	}
	if misbound && wanted && vip.Claim == plan.ClaimAddress {
		delete(d.have.vips, vip)
	} else {
		d.have.vips[vip] = struct{}{}
	}
}

func (d *Adoption) vipThought(vip plan.VIP, _ struct{}) {
	_, there := d.seen.vips[vip]
	if _, written := d.touched.vips[vip]; !there && !written {
		delete(d.have.vips, vip)
	}
	if d.swept && len(d.vips.claims[vip]) == 0 {
		d.vipClaimed(vip, nil)
	}
}

func (d *Adoption) vipClaimed(vip plan.VIP, _ []claim[struct{}]) {
	_, wanted := d.vips.want(vip)
	_, there := d.have.vips[vip]
	compared(d, &d.vips, vip, wanted != there)
}

// compared notes whether a key differs, and counts it once.
func compared[K comparable, V any](d *Adoption, l *ledger[K, V], key K, differs bool) {
	_, known := l.dirty[key]
	l.compared(key, differs)
	if _, dirty := l.dirty[key]; dirty && !known {
		d.differences++
	}
}
