package plan

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Some rules cost every packet of the node, and few nodes need them. They are written on
// demand. Until then, the plan has placeholder rules. They match only new connections, and
// add an address of the first packet that needs the rules to a set. That packet is dropped, or
// treated as kube-proxy would treat it.
// The process reads the size of the set twice a second (NodePlan.Demands). Once the set has a
// member, it counts as in use, and the rules are written before the client sends the packet
// again. The set keeps its members, so a restarted process writes the rules at once.
//
// The rules are not postponed if no process reads the sets (Node.OnDemand is false), or if
// the kernel cannot add members to a set by a rule.

// Demand is a set to which placeholder rules add members, and the rules that a member demands.
type Demand struct {
	Set   SetName
	Table nat.Table
	Chain string // one of the chains that are written on demand
}

// Demands lists all sets of placeholder rules.
var Demands = []Demand{
	{DemandedVIPs, nat.Mangle, chainForeign},
	{DemandedLocalhost, nat.Raw, chainLocalhost},
	{DemandedInternal, nat.Mangle, chainInternal},
}

// Rules returns the chain of one family.
func (d Demand) Rules(f ip.Family) nat.Chain {
	return nat.Chain{Family: f, Table: d.Table, Name: d.Chain}
}

// postpones reports whether the rules that a member of a set demands are not written yet.
func (n *Node) postpones(set SetName, f ip.Family) bool { return n.OnDemand && !n.Uses.Has(set, f) }

// hasPlaceholders reports whether the placeholder rules of a set are written. While Demanding, the
// plan has both the placeholders and the rules on demand.
func (n *Node) hasPlaceholders(set SetName, f ip.Family) bool {
	return n.Demanding || n.postpones(set, f)
}

// demandsOf returns the sets of a family to which placeholder rules add members.
func demandsOf(cfg *Config, n *Node, facts *Facts, f ip.Family) []string {
	var out []string
	if cfg.hasDevicePortPlaceholders(n, f) {
		out = append(out, DemandedVIPs.In(f))
	}
	if hasLocalhostPlaceholders(cfg, n, facts, f) {
		out = append(out, DemandedLocalhost.In(f))
	}
	if cfg.hasInternalPlaceholders(n, f) {
		out = append(out, DemandedInternal.In(f))
	}
	return out
}

// addTo returns the target that adds a packet's address to a set. flags is "src" or "dst".
func (r *ruleset) addTo(set SetName, flags string) string {
	return "SET --add-set " + set.In(r.family) + " " + flags
}
