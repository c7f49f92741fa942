package reconcile

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The claim of a VIP changes after a restart with another configuration, or when an endpoint
// or another node gets its address. The VIP must stay local all the time:
//
//  1. While rules of the earlier configuration serve, the VIP keeps the earlier claim.
//  2. The new claim is added.
//  3. The members of claimSets change. A member of plan.PortVIPs gives packets the claim
//     mark, with which they skip table local if VIPs are shared. So it may exist only while
//     the route in the claim table does.
//  4. The earlier claim is released.

// claimSets maps a claim to the set that lists the VIPs with that claim.
var claimSets = map[plan.ClaimMode]plan.SetName{plan.ClaimPort: plan.PortVIPs, plan.ClaimRoute: plan.SharedVIPs}

// isClaimed reports whether the kernel has a claim of a VIP that matches.
func (f *flush) isClaimed(addr netip.Addr, matches func(*vipRecord) bool) bool {
	return slices.ContainsFunc([]plan.ClaimMode{plan.ClaimPort, plan.ClaimRoute, plan.ClaimAddress}, func(claim plan.ClaimMode) bool {
		v := f.vips.records.Get(plan.VIP{Addr: addr, Claim: claim})
		return v != nil && v.exists && matches(v)
	})
}

// keepsClaim reports whether a VIP keeps the claim of an earlier configuration for now.
func (f *flush) keepsClaim(addr netip.Addr) bool {
	return f.otherRulesServe() && f.isClaimed(addr, func(v *vipRecord) bool { return !v.wanted() })
}

// claimAgain adds the routes of VIPs that are local by a route of an earlier configuration. Only
// then may the chains that set the new claim mark replace those that set the earlier one.
func (f *flush) claimAgain() {
	if len(f.staleRoutes) == 0 || !f.pruning {
		return
	}
	local := map[netip.Addr]bool{}
	for route := range f.staleRoutes {
		local[route.Dst.Addr()] = true
	}
	var again []*vipRecord
	for v := range f.vips.allDirty() {
		if v.wanted() && !v.exists && local[v.key.Addr] {
			again = append(again, v)
		}
	}
	f.changeVIPs(again, true)
}

// claimOfSet returns the claim that a member of claimSets is for.
func (f *flush) claimOfSet(m *member) (plan.ClaimMode, bool) {
	set, family := f.sets.list[m.key.set].name, ip.Of(m.key.addr)
	for claim, name := range claimSets {
		if name.In(family) == set {
			return claim, true
		}
	}
	return "", false
}

// waitsForClaim reports whether a member must wait, because the kernel has only another claim
// of its VIP.
func (f *flush) waitsForClaim(m *member) bool {
	claim, ok := f.claimOfSet(m)
	return ok && f.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim != claim }) &&
		!f.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim == claim })
}

// deleteClaimMembers deletes the undesired members of claimSets whose VIPs have a desired
// claim by now.
func (f *flush) deleteClaimMembers() {
	var changes []ipset.Change
	for m := range f.members.allDirty() {
		if _, ok := f.claimOfSet(m); !ok || !m.exists {
			continue
		}
		if _, desired := f.desiredMember(m); !desired && f.isClaimed(m.key.addr, (*vipRecord).wanted) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}
