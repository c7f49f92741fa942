package cluster

import (
	"fmt"
	"os/exec"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab/control"
)

// The cluster's network: a bridge with the control plane's address, and a tap for each
// node. The Pod subnets are routed to their nodes.
const (
	bridge   = "br0"
	gateway4 = "172.30.0.1"
	gateway6 = "fd00:172:30::1"

	// PodCIDRs contain the addresses of all Pods.
	PodCIDRs = "10.244.0.0/16,fd00:10:244::/48"

	// Services of type LoadBalancer have addresses of these ranges, and their clients
	// have these addresses. Nodes are in none of these networks, so that a test can
	// distinguish clients from nodes.
	balanced4, balanced6 = "198.51.100.0/24", "2001:db8:1::/112"
	client4, client6     = "192.0.2.1", "2001:db8::1"
)

// node is a machine of the cluster, counted from 1.
type node int

func (n node) name() string     { return fmt.Sprintf("node%d", n) }
func (n node) tap() string      { return fmt.Sprintf("tap%d", n) }
func (n node) mac() string      { return fmt.Sprintf("52:54:00:00:00:%02x", int(n)) }
func (n node) address4() string { return fmt.Sprintf("172.30.0.%d", 10+n) }
func (n node) address6() string { return fmt.Sprintf("fd00:172:30::%d", 10+n) }
func (n node) pods4() string    { return fmt.Sprintf("10.244.%d.0/24", n) }
func (n node) pods6() string    { return fmt.Sprintf("fd00:10:244:%d::/64", n) }

// routes returns the routes to the node's Pods.
func (n node) routes() []string {
	return []string{
		"ip route replace " + n.pods4() + " via " + n.address4(),
		"ip -6 route replace " + n.pods6() + " via " + n.address6(),
	}
}

// nodesUpTo returns the nodes of a cluster of that size.
func nodesUpTo(count int) (nodes []node) {
	for n := range count {
		nodes = append(nodes, node(n+1))
	}
	return nodes
}

// setUpNetwork creates the network in the namespace of this process.
func setUpNetwork(nodes []node) error {
	commands := []string{
		"ip link set lo up",
		"ip link add " + bridge + " type bridge",
		"ip addr add " + gateway4 + "/24 dev " + bridge,
		"ip addr add " + gateway6 + "/64 dev " + bridge + " nodad",
		"ip link set " + bridge + " up",
		// Programs search for a default route when they choose an address.
		"ip route add default via " + nodesUpTo(1)[0].address4() + " metric 1000",
		"ip addr add " + client4 + "/32 dev lo",
		"ip addr add " + client6 + "/128 dev lo nodad", // tentative for a moment otherwise
		// Load balancers silently drop packets to addresses without a Service. The kernel
		// does the same with packets that enter by lo and are not local.
		"ip route add " + balanced4 + " dev lo src " + client4,
		"ip -6 route add " + balanced6 + " dev lo src " + client6,
		// Packets to several nodes are distributed by connection, because there is only
		// one client.
		"sysctl -q -w net.ipv4.fib_multipath_hash_policy=1",
		"sysctl -q -w net.ipv6.fib_multipath_hash_policy=1",
		"sysctl -q -w net.ipv4.ip_forward=1",
		"sysctl -q -w net.ipv6.conf.all.forwarding=1",
	}
	for _, n := range nodes {
		commands = append(commands,
			"ip tuntap add "+n.tap()+" mode tap", "ip link set "+n.tap()+" master "+bridge+" up")
		commands = append(commands, n.routes()...)
	}
	for _, command := range commands {
		words := strings.Fields(command)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", command, err, out)
		}
	}
	return nil
}

// networkScript sets up the node's side, with routes to the other nodes' Pods.
func (n node) networkScript(nodes []node) string {
	lines := []string{
		"ip link set eth0 up",
		"ip addr add " + n.address4() + "/24 dev eth0",
		"ip addr add " + n.address6() + "/64 dev eth0 nodad",
		"ip route add default via " + gateway4,
		"ip -6 route add default via " + gateway6,
	}
	for _, other := range nodes {
		if other != n {
			lines = append(lines, other.routes()...)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

const cniFormat = `{
  "cniVersion": "0.4.0",
  "name": "lab",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": %q}], [{"subnet": %q}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

func (n node) cni() string { return fmt.Sprintf(cniFormat, n.pods4(), n.pods6()) }

const nodeFormat = `apiVersion: v1
kind: Node
metadata:
  name: %[1]s
  labels: {kubernetes.io/hostname: %[1]s, topology.kubernetes.io/zone: %[4]s}
spec:
  podCIDR: %[2]q
  podCIDRs: [%[2]q, %[3]q]
---
`

// object returns the Node that the kubelet finds when it starts.
func (n node) object() string {
	return fmt.Sprintf(nodeFormat, n.name(), n.pods4(), n.pods6(), n.zone())
}

// zones is the number of zones: with six nodes each has two, as tests of zone-local
// Services require.
const zones = 3

func (n node) zone() string { return fmt.Sprintf("zone-%d", (n-1)%zones+1) }

// users are the users that the API server identifies by their tokens.
func users(nodes []node) []control.User {
	list := []control.User{
		{Name: "system:kube-controller-manager"}, {Name: "system:kube-scheduler"},
	}
	for _, n := range nodes {
		list = append(list, control.User{Name: n.user(), Groups: []string{"system:nodes"}})
	}
	return list
}

func (n node) user() string { return "system:node:" + n.name() }

// NodeAddress returns the IPv4 address of a node, counted from 1.
func NodeAddress(n int) string { return node(n).address4() }
