package reconcile

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The members of some sets preserve the client address under externalTrafficPolicy Local: no
// SNAT, so an endpoint on another node would reply to the client directly, not through this
// node. Such a member must never be in effect while its virtual server has endpoints of
// other nodes. If an existing virtual server changes, the member is therefore added after
// the change of real servers, and deleted before it.

// clientIPAddressSets are those of these sets whose members are addresses and ports,
// clientIPPortSets those whose members are node ports.
var (
	clientIPAddressSets = []plan.SetName{plan.LoadBalancerLocal, plan.ExternalIPLocal}
	clientIPPortSets    = map[plan.SetName]ip.Protocol{
		plan.NodePortLocalTCP: ip.TCP, plan.NodePortLocalUDP: ip.UDP, plan.NodePortLocalSCTP: ip.SCTP,
	}
)

// preservesClientIP reports whether a member preserves the client address at a virtual
// server that exists, is desired, and is about to change.
func (f *flush) preservesClientIP(m *member) bool {
	if f.servers.existing == 0 {
		return false
	}
	set := f.sets.list[m.key.set].name
	for _, family := range ip.Families {
		for _, name := range clientIPAddressSets {
			if set == name.In(family) {
				s := f.servers.records.get(f.addressIn(m))
				return s != nil && s.changing()
			}
		}
		for name, protocol := range clientIPPortSets {
			if set == name.In(family) {
				return f.portChanging(family, protocol, m.key.port)
			}
		}
	}
	return false
}

// changing reports whether an existing, desired object is about to change.
func (r *record[K, W, A]) changing() bool { return r.dirty && r.exists && r.wanted() }

// portChanging reports whether an existing, desired virtual server of a node port is about
// to change, on any address.
func (f *flush) portChanging(family ip.Family, protocol ip.Protocol, port uint16) bool {
	for s := range f.servers.allDirty() {
		if s.key.Port == port && s.key.Protocol == protocol && s.key.Family() == family && s.changing() {
			return true
		}
	}
	return false
}

// deleteClientIPMembers deletes the members of these sets that are not desired although
// their virtual server stays.
func (f *flush) deleteClientIPMembers() {
	var changes []ipset.Change
	for m := range f.members.allDirty() {
		if _, desired := f.desiredMember(m); m.exists && !desired && f.preservesClientIP(m) {
			changes = append(changes, f.memberChange(ipset.DeleteEntry, m))
		}
	}
	f.applyMembers(changes)
}
