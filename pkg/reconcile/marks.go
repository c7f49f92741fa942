package reconcile

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A fwmark virtual server does not say which address and port it serves. The members of
// plan.Local do: each is an address and port with its fwmark.

// usedMarks returns the fwmarks in use by address and port, desired or not: those of members of
// plan.Local and of retired virtual servers.
func (a *Reconciler) usedMarks() map[ipvs.Key]uint32 {
	out := make(map[ipvs.Key]uint32, len(a.marked))
	for fwm, key := range a.retired {
		out[key] = max(out[key], fwm.FWMark)
	}
	for fwm, key := range a.marked {
		out[key] = fwm.FWMark
	}
	return out
}

// holdsMark reports whether the kernel still has the member of plan.Local for an address and
// port, or its fwmark virtual server.
func (a *Reconciler) holdsMark(key ipvs.Key, mark uint32) bool {
	for _, fwm := range a.markVariants(fwmKey(key.Family(), mark)) {
		if a.servers.holds(fwm) {
			return true
		}
	}
	return a.members.holds(a.localMember(key))
}

// markInUse reports whether a virtual server of either family has the mark: a foreign one,
// or one of ours, retired ones included.
func (a *Reconciler) markInUse(mark uint32) bool {
	for _, family := range ip.Families {
		for _, fwm := range a.markVariants(fwmKey(family, mark)) {
			if _, foreign := a.foreign[fwm]; foreign || a.servers.holds(fwm) {
				return true
			}
		}
	}
	return false
}

func fwmKey(family ip.Family, mark uint32) ipvs.Key {
	return ipvs.Key{Addr: family.Unspecified(), FWMark: mark}
}

func entryOf(key ipvs.Key) ipset.Entry {
	return ipset.Entry{Addr: key.Addr, Port: key.Port, Protocol: key.Protocol}
}

func keyOf(e ipset.Entry) ipvs.Key {
	return ipvs.Key{Protocol: e.Protocol, Addr: e.Addr, Port: e.Port}
}

// markVariants returns a fwmark key with and without the masquerade mark. A process that was
// killed after it changed the member of plan.Local leaves the other one.
func (a *Reconciler) markVariants(fwm ipvs.Key) [2]ipvs.Key {
	other := fwm
	other.FWMark ^= a.cfg.MasqueradeMark
	return [2]ipvs.Key{fwm, other}
}

// addressOf returns the address and port that a virtual server serves; false if no member
// records it.
func (a *Reconciler) addressOf(key ipvs.Key) (ipvs.Key, bool) {
	if key.FWMark == 0 {
		return key, true
	}
	if address, ok := a.recordedAddress(key); ok {
		return address, true
	}
	address, ok := a.marked[a.markVariants(key)[1]]
	return address, ok
}

// recordedAddress returns the address and port of a fwmark virtual server from the member of
// plan.Local that carries the mark, or from the record of a retired one.
func (a *Reconciler) recordedAddress(fwm ipvs.Key) (ipvs.Key, bool) {
	if address, ok := a.marked[fwm]; ok {
		return address, true
	}
	address, ok := a.retired[fwm]
	return address, ok
}

// wantServer returns the desired virtual server. A fwmark virtual server is desired only
// once a member proves it to be ours, and only while its Service also has the address and
// port.
func (a *Reconciler) wantServer(key ipvs.Key) (*wantedServer, bool) {
	if s := a.servers.records[key]; s != nil {
		return a.wantRecord(s)
	}
	return nil, false
}

// wantRecord is wantServer for a record.
func (a *Reconciler) wantRecord(s *server) (*wantedServer, bool) {
	if !s.wanted() {
		return nil, false
	}
	if s.key.FWMark == 0 {
		return &s.value, true
	}
	address, ok := a.recordedAddress(s.key)
	if !ok || a.servers.winner(address) != s.owner.Name {
		return nil, false
	}
	return &s.value, true
}

// localMember returns the key of the member of plan.Local for an address and port.
func (a *Reconciler) localMember(key ipvs.Key) memberKey {
	return a.sets.key(plan.Member{Set: plan.Local.In(key.Family()), Entry: entryOf(key)})
}

// markOf returns the mark that the kernel gives to packets of internal clients to an address
// and port; 0 if none.
func (a *Reconciler) markOf(key ipvs.Key) uint32 {
	if m := a.members.records[a.localMember(key)]; m != nil && m.there {
		return m.actual
	}
	return 0
}

// markFWMarkServer marks the fwmark virtual server of an address and port dirty.
func (a *Reconciler) markFWMarkServer(key ipvs.Key) {
	a.markIfWanted(fwmKey(key.Family(), a.markOf(key)))
}

func (a *Reconciler) markIfWanted(fwm ipvs.Key) {
	if a.servers.wanted(fwm) {
		a.servers.markKey(fwm)
	}
}

// indexMarks rebuilds the index of fwmarks from the sets. If two members carry the same
// mark, another program wrote one of them: the desired one counts.
func (a *Reconciler) indexMarks() {
	a.marked = map[ipvs.Key]ipvs.Key{}
	local := map[uint16]ip.Family{}
	for _, family := range a.cfg.Families {
		local[a.sets.named(plan.Local.In(family))] = family
	}
	for m := range a.members.allHeld() {
		family, ok := local[m.key.set]
		if !ok || m.actual == 0 {
			continue
		}
		fwm := fwmKey(family, m.actual)
		want, wanted := a.wantMember(m)
		if _, known := a.marked[fwm]; !known || wanted && want == m.actual {
			a.marked[fwm] = keyOf(a.sets.member(m.key).Entry)
		}
	}
}

// memberMarked updates the index when the mark of a member changes from was to is; 0 is no
// mark. It marks the virtual servers dirty that waited for the member.
func (a *Reconciler) memberMarked(e ipset.Entry, was, is uint32) {
	if was == is {
		return
	}
	family, key := ip.Of(e.Addr), keyOf(e)
	if fwm := fwmKey(family, was); was != 0 && a.marked[fwm] == key {
		delete(a.marked, fwm)
		if a.servers.holds(fwm) {
			a.servers.markKey(fwm) // to be retired
		}
	}
	if is != 0 {
		fwm := fwmKey(family, is)
		a.marked[fwm] = key
		a.markIfWanted(fwm)
		a.markRecord(fwm)
	}
}
