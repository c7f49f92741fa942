package reconcile

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// The claim of a VIP changes after a restart with another configuration, or when another node, or an
// endpoint of a Service with the VIP, gets its address. The VIP must stay local all the time:
//
//  1. While rules of the earlier configuration serve, the VIP keeps the earlier claim.
//  2. The new claim is added.
//  3. The members of claimSets change. A member of plan.PortVIPs gives packets the claim
//     mark, with which they skip table local if VIPs are shared. So it may exist only while
//     the route in the claim table does.
//  4. The earlier claim is released.

// claimSets maps a claim to the set that lists the VIPs with that claim.
var claimSets = map[plan.ClaimMode]plan.SetName{plan.ClaimPort: plan.PortVIPs, plan.ClaimRoute: plan.SharedVIPs}

// desired reports whether a claim of a VIP is desired.
func (t *vipTable) desired(v *vipRecord) bool { return v.wanted() && !t.yields(v) }

// claimedByPort reports whether any Service claims a VIP by port.
func (t *vipTable) claimedByPort(a netip.Addr) bool {
	return t.wanted(plan.VIP{Addr: a, Claim: plan.ClaimPort})
}

// yields reports whether the route of a VIP yields to a claim by port: a Service that wants this claim
// shows that the VIP is the address of another node, which the route would cut off. All Services that
// want the route must do so under ClaimAuto: their plans list the VIP in plan.SharedVIPs, others do
// not. A Service with the VIP as its external IP cannot change the claim of one that got it as its
// load balancer IP.
func (t *vipTable) yields(v *vipRecord) bool {
	if v.key.Claim != plan.ClaimRoute {
		return false
	}
	port := t.records.Get(plan.VIP{Addr: v.key.Addr, Claim: plan.ClaimPort})
	if port == nil || !port.wanted() || port.precedence > v.precedence {
		return false
	}
	m := t.members.records.Get(t.members.claimMember(plan.SharedVIPs, v.key.Addr))
	return m != nil && t.members.ownerCount(m) == t.ownerCount(v)
}

func (t *memberTable) claimMember(set plan.SetName, a netip.Addr) memberKey {
	return t.sets.key(plan.Member{Set: set.In(ip.Of(a)), Entry: ipset.Entry{Addr: a}})
}

// followsClaim reports whether the desired claim of a VIP allows a member: plan.SharedVIPs and
// plan.VIPAddresses list it unless the route yields, and plan.Refused lists ports of VIPs claimed by
// port.
func (t *vipTable) followsClaim(m *member) bool {
	switch set, a := t.members.sets.list[m.key.set].name, m.key.addr; set {
	case plan.SharedVIPs.In(ip.Of(a)), plan.VIPAddresses.In(ip.Of(a)):
		v := t.records.Get(plan.VIP{Addr: a, Claim: plan.ClaimRoute})
		return v == nil || !t.yields(v) || t.wanted(plan.VIP{Addr: a, Claim: plan.ClaimAddress})
	case plan.Refused.In(ip.Of(a)):
		return t.claimedByPort(a)
	}
	return true
}

// keepPortClaims returns a Service's plan in which a VIP that the Service claims by port is still
// claimed so. It was shown to be another node's address, and stays one while the endpoint there is
// replaced.
func (t *serviceTables) keepPortClaims(name types.NamespacedName, desired plan.ServicePlan) plan.ServicePlan {
	if o := t.owned.Get(name); o != nil {
		for _, v := range o.vips {
			if v.key.Claim == plan.ClaimPort {
				desired = desired.ClaimByPort(v.key.Addr)
			}
		}
	}
	return desired
}

