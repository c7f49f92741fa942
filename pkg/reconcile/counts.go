package reconcile

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// The kernel does not notify us of changes in IPVS and in sets. Reading them whole costs
// time for each member; reading their counts costs a few system calls.

// fullCheckCalls is the number of calls of Suspicious that together check every virtual
// server. The proxy loop calls it once a second.
const fullCheckCalls = 20 * 60

// minChecked is the least number of virtual servers that one call checks.
const minChecked = 4

// Suspicious reports whether the kernel differs from the cached state, as far as a cheap
// check can tell. It compares the number of IPv4 virtual servers, the number of members of
// each set, and the real servers of a few virtual servers, different ones with each call. A
// failed read is not suspicious. It must not be called while an observation or a resync
// runs.
func (a *Reconciler) Suspicious() bool {
	return a.serversMissing() || a.membersMissing() || a.realServersDiffer()
}

func (a *Reconciler) serversMissing() bool {
	n, err := a.kernel.IPVS.Count()
	return err == nil && n != a.ipv4Servers+countIPv4(a.foreign)
}

func countIPv4(s ipvs.State) int {
	n := 0
	for key := range s {
		if key.Addr.Is4() {
			n++
		}
	}
	return n
}

// membersMissing skips empty sets: the resync finds what another program adds there.
func (a *Reconciler) membersMissing() bool {
	held := map[string]int{}
	var names []string
	for _, set := range a.sets.list {
		if set.held > 0 {
			held[set.name] = set.held
			names = append(names, set.name)
		}
	}
	if len(names) == 0 {
		return false
	}
	sizes, err := a.kernel.IPSet.Sizes(names)
	return err == nil && slices.ContainsFunc(names, func(name string) bool {
		n, there := sizes[name]
		return !there || n >= 0 && n != held[name]
	})
}

// realServersDiffer checks the next virtual servers. They include those of IPv6, which the
// kernel does not count.
func (a *Reconciler) realServersDiffer() bool {
	if len(a.toCheck) == 0 {
		a.toCheck = slices.AppendSeq(make([]*server, 0, a.servers.held), a.servers.allHeld())
	}
	n := min(len(a.toCheck), max(minChecked, a.servers.held/fullCheckCalls+1))
	for _, s := range a.toCheck[:n] {
		if !s.there {
			continue
		}
		if is, err := a.kernel.IPVS.RealServers(s.key); err == nil && !s.actual.equals(is) {
			return true
		}
	}
	if a.toCheck = a.toCheck[n:]; len(a.toCheck) == 0 {
		a.toCheck = nil // release its array
	}
	return false
}

// Size returns how many virtual servers and set members of ours the kernel holds.
func (a *Reconciler) Size() int {
	return a.servers.held + a.members.held
}
