package plan

import (
	"maps"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// NodePlan is the desired state that does not depend on single Services.
type NodePlan struct {
	Sysctls sysctl.State
	Watched []string // sysctls that are only read; see Warnings
	Sets    []ipset.Set
	Members []Member // of sets that no Service fills
	NAT     nat.State
	// Demands are the sets to which placeholder rules of NAT add members. Once such a set has
	// a member, it is in use (Node.Uses), and the plan has the rules on demand instead.
	Demands []string
	// Chains lists every chain that NAT has when all sets are in use; sorted.
	Chains []nat.Chain
	// Variants are the states that NAT has with some other sets in use. They show whether an earlier
	// process of this version and configuration wrote the rules in the kernel (nat.Among): each rule
	// that NAT can have is in one of them, and a rule in all of them is in NAT whatever sets are in
	// use. Empty if Node.Started.
	Variants []nat.State
	Rules    []routing.Rule // policy rules
	// Routes are those of Gateways, for tables that Rules look up.
	Routes []routing.Route
	// Loopback is for the node ports of the loopback address.
	Loopback nft.Loopback
	Bound    []Binding // bindings that Rules implement
	Modes    []InterfaceMode
}

// ForNode computes the plan of the node.
func ForNode(cfg *Config, n *Node) NodePlan {
	facts := NewFacts(cfg, n)
	n = withNameableLinks(n)
	plan := NodePlan{
		Sysctls: sysctls(cfg, n),
		Watched: watchedSysctls(cfg, n),
		NAT:     nat.State{Chains: map[nat.Chain][]nat.Rule{}},
	}
	paths := map[ip.Family]Paths{}
	for _, family := range cfg.Families {
		paths[family] = PathsOf(cfg, n, family)
		plan.Sets = append(plan.Sets, Sets(family)...)
		addRuleset(&plan.NAT, cfg, n, &facts, family, paths[family])
		addLocalhost(&plan, cfg, n, &facts, family)
		addReplyRouting(&plan, cfg, family, paths[family])
		addBranches(&plan, cfg, n, family, paths[family])
		plan.Modes = append(plan.Modes, paths[family].Modes...)
		addClaimRules(&plan, cfg, n, family)
		plan.Demands = append(plan.Demands, demandsOf(cfg, n, &facts, family)...)
	}
	addSharedSysctls(&plan, cfg, n)
	addReroute(&plan, cfg, n)
	addVariants(&plan, cfg, n, &facts, paths)
	return plan
}

// addVariants adds Chains and Variants.
func addVariants(plan *NodePlan, cfg *Config, n *Node, facts *Facts, paths map[ip.Family]Paths) {
	all := SetsInUse{}
	for _, set := range plan.Sets {
		all[set.Name] = true
	}
	with := func(uses SetsInUse) nat.State { return natWith(cfg, n, facts, paths, uses) }
	rules := with(all)
	plan.Chains = slices.SortedFunc(maps.Keys(rules.Chains), nat.Chain.Compare)
	if !n.Started {
		plan.Variants = []nat.State{rules, with(SetsInUse{})}
		for _, set := range reshaping {
			plan.Variants = append(plan.Variants, with(without(all, set)))
		}
	}
}

// natWith returns NAT for the given sets in use, with all placeholder rules.
func natWith(cfg *Config, n *Node, facts *Facts, paths map[ip.Family]Paths, uses SetsInUse) nat.State {
	variant, p := *n, NodePlan{NAT: nat.State{Chains: map[nat.Chain][]nat.Rule{}}}
	variant.Uses, variant.Demanding = uses, true
	for _, family := range cfg.Families {
		addRuleset(&p.NAT, cfg, &variant, facts, family, paths[family])
		addLocalhost(&p, cfg, &variant, facts, family)
	}
	return p.NAT
}

// reshaping are the sets that, while in use, change rules that match other sets.
var reshaping = []SetName{Local, PortVIPs}

func without(uses SetsInUse, set SetName) SetsInUse {
	out := maps.Clone(uses)
	for _, family := range ip.Families {
		delete(out, set.In(family))
	}
	return out
}

// addReroute disables the second route lookup of replies (snat_reroute) while it cannot change
// their route, and enables it otherwise. If the process does not learn of route changes, or could
// not enable it again, it leaves the parameter unset, as kube-proxy does. The policy rules of this
// plan need the lookup, even before the Inventory has them. Two kinds do not: rules that skip table
// local, and rules that look up the table of claimed VIPs. These tables have no route for replies to
// other hosts.
func addReroute(plan *NodePlan, cfg *Config, n *Node) {
	if _, set := plan.Sysctls[SNATReroute]; set || !n.Watched || n.ReadOnly || n.Inventory.Reroute == routing.RerouteUnknown {
		return
	}
	plan.Sysctls[SNATReroute] = "1"
	reroutes := func(r routing.Rule) bool { return r.Action != routing.SkipLocal && r.Table != cfg.VIPs.Table }
	if n.Inventory.Reroute == routing.RerouteUnneeded && !slices.ContainsFunc(plan.Rules, reroutes) {
		plan.Sysctls[SNATReroute] = "0"
	}
}

// IPForward is the kernel parameter for forwarding of IPv4.
const IPForward = "net/ipv4/ip_forward"

// sysctls returns the kernel parameters that IPVS needs to serve Services correctly.
func sysctls(cfg *Config, n *Node) sysctl.State {
	s := sysctl.State{
		// Masquerading needs conntrack entries for IPVS connections.
		"net/ipv4/vs/conntrack": "1",
		// Connections to a removed real server are dropped at once, so that the
		// client's next packet is scheduled again.
		"net/ipv4/vs/expire_nodest_conn": "1",
		// Session affinity ends with its endpoint.
		"net/ipv4/vs/expire_quiescent_template": "1",
		IPForward:                               "1",
	}
	// Before 5.9, mode 1 delays a reused client port by a second. Before 4.1 the
	// parameter does not exist (kubernetes#81775).
	if n.Kernel.AtLeast(4, 1) && !n.Kernel.AtLeast(5, 9) {
		s["net/ipv4/vs/conn_reuse_mode"] = "0"
	}
	if cfg.StrictARP {
		s["net/ipv4/conf/all/arp_ignore"] = "1"
		s["net/ipv4/conf/all/arp_announce"] = "2"
	}
	addBridgeSysctls(s, cfg, n)
	return s
}
