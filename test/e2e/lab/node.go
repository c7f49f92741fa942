package lab

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
)

// Node is a node of the cluster: it forwards, has a strict reverse-path check, and may
// run a proxy and pods.
type Node struct {
	*Namespace
	runDir  string // the /run of its programs
	proxies []*Process

	readOnlySysctls bool
}

// Pod is a namespace behind a node.
type Pod struct {
	*Namespace
	Node *Node // nil: a node outside the lab
	// HostInterface is the node's end of its link.
	HostInterface string
	// Addresses are its own, IPv4 or IPv6 or both.
	Addresses []netip.Addr
}

// Node creates a node without interfaces.
func (l *Lab) Node(name string) *Node {
	l.t.Helper()
	n := &Node{Namespace: l.Namespace(name), runDir: l.t.TempDir()}
	n.forward()
	n.reversePath("1")
	l.nodes = append(l.nodes, n)
	return n
}

// ReadOnlySysctls makes kernel parameters read-only for programs that are started
// afterwards.
func (n *Node) ReadOnlySysctls() { n.readOnlySysctls = true }

// ReversePath sets rp_filter on all interfaces to "0", "1" or "2". The default is 1
// (strict).
func (n *Node) ReversePath(mode string) {
	n.lab.t.Helper()
	n.reversePath(mode)
	links, err := whole(n.netlink.LinkList)
	n.lab.must(err, "%s: interfaces", n.Name)
	for _, link := range links {
		// As in sysctl(8), dots and slashes change places.
		name := strings.ReplaceAll(link.Attrs().Name, ".", "/")
		n.Sysctl("net.ipv4.conf."+name+".rp_filter", mode)
	}
}

// The next hop of a pod that has only host routes.
var (
	podGateway4 = netip.MustParseAddr("169.254.1.1")
	podGateway6 = netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")
)

// Pod creates a pod with a separate link, as CNIs without a bridge do: the node has a
// host route to each address, and the pod a default route to a next hop that no host has.
// hostInterface names the node's end; "" chooses a name.
func (n *Node) Pod(name, hostInterface string, addresses ...string) *Pod {
	n.lab.t.Helper()
	pod := n.newPod(name, hostInterface, addresses)
	for _, address := range pod.Addresses {
		pod.Address("eth0", address.String())
		gateway := podGateway4
		if address.Is6() {
			gateway = podGateway6
		}
		pod.Neighbour("eth0", gateway, n.MAC(pod.HostInterface))
		pod.Route(fmt.Sprintf("default via %s dev eth0 onlink", gateway))
		n.Route(fmt.Sprintf("%s dev %s", address, pod.HostInterface))
	}
	return pod
}

func (n *Node) newPod(name, hostInterface string, addresses []string) *Pod {
	n.lab.t.Helper()
	if hostInterface == "" {
		hostInterface = n.lab.linkName("veth")
	}
	pod := &Pod{Namespace: n.lab.Namespace(name), Node: n, HostInterface: hostInterface}
	for _, prefix := range n.lab.prefixes(addresses) {
		pod.Addresses = append(pod.Addresses, prefix.Addr())
	}
	n.connect(hostInterface, pod.Namespace, "eth0")
	return pod
}

// Bridge is a bridge of a node, to which pods are attached.
type Bridge struct {
	node     *Node
	name     string
	gateways []netip.Prefix
}

// Bridge creates a bridge on which the node has the given addresses, such as
// "10.244.1.1/24".
func (n *Node) Bridge(name string, gateways ...string) *Bridge {
	n.lab.t.Helper()
	n.bridge(name)
	n.Address(name, gateways...)
	return &Bridge{node: n, name: name, gateways: n.lab.prefixes(gateways)}
}

// Pod creates a pod on the bridge, in its subnets and with the node as its gateway. The
// bridge sends a packet back to its source pod if necessary (hairpin), as with most CNIs.
func (b *Bridge) Pod(name string, addresses ...string) *Pod {
	n := b.node
	n.lab.t.Helper()
	pod := n.newPod(name, "", addresses)
	port := n.link(pod.HostInterface)
	n.lab.must(n.netlink.LinkSetMaster(port, n.link(b.name)), "attach %s to %s", name, b.name)
	n.lab.must(n.netlink.LinkSetHairpin(port, true), "hairpin of %s", name)
	for _, address := range pod.Addresses {
		for _, gateway := range b.gateways {
			if gateway.Addr().Is4() == address.Is4() {
				pod.Address("eth0", fmt.Sprintf("%s/%d", address, gateway.Bits()))
				pod.Route(fmt.Sprintf("default via %s dev eth0", gateway.Addr()))
			}
		}
	}
	return pod
}

// MacvlanPod creates a pod with an address of the node's own subnet, on a macvlan
// interface beside the node's. It replies to neighbors without the node.
func (n *Node) MacvlanPod(name, parent string, segment *Segment, addresses ...string) *Pod {
	n.lab.t.Helper()
	pod := &Pod{Namespace: n.lab.Namespace(name), Node: n}
	for _, prefix := range n.lab.prefixes(addresses) {
		pod.Addresses = append(pod.Addresses, prefix.Addr())
	}
	// The interface is created beside its parent, whose name may be eth0 as well.
	temporary := n.lab.linkName("macvlan")
	err := n.netlink.LinkAdd(&netlink.Macvlan{
		LinkAttrs: netlink.LinkAttrs{
			Name: temporary, ParentIndex: n.link(parent).Attrs().Index, Namespace: netlink.NsFd(pod.file),
		},
		Mode: netlink.MACVLAN_MODE_BRIDGE,
	})
	n.lab.must(err, "%s: macvlan on %s", name, parent)
	n.lab.must(pod.netlink.LinkSetName(pod.link(temporary), "eth0"), "%s: rename the macvlan", name)
	pod.Up("eth0")
	pod.Address("eth0", addresses...)
	segment.DefaultRoute(pod.Namespace, "eth0")
	return pod
}
