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

// A policy rule by input interface ("from all iif vlan1 lookup 101") gives a pod
// a way out of its own, past the main table. AWS VPC CNI writes such rules for
// pods with security groups in strict mode, at priority 10, and moves the rule of
// table local behind them, to 20; the pod's own route is in table 101 alone. Then
// IPVS never sees the pod's requests, what it sends on for the pod leaves by the
// main table with a source that the network does not take there, and answers do
// not find the pod: all of that is looked up without an input interface.
//
// So requests of such pods for a Service are bound by a value of reply routing's,
// one for all pods. docs/eni.md shows a connection's way:
//
//	9:     fwmark 0x3060/0x3060 lookup local                     (if a rule by input interface is before table local)
//	480:   to 10.12.200.44 fwmark 0x3060/0x3060 lookup 101       (answers)
//	32760: from 10.12.200.44 iif lo lookup 101                   (what IPVS sends on)
//
// Nothing else that the pod sends or is sent changes its way.

// Branch is the way out of pods behind an interface.
type Branch struct {
	Link  string // the node's end of the pods' link
	Out   string // the interface of the table's default route
	Table int
	Pods  []netip.Prefix // of one address each
}

// sentRulePriority is that of the rules for what IPVS sends on: behind a CNI's
// rules that lead to pods of this node, before the main table.
const sentRulePriority = 32760

// branches finds them for one family, in the order of the policy rules. It
// returns none if reply routing is off.
func branches(cfg *Config, n *Node, family ip.Family) []Branch {
	if cfg.SNAT.Mode != SNATAuto && cfg.SNAT.Mode != SNATFWMark || bits.OnesCount32(cfg.SNAT.Mark) < 2 || len(n.Inventory.Attached) == 0 {
		return nil
	}
	f := branchFinder{node: n, family: family, main: mainLink(&n.Inventory, family), outer: outerLinks(cfg, n, family), enis: enis(cfg, n, family)}
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
	node   *Node
	family ip.Family
	main   string
	outer  []string
	enis   []ENI
}

