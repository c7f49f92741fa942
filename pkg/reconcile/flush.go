package reconcile

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// flush is one pass over the dirty keys.
type flush struct {
	*Reconciler
	problems   Problems
	nodeFailed bool // part of the node's state was refused
	linkGone   bool // another program has deleted kube-ipvs0
}

// Flush writes all differences. Rules for sets that come into use precede their members; rules
// for sets that are not used any more are deleted after the last members. A refused change is
// kept for a retry; the others are applied.
func (r *Reconciler) Flush() Problems {
	r.planNode()
	problems := r.flush()
	if r.planNode() {
		problems = append(problems, r.flush()...)
	}
	r.input.Started = r.pruning
	return problems
}

// flush writes all differences from the current plans. The order ensures that a VIP becomes
// local only after its rules and real servers exist, and stops being local before they are
// deleted.
func (r *Reconciler) flush() Problems {
	f := &flush{Reconciler: r}
	f.flushNode()
	if f.waitsForPrune() {
		return f.problems
	}
	f.addMembers()
	f.deleteClientIPMembers()
	f.flushServers()
	f.addMembers() // those that waited for a virtual server
	f.flushVIPs()
	f.deleteReplaced()
	f.deleteServers()
	f.deleteMembers()
	f.deleteStaleFlows()
	f.servers.compact()
	f.members.compact()
	f.vips.compact()
	f.dropUnusedSets()
	if f.linkGone {
		f.cached.link, f.node.dirty = false, true // the retry adds it before the addresses
	}
	return f.problems
}

// fail records a problem of the owners, or of the node if there are none.
func (f *flush) fail(owners []types.NamespacedName, err error) {
	for _, name := range owners {
		f.refused[name] = struct{}{}
	}
	if len(owners) == 0 {
		f.refused[nodeOwner.Name] = struct{}{}
	}
	f.problems = append(f.problems, Problem{owners, err})
}

// applyChanges applies changes, and calls done for each that succeeded and failed for the others.
func applyChanges[C change](changes []C, write func([]C) []kernel.Failure[C], done func(C), failed func(C, error)) {
	if len(changes) > 0 {
		succeeded(changes, write(changes), func(i int) { done(changes[i]) }, func(i int, err error) { failed(changes[i], err) })
	}
}

// addMembers adds the members that need not wait, to all sets in one call. A member of
// plan.Local gets a new mark only after the virtual server of its old mark has a drain entry.
func (f *flush) addMembers() {
	f.addDrainEntriesOfReplaced()
	var changes []ipset.Change
	for m := range f.members.allDirty() {
		want, desired := f.desiredMember(m)
		set := f.sets.list[m.key.set]
		different := !m.exists || m.cached != want
		switch {
		case desired && set.failed:
			f.members.setStuck(m) // setSection reports the missing set
		case desired && !m.exists && f.preservesClientIP(m): // added after the virtual server changed
		case desired && !m.exists && f.waitsForClaim(m): // added once the VIP is claimed in the new way
		case f.waitsForWeights(m, want) || desired && f.waitsForDrainEntry(m, want):
		case desired && different:
			c := f.memberChange(ipset.AddEntry, m)
			c.Mark = want
			changes = append(changes, c)
		case desired == m.exists:
			f.members.setClean(m)
		}
	}
	f.applyMembers(changes)
}

// waitsForDrainEntry reports whether a member of plan.Local keeps its mark for now, because the
// virtual server of the mark has no drain entry yet.
func (f *flush) waitsForDrainEntry(m *member, want uint32) bool {
	fwm, exists := f.fwmarkOf(m)
	return exists && m.cached != want && f.retired[fwm] != f.addressIn(m) && !f.sets.get(plan.Draining.In(fwm.Family())).failed
}

