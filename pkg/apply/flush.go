package apply

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// flush is one pass over the dirty keys.
type flush struct {
	*Applier
	problems Problems
}

// Flush writes all differences. The order ensures that a VIP becomes local only after its
// rules and real servers exist, and stops being local before they are deleted. A refused
// change is kept for Retry; the others are applied.
func (a *Applier) Flush() Problems {
	f := &flush{Applier: a}
	f.flushNode()
	f.addMembers()
	f.deleteClientIPMembers()
	f.flushServers()
	f.addMembers() // those that waited for a virtual server
	f.flushVIPs()
	f.deleteServers()
	f.deleteMembers()
	if !f.flows.failed {
		f.deleteStaleFlows()
	}
	f.servers.shrink()
	f.members.shrink()
	f.vips.shrink()
	return f.problems
}

// fail records a problem of the owners.
func (f *flush) fail(owners []types.NamespacedName, err error) {
	f.problems = append(f.problems, Problem{owners, err})
}

// applyChanges applies changes, and calls done for each that succeeded and failed for the others.
func applyChanges[C interface {
	comparable
	fmt.Stringer
}](changes []C, apply func([]C) []kernel.Failure[C], done func(C), failed func(C, error)) {
	applyIndexed(changes, apply, func(i int) { done(changes[i]) }, func(i int, err error) { failed(changes[i], err) })
}

// applyIndexed is applyChanges with the indexes of the changes in place of the changes.
func applyIndexed[C interface {
	comparable
	fmt.Stringer
}](changes []C, apply func([]C) []kernel.Failure[C], done func(int), failed func(int, error)) {
	if len(changes) == 0 {
		return
	}
	refused := map[C]error{}
	for _, f := range apply(changes) {
		refused[f.Change] = f
	}
	for i, c := range changes {
		if err, ok := refused[c]; ok {
			failed(i, err)
		} else {
			done(i)
		}
	}
}

// addMembers adds members to all sets in one call. A member of plan.Local gets a new mark
// only after the virtual server of its old mark is recorded.
func (f *flush) addMembers() {
	f.recordReplaced()
	var changes []ipset.Change
	for m := range f.members.dirty {
		want, wanted := f.wantMember(m)
		have, there := f.cached.sets[m.Set].Entries[m.Entry]
		fwm, exists := f.localMark(m)
		switch {
		case wanted && f.failedSets[m.Set]:
			f.members.markStuck(m) // flushSets reports the missing set
		case wanted && !there && f.preservesClientIP(m): // added after the virtual server changed
		case f.waitsForWeights(m, want), wanted && exists && have != want && f.retired[fwm] != keyOf(m.Entry) && !f.failedSets[plan.Draining.In(fwm.Family())]:
		case wanted && (!there || have != want):
			c := f.memberChange(ipset.AddEntry, m)
			c.Mark = want
			changes = append(changes, c)
		case wanted == there:
			f.members.markClean(m)
		}
	}
	f.applyMembers(changes)
}

