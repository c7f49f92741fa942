package reconcile

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// markIndex has the addresses and ports of fwmark virtual servers, which do not say which ones they
// serve. The members of plan.Local do: each is an address and port with its fwmark. Those of
// plan.Draining do for retired virtual servers; see retire.go.
type markIndex struct {
	cfg     *plan.Config
	servers *serverTable
	members *memberTable
	inLocal map[ipvs.Key]ipvs.Key // fwmark key to address and port, from the members of plan.Local in the kernel
	retired map[ipvs.Key]ipvs.Key // likewise for retired virtual servers, from the members of plan.Draining
}

// used returns the fwmarks in the kernel by address and port: those of members of
// plan.Local and of retired virtual servers.
func (x *markIndex) used() map[ipvs.Key]uint32 {
	out := make(map[ipvs.Key]uint32, len(x.inLocal))
	for fwm, key := range x.retired {
		out[key] = max(out[key], fwm.FWMark)
	}
	for fwm, key := range x.inLocal {
		out[key] = fwm.FWMark
	}
	return out
}

// kernelUses reports whether the kernel has the member of plan.Local for an address and
// port, or a virtual server with the fwmark.
func (x *markIndex) kernelUses(key ipvs.Key, mark uint32) bool {
	for _, fwm := range x.variants(fwmKey(key.Family(), mark)) {
		if x.servers.exists(fwm) {
			return true
		}
	}
	return x.members.exists(x.members.localMember(key))
}

// inUse reports whether a virtual server of a family has the mark: a foreign one, or one
// of ours, retired ones included.
func (x *markIndex) inUse(family ip.Family, mark uint32) bool {
	for _, fwm := range x.variants(fwmKey(family, mark)) {
		if _, foreign := x.servers.foreign[fwm]; foreign || x.servers.exists(fwm) {
			return true
		}
	}
	return false
}

func fwmKey(family ip.Family, mark uint32) ipvs.Key {
	return ipvs.Key{Addr: family.Unspecified(), FWMark: mark}
}

// variants returns a fwmark key with and without the masquerade mark. A process that was
// killed after it changed the member of plan.Local leaves the other one.
func (x *markIndex) variants(fwm ipvs.Key) [2]ipvs.Key {
	other := fwm
	other.FWMark ^= x.cfg.MasqueradeMark
	return [2]ipvs.Key{fwm, other}
}

// addressOf returns the address and port that a virtual server serves; false if no set lists
// its fwmark.
func (x *markIndex) addressOf(key ipvs.Key) (ipvs.Key, bool) {
	if key.FWMark == 0 {
		return key, true
	}
	if address, ok := x.listedAddress(key); ok {
		return address, true
	}
	address, ok := x.inLocal[x.variants(key)[1]]
	return address, ok
}

// listedAddress returns the address and port of a fwmark virtual server from the member of
// plan.Local that carries the mark, or from its drain entry.
func (x *markIndex) listedAddress(fwm ipvs.Key) (ipvs.Key, bool) {
	if address, ok := x.inLocal[fwm]; ok {
		return address, true
	}
	address, ok := x.retired[fwm]
	return address, ok
}

// desiredServer returns the desired virtual server; nil if none is desired. A fwmark virtual server is
// desired only once a member proves it to be ours, and only while its Service has precedence at the
// address and port too.
func (t *serviceTables) desiredServer(key ipvs.Key) *wantedServer {
	if s := t.servers.records.Get(key); s != nil {
		return t.desiredIn(s)
	}
	return nil
}

// desiredIn is desiredServer for a record of the table.
func (t *serviceTables) desiredIn(s *server) *wantedServer {
	if !s.wanted() {
		return nil
	}
	if s.key.FWMark == 0 {
		return &s.value
	}
	address, ok := t.marks.listedAddress(s.key)
	if !ok || t.servers.winner(address) != s.owner.Name {
		return nil
	}
	return &s.value
}

// markOf returns the mark that the kernel gives to packets of internal clients to an address
// and port; 0 if none.
func (x *markIndex) markOf(key ipvs.Key) uint32 {
	if m := x.members.records.Get(x.members.localMember(key)); m != nil && m.exists {
		return m.cached
	}
	return 0
}

// setServerDirty makes the fwmark virtual server of an address and port dirty.
func (x *markIndex) setServerDirty(key ipvs.Key) {
	x.setDirtyIfWanted(fwmKey(key.Family(), x.markOf(key)))
}

func (x *markIndex) setDirtyIfWanted(fwm ipvs.Key) {
	if x.servers.wanted(fwm) {
		x.servers.setKeyDirty(fwm)
	}
}

// indexMarks rebuilds inLocal from the sets. If two members carry the same mark, another
// program wrote one of them: the desired one counts.
func (t *serviceTables) indexMarks() {
	t.marks.inLocal = map[ipvs.Key]ipvs.Key{}
	local := map[uint16]ip.Family{}
	for _, family := range t.cfg.Families {
		local[t.sets.named(plan.Local.In(family))] = family
	}
	for m := range t.members.allExisting() {
		family, ok := local[m.key.set]
		if !ok || m.cached == 0 {
			continue
		}
		fwm := fwmKey(family, m.cached)
		want, desired := t.desiredMember(m)
		if _, known := t.marks.inLocal[fwm]; !known || desired && want == m.cached {
			t.marks.inLocal[fwm] = plan.KeyOf(t.sets.member(m.key).Entry)
		}
	}
}

// memberChanged updates inLocal when the mark of a member changes from was to is; 0 is no
// mark. It makes the virtual servers dirty that waited for the member.
func (x *markIndex) memberChanged(e ipset.Entry, was, is uint32) {
	if was == is {
		return
	}
	family, key := ip.Of(e.Addr), plan.KeyOf(e)
	if fwm := fwmKey(family, was); was != 0 && x.inLocal[fwm] == key {
		delete(x.inLocal, fwm)
		if x.servers.exists(fwm) {
			x.servers.setKeyDirty(fwm) // to be retired
		}
	}
	if is != 0 {
		fwm := fwmKey(family, is)
		x.inLocal[fwm] = key
		x.setDirtyIfWanted(fwm)
		x.setDrainEntryDirty(fwm)
	}
}
