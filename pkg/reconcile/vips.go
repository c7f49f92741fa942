package reconcile

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// vipTable has the VIPs with their claims. Some members decide which claim is desired; see yields.
type vipTable struct {
	table[plan.VIP, struct{}, struct{}]
	cfg        *plan.Config
	members    *memberTable
	wrongScope map[netip.Addr]struct{} // addresses that kube-proxy added, with another scope
}

// replaceWrongScope treats desired addresses that kube-proxy added, with another scope, as missing, so
// that they are added again. Other ones are deleted like any stale address.
func (t *vipTable) replaceWrongScope() {
	for addr := range t.wrongScope {
		if v := t.records.Get(plan.VIP{Addr: addr, Claim: plan.ClaimAddress}); v != nil && v.wanted() {
			t.clearCached(v)
		}
	}
}

// noteRemoved handles deletions of VIPs that the kernel reported, our own included. It clears the
// cached state of desired VIPs, so that the next Flush claims them again, and returns their number.
func (t *vipTable) noteRemoved(removals []routing.Removal) int {
	n := 0
	for _, r := range removals {
		v := t.records.Get(plan.VIP{Addr: r.Addr, Claim: t.claimOf(r.Table)})
		if v != nil && t.desired(v) && v.exists {
			t.clearCached(v)
			t.setDirty(v)
			n++
		}
	}
	return n
}

// claimOf returns the claim of a VIP with a route in a table, or with an address if table is 0.
func (t *vipTable) claimOf(table int) plan.ClaimMode {
	switch table {
	case 0:
		return plan.ClaimAddress
	case t.cfg.VIPs.Table:
		return plan.ClaimPort
	}
	return plan.ClaimRoute
}

// vipWriter claims and releases VIPs.
type vipWriter struct {
	t        *serviceTables
	kernel   *Kernel
	problems *Problems
	linkGone bool // another program has deleted kube-ipvs0
}

// due returns the VIPs to claim, except blocked ones, and those to release. A VIP whose claim
// changes stays local all the time; see claims.go.
func (w *vipWriter) due(s stage) (added, removed []*vipRecord) {
	lackMembers, lackServers := w.lacking()
	blocked := func(v *vipRecord) bool {
		return lackMembers[v.key.Addr] || lackServers[v.key.Addr] && !w.hasServer(v)
	}
	for v := range w.t.vips.allDirty() {
		switch {
		case w.t.vips.desired(v) == v.exists:
			w.t.vips.setClean(v)
		case v.exists:
			removed = append(removed, v)
		case !blocked(v) && !w.t.vips.keepsClaim(v.key.Addr, s):
			added = append(added, v)
		}
	}
	return added, removed
}

// change claims or releases VIPs.
func (w *vipWriter) change(vips []*vipRecord, wanted bool) {
	if len(vips) == 0 {
		return
	}
	changes := make([]routing.Change, len(vips))
	for i, v := range vips {
		changes[i] = w.changeOf(v.key, wanted)
	}
	succeeded(changes, w.kernel.writeRouting(changes), func(i int) { w.done(vips[i]) }, func(i int, err error) { w.refused(vips[i], changes[i], err) })
}

// refused reports a change of a VIP that the kernel refused, and sets it aside.
func (w *vipWriter) refused(v *vipRecord, c routing.Change, err error) {
	w.problems.add(w.t.vips.claimants(v), err)
	w.t.vips.setStuck(v)
	if c.Op == routing.AddAddress && errors.Is(err, unix.ENODEV) {
		w.linkGone = true
	}
}

// changeOf returns the change that claims or releases a VIP.
func (w *vipWriter) changeOf(vip plan.VIP, wanted bool) routing.Change {
	route, ok := w.t.cfg.VIPs.Route(vip)
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
func (w *vipWriter) lacking() (members, servers map[netip.Addr]bool) {
	members, servers = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for key, m := range w.t.members.stuck {
		set := w.t.sets.list[key.set]
		if _, desired := w.t.desiredMember(m); desired && (!set.failed || requiredSets[set.name]) {
			members[key.addr] = true
		}
	}
	for key, s := range w.t.servers.stuck {
		if !s.exists && key.FWMark == 0 {
			servers[key.Addr] = true
		}
	}
	return members, servers
}

// hasServer reports whether the kernel has a virtual server of a VIP.
func (w *vipWriter) hasServer(v *vipRecord) bool {
	return slices.ContainsFunc(w.t.vips.claimants(v), func(name types.NamespacedName) bool {
		return slices.ContainsFunc(w.t.owned.Get(name).servers, func(s *server) bool { return s.exists && s.key.Addr == v.key.Addr })
	})
}

// done updates the cached state after a VIP was claimed or released.
func (w *vipWriter) done(v *vipRecord) {
	w.t.vips.noteWritten(v)
	if w.t.vips.desired(v) {
		w.t.vips.setCached(v, struct{}{})
		w.addFlowsOf(v)
	} else {
		w.t.vips.clearCached(v)
	}
	w.t.vips.setClean(v)
}

// addFlowsOf adds the UDP flows to a VIP that has become local to those to delete.
func (w *vipWriter) addFlowsOf(v *vipRecord) {
	for _, name := range w.t.vips.claimants(v) {
		for _, s := range w.t.owned.Get(name).servers {
			if s.exists && s.key.Addr == v.key.Addr && s.key.Protocol == ip.UDP {
				w.t.addStaleFlows(s.key)
			}
		}
	}
}