// branch returns the way out that a rule gives, and false if it gives pods none.
func (f *branchFinder) branch(r routing.Rule) (Branch, bool) {
	inv := &f.node.Inventory
	byInput := routing.Rule{Family: f.family, Priority: r.Priority, IIf: r.IIf, Table: r.Table}
	if r != byInput || r.IIf == "" || r.IIf == "lo" || r.Table == tableMain || r.Table == tableLocal || slices.Contains(f.outer, r.IIf) {
		return Branch{}, false
	}
	at := slices.IndexFunc(inv.Defaults, func(d routing.Route) bool { return d.Family == f.family && d.Table == r.Table && !d.Local })
	if f.main == "" || at < 0 {
		return Branch{}, false
	}
	b := Branch{Link: r.IIf, Out: inv.Defaults[at].Link, Table: r.Table}
	if b.Out == f.main || b.Out == b.Link {
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

// routedBySource reports whether a rule by source leads a pod to an ENI, which
// then answers for its way.
func (f *branchFinder) routedBySource(pod netip.Addr) bool {
	return slices.ContainsFunc(f.enis, func(e ENI) bool { return containsAny(e.Sources, pod) })
}

// branchMark is the value of requests of all such pods: all bits of the mask. It
// is false if an ENI has it.
func branchMark(cfg *Config, bound []Binding) (uint32, bool) {
	return cfg.SNAT.Mark, !slices.ContainsFunc(bound, func(b Binding) bool { return b.Mark == cfg.SNAT.Mark })
}

// addBranches adds the policy rules, and the pods to the set that the rules below
// match.
func addBranches(part *NodePart, cfg *Config, n *Node, family ip.Family, paths Paths) {
	if len(paths.Branches) == 0 {
		return
	}
	part.Sysctls[SNATReroute] = "1"
	if family == ip.IPv4 {
		part.Sysctls[SrcValidMark] = "1"
	}
	mark := routing.Rule{Family: family, Mark: paths.BranchMark, Mask: cfg.SNAT.Mark}
	if before := beforeLocal(n, family, paths.Branches); before > 0 {
		request := mark
		request.Priority, request.Table = before, tableLocal
		part.Rules = append(part.Rules, request)
	}
	for _, b := range paths.Branches {
		for _, pod := range b.Pods {
			answer := mark
			answer.Priority, answer.To, answer.Table = cfg.SNAT.Priority, pod, b.Table
			part.Rules = append(part.Rules, answer,
				routing.Rule{Family: family, Priority: sentRulePriority, From: pod, IIf: "lo", Table: b.Table})
			part.Members = append(part.Members, Member{Set: BranchSources.In(family), Entry: ipset.Entry{Net: pod}})
		}
	}
}

// beforeLocal returns the priority just before the first rule of a branch, or 0 if
// table local is looked up before all of them, or none is free.
func beforeLocal(n *Node, family ip.Family, found []Branch) int {
	for _, r := range n.Inventory.Rules {
		switch {
		case r == routing.Rule{Family: family, Priority: r.Priority, Table: tableLocal}:
			return 0
		case r.Family == family && slices.ContainsFunc(found, func(b Branch) bool { return b.Link == r.IIf && b.Table == r.Table }):
			return r.Priority - 1
		}
	}
	return 0
}

// branchRules stand in PREROUTING, for packets of such pods. The mark has the
// request found local. It also leads the reverse-path check to the pod's interface:
// for a packet that is forwarded the kernel looks the way back up as if it entered
// by the interface that the packet leaves by, for a local one as if by lo
// (fib_validate_source):
//
//	-A PREROUTING -m set --match-set KUBE-IPVS-BRANCH src -j KUBE-IPVS-BRANCH
//	-A KUBE-IPVS-BRANCH -m conntrack --ctstate NEW -m set --match-set KUBE-CLUSTER-IP dst,dst -j CONNMARK --set-xmark 0x3060/0x3060     (load balancers, external IPs, node ports)
//	-A KUBE-IPVS-BRANCH -m connmark --mark 0x3060/0x3060 -m conntrack --ctdir ORIGINAL -j MARK --set-xmark 0x3060/0x3060
func (r *ruleset) branchRules() {
	bound := r.masked(r.paths.BranchMark)
	var rules []nat.Rule
	for _, set := range r.used(ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts) {
		rules = append(rules, rule("from a branch", "-m conntrack --ctstate NEW "+r.match(set, "dst,dst"), "CONNMARK --set-xmark "+bound))
	}
	r.jumpIf(nat.Mangle, "PREROUTING", r.match(BranchSources, "src"), "KUBE-IPVS-BRANCH", "kubernetes reply routing")
	r.chain(nat.Mangle, "KUBE-IPVS-BRANCH", append(rules,
		nat.Rule(fmt.Sprintf("-m connmark --mark %[1]s -m conntrack --ctdir ORIGINAL -j MARK --set-xmark %[1]s", bound)))...)
}

// branchArrived takes the mark off in INPUT. A virtual server with a fwmark is
// looked up by the whole mark, and what IPVS sends on goes by the pod's source:
//
//	-A KUBE-IPVS-BIND -m mark --mark 0x3060/0x3060 -j MARK --set-xmark 0x0/0x3060
func (r *ruleset) branchArrived() []nat.Rule {
	if len(r.paths.Branches) == 0 {
		return nil
	}
	return []nat.Rule{nat.Rule(fmt.Sprintf("-m mark --mark %s -j MARK --set-xmark %s", r.masked(r.paths.BranchMark), r.masked(0)))}
}

// branchSource keeps such pods' own addresses. The network takes no other by their
// way out, and answers are led to this node by it, or by the connection's mark:
//
//	-A KUBE-POSTROUTING -m set --match-set KUBE-IPVS-BRANCH src -j RETURN
func (r *ruleset) branchSource() []nat.Rule {
	if len(r.paths.Branches) == 0 {
		return nil
	}
	return []nat.Rule{rule("the network takes only its own address", r.match(BranchSources, "src"), "RETURN")}
}
