package lab

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Branches says which policy rules lead to pods with an interface of their own: a VLAN of the
// secondary interface.
type Branches string

// AWS VPC CNI calls these the modes of security groups for pods.
const (
	NoBranches       Branches = ""
	StandardBranches Branches = "standard" // by the pod's address
	StrictBranches   Branches = "strict"   // by input interface, before table local
)

// branchGateways are the next hops of the branches. The CNI lets ICMPv6 of the second one
// pass to table local, so that the node receives its neighbor advertisements.
var branchGateways = map[bool]string{true: "10.12.200.1/24", false: "fe80:ec2::1/64"}

// moveLocal moves table local behind the rules by input interface.
func (c *ENICluster) moveLocal(family string) {
	c.t.Helper()
	if family == "-6" {
		gateway := netip.MustParsePrefix(branchGateways[false]).Addr()
		c.Node.Exec("ip", family, "rule", "add", "pref", "0", "from", gateway.String(), "ipproto", "ipv6-icmp", "lookup", "local")
	}
	c.Node.Exec("ip", family, "rule", "add", "pref", "20", "lookup", "local")
	c.Node.Exec("ip", family, "rule", "del", "pref", "0", "from", "all", "lookup", "local")
}

// branchPod creates a pod with a branch interface.
func (c *ENICluster) branchPod(name, link string, address netip.Addr) *Pod {
	c.t.Helper()
	number := len(c.uplinks) + 1
	vlan, table, mac := fmt.Sprintf("vlan.eth.%d", number), 100+number, net.HardwareAddr{0x02, 0xee, 0, 0, 0, byte(number)}
	c.Node.Link(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: vlan, ParentIndex: c.Node.link("eth1").Attrs().Index, HardwareAddr: mac}, VlanId: number})
	gateway := branchGateways[address.Is4()]
	router := c.trunk.VLAN(number, gateway)
	c.Fabric.Neighbour(router, address, mac)
	c.Fabric.Route(fmt.Sprintf("%s dev %s", address, router))
	c.Fabric.ports = append(c.Fabric.ports, &Port{
		segment: c.trunk, host: c.Node.Namespace, Interface: vlan, name: router, owns: []netip.Prefix{netip.PrefixFrom(address, address.BitLen())},
	})
	c.Eth1.Accept(address.String())
	next := netip.MustParsePrefix(gateway).Addr()
	c.Node.Route(fmt.Sprintf("%s dev %s table %d", next, vlan, table), fmt.Sprintf("default via %s dev %s table %d", next, vlan, table))

	pod := c.Node.Pod(name, link, address.String())
	c.uplinks[pod] = vlan
	if c.layout.Branches == StandardBranches {
		c.podRules(address, table)
		return pod
	}
	family := "-4"
	if address.Is6() {
		family = "-6"
	}
	c.Node.Exec("ip", family, "route", "del", address.String(), "dev", link)
	c.Node.Route(fmt.Sprintf("%s dev %s table %d", address, link, table))
	for _, iif := range []string{vlan, link} {
		c.Node.Exec("ip", family, "rule", "add", "pref", "10", "iif", iif, "lookup", fmt.Sprint(table))
	}
	return pod
}

// Uplink returns the interface on which the fabric delivers packets for a pod.
func (c *ENICluster) Uplink(pod *Pod) string {
	if uplink, ok := c.uplinks[pod]; ok {
		return uplink
	}
	if c.bridge != nil {
		return "eth0"
	}
	return "eth1"
}
