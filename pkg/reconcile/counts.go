package reconcile

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// The kernel does not notify us of changes in IPVS and in sets. Reading them whole costs
// time for each member; reading their counts costs a few system calls.

// fullCheckCalls is the number of calls of suspicious that together check every virtual
// server.
const fullCheckCalls = 20 * 60

// minChecked is the least number of virtual servers that one call checks.
const minChecked = 4

// suspicious reports whether the kernel differs from the cached state, as far as a cheap
// check can tell. It compares the number of IPv4 virtual servers, the number of members of
// each set, and the real servers of a few virtual servers, different ones with each call. A
// failed read is not suspicious. It must not be called while an observation or a resync
// runs.
func (r *Reconciler) suspicious() bool {
	return r.serversMissing() || r.membersMissing() || r.realServersDiffer()
}

func (r *Reconciler) serversMissing() bool {
	n, err := r.kernel.IPVS.Count()
	return err == nil && n != r.ipv4Servers+countIPv4(r.foreign)
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
func (r *Reconciler) membersMissing() bool {
	held := map[string]int{}
	var names []string
	for _, set := range r.sets.list {
		if set.held > 0 {
			held[set.name] = set.held
			names = append(names, set.name)
		}
	}
	if len(names) == 0 {
		return false
	}
	sizes, err := r.kernel.IPSet.Sizes(names)
	return err == nil && slices.ContainsFunc(names, func(name string) bool {
		n, there := sizes[name]
		return !there || n >= 0 && n != held[name]
	})
}

// realServersDiffer checks the next virtual servers. They include those of IPv6, which the
// kernel does not count.
func (r *Reconciler) realServersDiffer() bool {
	if len(r.toCheck) == 0 {
		r.toCheck = slices.AppendSeq(make([]*server, 0, r.servers.held), r.servers.allHeld())
	}
	n := min(len(r.toCheck), max(minChecked, r.servers.held/fullCheckCalls+1))
	for _, s := range r.toCheck[:n] {
		if !s.there {
			continue
		}
		if is, err := r.kernel.IPVS.RealServers(s.key); err == nil && !s.actual.equals(is) {
			return true
		}
	}
	if r.toCheck = r.toCheck[n:]; len(r.toCheck) == 0 {
		r.toCheck = nil // release its array
	}
	return false
}
