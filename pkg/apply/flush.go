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

// flush is one pass over what is dirty.
type flush struct {
	*Applier
	problems Problems
}

// Flush writes all that differs, in an order in which no VIP answers before
// its rules and real servers stand, and none loses them before it has stopped
// to answer. What fails stays to be tried again; the rest goes on.
func (a *Applier) Flush() Problems {
	f := &flush{Applier: a}
	f.flushNode()
	f.addMembers()
	f.stopKeeping()
	f.flushServers()
	f.addMembers() // those that wait for a virtual server
	f.flushVIPs()
	f.deleteServers()
	f.deleteMembers()
	if !f.flows.wait {
		f.forgetStale()
	}
	f.servers.rest()
	f.members.rest()
	f.vips.rest()
	return f.problems
}

// fail notes a problem of the owners of something.
func (f *flush) fail(owners []types.NamespacedName, err error) {
	f.problems = append(f.problems, Problem{owners, err})
}

// settle has changes applied, and calls done for each that was carried out
// and failed for the others.
func settle[C interface {
	comparable
	fmt.Stringer
}](changes []C, apply func([]C) []kernel.Failure[C], done func(C), failed func(C, error)) {
	settleEach(changes, apply, func(i int) { done(changes[i]) }, func(i int, err error) { failed(changes[i], err) })
}

