package apply

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A fwmark virtual server does not say which address and port it serves. The members of
// plan.Local do: each is an address and port with its fwmark.

// Marks returns the fwmarks in use by address and port, desired or not: those of members of
// plan.Local and of retired virtual servers.
func (a *Applier) Marks() map[ipvs.Key]uint32 {
	out := make(map[ipvs.Key]uint32, len(a.marked))
	for fwm, key := range a.retired {
		out[key] = max(out[key], fwm.FWMark)
	}
	for fwm, key := range a.marked {
		out[key] = fwm.FWMark
	}
	return out
}

// HoldsMark reports whether the kernel still has the member of plan.Local for an address and
// port, or its fwmark virtual server.
func (a *Applier) HoldsMark(key ipvs.Key, mark uint32) bool {
	_, member := a.cached.sets[plan.Local.In(key.Family())].Entries[entryOf(key)]
	for _, fwm := range a.markVariants(fwmKey(key.Family(), mark)) {
		if _, there := a.cached.servers[fwm]; there {
			return true
		}
	}
	return member
}

// MarkInUse reports whether a virtual server of either family has the mark: a foreign one,
// or one of ours, retired ones included.
func (a *Applier) MarkInUse(mark uint32) bool {
	for _, family := range ip.Families {
		for _, fwm := range a.markVariants(fwmKey(family, mark)) {
			_, foreign := a.foreign[fwm]
			if _, ours := a.cached.servers[fwm]; foreign || ours {
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
func (a *Applier) markVariants(fwm ipvs.Key) [2]ipvs.Key {
	other := fwm
	other.FWMark ^= a.cfg.MasqueradeMark
	return [2]ipvs.Key{fwm, other}
}

// addressOf returns the address and port that a virtual server serves; false if no member
// records it.
func (a *Applier) addressOf(key ipvs.Key) (ipvs.Key, bool) {
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
func (a *Applier) recordedAddress(fwm ipvs.Key) (ipvs.Key, bool) {
	if address, ok := a.marked[fwm]; ok {
		return address, true
	}
	address, ok := a.retired[fwm]
	return address, ok
}

// wantServer returns the desired virtual server. A fwmark virtual server is desired only
// once a member proves it to be ours, and only while its Service also has the address and
// port.
func (a *Applier) wantServer(key ipvs.Key) (*plan.VirtualServer, bool) {
	vs, ok := a.servers.want(key)
	if !ok || key.FWMark == 0 {
		return vs, ok
	}
	address, ok := a.recordedAddress(key)
	if !ok || a.servers.winner(address) != a.servers.winner(key) {
		return nil, false
	}
	return vs, true
}

// markFWMarkServer marks the fwmark virtual server of an address and port dirty.
func (a *Applier) markFWMarkServer(key ipvs.Key) {
	mark := a.cached.sets[plan.Local.In(key.Family())].Entries[entryOf(key)]
	a.markIfWanted(fwmKey(key.Family(), mark))
}

func (a *Applier) markIfWanted(fwm ipvs.Key) {
	if _, claimed := a.servers.want(fwm); claimed {
		a.servers.markDirty(fwm)
	}
}

// indexMarks rebuilds the index of fwmarks from the sets. If two members carry the same
// mark, another program wrote one of them: the desired one counts.
func (a *Applier) indexMarks() {
	a.marked = map[ipvs.Key]ipvs.Key{}
	for _, family := range a.cfg.Families {
		set := plan.Local.In(family)
		for e, mark := range a.cached.sets[set].Entries {
			fwm := fwmKey(family, mark)
			want, wanted := a.wantMember(plan.Member{Set: set, Entry: e})
			if _, known := a.marked[fwm]; mark != 0 && (!known || wanted && want == mark) {
				a.marked[fwm] = keyOf(e)
			}
		}
	}
}

// memberMarked updates the index when the mark of a member changes from was to is; 0 is no
// mark. It marks the virtual servers dirty that waited for the member.
func (a *Applier) memberMarked(e ipset.Entry, was, is uint32) {
	if was == is {
		return
	}
	family, key := ip.Of(e.Addr), keyOf(e)
	if fwm := fwmKey(family, was); was != 0 && a.marked[fwm] == key {
		delete(a.marked, fwm)
		if _, exists := a.cached.servers[fwm]; exists {
			a.servers.markDirty(fwm) // to be retired
		}
	}
	if is != 0 {
		fwm := fwmKey(family, is)
		a.marked[fwm] = key
		a.markIfWanted(fwm)
		a.markRecord(fwm)
	}
}
