package apply

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The members of some sets keep the client's address under externalTrafficPolicy
// Local. An endpoint on another node answers such a client past this node. So where a
// virtual server that stands changes with its member, it has the endpoints of this node
// alone first, and is given others last: the member is added behind the change of real
// servers, and deleted before it.

// keeping are these sets by what a member of them tells of a virtual server.
var (
	keepingAddresses = []plan.SetName{plan.LoadBalancerLocal, plan.ExternalIPLocal}
	keepingPorts     = map[plan.SetName]ip.Protocol{
		plan.NodePortLocalTCP: ip.TCP, plan.NodePortLocalUDP: ip.UDP, plan.NodePortLocalSCTP: ip.SCTP,
	}
)

// keepsClient reports whether a member keeps the client's address at a virtual server
// that stands, is desired and is about to change.
func (f *flush) keepsClient(m plan.Member) bool {
	if len(f.have.servers) == 0 {
		return false
	}
	for _, family := range ip.Families {
		for _, name := range keepingAddresses {
			if m.Set == name.In(family) {
				_, dirty := f.servers.dirty[keyOf(m.Entry)]
				_, stands := f.have.servers[keyOf(m.Entry)]
				_, wanted := f.servers.want(keyOf(m.Entry))
				return dirty && stands && wanted
			}
		}
		for name, protocol := range keepingPorts {
			if m.Set == name.In(family) {
				return f.portChanges(family, protocol, m.Entry.Port)
			}
		}
	}
	return false
}

// portChanges does the same for a node port, of which any address may change.
func (f *flush) portChanges(family ip.Family, protocol ip.Protocol, port uint16) bool {
	for key := range f.servers.dirty {
		if key.Port != port || key.Protocol != protocol || key.Family() != family {
			continue
		}
		_, stands := f.have.servers[key]
		if _, wanted := f.servers.want(key); stands && wanted {
			return true
		}
	}
	return false
}

// stopKeeping deletes the members of these sets that nobody wants while their virtual
// server stays.
func (f *flush) stopKeeping() {
	var changes []ipset.Change
	for m := range f.members.dirty {
		_, there := f.have.sets[m.Set].Entries[m.Entry]
		if _, wanted := f.wantMember(m); there && !wanted && f.keepsClient(m) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}
