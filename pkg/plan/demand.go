package plan

import (
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Some rules cost every packet of the node, and few nodes ever need them. They are written
// on demand: instead of them, a rule for new connections adds the first packet that needs
// them to a set, and the packet is dropped. The process reads the set's size twice a second
// (NodePlan.Demands), counts the set as in use once it has a member, and writes the rules
// before the client sends the packet again. The set keeps its members, so the rules are
// written at once after a restart.
//
// Without a process that reads the sets (Node.OnDemand), and where the kernel cannot add
// members by a rule, the rules are written at once.

// Demand is a set that stands for rules on demand.
type Demand struct {
	Set   SetName
	Table nat.Table
	Chain string // one of the chains that are written on demand
}

// Demands are all of them.
var Demands = []Demand{
	{AskedVIPs, nat.Mangle, "KUBE-IPVS-FOREIGN"},
	{AskedLocalhost, nat.Raw, "KUBE-IPVS-LOCALHOST"},
}

// Rules returns the chain in a family.
func (d Demand) Rules(f ip.Family) nat.Chain {
	return nat.Chain{Family: f, Table: d.Table, Name: d.Chain}
}

// waits reports whether rules on demand are not written yet, and demands whether the rules
// are written that demand them.
func (n *Node) waits(set SetName, f ip.Family) bool   { return n.OnDemand && !n.Uses.Has(set, f) }
func (n *Node) demands(set SetName, f ip.Family) bool { return n.Demanding || n.waits(set, f) }

// demandsOf returns the sets of a family to which the node's rules add members.
func demandsOf(cfg *Config, n *Node, facts *Facts, f ip.Family) []string {
	var out []string
	if cfg.awaitsForeignPorts(n, f) {
		out = append(out, AskedVIPs.In(f))
	}
	if awaitsLocalhost(cfg, n, facts, f) {
		out = append(out, AskedLocalhost.In(f))
	}
	return out
}

// ask returns the target that adds a packet's address to a set.
func (r *ruleset) ask(set SetName, flags string) string {
	return "SET --add-set " + set.In(r.family) + " " + flags
}
