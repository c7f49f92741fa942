package apply

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Of two Services that claim an address and port one has it. What the other wants
// to be done with packets for it must not be done: members of sets say who is
// refused there, who may come and whose address is kept, so that anybody who may
// write external IPs could close somebody else's Service, or open it.

// bound gives the virtual server that a member is about; false for those about an
// address or a port alone, or about an endpoint that reaches itself.
func bound(m plan.Member) (ipvs.Key, bool) {
	e := m.Entry
	about := e.Addr.IsValid() && e.Protocol != 0 && m.Set != plan.LoopBack.In(ip.Of(e.Addr))
	return keyOf(e), about
}

// wantMember is the mark of a member that is wanted. One that is about a virtual
// server is wanted by the Service that has that, or by the node; the record of a
// retired one as long as it stands.
func (a *Applier) wantMember(m plan.Member) (mark uint32, wanted bool) {
	if fwm, address, ok := retiredIn(m); ok {
		return 0, a.needsRecord(fwm, address)
	}
	key, about := bound(m)
	if _, claimed := a.servers.want(key); !about || !claimed {
		return a.members.want(m)
	}
	if mark, wanted = a.members.of(m, nodeOwner.Name); wanted {
		return mark, true
	}
	return a.members.of(m, a.servers.winner(key))
}

// markBound has all members looked at that Services want for a virtual server.
func (a *Applier) markBound(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		for _, m := range a.parts[name].part.Members {
			if about, ok := bound(m); ok && about == key {
				m.Mark = 0
				a.members.mark(m)
			}
		}
	}
}
