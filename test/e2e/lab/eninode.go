package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
)

// ENINode is a dual-stack node of a CNI that gives pods the addresses of secondary
// network interfaces. A test plugs in as many ENIs as it needs. The node routes packets
// from a pod with an ENI's address out by that ENI, all others by the primary interface.
// Pods of other nodes and clients are beyond the fabric.
//
//	          .-- eth0 10.12.97.49 --.           .-- other pods 10.253.3.5, …
//	pods -- node                     fabric ----<
//	          '-- eth1, eth2, … -----'           '-- clients 198.51.100.9, …
//	               10.12.192.10, 10.12.193.10, …
type ENINode struct {
	*Lab
	Fabric *Fabric
	Node   *Node
	// Primary is eth0; ENIs are eth1, eth2, and so on.
	Primary *NodeInterface
	ENIs    []*NodeInterface

	beyond, outside  *Segment // with other nodes' pods, and with clients
	remotes, clients int
}

// NodeInterface is an interface of an ENINode, whether or not it is plugged in.
type NodeInterface struct {
	*Port
	// Number is 0 for the primary interface.
	Number int
	// Addresses are its own, IPv4 first, whether or not the node carries them.
	Addresses []netip.Addr

	node    *ENINode
	segment *Segment
	pods    []*Pod
}

// ENIPodCIDRs contain the addresses of an ENINode's pods.
const ENIPodCIDRs = "10.12.192.0/20,fd00:12:192::/48"

// ordinaryPods is the number of the subnet of pods on no ENI.
const ordinaryPods = 8

// podSubnet is a subnet of pods; those of ENIs have the ENIs' numbers.
func podSubnet(number int) []string {
	return []string{fmt.Sprintf("10.12.%d.0/24", 191+number), fmt.Sprintf("fd00:12:192:%d::/64", number)}
}

// podSubnetHost returns an address of such a subnet, IPv4 first.
func podSubnetHost(number, host int) []string {
	return []string{fmt.Sprintf("10.12.%d.%d", 191+number, host), fmt.Sprintf("fd00:12:192:%d::%d", number, host)}
}

// NewENINode creates the node with its primary interface, without any proxy's rules.
func NewENINode(t testing.TB) *ENINode {
	t.Helper()
	l := New(t)
	n := &ENINode{Lab: l, Fabric: l.Fabric("fabric"), Node: l.Node("node")}
	segment := n.Fabric.Segment("10.12.97.1/24", "fd00:12:97::1/64")
	port := segment.Attach(n.Node.Namespace, "eth0", "10.12.97.49/24", "fd00:12:97::49/64")
	segment.DefaultRoute(n.Node.Namespace, "eth0")
	n.Primary = &NodeInterface{Port: port, Addresses: addresses("10.12.97.49", "fd00:12:97::49"), node: n, segment: segment}
	n.Primary.Deliver(podSubnet(ordinaryPods)...)

	n.beyond = n.Fabric.Segment("10.253.3.1/24", "fd00:253:3::1/64")
	n.outside = n.Fabric.Segment("198.51.100.1/24", "fd00:51::1/64")
	return n
}

// AddRemote creates a pod of another node.
func (n *ENINode) AddRemote(name string) *Pod {
	n.t.Helper()
	v4, v6 := fmt.Sprintf("10.253.3.%d", 5+n.remotes), fmt.Sprintf("fd00:253:3::%d", 5+n.remotes)
	n.remotes++
	return &Pod{Namespace: n.beyond.Client(name, v4+"/24", v6+"/64"), Addresses: addresses(v4, v6)}
}

// AddClient creates a host outside the cluster.
func (n *ENINode) AddClient(name string) *Namespace {
	n.t.Helper()
	v4, v6 := fmt.Sprintf("198.51.100.%d/24", 9+n.clients), fmt.Sprintf("fd00:51::%d/64", 9+n.clients)
	n.clients++
	return n.outside.Client(name, v4, v6)
}

func addresses(texts ...string) []netip.Addr {
	var list []netip.Addr
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
}

