package reconcile

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// If two Services want the same address and port, one of them has precedence. The set members
// of the other must not be written: they determine which clients are refused or allowed, and
// whether the client address is preserved. Otherwise any user who may set external IPs could
// close, or open, another user's Service.

// serverOf returns the virtual server that a member configures. It returns false for a member
// that is an address or a port alone, or an endpoint that connects to itself.
func serverOf(m plan.Member) (ipvs.Key, bool) {
	e := m.Entry
	about := e.Addr.IsValid() && e.Protocol != 0 && m.Set != plan.LoopBack.In(ip.Of(e.Addr))
	return plan.KeyOf(e), about
}

// desiredMember returns the desired mark of a member, and whether the member is desired. A
// member that configures a virtual server is desired only if the node wants it, or the Service
// that has precedence there. A drain entry is desired while its virtual server exists.
func (r *Reconciler) desiredMember(m *member) (mark uint32, desired bool) {
	full := r.sets.member(m.key)
	if fwm, address, ok := parseDrainEntry(full); ok {
		return 0, r.needsDrainEntry(fwm, address)
	}
	key, about := serverOf(full)
	if !about || !r.servers.wanted(key) {
		return m.value, m.wanted()
	}
	for _, name := range []types.NamespacedName{nodeOwner.Name, r.servers.winner(key)} {
		if of, wanted := r.members.wantOf(m, name); wanted {
			return of.value, true
		}
	}
	return 0, false
}

// setMembersDirty makes all members dirty that the owners want for a virtual server.
func (r *Reconciler) setMembersDirty(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		p := r.owned.Get(name)
		if p == nil {
			continue
		}
		for _, m := range p.members {
			if about, ok := serverOf(r.sets.member(m.key)); ok && about == key {
				r.members.setDirty(m)
			}
		}
	}
}

// setCachedMember records that the kernel has a member.
func (r *Reconciler) setCachedMember(m *member, mark uint32) {
	if !m.exists {
		r.sets.list[m.key.set].existing++
	}
	r.members.setCached(m, mark)
}

// clearCachedMember records that the kernel does not have a member.
func (r *Reconciler) clearCachedMember(m *member) {
	if m.exists {
		r.sets.list[m.key.set].existing--
	}
	r.members.clearCached(m)
}

// setCachedSet records that the kernel has a set. If its creation failed before, its members
// become dirty.
func (r *Reconciler) setCachedSet(s ipset.Set) {
	set := r.sets.get(s.Name)
	set.set, set.exists = s, true
	if !set.failed {
		return
	}
	set.failed = false
	for key, m := range r.members.stuck {
		if r.sets.list[key.set] == set {
			r.members.setDirty(m)
		}
	}
}

// clearCachedSet records that the kernel does not have a set.
func (r *Reconciler) clearCachedSet(name string) {
	i := r.sets.named(name)
	r.sets.list[i].exists, r.sets.list[i].set = false, ipset.Set{}
	for m := range r.members.allExisting() {
		if m.key.set == i {
			r.clearCachedMember(m)
		}
	}
}
