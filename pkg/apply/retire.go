package apply

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A fwmark virtual server is retired, not deleted, while the virtual server of its
// address and port stays: the traffic policy changed, the last endpoint left this
// node, or the fwmark itself changed. IPVS finds an established connection by its
// addresses, without the mark, so all that it needs is that the virtual and the real
// server stay. Deleting them would reset it (expire_nodest_conn). Retiring takes
// three steps:
//
//  1. A member of plan.Draining records address, port and fwmark.
//  2. The member of plan.Local is deleted, or gets the new fwmark. Packets of new
//     connections no longer get the old fwmark.
//  3. All real servers get weight 0, and drain.
//
// At any time a set records that the virtual server is ours and which address and port
// it serves. This does not depend on the configured marks, so it survives a restart
// with another --local-mark. The record is deleted after the virtual server.

// retiredMember returns the member that records a retired virtual server.
func retiredMember(fwm, address ipvs.Key) plan.Member {
	e := entryOf(address)
	e.Addr2 = markAddr(fwm.Family(), fwm.FWMark)
	return plan.Member{Set: plan.Draining.In(fwm.Family()), Entry: e}
}

// retiredIn returns the virtual server that a member records; false for a member of another
// set.
func retiredIn(m plan.Member) (fwm, address ipvs.Key, ok bool) {
	if !m.Entry.Addr2.IsValid() || m.Set != plan.Draining.In(ip.Of(m.Entry.Addr)) {
		return fwm, address, false
	}
	bytes := m.Entry.Addr2.AsSlice()
	mark := binary.BigEndian.Uint32(bytes[len(bytes)-4:])
	return fwmKey(ip.Of(m.Entry.Addr), mark), keyOf(m.Entry), true
}

// markAddr encodes a mark as the last 32 bits of an address.
func markAddr(family ip.Family, mark uint32) netip.Addr {
	bytes := family.Unspecified().AsSlice()
	binary.BigEndian.PutUint32(bytes[len(bytes)-4:], mark)
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}

// needsRecord reports whether a record must stay because nothing else proves that the
// virtual server is ours.
func (a *Applier) needsRecord(fwm, address ipvs.Key) bool {
	_, exists := a.cached.servers[fwm]
	return exists && a.retired[fwm] == address && a.marked[fwm] != address
}

// indexRecord updates the index of records after a member was added or deleted.
func (a *Applier) indexRecord(m plan.Member, there bool) {
	fwm, address, ok := retiredIn(m)
	switch {
	case !ok:
	case there:
		a.retired[fwm] = address
	case a.retired[fwm] == address:
		delete(a.retired, fwm)
	}
}

// markRecord makes the record of a virtual server dirty, so that it is deleted if no longer
// needed.
func (a *Applier) markRecord(fwm ipvs.Key) {
	if address, recorded := a.retired[fwm]; recorded {
		a.members.markDirty(retiredMember(fwm, address))
	}
}

// mustDrain reports whether a virtual server that is not desired stays until its connections
// have ended: one with a fwmark and real servers, whose address and port are still served.
func (a *Applier) mustDrain(key ipvs.Key) bool {
	if key.FWMark == 0 || len(a.cached.servers[key].RealServers) == 0 || a.failedSets[plan.Draining.In(key.Family())] {
		return false // in the last case it cannot be recorded: the kernel lacks the set's type
	}
	if _, wanted := a.wantServer(key); wanted {
		return false
	}
	address, known := a.addressOf(key)
	_, served := a.servers.want(address)
	return known && served
}

// record adds the missing records of virtual servers. retiring maps fwmark keys to their
// address and port.
func (f *flush) record(retiring map[ipvs.Key]ipvs.Key) {
	var changes []ipset.Change
	for fwm, address := range retiring {
		if f.retired[fwm] != address && !f.failedSets[plan.Draining.In(fwm.Family())] {
			changes = append(changes, f.memberChange(ipset.AddEntry, retiredMember(fwm, address)))
		}
	}
	f.applyMembers(changes)
}

// localMark returns the fwmark that a dirty member of plan.Local has in the kernel, and
// whether its virtual server exists.
func (f *flush) localMark(m plan.Member) (fwm ipvs.Key, exists bool) {
	mark := f.cached.sets[m.Set].Entries[m.Entry]
	if mark == 0 || m.Set != plan.Local.In(ip.Of(m.Entry.Addr)) {
		return fwm, false
	}
	fwm = fwmKey(ip.Of(m.Entry.Addr), mark)
	_, exists = f.cached.servers[fwm]
	return fwm, exists && f.marked[fwm] == keyOf(m.Entry)
}

