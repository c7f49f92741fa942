package reconcile

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// The kernel does not notify us of changes in IPVS and in sets. Reading them whole costs
// time for each member; reading their counts costs a few system calls.

// sampledSlots is the number of index slots searched for one member of each large set. It is also
// the number of index slots from which the next virtual servers to check are taken.
const sampledSlots = 1024

// checkedAtOnce is the number of virtual servers whose real servers one spot check compares. So spot
// checks soon notice a difference in many virtual servers. One in a single virtual server may be found
// only by the next resync.
const checkedAtOnce = 4

// spotChecker compares the cached state with the kernel cheaply. It holds what it checks in turn.
type spotChecker struct {
	t           *serviceTables
	kernel      *Kernel
	toCheck     []*server // virtual servers that come next
	lastCounted int       // the large set that was counted last
	countBudget int       // members of large sets that may be counted
}

// differs returns the parts of the kernel that cheap checks find different from the
// cached state. They compare: the number of IPv4 virtual servers; the member counts of small sets
// and, in turn, of large ones; one random member of each large set; the real servers of a few virtual
// servers, others with each call. The cost does not grow with the number of Services. What cannot be
// read counts as equal. It must not be called during an observation or a resync.
func (c *spotChecker) differs() extent {
	switch {
	case c.membersMissing():
		return state
	case c.serversMissing() || c.realServersDiffer():
		return extent{servers: true}
	}
	return extent{}
}

func (c *spotChecker) serversMissing() bool {
	n, err := c.kernel.IPVS.Count()
	return err == nil && n != c.t.servers.ipv4Servers+countIPv4(c.t.servers.foreign)
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

// A set is large if it has more than smallSet members: the kernel goes through all members of a set
// to count them. Of large sets, a spot check counts countedAtOnce members on average.
const (
	smallSet      = 256
	countedAtOnce = 2048
)

// membersMissing counts the members of the small sets, and of large ones in turn. Of each large
// set it looks up one member at random, so that an emptied set is noticed at once. It skips empty
// sets: the resync finds what another program adds there.
func (c *spotChecker) membersMissing() bool {
	var counted []string
	var large []uint16
	for i, set := range c.t.sets.list {
		switch {
		case set.existing > smallSet:
			large = append(large, uint16(i))
		case set.existing > 0:
			counted = append(counted, set.name)
		}
	}
	for _, i := range c.nextToCount(large) {
		counted = append(counted, c.t.sets.list[i].name)
	}
	return c.countsDiffer(counted) || c.sampleMissing(large)
}

// nextToCount returns which of the large sets to count now; large has their indexes. Each
// call adds countedAtOnce members to a budget, from which each returned set takes its size.
func (c *spotChecker) nextToCount(large []uint16) []uint16 {
	var out []uint16
	all := c.t.sets.list
	c.countBudget += countedAtOnce
	for len(out) < len(large) {
		next := large[(c.lastCounted+1)%len(large)]
		if c.countBudget < all[next].existing {
			return out
		}
		c.countBudget -= all[next].existing
		c.lastCounted = (c.lastCounted + 1) % len(large)
		out = append(out, next)
	}
	c.countBudget = 0
	return out
}

func (c *spotChecker) countsDiffer(names []string) bool {
	if len(names) == 0 {
		return false
	}
	sizes, err := c.kernel.IPSet.Sizes(names)
	return err == nil && slices.ContainsFunc(names, func(name string) bool {
		n, there := sizes[name]
		return !there || n >= 0 && n != c.t.sets.get(name).existing
	})
}

// sampleMissing reports whether a member chosen at random from each of some sets is missing.
func (c *spotChecker) sampleMissing(sets []uint16) bool {
	if len(sets) == 0 {
		return false
	}
	for m := range c.t.members.records.Some(sampledSlots) {
		i := slices.Index(sets, m.key.set)
		if i < 0 || !m.exists {
			continue
		}
		full := c.t.sets.member(m.key)
		has, err := c.kernel.IPSet.Has(c.t.sets.list[m.key.set].set, full.Entry)
		if err == nil && !has || kernel.IsNotExist(err) {
			return true
		}
		if sets = slices.Delete(sets, i, i+1); len(sets) == 0 {
			break
		}
	}
	return false
}

// nextToCheck returns the next virtual server, or nil if there is none: in turn all of a small node, and
// a random part of those of a large one.
func (c *spotChecker) nextToCheck() *server {
	if len(c.toCheck) == 0 {
		c.toCheck = slices.Collect(c.t.servers.records.Some(sampledSlots))
	}
	if len(c.toCheck) == 0 {
		return nil
	}
	next := c.toCheck[0]
	if c.toCheck = c.toCheck[1:]; len(c.toCheck) == 0 {
		c.toCheck = nil // release its array
	}
	return next
}

// realServersDiffer checks the next virtual servers until one differs. They include those of IPv6, which
// the kernel does not count.
func (c *spotChecker) realServersDiffer() bool {
	for range checkedAtOnce {
		s := c.nextToCheck()
		if s == nil {
			return false
		}
		if !s.exists {
			continue
		}
		if is, err := c.kernel.IPVS.RealServers(s.key); err == nil && !s.cached.equals(is) {
			return true
		}
	}
	return false
}
