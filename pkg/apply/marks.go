package apply

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A virtual server with a mark does not say what it serves. Members of the set
// plan.Local do: each is an address and port, and the mark that leads there.

// Marks returns the marks in use by address and port, desired or not: those that
// members of plan.Local carry, and of retired virtual servers.
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

// HoldsMark tells whether the kernel still has the member for an address and
// port, or its virtual server.
func (a *Applier) HoldsMark(key ipvs.Key, mark uint32) bool {
	_, member := a.have.sets[plan.Local.In(key.Family())].Entries[entryOf(key)]
	for _, fwm := range a.twins(fwmKey(key.Family(), mark)) {
		if _, there := a.have.servers[fwm]; there {
			return true
		}
	}
	return member
}

// MarkInUse reports whether any virtual server has a mark in either family: one that
// is not ours, or one of ours that is retired.
func (a *Applier) MarkInUse(mark uint32) bool {
	for _, family := range ip.Families {
		for _, fwm := range a.twins(fwmKey(family, mark)) {
			_, foreign := a.foreign[fwm]
			if _, ours := a.have.servers[fwm]; foreign || ours {
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

// twins are a key and what it is if the same number is masqueraded, or not. A
// process that ended after it had changed the member leaves the other.
func (a *Applier) twins(fwm ipvs.Key) [2]ipvs.Key {
	other := fwm
	other.FWMark ^= a.cfg.MasqueradeMark
	return [2]ipvs.Key{fwm, other}
}

// serves returns the address and port that a virtual server serves; false if no
// member tells.
func (a *Applier) serves(key ipvs.Key) (ipvs.Key, bool) {
	if key.FWMark == 0 {
		return key, true
	}
	if address, ok := a.owned(key); ok {
		return address, true
	}
	address, ok := a.marked[a.twins(key)[1]]
	return address, ok
}

// owned returns the address and port of a virtual server with a mark, by the member
// of plan.Local that carries the mark, or by the record of a retired one.
func (a *Applier) owned(fwm ipvs.Key) (ipvs.Key, bool) {
	if address, ok := a.marked[fwm]; ok {
		return address, true
	}
	address, ok := a.retired[fwm]
	return address, ok
}

// wantServer returns the desired virtual server. One with a mark is desired once a
// member says that it is ours, and as long as the Service has the address and port
// too: of two that claim them, the older.
func (a *Applier) wantServer(key ipvs.Key) (*plan.VirtualServer, bool) {
	vs, ok := a.servers.want(key)
	if !ok || key.FWMark == 0 {
		return vs, ok
	}
	address, ok := a.owned(key)
	if !ok || a.servers.winner(address) != a.servers.winner(key) {
		return nil, false
	}
	return vs, true
}

// markTwin has the virtual server with a mark looked at when the one with the
// address and port was.
func (a *Applier) markTwin(key ipvs.Key) {
	mark := a.have.sets[plan.Local.In(key.Family())].Entries[entryOf(key)]
	a.markIfWanted(fwmKey(key.Family(), mark))
}

func (a *Applier) markIfWanted(fwm ipvs.Key) {
	if _, claimed := a.servers.want(fwm); claimed {
		a.servers.mark(fwm)
	}
}

// indexMarks reads the index from the sets. Of two members that carry one mark
// somebody else has written one: the one that is wanted counts.
func (a *Applier) indexMarks() {
	a.marked = map[ipvs.Key]ipvs.Key{}
	for _, family := range a.cfg.Families {
		set := plan.Local.In(family)
		for e, mark := range a.have.sets[set].Entries {
			fwm := fwmKey(family, mark)
			want, wanted := a.wantMember(plan.Member{Set: set, Entry: e})
			if _, known := a.marked[fwm]; mark != 0 && (!known || wanted && want == mark) {
				a.marked[fwm] = keyOf(e)
			}
		}
	}
}

// memberMarked keeps the index as a member's mark changes; 0 is none. What has
// waited for the member can be programmed.
func (a *Applier) memberMarked(e ipset.Entry, was, is uint32) {
	if was == is {
		return
	}
	family, key := ip.Of(e.Addr), keyOf(e)
	if fwm := fwmKey(family, was); was != 0 && a.marked[fwm] == key {
		delete(a.marked, fwm)
		if _, stands := a.have.servers[fwm]; stands {
			a.servers.mark(fwm) // to be retired
		}
	}
	if is != 0 {
		fwm := fwmKey(family, is)
		a.marked[fwm] = key
		a.markIfWanted(fwm)
		a.lookAtRecord(fwm)
	}
}
