package reconcile

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// additions are the differences of a flush in which the kernel has none of the objects yet. A goroutine
// writes them, in the order of flushTables. Meanwhile the tables say that the kernel has them.
type additions struct {
	members []*member
	servers []*server
	vips    []*vipRecord

	memberChanges []ipset.Change
	serverChanges []ipvs.Change
	vipChanges    []routing.Change

	// Set before ended is closed. Later kinds of objects are not written after a refusal.
	refusedMembers []ipset.Failure
	refusedServers []ipvs.Failure
	refusedVIPs    []routing.Failure
	ended          chan struct{}
}

// FlushAhead is a Flush that lets the caller plan the next Services while it writes. If all
// differences are additions, which is so for most Services that a node gets at startup, it returns
// before they are written. The next FlushAhead, Flush or Prune waits for them, and returns their
// problems too. Before that call, only Set may be called. If not all differences are additions,
// FlushAhead is Flush.
func (r *Reconciler) FlushAhead() Problems {
	r.planNode()
	next := r.collectAdditions()
	if problems := r.finishAdditions(); next == nil || len(problems) > 0 {
		return append(problems, r.Flush()...)
	}
	r.ahead = next
	go next.write(&r.kernel)
	r.cacheAdditions(next)
	return nil
}

// collectAdditions returns the differences if all of them are additions, and nil otherwise. Members
// of plan.Local, fwmark virtual servers and claims that replace others have an order of their own, so
// they are not among additions.
func (r *Reconciler) collectAdditions() *additions {
	if r.kernel.dryRun != nil || r.node.dirty || r.stage() != adding || len(r.servers.stuck)+len(r.members.stuck)+len(r.vips.stuck) > 0 {
		return nil
	}
	f, a := r.newFlush(), &additions{ended: make(chan struct{})}
	for m := range r.members.allDirty() {
		set := r.sets.list[m.key.set]
		if mark, desired := r.desiredMember(m); m.exists || !desired || mark != 0 || !set.exists || set.failed || r.vips.waitsForClaim(m) {
			return nil
		}
		a.members = append(a.members, m)
		a.memberChanges = append(a.memberChanges, f.members.changeOf(ipset.AddEntry, m))
	}
	for s := range r.servers.allDirty() {
		want := r.desiredIn(s)
		if s.exists || want == nil || s.key.FWMark != 0 {
			return nil
		}
		a.servers = append(a.servers, s)
		a.serverChanges = append(a.serverChanges, r.serverChanges(s, want)...)
	}
	for v := range r.vips.allDirty() {
		if v.exists || !r.vips.desired(v) || r.vips.keepsClaim(v.key.Addr, adding) {
			return nil
		}
		a.vips = append(a.vips, v)
		a.vipChanges = append(a.vipChanges, f.vips.changeOf(v.key, true))
	}
	slices.SortStableFunc(a.memberChanges, bySourceRangeOrder)
	return a
}

// write writes one kind of objects after the other. If some of a kind are refused, it ends: a VIP must not
// become local without its members.
func (a *additions) write(k *Kernel) {
	defer close(a.ended)
	if len(a.memberChanges) > 0 {
		a.refusedMembers = k.writeSets(a.memberChanges)
	}
	if len(a.serverChanges) > 0 && !a.refused() {
		a.refusedServers = k.writeIPVS(a.serverChanges)
	}
	if len(a.vipChanges) > 0 && !a.refused() {
		a.refusedVIPs = k.writeRouting(a.vipChanges)
	}
}

// refused reports whether anything was refused.
func (a *additions) refused() bool {
	return len(a.refusedMembers)+len(a.refusedServers)+len(a.refusedVIPs) > 0
}

// cacheAdditions records that the kernel has the additions.
func (r *Reconciler) cacheAdditions(a *additions) {
	for _, m := range a.members {
		r.members.setCached(m, 0)
		r.members.setClean(m)
	}
	for _, s := range a.servers {
		want := r.desiredIn(s)
		is := cachedServer{settings: want.settings, place: s.cached.place, reals: want.endpoints, shared: true}
		if other := func(e endpoint) bool { return e.Flags&plan.IsRealServer == 0 }; slices.ContainsFunc(is.reals, other) {
			is.reals, is.shared = slices.DeleteFunc(slices.Clone(want.endpoints), other), false
		}
		r.servers.setCached(s, is)
		r.servers.setClean(s)
	}
	for _, v := range a.vips {
		r.vips.setCached(v, struct{}{})
		r.vips.setClean(v)
	}
	r.servers.compact()
	r.members.compact()
	r.vips.compact()
}

// finishAdditions waits until the additions of the last FlushAhead are written. It sets aside what was
// refused, makes dirty what was not written, and returns the problems.
func (r *Reconciler) finishAdditions() Problems {
	a := r.ahead
	if a == nil {
		return nil
	}
	<-a.ended
	r.ahead = nil
	if !a.refused() {
		return nil
	}
	f := r.newFlush()
	for _, failure := range a.refusedMembers {
		r.members.clearCached(f.members.memberOf(failure.Change))
		f.members.refused(failure.Change, failure)
	}
	if len(a.refusedMembers) > 0 {
		for _, s := range a.servers {
			r.clearCachedServer(s)
			r.servers.setDirty(s)
		}
	}
	refused := f.servers.refused()
	for _, failure := range a.refusedServers {
		s := r.servers.get(failure.Change.Key)
		if failure.Change.Op == ipvs.AddVirtualServer {
			r.clearCachedServer(s)
		} else if s.exists {
			r.servers.deleteRealServer(s, failure.Change.Dest)
		}
		refused(failure.Change, failure)
	}
	if len(a.refusedMembers)+len(a.refusedServers) > 0 {
		for _, v := range a.vips {
			r.vips.clearCached(v)
			r.vips.setDirty(v)
		}
	}
	for _, failure := range a.refusedVIPs {
		v := a.vips[slices.Index(a.vipChanges, failure.Change)]
		r.vips.clearCached(v)
		f.vips.refused(v, failure.Change, failure)
	}
	f.noteLink()
	r.noteRefused(f.problems)
	return f.problems
}
