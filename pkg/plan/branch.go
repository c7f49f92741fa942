package plan

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// A policy rule by input interface ("from all iif vlan1 lookup 101") routes a pod's traffic past
// the main table. AWS VPC CNI writes such rules, at priority 10, for pods with security groups in
// strict mode, and moves the rule of table local behind them, to 20. The pod's own route exists
// only in table 101. Three things break. IPVS never sees the pod's requests, because table 101 routes
// them out of the node. IPVS looks up routes without an input interface. So the packets that it
// forwards for the pod leave through the main table, with a source that the network rejects, and
// replies are not routed to the pod.
//
// Requests of such pods for a Service are therefore bound to one value of the reply
// mark, shared by all these pods. docs/concepts/eni.md shows the path of a connection:
//
//	9:     fwmark 0x3060/0x3060 lookup local                     (if a rule by input interface is before table local)
//	480:   to 10.12.200.44 fwmark 0x3060/0x3060 lookup 101       (replies)
//	32760: from 10.12.200.44 iif lo lookup 101                   (packets that IPVS forwards)
//
// No other traffic of the pod changes its path.

// Branch is the route of pods behind an interface, selected by input interface.
type Branch struct {
	Link  string // the node's end of the pods' link
	Out   string // the interface of the table's default route
	Table int
	Pods  []netip.Prefix // single addresses
}

// forwardedRulePriority is the priority of the rules for packets that IPVS forwards: behind
// a CNI's rules for pods of this node, before the main table.
const forwardedRulePriority = 32760

// branches returns the branches of one family in the order of the policy rules. It returns none
// if reply routing is off or has too few bits for another value.
func branches(cfg *Config, n *Node, family ip.Family) []Branch {
	if cfg.SNAT.Mode != SNATAuto && cfg.SNAT.Mode != SNATFWMark || bits.OnesCount32(cfg.SNAT.Mark) < 2 || len(n.Inventory.Attached) == 0 {
		return nil
	}
	f := branchFinder{node: n, family: family, primary: primaryLink(&n.Inventory, family), outer: outerLinks(cfg, n, family), enis: enis(cfg, n, family)}
	var out []Branch
	for _, r := range n.Inventory.Rules {
		known := slices.ContainsFunc(out, func(b Branch) bool { return b.Link == r.IIf })
		if b, ok := f.branch(r); ok && !known {
			out = append(out, b)
		}
	}
	return out
}

type branchFinder struct {
	node    *Node
	family  ip.Family
	primary string
	outer   []string
	enis    []ENI
}

// branch returns the branch that a rule creates, and false if the rule routes no pods.
func (f *branchFinder) branch(r routing.Rule) (Branch, bool) {
	inv := &f.node.Inventory
	byInput := routing.Rule{Family: f.family, Priority: r.Priority, IIf: r.IIf, Table: r.Table}
	if r != byInput || r.IIf == "" || r.IIf == "lo" || r.Table == routing.TableMain || r.Table == routing.TableLocal || slices.Contains(f.outer, r.IIf) {
		return Branch{}, false
	}
	at := slices.IndexFunc(inv.Defaults, func(d routing.Route) bool { return d.Family == f.family && d.Table == r.Table && !d.Local })
	if f.primary == "" || at < 0 {
		return Branch{}, false
	}
	b := Branch{Link: r.IIf, Out: inv.Defaults[at].Link, Table: r.Table}
	if b.Out == f.primary || b.Out == b.Link {
		return Branch{}, false
	}
	for _, a := range inv.Attached {
		if a.Family == f.family && a.Link == b.Link && !f.routedBySource(a.Dst.Addr()) {
			b.Pods = append(b.Pods, a.Dst)
		}
	}
	slices.SortFunc(b.Pods, comparePrefixes)
	b.Pods = slices.Compact(b.Pods)
	return b, len(b.Pods) > 0
}

// routedBySource reports whether a rule by source routes a pod through an ENI. Such a
// pod belongs to the ENI, not to a branch.
func (f *branchFinder) routedBySource(pod netip.Addr) bool {
	return slices.ContainsFunc(f.enis, func(e ENI) bool { return containsAny(e.Sources, pod) })
}

