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
//  2. The member of plan.Local is deleted, or gets the new fwmark: packets of new
//     connections are not marked with the old one any more.
//  3. All real servers get weight 0, and drain.
//
// Between any two of them, and after, a set tells whose the virtual server is and
// what it serves. That does not depend on the configured marks, so it holds over a
// restart with another --local-mark. The record is deleted after the virtual server.

// retiredMember is the record of a retired virtual server.
func retiredMember(fwm, address ipvs.Key) plan.Member {
	e := entryOf(address)
	e.Addr2 = markAddr(fwm.Family(), fwm.FWMark)
	return plan.Member{Set: plan.Draining.In(fwm.Family()), Entry: e}
}

// retiredIn returns what a member records; false if it is of another set.
func retiredIn(m plan.Member) (fwm, address ipvs.Key, ok bool) {
	if !m.Entry.Addr2.IsValid() || m.Set != plan.Draining.In(ip.Of(m.Entry.Addr)) {
		return fwm, address, false
	}
	bytes := m.Entry.Addr2.AsSlice()
	mark := binary.BigEndian.Uint32(bytes[len(bytes)-4:])
	return fwmKey(ip.Of(m.Entry.Addr), mark), keyOf(m.Entry), true
}

// markAddr writes a mark as an address: its last 32 bits.
func markAddr(family ip.Family, mark uint32) netip.Addr {
	bytes := family.Unspecified().AsSlice()
	binary.BigEndian.PutUint32(bytes[len(bytes)-4:], mark)
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}

// needsRecord reports whether a record must stay: nothing else says whose the virtual
// server is.
func (a *Applier) needsRecord(fwm, address ipvs.Key) bool {
	_, stands := a.have.servers[fwm]
	return stands && a.retired[fwm] == address && a.marked[fwm] != address
}

// noteRecord keeps the index of records.
func (a *Applier) noteRecord(m plan.Member, there bool) {
	fwm, address, ok := retiredIn(m)
	switch {
	case !ok:
	case there:
		a.retired[fwm] = address
	case a.retired[fwm] == address:
		delete(a.retired, fwm)
	}
}

// lookAtRecord has the record of a virtual server deleted if it is not needed.
func (a *Applier) lookAtRecord(fwm ipvs.Key) {
	if address, recorded := a.retired[fwm]; recorded {
		a.members.mark(retiredMember(fwm, address))
	}
}

// outlives reports whether a virtual server is kept until its connections have ended,
// although it is not desired: one with a fwmark and real servers whose address and
// port stay in service.
func (a *Applier) outlives(key ipvs.Key) bool {
	if key.FWMark == 0 || len(a.have.servers[key].RealServers) == 0 || a.lost[plan.Draining.In(key.Family())] {
		return false // or it cannot be recorded, as the kernel lacks the set's type
	}
	if _, wanted := a.wantServer(key); wanted {
		return false
	}
	address, known := a.serves(key)
	_, served := a.servers.want(address)
	return known && served
}

// record writes the records of virtual servers, by their addresses, that have none yet.
func (f *flush) record(retiring map[ipvs.Key]ipvs.Key) {
	var changes []ipset.Change
	for fwm, address := range retiring {
		if f.retired[fwm] != address && !f.lost[plan.Draining.In(fwm.Family())] {
			changes = append(changes, f.memberChange(ipset.AddEntry, retiredMember(fwm, address)))
		}
	}
	f.applyMembers(changes)
}

// localMark returns the mark that a dirty member of plan.Local has in the kernel, if
// a virtual server stands under it.
func (f *flush) localMark(m plan.Member) (fwm ipvs.Key, stands bool) {
	mark := f.have.sets[m.Set].Entries[m.Entry]
	if mark == 0 || m.Set != plan.Local.In(ip.Of(m.Entry.Addr)) {
		return fwm, false
	}
	fwm = fwmKey(ip.Of(m.Entry.Addr), mark)
	_, stands = f.have.servers[fwm]
	return fwm, stands && f.marked[fwm] == keyOf(m.Entry)
}

// recordReplaced records the virtual servers whose member of plan.Local is about to
// get another mark.
func (f *flush) recordReplaced() {
	retiring := map[ipvs.Key]ipvs.Key{}
	for m := range f.members.dirty {
		fwm, stands := f.localMark(m)
		if want, wanted := f.wantMember(m); stands && wanted && want != fwm.FWMark {
			retiring[fwm] = keyOf(m.Entry)
		}
	}
	f.record(retiring)
}

// unmark deletes the members of plan.Local that nobody wants while the address and
// port stay in service: from then on new connections use its plain virtual server,
// which has its endpoints by now.
func (f *flush) unmark() {
	retiring := map[ipvs.Key]ipvs.Key{}
	for m := range f.members.dirty {
		fwm, stands := f.localMark(m)
		if _, wanted := f.wantMember(m); stands && !wanted && f.outlives(fwm) {
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

// revives reports whether a member of plan.Local must wait: it leads to a virtual
// server that is retired, whose real servers do not have their weights yet.
func (f *flush) revives(m plan.Member, mark uint32) bool {
	if mark == 0 {
		return false
	}
	fwm := fwmKey(ip.Of(m.Entry.Addr), mark)
	_, dirty := f.servers.dirty[fwm]
	return dirty && f.retired[fwm] == keyOf(m.Entry)
}

// retirements drains the dirty virtual servers that outlive their desire.
func (f *flush) retirements() []ipvs.Change {
	var all []ipvs.Change
	for key := range f.servers.dirty {
		if !f.outlives(key) {
			continue
		}
		changes := f.retireChanges(key)
		if len(changes) == 0 {
			f.servers.clean(key)
		}
		all = append(all, changes...)
	}
	return all
}

// retireChanges takes the weight of all real servers, once no new connection is led
// there. Of UDP and SCTP a real server stays only as long as one of the two virtual
// servers that serve the address and port has it too: their flows end with the
// endpoint, as elsewhere.
func (f *flush) retireChanges(key ipvs.Key) []ipvs.Change {
	address, _ := f.serves(key)
	if f.marked[key] == address {
		return nil
	}
	var changes []ipvs.Change
	for dest, rs := range f.have.servers[key].RealServers {
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

// wantRealServer reports whether an address and port has a real server, of itself or by
// its present mark.
func (f *flush) wantRealServer(address ipvs.Key, dest netip.AddrPort) bool {
	mark := f.have.sets[plan.Local.In(address.Family())].Entries[entryOf(address)]
	return slices.ContainsFunc([]ipvs.Key{address, fwmKey(address.Family(), mark)}, func(key ipvs.Key) bool {
		vs, wanted := f.wantServer(key)
		return wanted && slices.ContainsFunc(vs.RealServers, func(rs plan.RealServer) bool { return rs.AddrPort == dest })
	})
}

// deleteRetired deletes retired virtual servers that have no real server left, and
// their records.
func (f *flush) deleteRetired() {
	var servers []ipvs.Change
	for fwm := range f.retired {
		_, wanted := f.wantServer(fwm)
		if s, stands := f.have.servers[fwm]; stands && !wanted && len(s.RealServers) == 0 && f.marked[fwm] == (ipvs.Key{}) {
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

// lookAtRetired has the retired virtual servers of an address and port compared, after
// a claim on that has changed.
func (a *Applier) lookAtRetired(address ipvs.Key) {
	for fwm, of := range a.retired {
		if of == address {
			a.servers.mark(fwm)
		}
	}
}
