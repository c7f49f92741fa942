package reconcile

import (
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// flush is one pass over the dirty keys and the node's sections. It determines the order of writes.
// The writers and the sections write, each one kind of object.
type flush struct {
	t          *serviceTables
	ns         *nodeSections
	problems   Problems
	members    memberWriter
	servers    serverWriter
	vips       vipWriter
	nodeFailed bool // part of the node's state was refused
}

// newFlush returns a flush that has written nothing yet.
func (r *Reconciler) newFlush() *flush {
	f := &flush{t: r.serviceTables, ns: r.nodeSections}
	f.members = memberWriter{t: f.t, kernel: &r.kernel, sets: r.node.sets, problems: &f.problems}
	f.servers = serverWriter{t: f.t, kernel: &r.kernel, problems: &f.problems}
	f.vips = vipWriter{t: f.t, kernel: &r.kernel, problems: &f.problems}
	return f
}

// Flush writes all differences. A refused change is kept for a retry; the others are applied. Rules for
// sets that come into use precede their members. Rules for sets that went out of use are deleted after
// the last members: the first pass deletes the members, and the second one the rules.
func (r *Reconciler) Flush() Problems {
	problems := r.finishAdditions()
	r.planNode()
	problems = append(problems, r.flush()...)
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
	f := r.newFlush()
	if r.node.dirty {
		f.flushNode()
		r.noteOmissions(time.Now())
	}
	if f.ns.stage() != holding {
		f.flushTables()
	}
	r.noteRefused(f.problems)
	return f.problems
}

// flushTables writes the differences of what Services own. In between it deletes the rules, routes and
// tables that served before (deleteReplaced).
func (f *flush) flushTables() {
	f.members.add()
	f.members.deleteFromClientIPSets()
	f.flushServers()
	f.members.add() // those that waited for a virtual server
	f.flushVIPs()
	f.deleteReplaced()
	f.servers.delete()
	f.members.delete()
	f.deleteStaleFlows()
	f.t.servers.compact()
	f.t.members.compact()
	f.t.vips.compact()
	if f.t.pruning {
		f.t.sets.dropUnused()
	}
	f.noteLink()
}

// noteLink makes the link dirty if another program has deleted it. The retry adds it before the addresses.
func (f *flush) noteLink() {
	if f.vips.linkGone {
		f.ns.cached.link, f.ns.node.dirty = false, true
	}
}

// flushServers adds and updates virtual and real servers, all additions before the first
// removal, and removes stale real servers. Fwmark virtual servers come first: before the
// virtual server of the address loses endpoints of other nodes, internal clients must already
// use the fwmark one. Conversely, a fwmark is removed (deleteFromLocal) only once the virtual server
// of the address has exactly its desired endpoints, because internal clients then use that one.
func (f *flush) flushServers() {
	grow, shrink := f.servers.due()
	f.servers.apply(grow, shrink...)
	f.members.add() // those that waited for a fwmark virtual server
	f.servers.apply(shrink)
	f.members.deleteFromLocal()
	f.servers.apply(f.servers.retirements())
}

// flushVIPs claims VIPs, and then releases those that are not desired.
func (f *flush) flushVIPs() {
	added, removed := f.vips.due(f.ns.stage())
	f.vips.change(added, true)
	if len(added)+len(removed) > 0 {
		f.members.add() // those that waited for a claim
		f.members.deleteFromClaimSets()
	}
	f.vips.change(removed, false)
}

// deleteRetired deletes retired virtual servers without real servers, and their drain entries.
func (f *flush) deleteRetired() {
	f.members.deleteDrainEntries(f.servers.deleteRetired())
}

// applyChanges applies changes, and calls done for each that succeeded and failed for the others.
func applyChanges[C change](changes []C, write func([]C) []kernel.Failure[C], done func(C), failed func(C, error)) {
	if len(changes) > 0 {
		succeeded(changes, write(changes), func(i int) { done(changes[i]) }, func(i int, err error) { failed(changes[i], err) })
	}
}
