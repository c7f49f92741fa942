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
// that has precedence there. A drain entry is desired while its virtual server exists. Members of
// some sets depend on how a VIP is claimed; see followsClaim.
func (t *tables) desiredMember(m *member) (mark uint32, desired bool) {
	full := t.sets.member(m.key)
	if fwm, address, ok := parseDrainEntry(full); ok {
		return 0, t.needsDrainEntry(fwm, address)
	}
	if !t.followsClaim(m) {
		return 0, false
	}
	key, about := serverOf(full)
	if !about || !t.servers.wanted(key) {
		return m.value, m.wanted()
	}
	for _, name := range []types.NamespacedName{nodeOwner.Name, t.servers.winner(key)} {
		if of, wanted := t.members.wantOf(m, name); wanted {
			return of.value, true
		}
	}
	return 0, false
}

// setMembersDirty makes all members dirty that the owners want for a virtual server.
func (t *tables) setMembersDirty(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		p := t.owned.Get(name)
		if p == nil {
			continue
		}
		for _, m := range p.members {
			if about, ok := serverOf(t.sets.member(m.key)); ok && about == key {
				t.members.setDirty(m)
			}
		}
	}
}

// setCachedMember records that the kernel has a member.
func (t *tables) setCachedMember(m *member, mark uint32) {
	if !m.exists {
		t.sets.list[m.key.set].existing++
	}
	t.members.setCached(m, mark)
}

// clearCachedMember records that the kernel does not have a member.
func (t *tables) clearCachedMember(m *member) {
	if m.exists {
		t.sets.list[m.key.set].existing--
	}
	t.members.clearCached(m)
}

// setCachedSet records that the kernel has a set. If its creation failed before, its members
// become dirty.
func (t *tables) setCachedSet(s ipset.Set) {
	set := t.sets.get(s.Name)
	set.set, set.exists = s, true
	if !set.failed {
		return
	}
	set.failed = false
	for key, m := range t.members.stuck {
		if t.sets.list[key.set] == set {
			t.members.setDirty(m)
		}
	}
}

// clearCachedSet records that the kernel does not have a set.
func (t *tables) clearCachedSet(name string) {
	i := t.sets.named(name)
	t.sets.list[i].exists, t.sets.list[i].set = false, ipset.Set{}
	for m := range t.members.allExisting() {
		if m.key.set == i {
			t.clearCachedMember(m)
		}
	}
}