// branchMark returns the mark value that the requests of all pods behind branches share: all
// bits of the mask. It returns false if an ENI has that value, or if another program's marks conflict
// with it.
func branchMark(cfg *Config, n *Node, family ip.Family, bound []Binding) (uint32, bool) {
	taken := slices.ContainsFunc(bound, func(b Binding) bool { return b.Mark == cfg.SNAT.Mark })
	return cfg.SNAT.Mark, !taken && !conflictsWithMarks(cfg, n, family, cfg.SNAT.Mark)
}

// addBranches adds the policy rules, and the members of the set that branchRules and
// keepBranchSource match.
func addBranches(plan *NodePlan, cfg *Config, n *Node, family ip.Family, paths Paths) {
	if len(paths.Branches) == 0 {
		return
	}
	plan.Sysctls[SNATReroute] = "1"
	if family == ip.IPv4 {
		plan.Sysctls[SrcValidMark] = "1"
	}
	mark := routing.Rule{Family: family, Mark: paths.BranchMark, Mask: cfg.SNAT.Mark}
	if before := beforeLocal(n, family, paths.Branches); before > 0 {
		request := mark
		request.Priority, request.Table = before, routing.TableLocal
		plan.Rules = append(plan.Rules, request)
	}
	for _, b := range paths.Branches {
		for _, pod := range b.Pods {
			reply := mark
			reply.Priority, reply.To, reply.Table = cfg.SNAT.Priority, pod, b.Table
			plan.Rules = append(plan.Rules, reply,
				routing.Rule{Family: family, Priority: forwardedRulePriority, From: pod, IIf: "lo", Table: b.Table})
			plan.Members = append(plan.Members, Member{Set: BranchSources.In(family), Entry: ipset.Entry{Net: pod}})
		}
	}
}

// beforeLocal returns the priority just before the first rule of a branch. It returns 0
// if table local is looked up before all of them, or if that priority is 0.
func beforeLocal(n *Node, family ip.Family, found []Branch) int {
	for _, r := range n.Inventory.Rules {
		switch {
		case r == routing.Rule{Family: family, Priority: r.Priority, Table: routing.TableLocal}:
			return 0
		case r.Family == family && slices.ContainsFunc(found, func(b Branch) bool { return b.Link == r.IIf && b.Table == r.Table }):
			return r.Priority - 1
		}
	}
	return 0
}

// branchRules writes the PREROUTING rules for packets of these pods. The mark makes the request
// local. It also makes the reverse-path check (fib_validate_source) find the pod's interface. The
// kernel looks up the reverse route of a forwarded packet as if it entered through the packet's
// output interface, and that of a local packet as if it entered through lo:
//
//	-A PREROUTING -m set --match-set KUBE-IPVS-BRANCH src -j KUBE-IPVS-BRANCH
//	-A KUBE-IPVS-BRANCH -m conntrack --ctstate NEW -m set --match-set KUBE-CLUSTER-IP dst,dst -j CONNMARK --set-xmark 0x3060/0x3060     (load balancers, external IPs, node ports)
//	-A KUBE-IPVS-BRANCH -m connmark --mark 0x3060/0x3060 -m conntrack --ctdir ORIGINAL -j MARK --set-xmark 0x3060/0x3060
func (r *ruleset) branchRules() {
	bound := r.masked(r.paths.BranchMark)
	var rules []nat.Rule
	for _, set := range r.used(ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts) {
		rules = append(rules, rule("from a pod routed by interface", "-m conntrack --ctstate NEW "+r.match(set, "dst,dst"), "CONNMARK --set-xmark "+bound))
	}
	r.jumpFirst(nat.Mangle, "PREROUTING", r.match(BranchSources, "src"), "KUBE-IPVS-BRANCH", replyComment)
	r.chain(nat.Mangle, "KUBE-IPVS-BRANCH", append(rules,
		nat.Rule(fmt.Sprintf("-m connmark --mark %[1]s -m conntrack --ctdir ORIGINAL -j MARK --set-xmark %[1]s", bound)))...)
}

// keepBranchSource keeps the pods' own addresses. Their uplink accepts no other source, and
// replies return to this node by that address or by the connmark:
//
//	-A KUBE-POSTROUTING -m set --match-set KUBE-IPVS-BRANCH src -j RETURN
func (r *ruleset) keepBranchSource() []nat.Rule {
	if len(r.paths.Branches) == 0 {
		return nil
	}
	return []nat.Rule{rule("pod keeps its own address", r.match(BranchSources, "src"), "RETURN")}
}
