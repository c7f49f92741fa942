package reconcile

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A fwmark virtual server does not say which address and port it serves. The members of
// plan.Local do: each is an address and port with its fwmark.

// usedMarks returns the fwmarks in the kernel by address and port: those of members of
// plan.Local and of retired virtual servers.
func (r *Reconciler) usedMarks() map[ipvs.Key]uint32 {
	out := make(map[ipvs.Key]uint32, len(r.inLocal))
	for fwm, key := range r.retired {
		out[key] = max(out[key], fwm.FWMark)
	}
	for fwm, key := range r.inLocal {
		out[key] = fwm.FWMark
	}
	return out
}

// kernelUsesMark reports whether the kernel has the member of plan.Local for an address and
// port, or a virtual server with the fwmark.
func (r *Reconciler) kernelUsesMark(key ipvs.Key, mark uint32) bool {
	for _, fwm := range r.markVariants(fwmKey(key.Family(), mark)) {
		if r.servers.exists(fwm) {
			return true
		}
	}
	return r.members.exists(r.localMember(key))
}

// markInUse reports whether a virtual server of a family has the mark: a foreign one, or one
// of ours, retired ones included.
func (r *Reconciler) markInUse(family ip.Family, mark uint32) bool {
	for _, fwm := range r.markVariants(fwmKey(family, mark)) {
		if _, foreign := r.foreign[fwm]; foreign || r.servers.exists(fwm) {
			return true
		}
	}
	return false
}

func fwmKey(family ip.Family, mark uint32) ipvs.Key {
	return ipvs.Key{Addr: family.Unspecified(), FWMark: mark}
}

// markVariants returns a fwmark key with and without the masquerade mark. A process that was
// killed after it changed the member of plan.Local leaves the other one.
func (r *Reconciler) markVariants(fwm ipvs.Key) [2]ipvs.Key {
	other := fwm
	other.FWMark ^= r.cfg.MasqueradeMark
	return [2]ipvs.Key{fwm, other}
}

// addressOf returns the address and port that a virtual server serves; false if no set lists
// its fwmark.
func (r *Reconciler) addressOf(key ipvs.Key) (ipvs.Key, bool) {
	if key.FWMark == 0 {
		return key, true
	}
	if address, ok := r.listedAddress(key); ok {
		return address, true
	}
	address, ok := r.inLocal[r.markVariants(key)[1]]
	return address, ok
}

// listedAddress returns the address and port of a fwmark virtual server from the member of
// plan.Local that carries the mark, or from its drain entry.
func (r *Reconciler) listedAddress(fwm ipvs.Key) (ipvs.Key, bool) {
	if address, ok := r.inLocal[fwm]; ok {
		return address, true
	}
	address, ok := r.retired[fwm]
	return address, ok
}

// desiredServer returns the desired virtual server. A fwmark virtual server is desired only
// once a member proves it to be ours, and only while its Service has precedence at the address
// and port too.
func (r *Reconciler) desiredServer(key ipvs.Key) (*wantedServer, bool) {
	if s := r.servers.records.Get(key); s != nil {
		return r.desiredIn(s)
	}
	return nil, false
}

// desiredIn is desiredServer for a record of the table.
func (r *Reconciler) desiredIn(s *server) (*wantedServer, bool) {
	if !s.wanted() {
		return nil, false
	}
	if s.key.FWMark == 0 {
		return &s.value, true
	}
	address, ok := r.listedAddress(s.key)
	if !ok || r.servers.winner(address) != s.owner.Name {
		return nil, false
	}
	return &s.value, true
}

// localMember returns the key of the member of plan.Local for an address and port.
func (r *Reconciler) localMember(key ipvs.Key) memberKey {
	return r.sets.key(plan.Member{Set: plan.Local.In(key.Family()), Entry: plan.EntryOf(key)})
}

// markOf returns the mark that the kernel gives to packets of internal clients to an address
// and port; 0 if none.
func (r *Reconciler) markOf(key ipvs.Key) uint32 {
	if m := r.members.records.Get(r.localMember(key)); m != nil && m.exists {
		return m.cached
	}
	return 0
}

// setFWMarkServerDirty makes the fwmark virtual server of an address and port dirty.
func (r *Reconciler) setFWMarkServerDirty(key ipvs.Key) {
	r.setDirtyIfWanted(fwmKey(key.Family(), r.markOf(key)))
}

func (r *Reconciler) setDirtyIfWanted(fwm ipvs.Key) {
	if r.servers.wanted(fwm) {
		r.servers.setKeyDirty(fwm)
	}
}

// indexMarks rebuilds inLocal from the sets. If two members carry the same mark, another
// program wrote one of them: the desired one counts.
func (r *Reconciler) indexMarks() {
	r.inLocal = map[ipvs.Key]ipvs.Key{}
	local := map[uint16]ip.Family{}
	for _, family := range r.cfg.Families {
		local[r.sets.named(plan.Local.In(family))] = family
	}
	for m := range r.members.allExisting() {
		family, ok := local[m.key.set]
		if !ok || m.cached == 0 {
			continue
		}
		fwm := fwmKey(family, m.cached)
		want, desired := r.desiredMember(m)
		if _, known := r.inLocal[fwm]; !known || desired && want == m.cached {
			r.inLocal[fwm] = plan.KeyOf(r.sets.member(m.key).Entry)
		}
	}
}

// memberMarkChanged updates inLocal when the mark of a member changes from was to is; 0 is no
// mark. It makes the virtual servers dirty that waited for the member.
func (r *Reconciler) memberMarkChanged(e ipset.Entry, was, is uint32) {
	if was == is {
		return
	}
	family, key := ip.Of(e.Addr), plan.KeyOf(e)
	if fwm := fwmKey(family, was); was != 0 && r.inLocal[fwm] == key {
		delete(r.inLocal, fwm)
		if r.servers.exists(fwm) {
			r.servers.setKeyDirty(fwm) // to be retired
		}
	}
	if is != 0 {
		fwm := fwmKey(family, is)
		r.inLocal[fwm] = key
		r.setDirtyIfWanted(fwm)
		r.setDrainEntryDirty(fwm)
	}
}