// recordReplaced records the virtual servers whose member of plan.Local is about to get
// another mark.
func (f *flush) recordReplaced() {
	retiring := map[ipvs.Key]ipvs.Key{}
	for m := range f.members.dirty {
		fwm, exists := f.localMark(m)
		if want, wanted := f.wantMember(m); exists && wanted && want != fwm.FWMark {
			retiring[fwm] = keyOf(m.Entry)
		}
	}
	f.record(retiring)
}

// unmark deletes undesired members of plan.Local whose address and port are still served.
// From then on new connections use the virtual server of the address, which has its
// endpoints by now.
func (f *flush) unmark() {
	retiring := map[ipvs.Key]ipvs.Key{}
	for m := range f.members.dirty {
		fwm, exists := f.localMark(m)
		if _, wanted := f.wantMember(m); exists && !wanted && f.mustDrain(fwm) {
			retiring[fwm] = keyOf(m.Entry)
		}
	}
	f.record(retiring)
	var changes []ipset.Change
	for fwm, address := range retiring {
		if f.retired[fwm] == address {
			m := plan.Member{Set: plan.Local.In(fwm.Family()), Entry: entryOf(address)}
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}

// waitsForWeights reports whether a member of plan.Local must wait, because the retired
// virtual server it leads to does not have its weights back yet.
func (f *flush) waitsForWeights(m plan.Member, mark uint32) bool {
	if mark == 0 {
		return false
	}
	fwm := fwmKey(ip.Of(m.Entry.Addr), mark)
	_, dirty := f.servers.dirty[fwm]
	return dirty && f.retired[fwm] == keyOf(m.Entry)
}

// retirements returns the changes that drain the dirty virtual servers for which mustDrain
// holds.
func (f *flush) retirements() []ipvs.Change {
	var all []ipvs.Change
	for key := range f.servers.dirty {
		if !f.mustDrain(key) {
			continue
		}
		changes := f.retireChanges(key)
		if len(changes) == 0 {
			f.servers.markClean(key)
		}
		all = append(all, changes...)
	}
	return all
}

// retireChanges sets all real servers to weight 0, once no new connection reaches the
// virtual server. Real servers of UDP and SCTP stay only while a desired virtual server of
// the address and port has them too: as elsewhere, their flows end with the endpoint.
func (f *flush) retireChanges(key ipvs.Key) []ipvs.Change {
	address, _ := f.addressOf(key)
	if f.marked[key] == address {
		return nil
	}
	var changes []ipvs.Change
	for dest, rs := range f.cached.servers[key].RealServers {
		switch c := (ipvs.Change{Op: ipvs.UpdateRealServer, Key: key, Dest: dest}); {
		case address.Protocol != ip.TCP && !f.wantRealServer(address, dest):
			c.Op = ipvs.DeleteRealServer
			changes = append(changes, c)
		case rs.Weight != 0:
			changes = append(changes, c)
			fallthrough
		default:
			f.drain(key, dest)
		}
	}
	return changes
}

// wantRealServer reports whether an address and port has a desired real server, directly or
// through its present fwmark.
func (f *flush) wantRealServer(address ipvs.Key, dest netip.AddrPort) bool {
	mark := f.cached.sets[plan.Local.In(address.Family())].Entries[entryOf(address)]
	return slices.ContainsFunc([]ipvs.Key{address, fwmKey(address.Family(), mark)}, func(key ipvs.Key) bool {
		vs, wanted := f.wantServer(key)
		return wanted && slices.ContainsFunc(vs.RealServers, func(rs plan.RealServer) bool { return rs.AddrPort == dest })
	})
}

// deleteRetired deletes retired virtual servers without real servers, and their records.
func (f *flush) deleteRetired() {
	var servers []ipvs.Change
	for fwm := range f.retired {
		_, wanted := f.wantServer(fwm)
		if s, exists := f.cached.servers[fwm]; exists && !wanted && len(s.RealServers) == 0 && f.marked[fwm] == (ipvs.Key{}) {
			servers = append(servers, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: fwm})
		}
	}
	f.applyServers(servers)
	var records []ipset.Change
	for _, c := range servers {
		if m := retiredMember(c.Key, f.retired[c.Key]); f.retired[c.Key] != (ipvs.Key{}) && !f.needsRecord(c.Key, f.retired[c.Key]) {
			records = append(records, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(records)
}

// markRetired makes the retired virtual servers of an address and port dirty.
func (a *Applier) markRetired(address ipvs.Key) {
	for fwm, of := range a.retired {
		if of == address {
			a.servers.markDirty(fwm)
		}
	}
}