// AddENI creates the next ENI and plugs it in. The node does not carry its addresses yet.
func (n *ENINode) AddENI() *NodeInterface {
	n.t.Helper()
	number := len(n.ENIs) + 1
	gateways := podSubnetHost(number, 1)
	i := &NodeInterface{
		Number: number, Addresses: addresses(podSubnetHost(number, 10)...), node: n,
		segment: n.Fabric.Segment(gateways[0]+"/24", gateways[1]+"/64"),
	}
	n.ENIs = append(n.ENIs, i)
	i.Plug()
	return i
}

// Interfaces returns all interfaces of the node, the primary one first.
func (n *ENINode) Interfaces() []*NodeInterface {
	return append([]*NodeInterface{n.Primary}, n.ENIs...)
}

// Name is the name of the interface on the node.
func (i *NodeInterface) Name() string { return fmt.Sprintf("eth%d", i.Number) }

// Table is the routing table with the default route by an ENI.
func (i *NodeInterface) Table() int { return 1002 + i.Number }

// Plug plugs in an ENI, as the cloud does, and makes the node route its pods' packets out
// by it, as the CNI does.
func (i *NodeInterface) Plug() {
	n := i.node
	n.t.Helper()
	i.Port = i.segment.Attach(n.Node.Namespace, i.Name())
	owned := slices.Clone(i.Addresses)
	for _, pod := range i.pods {
		owned = append(owned, pod.Addresses...)
	}
	i.Own(texts(owned)...)
	for _, gateway := range i.segment.gateways {
		n.Node.Route(
			fmt.Sprintf("%s dev %s table %d", gateway.Addr(), i.Name(), i.Table()),
			fmt.Sprintf("default via %s dev %s table %d", gateway.Addr(), i.Name(), i.Table()),
		)
	}
	for _, pod := range i.pods {
		i.route(pod)
	}
}

// Unplug removes an ENI from the node, and its pods' rules.
func (i *NodeInterface) Unplug() {
	n := i.node
	n.t.Helper()
	for _, pod := range i.pods {
		for family, address := range pod.Addresses {
			option := []string{"-4", "-6"}[family]
			n.Node.Exec("ip", option, "rule", "del", "pref", "1000", "to", address.String())
			n.Node.Exec("ip", option, "rule", "del", "pref", "2000", "from", address.String())
		}
	}
	i.Port.Unplug()
}

// Carry adds the interface's own addresses to it.
func (i *NodeInterface) Carry() { i.node.Node.Address(i.Name(), texts(i.Addresses)...) }

// Drop removes the interface's own addresses from it.
func (i *NodeInterface) Drop() {
	for _, address := range i.Addresses {
		i.node.Node.Exec("ip", "address", "del", netip.PrefixFrom(address, address.BitLen()).String(), "dev", i.Name())
	}
}

// Deliver makes the fabric deliver packets for the prefixes to this interface, and accept
// the prefixes as sources from it.
func (i *NodeInterface) Deliver(prefixes ...string) {
	n := i.node
	n.t.Helper()
	for _, prefix := range n.prefixes(prefixes) {
		next := i.Addresses[0]
		if prefix.Addr().Is6() {
			next = i.Addresses[1]
		}
		n.Fabric.Route(fmt.Sprintf("%s via %s", prefix, next))
	}
	i.Accept(prefixes...)
}

// AddPod creates a pod with addresses of the ENI or, on the primary interface, with
// addresses of no interface.
func (i *NodeInterface) AddPod(name string) *Pod {
	n := i.node
	n.t.Helper()
	subnet := i.Number
	if subnet == 0 {
		subnet = ordinaryPods
	}
	pod := n.Node.Pod(name, "", podSubnetHost(subnet, 44+len(i.pods))...)
	i.pods = append(i.pods, pod)
	if i.Number > 0 {
		i.Own(texts(pod.Addresses)...)
	}
	i.route(pod)
	return pod
}

// route makes the node route the pod's packets as the CNI does.
func (i *NodeInterface) route(pod *Pod) {
	for _, address := range pod.Addresses {
		i.node.Node.Rule(fmt.Sprintf("pref 1000 to %s lookup main", address))
		if i.Number > 0 {
			i.node.Node.Rule(fmt.Sprintf("pref 2000 from %s lookup %d", address, i.Table()))
		}
	}
}

func texts(addresses []netip.Addr) []string {
	var list []string
	for _, address := range addresses {
		list = append(list, address.String())
	}
	return list
}
