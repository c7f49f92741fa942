package reconcile

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// A VIP is claimed in another way after a restart with another configuration, or when an
// endpoint or a peer gets its address. It stays local in between:
//
//  1. While rules of the earlier configuration serve, it keeps the earlier claim.
//  2. It is claimed in the new way.
//  3. The members of claimSets change. A member of plan.PortVIPs gives packets the claim
//     mark, with which they skip table local if VIPs are shared. So it must exist only while
//     the route in the claim table does.
//  4. The earlier claim is released.

// claimSets are the sets whose members change with the claim of a VIP, by the claim.
var claimSets = map[plan.ClaimMode]plan.SetName{plan.ClaimPort: plan.PortVIPs, plan.ClaimRoute: plan.SharedVIPs}

// isClaimed reports whether the kernel has a VIP by any claim that matches.
func (f *flush) isClaimed(addr netip.Addr, matches func(*vipRecord) bool) bool {
	return slices.ContainsFunc([]plan.ClaimMode{plan.ClaimPort, plan.ClaimRoute, plan.ClaimAddress}, func(claim plan.ClaimMode) bool {
		v := f.vips.records.get(plan.VIP{Addr: addr, Claim: claim})
		return v != nil && v.there && matches(v)
	})
}

// keepsClaim reports whether a VIP keeps the claim of an earlier configuration for now.
func (f *flush) keepsClaim(addr netip.Addr) bool {
	return f.otherRulesServe() && f.isClaimed(addr, func(v *vipRecord) bool { return !v.wanted() })
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

// waitsForClaim reports whether a member must wait, because its VIP is claimed only in
// another way yet.
func (f *flush) waitsForClaim(m *member) bool {
	claim, ok := f.claimOfSet(m)
	return ok && f.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim != claim }) &&
		!f.isClaimed(m.key.addr, func(v *vipRecord) bool { return v.key.Claim == claim })
}

// deleteClaimMembers deletes the undesired members of claimSets whose VIPs are claimed in
// another way by now.
func (f *flush) deleteClaimMembers() {
	var changes []ipset.Change
	for m := range f.members.allDirty() {
		if _, ok := f.claimOfSet(m); !ok || !m.there {
			continue
		}
		if _, wanted := f.wantMember(m); !wanted && f.isClaimed(m.key.addr, (*vipRecord).wanted) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}
