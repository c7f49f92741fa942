package reconcile

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// memberTable has the members of sets; its values are marks. Its setCached and clearCached shadow
// those of table, to count the members of each set.
type memberTable struct {
	table[memberKey, uint32, uint32]
	sets *sets
}

// localMember returns the key of the member of plan.Local for an address and port.
func (t *memberTable) localMember(key ipvs.Key) memberKey {
	return t.sets.key(plan.Member{Set: plan.Local.In(key.Family()), Entry: plan.EntryOf(key)})
}

// addressIn returns a member's address and port as the key of a virtual server.
func (t *memberTable) addressIn(m *member) ipvs.Key {
	return plan.KeyOf(t.sets.member(m.key).Entry)
}

// setCached records that the kernel has a member.
func (t *memberTable) setCached(m *member, mark uint32) {
	if !m.exists {
		t.sets.list[m.key.set].existing++
	}
	t.table.setCached(m, mark)
}

// clearCached records that the kernel does not have a member.
func (t *memberTable) clearCached(m *member) {
	if m.exists {
		t.sets.list[m.key.set].existing--
	}
	t.table.clearCached(m)
}

// setCachedSet records that the kernel has a set. If its creation failed before, its members
// become dirty.
func (t *memberTable) setCachedSet(s ipset.Set) {
	set := t.sets.get(s.Name)
	set.set, set.exists = s, true
	if !set.failed {
		return
	}
	set.failed = false
	for key, m := range t.stuck {
		if t.sets.list[key.set] == set {
			t.setDirty(m)
		}
	}
}

// clearCachedSet records that the kernel does not have a set.
func (t *memberTable) clearCachedSet(name string) {
	i := t.sets.named(name)
	t.sets.list[i].exists, t.sets.list[i].set = false, ipset.Set{}
	for m := range t.allExisting() {
		if m.key.set == i {
			t.clearCached(m)
		}
	}
}

// If two Services want the same address and port, one of them has precedence. The set members
// of the other must not be written: they determine which clients are refused or allowed, and
// whether the client address is preserved. Otherwise any user who may set external IPs could
// close, or open, another user's Service.

// serverOf returns the virtual server that a member configures. It returns false for a member
// that is an address or a port alone, or an endpoint that connects to itself.
func serverOf(m plan.Member) (key ipvs.Key, configures bool) {
	e := m.Entry
	return plan.KeyOf(e), e.Addr.IsValid() && e.Protocol != 0 && m.Set != plan.LoopBack.In(ip.Of(e.Addr))
}

// desiredMember returns the desired mark of a member, and whether the member is desired. A
// member that configures a virtual server is desired only if the node wants it, or the Service
// that has precedence there. A drain entry is desired while its virtual server exists. Members of
// some sets depend on how a VIP is claimed; see followsClaim.
func (t *serviceTables) desiredMember(m *member) (mark uint32, desired bool) {
	full := t.sets.member(m.key)
	if fwm, address, ok := parseDrainEntry(full); ok {
		return 0, t.marks.needsDrainEntry(fwm, address)
	}
	if !t.vips.followsClaim(m) {
		return 0, false
	}
	key, configures := serverOf(full)
	if !configures || !t.servers.wanted(key) {
		return m.value, m.wanted()
	}
	for _, name := range []types.NamespacedName{nodeOwner.Name, t.servers.winner(key)} {
		if w, wanted := t.members.wantOf(m, name); wanted {
			return w.value, true
		}
	}
	return 0, false
}

// setMembersDirty makes all members dirty that the owners want for a virtual server.
func (t *serviceTables) setMembersDirty(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		o := t.owned.Get(name)
		if o == nil {
			continue
		}
		for _, m := range o.members {
			if of, configures := serverOf(t.sets.member(m.key)); configures && of == key {
				t.members.setDirty(m)
			}
		}
	}
}

// memberWriter writes set members. The methods that write members with an order of their own are
// in claims.go, clientip.go and retire.go.
type memberWriter struct {
	t        *serviceTables
	kernel   *Kernel
	sets     map[string]ipset.Set // those that the node wants, by name
	problems *Problems
}

