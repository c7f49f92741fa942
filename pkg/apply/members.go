package apply

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
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
func (a *Applier) wantMember(m plan.Member) (mark uint32, wanted bool) {
	if fwm, address, ok := retiredIn(m); ok {
		return 0, a.needsRecord(fwm, address)
	}
	key, about := serverOf(m)
	if _, claimed := a.servers.want(key); !about || !claimed {
		return a.members.want(m)
	}
	if mark, wanted = a.members.valueFor(m, nodeOwner.Name); wanted {
		return mark, true
	}
	return a.members.valueFor(m, a.servers.winner(key))
}

// markMembersOf marks all members dirty that the owners want for a virtual server.
func (a *Applier) markMembersOf(key ipvs.Key, owners []types.NamespacedName) {
	for _, name := range owners {
		for _, m := range a.parts[name].part.Members {
			if about, ok := serverOf(m); ok && about == key {
				m.Mark = 0
				a.members.markDirty(m)
			}
		}
	}
}
