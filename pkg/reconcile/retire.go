package reconcile

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// An address and port with externalTrafficPolicy Local has two virtual servers. That of the address has
// the node-local endpoints, for external clients. A fwmark virtual server has all endpoints, for
// internal clients: the member of plan.Local gives their packets its mark. It may become undesired
// while the other one stays, because the policy changed, the last endpoint left this node, or the
// fwmark itself changed. IPVS finds an established connection by its addresses, without the mark. So
// all that it needs is that the virtual and the real server stay; deleting them would reset it
// (expire_nodest_conn). The virtual server is therefore retired:
//
//  1. A member of plan.Draining, the drain entry, lists address, port and fwmark
//     (addDrainEntriesOfMarks and deleteFromLocal).
//  2. The member of plan.Local is deleted (deleteFromLocal) or gets the new fwmark (add). Packets of
//     new connections no longer get the old one.
//  3. All real servers get weight 0, and drain (retirements).
//  4. The virtual server is deleted after its last real server (deleteRetired), and then the drain
//     entry (deleteDrainEntries).
//
// At any time a set lists the virtual server, which proves that it is ours, with the address
// and port that it serves. This does not depend on the configured marks, so it survives a
// restart with another --local-mark.
//
// A fwmark virtual server that is added to an address in use takes the opposite way. It gets a drain
// entry, then real servers, and only then the member of plan.Local gives packets its mark
// (waitsForWeights). That makes the drain entry superfluous.

// mustRetire reports whether a virtual server that is not desired must be retired, not deleted: one
// with a fwmark and real servers, whose address and port are still served.
func (t *serviceTables) mustRetire(s *server) bool {
	if s.key.FWMark == 0 || len(s.cached.reals) == 0 || t.sets.get(plan.Draining.In(s.key.Family())).failed {
		return false // in the last case it cannot have a drain entry: the kernel lacks the set's type
	}
	address, known := t.marks.addressOf(s.key)
	return t.desiredIn(s) == nil && known && t.servers.wanted(address)
}

// addDrainEntriesOfMarks adds the drain entries that must precede a new mark of a member of plan.Local:
//
//   - for the virtual server of the old mark, which is to be retired;
//   - for the virtual server of the new mark, if it does not exist yet and the address is served already.
func (w *memberWriter) addDrainEntriesOfMarks() {
	entries := map[ipvs.Key]ipvs.Key{}
	for m := range w.t.members.allDirty() {
		family := ip.Of(m.key.addr)
		if w.t.sets.list[m.key.set].name != plan.Local.In(family) {
			continue
		}
		want, desired := w.t.desiredMember(m)
		if !desired || m.exists && m.cached == want {
			continue
		}
		address := w.t.members.addressIn(m)
		if old, exists := w.t.marks.fwmarkOf(m); exists {
			entries[old] = address
		}
		if added := fwmKey(family, want); w.t.servers.isDirty(added) && w.t.marks.unused(added) && w.t.servers.exists(address) {
			entries[added] = address
		}
	}
	w.addDrainEntries(entries)
}

// waitsForDrainEntry reports whether a member of plan.Local keeps its mark for now, because the
// virtual server of the mark has no drain entry yet: the kernel refused it.
func (x *markIndex) waitsForDrainEntry(m *member, want uint32) bool {
	fwm, exists := x.fwmarkOf(m)
	return exists && m.cached != want && x.retired[fwm] != x.members.addressIn(m) && !x.members.sets.get(plan.Draining.In(fwm.Family())).failed
}

// waitsForWeights reports whether a member of plan.Local must wait, because its fwmark virtual
// server has a drain entry, and does not exist yet or still has weights of 0.
func (x *markIndex) waitsForWeights(m *member, mark uint32) bool {
	if mark == 0 {
		return false
	}
	fwm := fwmKey(ip.Of(m.key.addr), mark)
	return x.servers.isDirty(fwm) && x.retired[fwm] == x.members.addressIn(m)
}

