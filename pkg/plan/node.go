package plan

import (
	"cmp"
	"maps"
	"slices"

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
	// Chains lists every chain that NAT has when all sets are in use; sorted.
	Chains []nat.Chain
	Rules  []routing.Rule
	// Loopback is for the node ports of the loopback address.
	Loopback nft.Loopback
	Bound    []Binding // bindings that Rules implement
	Modes    []InterfaceMode
}

// ForNode computes the plan of the node.
func ForNode(cfg *Config, n *Node) NodePlan {
	part := NodePlan{
		Sysctls: sysctls(cfg, n),
		Watched: watchedSysctls(cfg, n),
		NAT:     nat.State{Chains: map[nat.Chain][]nat.Rule{}},
	}
	facts := NewFacts(cfg, n)
	for _, family := range cfg.Families {
		paths := PathsOf(cfg, n, family)
		part.Sets = append(part.Sets, Sets(family)...)
		addRuleset(&part.NAT, cfg, n, family, paths)
		addLocalhost(&part, cfg, n, &facts, family)
		addReplyRouting(&part, cfg, family, paths)
		addBranches(&part, cfg, n, family, paths)
		part.Modes = append(part.Modes, paths.Modes...)
		addClaimRules(&part, cfg, n, family)
	}
	addSharedSysctls(&part, cfg, n)
	addReroute(&part, n)
	part.Chains = allChains(cfg, n)
	return part
}

// allChains returns the chains of a node on which every set is in use.
func allChains(cfg *Config, n *Node) []nat.Chain {
	all := *n
	all.Uses = nil
	s := nat.State{Chains: map[nat.Chain][]nat.Rule{}}
	for _, family := range cfg.Families {
		addRuleset(&s, cfg, &all, family, PathsOf(cfg, n, family))
	}
	return slices.SortedFunc(maps.Keys(s.Chains), func(a, b nat.Chain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Name, b.Name))
	})
}

// addReroute turns the second route look-up of replies off while it cannot change their
// route, and on again otherwise. kube-proxy leaves it on, which is the kernel's default. A
// process that is not told of changes, or could not turn it on again, leaves it alone. The
// rules of the plan itself need it, even if the Inventory does not have them yet, except
// those by which packets skip table local: replies to other hosts have no route there.
func addReroute(part *NodePlan, n *Node) {
	if _, set := part.Sysctls[SNATReroute]; set || !n.Watched || n.ReadOnly || n.Inventory.Reroute == routing.RerouteUnknown {
		return
	}
	part.Sysctls[SNATReroute] = "1"
	if n.Inventory.Reroute == routing.RerouteNeedless && !slices.ContainsFunc(part.Rules, func(r routing.Rule) bool { return r.Action != routing.SkipLocal }) {
		part.Sysctls[SNATReroute] = "0"
	}
}

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
		"net/ipv4/ip_forward":                   "1",
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