// add adds the members that need not wait, to all sets in one call. A member of
// plan.Local gets a new mark only after the virtual server of its old mark has a drain entry.
func (w *memberWriter) add() {
	w.addDrainEntriesOfMarks()
	var changes []ipset.Change
	for m := range w.t.members.allDirty() {
		want, desired := w.t.desiredMember(m)
		set := w.t.sets.list[m.key.set]
		different := !m.exists || m.cached != want
		switch {
		case desired && set.failed:
			w.t.members.setStuck(m) // setSection reports the missing set
		case desired && !m.exists && w.waitsForServer(m): // added after the virtual server changed
		case desired && !m.exists && w.t.vips.waitsForClaim(m): // added once the VIP is claimed in the new way
		case w.t.marks.waitsForWeights(m, want) || desired && w.t.marks.waitsForDrainEntry(m, want):
		case desired && different:
			c := w.changeOf(ipset.AddEntry, m)
			c.Mark = want
			changes = append(changes, c)
		case desired == m.exists:
			w.t.members.setClean(m)
		}
	}
	w.apply(changes)
}

// delete removes members that are not desired. A member that proves a virtual server
// to be ours stays until the virtual server is deleted: without it the virtual server would
// look foreign and never be removed.
func (w *memberWriter) delete() {
	var changes []ipset.Change
	for m := range w.t.members.allDirty() {
		if _, desired := w.t.desiredMember(m); !desired && !w.t.provesOwnership(m) {
			changes = append(changes, w.changeOf(ipset.DeleteEntry, m))
		}
	}
	w.apply(changes)
}

// change returns a change of a member.
func (w *memberWriter) change(op ipset.Op, m plan.Member) ipset.Change {
	set, ok := w.sets[m.Set]
	if !ok {
		set.Name = m.Set
	}
	return ipset.Change{Op: op, Set: set, Entry: m.Entry}
}

// changeOf returns a change of the member of a record.
func (w *memberWriter) changeOf(op ipset.Op, m *member) ipset.Change {
	return w.change(op, w.t.sets.member(m.key))
}

// apply writes changes, and updates the cached state.
func (w *memberWriter) apply(changes []ipset.Change) {
	slices.SortStableFunc(changes, bySourceRangeOrder)
	applyChanges(changes, w.kernel.writeSets, w.done, w.refused)
}

// refused reports a change that the kernel refused, and sets it aside.
func (w *memberWriter) refused(c ipset.Change, err error) {
	m := w.memberOf(c)
	w.problems.add(w.t.members.owners(m.key), err)
	w.t.members.setStuck(m)
}

// bySourceRangeOrder compares changes in the order of sourceRangeOrder.
func bySourceRangeOrder(a, b ipset.Change) int {
	return cmp.Compare(sourceRangeOrder(a), sourceRangeOrder(b))
}

// sourceRangeOrder sorts changes so that a VIP enters LOAD-BALANCER-FW after its allowed
// sources and leaves before them; allowed clients are never rejected in between
// (kubernetes#119656).
func sourceRangeOrder(c ipset.Change) int {
	switch restricts := c.Set.Name == plan.LoadBalancerFW.In(ip.IPv4) || c.Set.Name == plan.LoadBalancerFW.In(ip.IPv6); {
	case restricts && c.Op == ipset.AddEntry:
		return 1
	case restricts:
		return -1
	}
	return 0
}

// memberOf returns the record of the member that a change is about.
func (w *memberWriter) memberOf(c ipset.Change) *member {
	return w.t.members.get(w.t.sets.key(plan.Member{Set: c.Set.Name, Entry: c.Entry}))
}

// done updates the cached state after a change.
func (w *memberWriter) done(c ipset.Change) {
	m := w.memberOf(c)
	w.t.members.noteWritten(m)
	was := m.cached
	if c.Op == ipset.DeleteEntry {
		w.t.members.clearCached(m)
	} else {
		if set := w.t.sets.list[m.key.set]; !set.exists {
			set.set, set.exists = c.Set, true
		}
		w.t.members.setCached(m, c.Mark)
	}
	w.t.members.setClean(m)
	w.t.marks.memberChanged(c.Entry, was, c.Mark)
	w.t.marks.indexDrainEntry(plan.Member{Set: c.Set.Name, Entry: c.Entry}, c.Op == ipset.AddEntry)
}
