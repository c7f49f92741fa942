package reconcile

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// If two Services want the same address and port, one of them has it. The set members of the
// other one must not be written: they say which clients are refused or allowed there, and
// whether the client address is preserved. Otherwise any user who may set external IPs could
// close, or open, another user's Service.

// serverOf returns the virtual server that a member is about. It returns false for members
// about an address or a port alone, or about an endpoint that connects to itself.
func serverOf(m plan.Member) (ipvs.Key, bool) {
	e := m.Entry
	about := e.Addr.IsValid() && e.Protocol != 0 && m.Set != plan.LoopBack.In(ip.Of(e.Addr))
	return keyOf(e), about
}

// wantMember returns the desired mark of a member, and whether the member is desired. A
// member about a virtual server is desired if the Service that has the virtual server wants
// it, or the node does. The record of a retired virtual server is desired as long as that
// exists.
func (r *Reconciler) wantMember(m *member) (mark uint32, wanted bool) {
	full := r.sets.member(m.key)
	if fwm, address, ok := retiredIn(full); ok {
		return 0, r.needsRecord(fwm, address)
	}
	key, about := serverOf(full)
	if !about || !r.servers.wanted(key) {
		return m.value, m.wanted()
	}
	for _, name := range []types.NamespacedName{nodeOwner.Name, r.servers.winner(key)} {
		if of, wanted := r.members.desiredBy(m, name); wanted {
			return of.value, true
		}
	}
	return 0, false
}

// markMembersOf marks all members dirty that the owners want for a virtual server.
func (r *Reconciler) markMembersOf(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		p := r.parts[name]
		if p == nil {
			continue
		}
		for _, m := range p.members {
			if about, ok := serverOf(r.sets.member(m.key)); ok && about == key {
				r.members.markDirty(m)
			}
		}
	}
}

// holdMember records that the kernel has a member.
func (r *Reconciler) holdMember(m *member, mark uint32) {
	if !m.there {
		r.sets.list[m.key.set].held++
	}
	r.members.hold(m, mark)
}

// loseMember records that the kernel does not have a member.
func (r *Reconciler) loseMember(m *member) {
	if m.there {
		r.sets.list[m.key.set].held--
	}
	r.members.markMissing(m)
}

// loseSet records that the kernel does not have a set.
func (r *Reconciler) loseSet(name string) {
	i := r.sets.named(name)
	r.sets.list[i].exists, r.sets.list[i].set = false, ipset.Set{}
	for m := range r.members.allHeld() {
		if m.key.set == i {
			r.loseMember(m)
		}
	}
}
