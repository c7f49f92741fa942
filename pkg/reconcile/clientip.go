package reconcile

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The members of client IP sets preserve the client address under externalTrafficPolicy Local.
// Packets are not masqueraded, so an endpoint on another node would reply to the client directly,
// not through this node. Such a member must never be in effect while its virtual server has
// endpoints of other nodes. If an existing virtual server changes, the member is therefore added
// after the change of real servers, and deleted before it. It is not added if the kernel refuses
// that change.

// clientIPAddressSets are the client IP sets whose members are addresses and ports. The others,
// whose members are node ports, are those of plan.NodePortSets.
var clientIPAddressSets = []plan.SetName{plan.LoadBalancerLocal, plan.ExternalIPLocal}

// clientIPSetOf maps the name of a set of all node ports to that of the ports that preserve the
// client address.
var clientIPSetOf = func() map[string]string {
	out := map[string]string{}
	for _, family := range ip.Families {
		for _, protocol := range ip.Protocols {
			all, local := plan.NodePortSets(protocol)
			out[all.In(family)] = local.In(family)
		}
	}
	return out
}()

// setFoundDirty makes the members dirty that an earlier process left for the virtual servers and
// node ports of an owner, in client IP sets and in plan.Local. They must change in order with the real
// servers. Prune, which compares all members, would be too late: the virtual servers have changed
// by then.
//
// Members of plan.Local wait for Prune while rules of another configuration serve: those may not
// masquerade internal clients at the virtual server of the address.
func (t *serviceTables) setFoundDirty(o *ownedState) {
	found := func(set string, entry ipset.Entry) {
		if m := t.members.records.Get(t.sets.key(plan.Member{Set: set, Entry: entry})); m != nil && m.exists {
			t.members.setDirty(m)
		}
	}
	for _, s := range o.servers {
		if s.key.FWMark != 0 {
			continue
		}
		family, entry := s.key.Family(), plan.EntryOf(s.key)
		for _, name := range clientIPAddressSets {
			found(name.In(family), entry)
		}
		if t.rulesCurrent {
			found(plan.Local.In(family), entry)
		}
	}
	for _, m := range o.members {
		full := t.sets.member(m.key)
		if set, ok := clientIPSetOf[full.Set]; ok {
			found(set, full.Entry)
		}
	}
}

// waitsForServer reports whether a member of a client IP set must wait, because its virtual server
// must change first; see mustChangeFirst.
func (w *memberWriter) waitsForServer(m *member) bool {
	if w.t.servers.existing == 0 {
		return false
	}
	set := w.t.sets.list[m.key.set].name
	for _, family := range ip.Families {
		for _, name := range clientIPAddressSets {
			if set == name.In(family) {
				s := w.t.servers.records.Get(w.t.members.addressIn(m))
				return s != nil && w.t.servers.mustChangeFirst(s)
			}
		}
		for _, protocol := range ip.Protocols {
			if _, local := plan.NodePortSets(protocol); set == local.In(family) {
				return w.t.servers.portMustChangeFirst(family, protocol, m.key.port)
			}
		}
	}
	return false
}

// mustChangeFirst reports whether an existing, desired virtual server is about to change, or
// selects real servers that are not desired because the kernel refused the change.
func (t *serverTable) mustChangeFirst(s *server) bool {
	if !s.exists || !s.wanted() {
		return false
	}
	return s.dirty || t.stuck[s.key] == s && slices.ContainsFunc(s.cached.reals, func(r endpoint) bool {
		return r.Weight > 0 && !s.value.is(r.Dest(), plan.IsRealServer)
	})
}

// portMustChangeFirst reports whether mustChangeFirst is true for a virtual server of a node port,
// on any address.
func (t *serverTable) portMustChangeFirst(family ip.Family, protocol ip.Protocol, port uint16) bool {
	must := func(s *server) bool {
		return s.key.Port == port && s.key.Protocol == protocol && s.key.Family() == family && t.mustChangeFirst(s)
	}
	for s := range t.allDirty() {
		if must(s) {
			return true
		}
	}
	for _, s := range t.stuck {
		if must(s) {
			return true
		}
	}
	return false
}

// deleteFromClientIPSets deletes the undesired members of client IP sets whose virtual server stays.
// It does so even if the virtual server does not change: internal clients must not lose the fwmark,
// and with it the masquerade mark, while the client address is still preserved.
func (w *memberWriter) deleteFromClientIPSets() {
	var changes []ipset.Change
	for m := range w.t.members.allDirty() {
		if _, desired := w.t.desiredMember(m); m.exists && !desired && w.isServerKept(m) {
			changes = append(changes, w.changeOf(ipset.DeleteEntry, m))
		}
	}
	w.apply(changes)
}

// isServerKept reports whether a member of a client IP set refers to a virtual server that exists
// and stays.
func (w *memberWriter) isServerKept(m *member) bool {
	set := w.t.sets.list[m.key.set].name
	for _, family := range ip.Families {
		for _, name := range clientIPAddressSets {
			if set == name.In(family) {
				s := w.t.servers.records.Get(w.t.members.addressIn(m))
				return s != nil && s.exists && s.wanted()
			}
		}
		for _, protocol := range ip.Protocols {
			if all, local := plan.NodePortSets(protocol); set == local.In(family) {
				full := w.t.sets.member(m.key)
				full.Set = all.In(family)
				same := w.t.members.records.Get(w.t.sets.key(full))
				return same != nil && same.exists && same.wanted()
			}
		}
	}
	return false
}
