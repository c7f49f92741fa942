package apply

import (
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// The kernel does not notify of changes in IPVS and in sets. Reading them whole costs
// time for each member; reading their counts costs a few system calls.

// looks is in how many calls of Suspicious every virtual server has been looked at. It
// is called once a second.
const looks = 20 * 60

// leastLooks is how many virtual servers a call looks at, if there are as many.
const leastLooks = 4

// Suspicious reports whether the kernel holds something else than what was last
// written and observed, as far as can be seen at little cost: by the number of
// virtual servers of IPv4 and of each set's members, and by the real servers of a few
// virtual servers, which are others with each call. What cannot be read is no reason
// for suspicion. It must not be called while an observation or an adoption is under way.
func (a *Applier) Suspicious() bool {
	return a.serversMissing() || a.membersMissing() || a.realServersDiffer()
}

func (a *Applier) serversMissing() bool {
	n, err := a.kernel.IPVS.Count()
	return err == nil && n != a.have.ofIPv4+ofIPv4(a.foreign)
}

func ofIPv4(s ipvs.State) int {
	n := 0
	for key := range s {
		if key.Addr.Is4() {
			n++
		}
	}
	return n
}

// membersMissing leaves out empty sets: what another program adds there, the
// comparison finds.
func (a *Applier) membersMissing() bool {
	for name, set := range a.have.sets {
		if len(set.Entries) == 0 {
			continue
		}
		n, known, err := a.kernel.IPSet.Count(name)
		if kernel.IsNotExist(err) || err == nil && known && n != len(set.Entries) {
			return true
		}
	}
	return false
}

// realServersDiffer looks at some virtual servers. Those of IPv6, which the kernel
// does not count, are among them as the others are.
func (a *Applier) realServersDiffer() bool {
	if len(a.toLook) == 0 {
		a.toLook = slices.AppendSeq(make([]ipvs.Key, 0, len(a.have.servers)), maps.Keys(a.have.servers))
	}
	n := min(len(a.toLook), max(leastLooks, len(a.have.servers)/looks+1))
	for _, key := range a.toLook[:n] {
		have, there := a.have.servers[key]
		if !there {
			continue
		}
		if is, err := a.kernel.IPVS.RealServers(key); err == nil && !maps.Equal(is, have.RealServers) {
			return true
		}
	}
	if a.toLook = a.toLook[n:]; len(a.toLook) == 0 {
		a.toLook = nil // not what is left of its array
	}
	return false
}

// Size is how many virtual servers and members of sets the kernel holds of ours.
func (a *Applier) Size() int {
	n := len(a.have.servers)
	for _, set := range a.have.sets {
		n += len(set.Entries)
	}
	return n
}