// deleteFromLocal deletes the undesired members of plan.Local whose virtual server must retire, after
// it has added the drain entries. New connections then use the virtual server of the address, which has
// its endpoints by now.
func (w *memberWriter) deleteFromLocal() {
	retiring := map[ipvs.Key]ipvs.Key{}
	for m := range w.t.members.allDirty() {
		fwm, exists := w.t.marks.fwmarkOf(m)
		if !exists {
			continue
		}
		address := w.t.members.addressIn(m)
		if _, desired := w.t.desiredMember(m); !desired && w.t.servers.exists(address) && w.t.mustRetire(w.t.servers.get(fwm)) {
			retiring[fwm] = address
		}
	}
	w.addDrainEntries(retiring)
	var changes []ipset.Change
	for fwm, address := range retiring {
		if w.t.marks.retired[fwm] == address {
			m := plan.Member{Set: plan.Local.In(fwm.Family()), Entry: plan.EntryOf(address)}
			changes = append(changes, w.change(ipset.DeleteEntry, m))
		}
	}
	w.apply(changes)
}

// fwmarkOf returns the fwmark that a dirty member of plan.Local has in the kernel, and
// whether its virtual server exists.
func (x *markIndex) fwmarkOf(m *member) (fwm ipvs.Key, exists bool) {
	if !m.exists || m.cached == 0 || x.members.sets.list[m.key.set].name != plan.Local.In(ip.Of(m.key.addr)) {
		return fwm, false
	}
	fwm = fwmKey(ip.Of(m.key.addr), m.cached)
	return fwm, x.servers.exists(fwm) && x.inLocal[fwm] == x.members.addressIn(m)
}

// unused reports whether neither a virtual server nor a set has a fwmark.
func (x *markIndex) unused(fwm ipvs.Key) bool {
	_, recorded := x.listedAddress(fwm)
	return !recorded && !x.servers.exists(fwm)
}

// retirements returns the changes that drain the dirty virtual servers that must retire.
func (w *serverWriter) retirements() []ipvs.Change {
	var all []ipvs.Change
	for s := range w.t.servers.allDirty() {
		if !w.t.mustRetire(s) {
			continue
		}
		changes := w.t.retireChanges(s)
		if len(changes) == 0 {
			w.t.servers.setClean(s)
		}
		all = append(all, changes...)
	}
	return all
}

// retireChanges returns the changes that set all real servers to weight 0, once no new connection
// reaches the virtual server, and adds these real servers to the drainer. Real servers of UDP and SCTP
// stay only while a desired virtual server of the address and port has them too: as elsewhere, their
// flows end with the endpoint.
func (t *serviceTables) retireChanges(s *server) []ipvs.Change {
	key := s.key
	address, _ := t.marks.addressOf(key)
	if t.marks.inLocal[key] == address {
		return nil
	}
	var changes []ipvs.Change
	for _, rs := range s.cached.reals {
		dest := rs.Dest()
		switch c := (ipvs.Change{Op: ipvs.UpdateRealServer, Key: key, Dest: dest}); {
		case address.Protocol != ip.TCP && !t.hasDesiredRealServer(address, dest):
			c.Op = ipvs.DeleteRealServer
			changes = append(changes, c)
		case rs.Weight != 0:
			changes = append(changes, c)
			fallthrough
		default:
			t.drainer.add(key, dest)
		}
	}
	return changes
}

// hasDesiredRealServer reports whether an address and port has a desired real server, directly or
// through its present fwmark.
func (t *serviceTables) hasDesiredRealServer(address ipvs.Key, dest netip.AddrPort) bool {
	return slices.ContainsFunc([]ipvs.Key{address, fwmKey(address.Family(), t.marks.markOf(address))}, func(key ipvs.Key) bool {
		want := t.desiredServer(key)
		return want != nil && want.is(dest, plan.IsRealServer)
	})
}

