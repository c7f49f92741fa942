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
func (a *Reconciler) wantMember(m *member) (mark uint32, wanted bool) {
	full := a.sets.member(m.key)
	if fwm, address, ok := retiredIn(full); ok {
		return 0, a.needsRecord(fwm, address)
	}
	key, about := serverOf(full)
	if !about || !a.servers.wanted(key) {
		return m.value, m.wanted()
	}
	for _, name := range []types.NamespacedName{nodeOwner.Name, a.servers.winner(key)} {
		if of, wanted := a.members.desiredBy(m, name); wanted {
			return of.value, true
		}
	}
	return 0, false
}

// markMembersOf marks all members dirty that the owners want for a virtual server.
func (a *Reconciler) markMembersOf(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		p := a.parts[name]
		if p == nil {
			continue
		}
		for _, m := range p.members {
			if about, ok := serverOf(a.sets.member(m.key)); ok && about == key {
				a.members.markDirty(m)
			}
		}
	}
}

// holdMember records that the kernel has a member.
func (a *Reconciler) holdMember(m *member, mark uint32) {
	if !m.there {
		a.sets.list[m.key.set].held++
	}
	a.members.hold(m, mark)
}

// loseMember records that the kernel does not have a member.
func (a *Reconciler) loseMember(m *member) {
	if m.there {
		a.sets.list[m.key.set].held--
	}
	a.members.lose(m)
}

// loseSet records that the kernel does not have a set.
func (a *Reconciler) loseSet(name string) {
	i := a.sets.named(name)
	a.sets.list[i].exists, a.sets.list[i].set = false, ipset.Set{}
	for m := range a.members.allHeld() {
		if m.key.set == i {
			a.loseMember(m)
		}
	}
}
