package lab

import (
	"fmt"
	"net/netip"
	"testing"
)

// ThreeNodes is an ordinary dual-stack cluster: three nodes on one subnet, each with a
// bridge for its pods, and routes between the pods' subnets. One client is outside, on a
// separate subnet.
type ThreeNodes struct {
	*Lab
	Fabric *Fabric
	// Segment is the nodes' subnet.
	Segment *Segment
	Nodes   [3]*BridgeNode
	Client  *Namespace
}

// BridgeNode is a node whose pods are on a bridge, cni0.
type BridgeNode struct {
	*Node
	// Number is 1, 2 or 3.
	Number int
	Bridge *Bridge
	// IPv4 and IPv6 are the node's addresses.
	IPv4, IPv6 netip.Addr
	// Uplink is the fabric's end of eth0.
	Uplink *Port
	pods   int
}

// NewThreeNodes creates the cluster, without any proxy's rules and without pods.
func NewThreeNodes(t testing.TB) *ThreeNodes {
	t.Helper()
	l := New(t)
	l.filterBridges()
	c := &ThreeNodes{Lab: l, Fabric: l.Fabric("fabric")}
	c.Fabric.Uplink()
	c.Segment = c.Fabric.Segment("192.168.50.1/24", "fd00:50::1/64")
	for i := range c.Nodes {
		c.Nodes[i] = c.newNode(i + 1)
	}
	for _, node := range c.Nodes {
		c.routePods(node)
	}
	outside := c.Fabric.Segment("198.51.100.1/24", "fd00:51::1/64")
	c.Client = outside.Client("client", "198.51.100.9/24", "fd00:51::9/64")
	return c
}

func (c *ThreeNodes) newNode(number int) *BridgeNode {
	c.t.Helper()
	n := &BridgeNode{
		Node: c.Node(fmt.Sprintf("node%d", number)), Number: number,
		IPv4: netip.AddrFrom4([4]byte{192, 168, 50, byte(10 + number)}),
		IPv6: netip.MustParseAddr(fmt.Sprintf("fd00:50::1%d", number)),
	}
	n.Uplink = c.Segment.Attach(n.Namespace, "eth0", n.IPv4.String()+"/24", n.IPv6.String()+"/64")
	n.Uplink.Accept(n.PodSubnets()...)
	c.Segment.DefaultRoute(n.Namespace, "eth0")
	n.Bridge = n.Node.Bridge("cni0", fmt.Sprintf("10.244.%d.1/24", number), fmt.Sprintf("fd00:244:%d::1/64", number))
	return n
}

// PodSubnets are the node's pod ranges, IPv4 first.
func (n *BridgeNode) PodSubnets() []string {
	return []string{fmt.Sprintf("10.244.%d.0/24", n.Number), fmt.Sprintf("fd00:244:%d::/64", n.Number)}
}

// Gateways are the node's addresses on the pods' side, IPv4 first.
func (n *BridgeNode) Gateways() []netip.Addr {
	var addresses []netip.Addr
	for _, prefix := range n.Bridge.gateways {
		addresses = append(addresses, prefix.Addr())
	}
	return addresses
}

// routePods adds routes to the node's pods on all other hosts.
func (c *ThreeNodes) routePods(node *BridgeNode) {
	c.t.Helper()
	hosts := []*Namespace{c.Fabric.Namespace}
	for _, other := range c.Nodes {
		if other != node {
			hosts = append(hosts, other.Namespace)
		}
	}
	subnets := node.PodSubnets()
	for _, host := range hosts {
		host.Route(fmt.Sprintf("%s via %s", subnets[0], node.IPv4), fmt.Sprintf("%s via %s", subnets[1], node.IPv6))
	}
}

// AddPod creates the node's next pod: 10.244.N.2 and fd00:244:N::2, and so on.
func (n *BridgeNode) AddPod(name string) *Pod {
	n.lab.t.Helper()
	n.pods++
	host := n.pods + 1
	return n.Bridge.Pod(name, fmt.Sprintf("10.244.%d.%d", n.Number, host), fmt.Sprintf("fd00:244:%d::%x", n.Number, host))
}