// deleteMembers removes members that are not desired. A member that proves a virtual server
// to be ours stays until the virtual server is deleted: without it the virtual server would
// look foreign and never be removed.
func (f *flush) deleteMembers() {
	var changes []ipset.Change
	for m := range f.members.dirty {
		if _, wanted := f.wantMember(m); !wanted && !f.provesOwnership(m) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}

// provesOwnership reports whether a member proves that an existing, no longer desired
// virtual server is ours.
func (f *flush) provesOwnership(m plan.Member) bool {
	fwm := fwmKey(ip.Of(m.Entry.Addr), f.cached.sets[m.Set].Entries[m.Entry])
	if _, exists := f.cached.servers[fwm]; exists && f.marked[fwm] == keyOf(m.Entry) {
		return true
	}
	key := keyOf(m.Entry)
	_, exists := f.cached.servers[key]
	if _, wanted := f.servers.want(key); !exists || wanted {
		return false
	}
	return slices.ContainsFunc(owning, func(name plan.SetName) bool { return name.In(key.Family()) == m.Set })
}

func (f *flush) memberChange(op ipset.Op, m plan.Member) ipset.Change {
	return ipset.Change{Op: op, Set: f.setNamed(m.Set), Entry: m.Entry}
}

func (f *flush) applyMembers(changes []ipset.Change) {
	slices.SortStableFunc(changes, func(a, b ipset.Change) int { return cmp.Compare(sourceRangeOrder(a), sourceRangeOrder(b)) })
	applyChanges(changes, f.kernel.IPSet.Apply, f.memberDone, func(c ipset.Change, err error) {
		m := plan.Member{Set: c.Set.Name, Entry: c.Entry}
		f.fail(f.members.owners(m), err)
		f.members.markStuck(m)
	})
}

// sourceRangeOrder sorts changes so that a VIP enters LOAD-BALANCER-FW after its allowed
// sources and leaves before them; allowed clients are never rejected in between
// (kubernetes#119656).
func sourceRangeOrder(c ipset.Change) int {
	switch restricts := c.Set.Name == plan.LoadBalancerFW.In(ip.IPv4) || c.Set.Name == plan.LoadBalancerFW.In(ip.IPv6); {
	case restricts && c.Op == ipset.AddEntry:
		return 1
	case restricts:
		return -1
	}
	return 0
}

func (f *flush) memberDone(c ipset.Change) {
	m := plan.Member{Set: c.Set.Name, Entry: c.Entry}
	f.members.markClean(m)
	f.touched.member(m)
	entries := f.cached.sets[m.Set].Entries
	f.memberMarked(m.Entry, entries[m.Entry], c.Mark)
	f.indexRecord(m, c.Op == ipset.AddEntry)
	if c.Op == ipset.DeleteEntry {
		delete(entries, m.Entry)
		return
	}
	if entries == nil {
		entries = map[ipset.Entry]uint32{}
		f.cached.sets[m.Set] = ipset.Contents{Set: c.Set, Entries: entries}
	}
	entries[m.Entry] = c.Mark
}

// flushVIPs claims VIPs, except blocked ones, and then releases those that are not desired.
// A VIP whose claim changes stays local all the time.
func (f *flush) flushVIPs() {
	var added, removed []plan.VIP
	blocked := f.blocked()
	for vip := range f.vips.dirty {
		_, wanted := f.vips.want(vip)
		_, there := f.cached.vips[vip]
		switch {
		case wanted == there:
			f.vips.markClean(vip)
		case there:
			removed = append(removed, vip)
		case !blocked[vip.Addr]:
			added = append(added, vip)
		}
	}
	vips := append(added, removed...)
	changes := make([]routing.Change, len(vips))
	for i, vip := range vips {
		changes[i] = f.vipChange(vip, i < len(added))
	}
	applyIndexed(changes, f.kernel.Routing.Apply, func(i int) { f.vipDone(vips[i]) }, func(i int, err error) {
		f.fail(f.vips.owners(vips[i]), err)
		f.vips.markStuck(vips[i])
	})
}

// vipChange returns the change that claims or releases a VIP.
func (f *flush) vipChange(vip plan.VIP, wanted bool) routing.Change {
	route, ok := f.cfg.VIPs.Route(vip)
	switch {
	case ok && wanted:
		return routing.Change{Op: routing.AddRoute, Route: route}
	case ok:
		return routing.Change{Op: routing.DeleteRoute, Route: route}
	case wanted:
		return routing.Change{Op: routing.AddAddress, Address: vip.Addr}
	}
	return routing.Change{Op: routing.DeleteAddress, Address: vip.Addr}
}

// requiredSets are the sets without which a VIP must not become local: those that prove its
// virtual server to be ours, and those that list allowed clients. If another set is missing,
// the Service works without that set's feature.
var requiredSets = func() map[string]bool {
	out := map[string]bool{}
	for _, family := range ip.Families {
		for _, name := range slices.Concat(owning, []plan.SetName{plan.LoadBalancerFW, plan.SourceCIDR, plan.SourceIP}) {
			out[name.In(family)] = true
		}
	}
	return out
}()

// blocked returns the addresses that must not become local yet because the kernel refused
// something they need. A VIP that is local without its virtual server would be answered by
// any process that listens on 0.0.0.0. A fwmark virtual server is not needed: without it the
// kernel uses the one of the address and port.
func (f *flush) blocked() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for m := range f.members.stuck {
		if _, wanted := f.wantMember(m); wanted && (!f.failedSets[m.Set] || requiredSets[m.Set]) {
			out[m.Entry.Addr] = true
		}
	}
	for key := range f.servers.stuck {
		if _, there := f.cached.servers[key]; !there && key.FWMark == 0 {
			out[key.Addr] = true
		}
	}
	return out
}

// vipDone records that the kernel has the desired state of a VIP.
func (f *flush) vipDone(vip plan.VIP) {
	f.vips.markClean(vip)
	f.touched.vip(vip)
	if _, wanted := f.vips.want(vip); wanted {
		f.cached.vips[vip] = struct{}{}
	} else {
		delete(f.cached.vips, vip)
	}
}

// Lost removes VIPs from the cached state that another program, or Flush, deleted from the
// kernel. It returns how many of them are desired; the next Flush claims these again.
func (a *Applier) Lost(lost []routing.Lost) int {
	n := 0
	for _, l := range lost {
		vip := plan.VIP{Addr: l.Addr, Claim: a.claimOf(l.Table)}
		if _, wanted := a.vips.want(vip); !wanted {
			continue
		}
		if _, there := a.cached.vips[vip]; there {
			delete(a.cached.vips, vip)
			a.vips.markDirty(vip)
			n++
		}
	}
	return n
}

// claimOf returns the claim of a VIP that has a route in a table, or an address if table is
// 0.
func (a *Applier) claimOf(table int) plan.ClaimMode {
	switch table {
	case 0:
		return plan.ClaimAddress
	case a.cfg.VIPs.Table:
		return plan.ClaimPort
	}
	return plan.ClaimRoute
}
