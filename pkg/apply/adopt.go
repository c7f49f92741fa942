package apply

import (
	"iter"
	"maps"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// keysAtOnce is how much of an observation a step of an adoption compares: with
// tens of thousands of Services all of it takes half a second, for which no change
// is to wait.
const keysAtOnce = 512

// Adoption takes an observation for what the kernel has, but for what was written
// since that began, and marks what differs from what is wanted. Between its steps Set
// and Flush may be called, and repair what was found so far.
//
// It looks closer only at what is not as it was thought to be. All other keys need
// nothing that is not known: what is to be written is marked already.
type Adoption struct {
	*Applier
	seen        *Observation
	atOnce      int
	lost        map[string]map[ipset.Entry]uint32 // what sets held that are not there
	moved       []ipvs.Key                        // virtual servers whose marks' members were not as thought
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
	a.have.nat = o.nat
	a.have.loopback = o.loopback
	a.have.kubeProxy = o.kubeProxy
	a.marks = nil
	for _, family := range a.cfg.Families {
		a.marks = append(a.marks, o.nat[family].Marks...)
	}
	a.have.link = o.routing.DummyLink
	a.have.rules = maps.Clone(o.routing.Rules)
	if a.have.rules == nil {
		a.have.rules = map[routing.Rule]struct{}{}
	}
	a.misbound = o.routing.Misbound
	d := &Adoption{Applier: a, seen: o, atOnce: keysAtOnce, lost: map[string]map[ipset.Entry]uint32{}}
	d.takeSets()
	d.differences = a.nodeDifferences()
	d.next, d.stop = iter.Pull(d.pieces)
	return d
}

// takeSets says which sets there are; what is in them comes later.
func (d *Adoption) takeSets() {
	for name, was := range d.have.sets {
		if _, there := d.seen.sets[name]; !there {
			d.lost[name] = was.Entries
			delete(d.have.sets, name)
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
	looked := 0
	goOn := func() bool {
		looked++
		return looked%d.atOnce != 0 || yield(struct{}{})
	}
	_ = d.takeMembers(goOn) && d.takeMarks() &&
		each(d.seen.servers, goOn, d.serverThere) &&
		each(d.have.servers, goOn, d.serverThought) &&
		each(d.foreign, goOn, d.foreignThought) &&
		each(d.seen.vips, goOn, d.vipThere) &&
		each(d.have.vips, goOn, d.vipThought)
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

func (d *Adoption) takeMembers(goOn func() bool) bool {
	for name, is := range d.seen.sets {
		there := func(e ipset.Entry, mark uint32) { d.memberThere(plan.Member{Set: name, Entry: e}, mark) }
		thought := func(e ipset.Entry, _ uint32) {
			if _, there := is.Entries[e]; !there {
				d.memberGone(plan.Member{Set: name, Entry: e})
			}
		}
		if !each(is.Entries, goOn, there) || !each(d.have.sets[name].Entries, goOn, thought) {
			return false
		}
	}
	for name, entries := range d.lost {
		gone := func(e ipset.Entry, mark uint32) {
			m := plan.Member{Set: name, Entry: e}
			d.markMoved(m, mark, 0)
			d.compareMember(m)
		}
		if !each(entries, goOn, gone) {
			return false
		}
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
	d.markMoved(m, was, mark)
	d.compareMember(m)
}

func (d *Adoption) memberGone(m plan.Member) {
	if _, written := d.touched.members[m]; written {
		return
	}
	entries := d.have.sets[m.Set].Entries
	d.markMoved(m, entries[m.Entry], 0)
	delete(entries, m.Entry)
	d.compareMember(m)
}

// compareMember marks a member that is not as it was thought to be. A set that is not
// wanted goes as a whole.
func (d *Adoption) compareMember(m plan.Member) {
	want, wanted := d.wantMember(m)
	if _, known := d.node.sets[m.Set]; !wanted && (!d.swept || !known) {
		return
	}
	have, there := d.have.sets[m.Set].Entries[m.Entry]
	differs := wanted != there || wanted && have != want
	d.count(differs)
	d.members.compared(m, differs)
}

// markMoved notes which marks a member has carried and carries.
func (d *Adoption) markMoved(m plan.Member, was, is uint32) {
	family := ip.Of(m.Entry.Addr)
	for _, mark := range []uint32{was, is} {
		if mark != 0 {
			d.moved = append(d.moved, fwmKey(family, mark))
		}
	}
}

// takeMarks reads anew what marks lead to, if that has changed, and compares what they
// lead to: it is wanted once its member is there.
func (d *Adoption) takeMarks() bool {
	if len(d.moved) > 0 {
		d.indexMarks()
	}
	for _, fwm := range d.moved {
		d.compareServer(fwm)
	}
	return true
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
	d.have.servers[key] = is
	d.have.realServers += len(is.RealServers) - len(was.RealServers)
	d.compareServer(key)
}

func (d *Adoption) serverThought(key ipvs.Key, was ipvs.Service) {
	if _, there := d.seen.servers[key]; there {
		return
	}
	if _, written := d.touched.servers[key]; written {
		return
	}
	delete(d.have.servers, key)
	d.have.realServers -= len(was.RealServers)
	d.compareServer(key)
}

func (d *Adoption) foreignThought(key ipvs.Key, _ ipvs.Service) {
	if _, there := d.seen.servers[key]; !there {
		delete(d.foreign, key)
	}
}

// compareServer marks a virtual server that is not as it was thought to be.
func (d *Adoption) compareServer(key ipvs.Key) {
	if _, claimed := d.servers.want(key); !claimed && !d.swept {
		return
	}
	vs, wanted := d.wantServer(key)
	_, there := d.have.servers[key]
	differs := !wanted && there || wanted && len((&flush{Applier: d.Applier}).serverChanges(key, vs)) > 0
	d.count(differs)
	d.servers.compared(key, differs)
}

// vipThere takes an address that is bound as kube-proxy does for none, if it is wanted:
// it is to be bound anew.
func (d *Adoption) vipThere(vip plan.VIP, _ struct{}) {
	_, there := d.have.vips[vip]
	_, wanted := d.vips.want(vip)
	_, misbound := d.misbound[vip.Addr]
	is := !misbound || !wanted || vip.Claim != plan.ClaimAddress
	if _, written := d.touched.vips[vip]; written || is == there {
		return
	}
	if is {
		d.have.vips[vip] = struct{}{}
	} else {
		delete(d.have.vips, vip)
	}
	d.compareVIP(vip)
}

func (d *Adoption) vipThought(vip plan.VIP, _ struct{}) {
	_, there := d.seen.vips[vip]
	if _, written := d.touched.vips[vip]; there || written {
		return
	}
	delete(d.have.vips, vip)
	d.compareVIP(vip)
}

// compareVIP marks a VIP that is not as it was thought to be.
func (d *Adoption) compareVIP(vip plan.VIP) {
	_, wanted := d.vips.want(vip)
	if !wanted && !d.swept {
		return
	}
	_, there := d.have.vips[vip]
	d.count(wanted != there)
	d.vips.compared(vip, wanted != there)
}

func (d *Adoption) count(differs bool) {
	if differs {
		d.differences++
	}
}