// deleteMembers removes members that are not desired. A member that proves a virtual server
// to be ours stays until the virtual server is deleted: without it the virtual server would
// look foreign and never be removed.
func (f *flush) deleteMembers() {
	var changes []ipset.Change
	for m := range f.members.allDirty() {
		if _, desired := f.desiredMember(m); !desired && !f.provesOwnership(m) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}

// provesOwnership reports whether a member proves that an existing, no longer desired
// virtual server is ours.
func (f *flush) provesOwnership(m *member) bool {
	full := f.sets.member(m.key)
	key := plan.KeyOf(full.Entry)
	fwm := fwmKey(ip.Of(m.key.addr), m.cached)
	if f.servers.exists(fwm) && f.inLocal[fwm] == key {
		return true
	}
	if !f.servers.exists(key) || f.servers.wanted(key) {
		return false
	}
	return slices.ContainsFunc(plan.Owning, func(name plan.SetName) bool { return name.In(key.Family()) == full.Set })
}

func (f *flush) memberChange(op ipset.Op, m *member) ipset.Change {
	full := f.sets.member(m.key)
	return ipset.Change{Op: op, Set: f.setNamed(full.Set), Entry: full.Entry}
}

func (f *flush) applyMembers(changes []ipset.Change) {
	slices.SortStableFunc(changes, func(a, b ipset.Change) int { return cmp.Compare(sourceRangeOrder(a), sourceRangeOrder(b)) })
	applyChanges(changes, f.kernel.writeSets, f.memberDone, func(c ipset.Change, err error) {
		m := f.memberOf(c)
		f.fail(f.members.owners(m.key), err)
		f.members.setStuck(m)
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

// memberOf returns the record of the member that a change is about.
func (f *flush) memberOf(c ipset.Change) *member {
	return f.members.get(f.sets.key(plan.Member{Set: c.Set.Name, Entry: c.Entry}))
}

func (f *flush) memberDone(c ipset.Change) {
	m := f.memberOf(c)
	f.members.noteWritten(m)
	was := m.cached
	if c.Op == ipset.DeleteEntry {
		f.clearCachedMember(m)
	} else {
		if set := f.sets.list[m.key.set]; !set.exists {
			set.set, set.exists = c.Set, true
		}
		f.setCachedMember(m, c.Mark)
	}
	f.members.setClean(m)
	f.memberMarkChanged(c.Entry, was, c.Mark)
	f.indexDrainEntry(plan.Member{Set: c.Set.Name, Entry: c.Entry}, c.Op == ipset.AddEntry)
}

// flushVIPs claims VIPs, except blocked ones, and then releases those that are not desired.
// A VIP whose claim changes stays local all the time; see claims.go.
func (f *flush) flushVIPs() {
	var added, removed []*vipRecord
	lackMembers, lackServers := f.lacking()
	blocked := func(v *vipRecord) bool {
		return lackMembers[v.key.Addr] || lackServers[v.key.Addr] && !f.hasServer(v)
	}
	for v := range f.vips.allDirty() {
		switch {
		case f.desiredVIP(v) == v.exists:
			f.vips.setClean(v)
		case v.exists:
			removed = append(removed, v)
		case !blocked(v) && !f.keepsClaim(v.key.Addr):
			added = append(added, v)
		}
	}
	f.changeVIPs(added, true)
	if len(added)+len(removed) > 0 {
		f.addMembers() // those that waited for a claim
		f.deleteClaimMembers()
	}
	f.changeVIPs(removed, false)
}

// changeVIPs claims or releases VIPs.
func (f *flush) changeVIPs(vips []*vipRecord, wanted bool) {
	if len(vips) == 0 {
		return
	}
	changes := make([]routing.Change, len(vips))
	for i, v := range vips {
		changes[i] = f.vipChange(v.key, wanted)
	}
	succeeded(changes, f.kernel.writeRouting(changes), func(i int) { f.vipDone(vips[i]) }, func(i int, err error) {
		f.fail(f.claimants(vips[i]), err)
		f.vips.setStuck(vips[i])
		if changes[i].Op == routing.AddAddress && errors.Is(err, unix.ENODEV) {
			f.linkGone = true
		}
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
		for _, name := range slices.Concat(plan.Owning, []plan.SetName{plan.LoadBalancerFW, plan.SourceCIDR, plan.SourceIP}) {
			out[name.In(family)] = true
		}
	}
	return out
}()

// lacking returns the addresses whose set members or virtual servers the kernel refused. A VIP
// does not become local without its set members, or without any virtual server: any process that
// listens on 0.0.0.0 would answer. If it has one, a refused virtual server affects its own port
// only, as under kube-proxy. A fwmark virtual server is not needed: without it the kernel uses
// the one of the address and port.
func (f *flush) lacking() (members, servers map[netip.Addr]bool) {
	members, servers = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for key, m := range f.members.stuck {
		set := f.sets.list[key.set]
		if _, desired := f.desiredMember(m); desired && (!set.failed || requiredSets[set.name]) {
			members[key.addr] = true
		}
	}
	for key, s := range f.servers.stuck {
		if !s.exists && key.FWMark == 0 {
			servers[key.Addr] = true
		}
	}
	return members, servers
}

// hasServer reports whether the kernel has a virtual server of a VIP.
func (f *flush) hasServer(v *vipRecord) bool {
	return slices.ContainsFunc(f.claimants(v), func(name types.NamespacedName) bool {
		return slices.ContainsFunc(f.owned.Get(name).servers, func(s *server) bool { return s.exists && s.key.Addr == v.key.Addr })
	})
}

// vipDone updates the cached state after a VIP was claimed or released.
func (f *flush) vipDone(v *vipRecord) {
	f.vips.noteWritten(v)
	if f.desiredVIP(v) {
		f.vips.setCached(v, struct{}{})
		f.addFlowsOf(v)
	} else {
		f.vips.clearCached(v)
	}
	f.vips.setClean(v)
}

// addFlowsOf adds the UDP flows to a VIP that has become local to those to delete.
func (f *flush) addFlowsOf(v *vipRecord) {
	for _, name := range f.claimants(v) {
		for _, s := range f.owned.Get(name).servers {
			if s.exists && s.key.Addr == v.key.Addr && s.key.Protocol == ip.UDP {
				f.addStaleFlows(s.key)
			}
		}
	}
}

// removed handles deletions of VIPs that the kernel reported, our own included. It clears the
// cached state of desired VIPs, so that the next Flush claims them again, and returns their number.
func (t *tables) removed(removals []routing.Removal) int {
	n := 0
	for _, l := range removals {
		v := t.vips.records.Get(plan.VIP{Addr: l.Addr, Claim: t.claimOf(l.Table)})
		if v != nil && t.desiredVIP(v) && v.exists {
			t.vips.clearCached(v)
			t.vips.setDirty(v)
			n++
		}
	}
	t.vipsRemoved = t.vipsRemoved || n > 0
	return n
}

// claimOf returns the claim of a VIP that has a route in a table, or an address if table is
// 0.
func (t *tables) claimOf(table int) plan.ClaimMode {
	switch table {
	case 0:
		return plan.ClaimAddress
	case t.cfg.VIPs.Table:
		return plan.ClaimPort
	}
	return plan.ClaimRoute
}