// portClaimChanged makes everything dirty that depends on whether a VIP is claimed by port.
func (t *serviceTables) portClaimChanged(a netip.Addr) {
	v := t.vips.records.Get(plan.VIP{Addr: a, Claim: plan.ClaimRoute})
	if v == nil {
		return
	}
	t.vips.setDirty(v)
	t.members.setKeyDirty(t.members.claimMember(plan.SharedVIPs, a))
	t.members.setKeyDirty(t.members.claimMember(plan.VIPAddresses, a))
	refused := t.sets.named(plan.Refused.In(ip.Of(a)))
	for _, name := range t.vips.owners(v.key) {
		for _, m := range t.owned.Get(name).members {
			if m.key.set == refused && m.key.addr == a {
				t.members.setDirty(m)
			}
		}
	}
}

// claimants returns the Services that a claim of a VIP serves.
func (t *vipTable) claimants(v *vipRecord) []types.NamespacedName {
	owners := t.owners(v.key)
	if route := t.records.Get(plan.VIP{Addr: v.key.Addr, Claim: plan.ClaimRoute}); v.key.Claim == plan.ClaimPort && route != nil && t.yields(route) {
		owners = append(owners, t.owners(route.key)...)
	}
	return owners
}

// isClaimed reports whether the kernel has a claim of a VIP that matches.
func (t *vipTable) isClaimed(addr netip.Addr, matches func(*vipRecord) bool) bool {
	return slices.ContainsFunc([]plan.ClaimMode{plan.ClaimPort, plan.ClaimRoute, plan.ClaimAddress}, func(claim plan.ClaimMode) bool {
		v := t.records.Get(plan.VIP{Addr: addr, Claim: claim})
		return v != nil && v.exists && matches(v)
	})
}

// keepsClaim reports whether a VIP keeps the claim of an earlier process until all Services are known:
// because others' rules serve, or because the claim is by port. In the latter case the Service whose
// endpoints show that the VIP is another node's address may not be known yet.
func (t *vipTable) keepsClaim(addr netip.Addr, s stage) bool {
	return s != settled && t.isClaimed(addr, func(v *vipRecord) bool {
		return !t.desired(v) && (s.othersServe() || v.key.Claim == plan.ClaimPort)
	})
}

// claimAgain adds the routes of VIPs that are local by a route of an earlier configuration. Only
// then may the chains that set the new claim mark replace those that set the earlier one.
func (w *vipWriter) claimAgain(earlier map[routing.Route]struct{}) {
	if len(earlier) == 0 || !w.t.pruning {
		return
	}
	local := map[netip.Addr]bool{}
	for route := range earlier {
		local[route.Dst.Addr()] = true
	}
	var again []*vipRecord
	for v := range w.t.vips.allDirty() {
		if w.t.vips.desired(v) && !v.exists && local[v.key.Addr] {
			again = append(again, v)
		}
	}
	w.change(again, true)
}

// claimOfSet returns the claim that a member of claimSets is for.
func (t *memberTable) claimOfSet(m *member) (plan.ClaimMode, bool) {
	set, family := t.sets.list[m.key.set].name, ip.Of(m.key.addr)
	for claim, name := range claimSets {
		if name.In(family) == set {
			return claim, true
		}
	}
	return "", false
}

// waitsForClaim reports whether a member must wait, because the kernel has only another claim
// of its VIP.
func (t *vipTable) waitsForClaim(m *member) bool {
	claim, ok := t.members.claimOfSet(m)
	return ok && t.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim != claim }) &&
		!t.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim == claim })
}

// deleteFromClaimSets deletes the undesired members of claimSets whose VIPs have a desired
// claim by now.
func (w *memberWriter) deleteFromClaimSets() {
	var changes []ipset.Change
	for m := range w.t.members.allDirty() {
		if _, ok := w.t.members.claimOfSet(m); !ok || !m.exists {
			continue
		}
		if _, desired := w.t.desiredMember(m); !desired && w.t.vips.isClaimed(m.key.addr, w.t.vips.desired) {
			changes = append(changes, w.changeOf(ipset.DeleteEntry, m))
		}
	}
	w.apply(changes)
}