// deleteRetired deletes retired virtual servers without real servers. It returns the changes, of
// which the kernel may have refused some.
func (w *serverWriter) deleteRetired() []ipvs.Change {
	var changes []ipvs.Change
	for fwm := range w.t.marks.retired {
		if s := w.t.servers.cachedServer(fwm); s != nil && w.t.desiredServer(fwm) == nil && len(s.reals) == 0 && w.t.marks.inLocal[fwm] == (ipvs.Key{}) {
			changes = append(changes, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: fwm})
		}
	}
	w.apply(changes)
	return changes
}

// deleteDrainEntries deletes the drain entries of deleted virtual servers.
func (w *memberWriter) deleteDrainEntries(deleted []ipvs.Change) {
	var entries []ipset.Change
	for _, c := range deleted {
		if address, recorded := w.t.marks.retired[c.Key]; recorded && !w.t.marks.needsDrainEntry(c.Key, address) {
			entries = append(entries, w.change(ipset.DeleteEntry, drainEntry(c.Key, address)))
		}
	}
	w.apply(entries)
}

// drainEntry returns the drain entry of a fwmark virtual server.
func drainEntry(fwm, address ipvs.Key) plan.Member {
	e := plan.EntryOf(address)
	e.Addr2 = markAddr(fwm.Family(), fwm.FWMark)
	return plan.Member{Set: plan.Draining.In(fwm.Family()), Entry: e}
}

// parseDrainEntry returns the virtual server of a drain entry; false for a member of another
// set.
func parseDrainEntry(m plan.Member) (fwm, address ipvs.Key, ok bool) {
	if !m.Entry.Addr2.IsValid() || m.Set != plan.Draining.In(ip.Of(m.Entry.Addr)) {
		return fwm, address, false
	}
	bytes := m.Entry.Addr2.AsSlice()
	mark := binary.BigEndian.Uint32(bytes[len(bytes)-4:])
	return fwmKey(ip.Of(m.Entry.Addr), mark), plan.KeyOf(m.Entry), true
}

// markAddr encodes a mark as the last 32 bits of an address.
func markAddr(family ip.Family, mark uint32) netip.Addr {
	bytes := family.Unspecified().AsSlice()
	binary.BigEndian.PutUint32(bytes[len(bytes)-4:], mark)
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}

// addDrainEntries adds the missing drain entries of virtual servers. retiring maps fwmark keys
// to their address and port.
func (w *memberWriter) addDrainEntries(retiring map[ipvs.Key]ipvs.Key) {
	var changes []ipset.Change
	for fwm, address := range retiring {
		if w.t.marks.retired[fwm] != address && !w.t.sets.get(plan.Draining.In(fwm.Family())).failed {
			changes = append(changes, w.change(ipset.AddEntry, drainEntry(fwm, address)))
		}
	}
	w.apply(changes)
}

// needsDrainEntry reports whether a drain entry must stay, because nothing else proves that the
// virtual server is ours.
func (x *markIndex) needsDrainEntry(fwm, address ipvs.Key) bool {
	return x.servers.exists(fwm) && x.retired[fwm] == address && x.inLocal[fwm] != address
}

// indexDrainEntry updates retired after a member was added or deleted.
func (x *markIndex) indexDrainEntry(m plan.Member, there bool) {
	fwm, address, ok := parseDrainEntry(m)
	switch {
	case !ok:
	case there:
		x.retired[fwm] = address
	case x.retired[fwm] == address:
		delete(x.retired, fwm)
	}
}

// setDrainEntryDirty makes the drain entry of a virtual server dirty, so that it is deleted if no
// longer needed.
func (x *markIndex) setDrainEntryDirty(fwm ipvs.Key) {
	if address, recorded := x.retired[fwm]; recorded {
		x.members.setKeyDirty(x.members.sets.key(drainEntry(fwm, address)))
	}
}

// setRetiredDirty makes the retired virtual servers of an address and port dirty.
func (x *markIndex) setRetiredDirty(address ipvs.Key) {
	for fwm, of := range x.retired {
		if of == address {
			x.servers.setKeyDirty(fwm)
		}
	}
}
