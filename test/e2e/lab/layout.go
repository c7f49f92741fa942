package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Layout is a CNI's layout of policy rules, tables and marks for pods that have an
// address of a secondary interface.
type Layout struct {
	Name string
	// Table has the default route by the secondary interface; 0 means 1000 plus the
	// interface's number.
	Table int
	// PodTo and PodFrom are the priorities of a pod's rules, FromENI that of the rule for
	// the secondary interface's own address; 0 means no rule.
	PodTo, PodFrom, FromENI int
	// PodLink is the node's end of the pod's link.
	PodLink string
	// ENIAddress and NodeAddress report whether the secondary interface carries its own
	// address, and the node's.
	ENIAddress, NodeAddress bool
	// Rules and Mangle are policy rules and iptables rules for marks. The node's
	// default route is also in MarkTable, if that is not 0.
	Rules, Mangle []string
	MarkTable     int
	// Branches gives each pod an interface of its own.
	Branches Branches
	// Plain is a node without policy routes: the secondary interface has an address of its
	// own network, and the pods are on a bridge, with addresses of neither network.
	Plain bool
	// Endpoints is the number of endpoint pods on the node; 0 means one.
	Endpoints int
	// ReplyGateway configures the gateway of the secondary interface's network.
	ReplyGateway bool
	// SNATMode is "" for the default.
	SNATMode string
}

// The layouts, with the marks of their CNIs.
var (
	// SeedLayout is the layout of the cluster that was reported first.
	SeedLayout = Layout{Name: "the first report", Table: 1003, PodTo: 1000, PodFrom: 2000, PodLink: "fsk7c22dbae71f7"}
	AWSLayout  = Layout{
		Name: "AWS VPC CNI", Table: 2, PodTo: 512, PodFrom: 1536, FromENI: 32765, PodLink: "eni7c22dbae71f", ENIAddress: true,
		Rules: []string{"pref 1024 fwmark 0x80/0x80 lookup main"},
		Mangle: []string{
			"PREROUTING -i eth0 -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80",
			"PREROUTING -i eni+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80",
		},
	}
	// AWSStandardLayout and AWSStrictLayout have pods with security groups.
	AWSStandardLayout = awsBranches("AWS VPC CNI, security groups, standard", "eni", StandardBranches)
	AWSStrictLayout   = awsBranches("AWS VPC CNI, security groups, strict", "vlan", StrictBranches)
	// TerwayLayout has Terway's symmetric routing enabled.
	TerwayLayout = Layout{
		Name: "Terway", PodTo: 512, PodFrom: 2048, PodLink: "cali7c22dbae71f", NodeAddress: true,
		Rules: []string{"pref 600 fwmark 0x10/0x10 lookup 100"}, MarkTable: 100,
		Mangle: []string{
			"PREROUTING -i eth0 -j CONNMARK --set-xmark 0x10/0x10",
			"PREROUTING -j CONNMARK --restore-mark --nfmask 0x10 --ctmask 0x10",
		},
	}
	CiliumLayout = Layout{
		Name: "Cilium ENI", Table: 11, PodTo: 20, PodFrom: 111, PodLink: "lxc7c22dbae71f", ENIAddress: true,
		Rules: []string{"pref 109 fwmark 0x80/0x80 lookup main"},
		Mangle: []string{
			"PREROUTING -i eth0 -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80",
			"PREROUTING -i lxc+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80",
		},
	}
	// VolcanoLayout has several pods on an interface without an address.
	VolcanoLayout     = Layout{Name: "Volcano", Table: 1003, PodTo: 1000, PodFrom: 2000, PodLink: "fsk1", Endpoints: 2}
	VolcanoSNATLayout = snatMode(VolcanoLayout, "snat")
	// NICsLayout is an ordinary node with two interfaces. NICsGatewayLayout is the same, with the
	// gateway of the second one configured.
	NICsLayout        = Layout{Name: "several NICs", Plain: true, Endpoints: 2}
	NICsGatewayLayout = Layout{Name: "several NICs, reply gateway", Plain: true, Endpoints: 2, ReplyGateway: true}
)

func snatMode(layout Layout, mode string) Layout {
	layout.Name, layout.SNATMode = layout.Name+", SNAT mode "+mode, mode
	return layout
}

// awsBranches returns AWSLayout with branch interfaces. prefix begins the names of the pods' links.
func awsBranches(name, prefix string, branches Branches) Layout {
	out := AWSLayout
	out.Name, out.Branches, out.PodLink = name, branches, prefix+"7c22dbae71f"
	out.Mangle = append(slices.Clone(out.Mangle), "PREROUTING -i vlan+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80")
	return out
}

// layOut configures the secondary interface as the CNI does.
func (c *ENICluster) layOut(plan *eniPlan, layout *Layout) {
	c.t.Helper()
	if layout.Plain {
		c.layOutPlainly(plan)
		return
	}
	for address, carried := range map[string]bool{plan.eni: layout.ENIAddress, plan.node: layout.NodeAddress} {
		if carried {
			c.Node.Address("eth1", address)
		}
	}
	c.table = layout.Table
	if c.table == 0 {
		c.table = 1000 + c.Node.link("eth1").Attrs().Index
	}
	c.Node.Route(
		fmt.Sprintf("%s dev eth1 table %d", plan.eniGateway, c.table),
		fmt.Sprintf("default via %s dev eth1 table %d", plan.eniGateway, c.table),
	)
	if layout.FromENI != 0 {
		c.Node.Rule(fmt.Sprintf("pref %d from %s lookup %d", layout.FromENI, plan.eni, c.table))
	}
	if layout.MarkTable != 0 {
		c.Node.Route(fmt.Sprintf("default via %s dev eth0 table %d", plan.nodeGateway, layout.MarkTable))
	}
	family, iptables := "-4", "iptables"
	if netip.MustParseAddr(plan.node).Is6() {
		family, iptables = "-6", "ip6tables"
	}
	if layout.Branches == StrictBranches {
		c.moveLocal(family)
	}
	for _, rule := range layout.Rules {
		c.Node.Exec("ip", append([]string{family, "rule", "add"}, strings.Fields(rule)...)...)
	}
	for _, rule := range layout.Mangle {
		c.Node.Exec(iptables, append([]string{"-w", "-t", "mangle", "-A"}, strings.Fields(rule)...)...)
	}
}