// settleEach is settle by the changes' places in the list.
func settleEach[C interface {
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

// addMembers adds members to sets, all sets in one go. A member of plan.Local gets
// another mark only once the virtual server under its old one is recorded.
func (f *flush) addMembers() {
	f.recordReplaced()
	var changes []ipset.Change
	for m := range f.members.dirty {
		want, wanted := f.wantMember(m)
		have, there := f.have.sets[m.Set].Entries[m.Entry]
		fwm, stands := f.localMark(m)
		switch {
		case wanted && f.lost[m.Set]:
			f.members.refused(m) // it is the node's problem, and waits for its set
		case wanted && !there && f.keepsClient(m): // behind the virtual server
		case f.revives(m, want), wanted && stands && have != want && f.retired[fwm] != keyOf(m.Entry) && !f.lost[plan.Draining.In(fwm.Family())]:
		case wanted && (!there || have != want):
			c := f.memberChange(ipset.AddEntry, m)
			c.Mark = want
			changes = append(changes, c)
		case wanted == there:
			f.members.clean(m)
		}
	}
	f.applyMembers(changes)
}

// deleteMembers removes members that nobody wants. One that says whose a
// virtual server is stays as long as that, or it would be taken for somebody
// else's, and stay for ever.
func (f *flush) deleteMembers() {
	var changes []ipset.Change
	for m := range f.members.dirty {
		if _, wanted := f.wantMember(m); !wanted && !f.tellsOwner(m) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}

// tellsOwner tells whether a member is one by which a virtual server is known to
// be ours that stands, and is to go.
func (f *flush) tellsOwner(m plan.Member) bool {
	fwm := fwmKey(ip.Of(m.Entry.Addr), f.have.sets[m.Set].Entries[m.Entry])
	if _, stands := f.have.servers[fwm]; stands && f.marked[fwm] == keyOf(m.Entry) {
		return true
	}
	key := keyOf(m.Entry)
	_, stands := f.have.servers[key]
	if _, wanted := f.servers.want(key); !stands || wanted {
		return false
	}
	return slices.ContainsFunc(owning, func(name plan.SetName) bool { return name.In(key.Family()) == m.Set })
}

func (f *flush) memberChange(op ipset.Op, m plan.Member) ipset.Change {
	return ipset.Change{Op: op, Set: f.setNamed(m.Set), Entry: m.Entry}
}

func (f *flush) applyMembers(changes []ipset.Change) {
	slices.SortStableFunc(changes, func(a, b ipset.Change) int { return cmp.Compare(turn(a), turn(b)) })
	settle(changes, f.kernel.IPSet.Apply, f.memberDone, func(c ipset.Change, err error) {
		m := plan.Member{Set: c.Set.Name, Entry: c.Entry}
		f.fail(f.members.owners(m), err)
		f.members.refused(m)
	})
}

// turn has an address be restricted only when those who may come are listed, and
// no more before they are taken off the list: nobody who may come is turned away
// in between (kubernetes#119656).
func turn(c ipset.Change) int {
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
	f.members.clean(m)
	f.touched.member(m)
	entries := f.have.sets[m.Set].Entries
	f.memberMarked(m.Entry, entries[m.Entry], c.Mark)
	f.noteRecord(m, c.Op == ipset.AddEntry)
	if c.Op == ipset.DeleteEntry {
		delete(entries, m.Entry)
		return
	}
	if entries == nil {
		entries = map[ipset.Entry]uint32{}
		f.have.sets[m.Set] = ipset.Contents{Set: c.Set, Entries: entries}
	}
	entries[m.Entry] = c.Mark
}

// flushVIPs claims VIPs, but for the blocked ones, and then gives up those that
// nobody wants: one that changes from one way of claiming to another is local
// all the time.
func (f *flush) flushVIPs() {
	var added, removed []plan.VIP
	blocked := f.blocked()
	for vip := range f.vips.dirty {
		_, wanted := f.vips.want(vip)
		_, there := f.have.vips[vip]
		switch {
		case wanted == there:
			f.vips.clean(vip)
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
	settleEach(changes, f.kernel.Routing.Apply, func(i int) { f.vipDone(vips[i]) }, func(i int, err error) {
		f.fail(f.vips.owners(vips[i]), err)
		f.vips.refused(vips[i])
	})
}

// vipChange claims a VIP, or gives it up.
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

// needed are the sets without which a VIP must not answer: those that say that
// its virtual server is ours, and those that say who may come. Without another
// one a Service lacks what that one is for, and serves.
var needed = func() map[string]bool {
	out := map[string]bool{}
	for _, family := range ip.Families {
		for _, name := range slices.Concat(owning, []plan.SetName{plan.LoadBalancerFW, plan.SourceCIDR, plan.SourceIP}) {
			out[name.In(family)] = true
		}
	}
	return out
}()

// blocked are addresses that must not become local yet, as something that
// they need was refused: a VIP that is local without its virtual server is
// answered by whatever listens on 0.0.0.0. A virtual server with a fwmark is not
// needed: without it the kernel takes the one of the address and port.
func (f *flush) blocked() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for m := range f.members.stuck {
		if _, wanted := f.wantMember(m); wanted && (!f.lost[m.Set] || needed[m.Set]) {
			out[m.Entry.Addr] = true
		}
	}
	for key := range f.servers.stuck {
		if _, there := f.have.servers[key]; !there && key.FWMark == 0 {
			out[key.Addr] = true
		}
	}
	return out
}

// vipDone notes that the kernel has what is wanted.
func (f *flush) vipDone(vip plan.VIP) {
	f.vips.clean(vip)
	f.touched.vip(vip)
	if _, wanted := f.vips.want(vip); wanted {
		f.have.vips[vip] = struct{}{}
	} else {
		delete(f.have.vips, vip)
	}
}

// Lost takes notice of VIPs that were deleted from the kernel, by another
// program or by Flush. It reports how many of them are wanted; the next Flush
// claims these again.
func (a *Applier) Lost(lost []routing.Lost) int {
	n := 0
	for _, l := range lost {
		vip := plan.VIP{Addr: l.Addr, Claim: a.claimOf(l.Table)}
		if _, wanted := a.vips.want(vip); !wanted {
			continue
		}
		if _, there := a.have.vips[vip]; there {
			delete(a.have.vips, vip)
			a.vips.mark(vip)
			n++
		}
	}
	return n
}

// claimOf returns by what a VIP is claimed that has a route in a table, or with
// no table an address.
func (a *Applier) claimOf(table int) plan.Claim {
	switch table {
	case 0:
		return plan.ClaimAddress
	case a.cfg.VIPs.Table:
		return plan.ClaimPort
	}
	return plan.ClaimRoute
}
