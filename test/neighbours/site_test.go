//go:build e2e

package neighbours

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// site is a node with the hosts around it. Each program has a site of its own with the
// same addresses, so that one set of Services serves both.
//
//	          .- lan (a client in the node's network)
//	fabric --+-- node: pods "pod", "here"
//	          +- there (an endpoint of another node)
//	          +- outside (a client), balancer (the owner of a VIP's other ports)
type site struct {
	*lab.Lab
	t       *testing.T
	plan    plan
	Fabric  *lab.Fabric
	Node    *lab.Node
	Uplink  *lab.Segment // the node's network
	Eth0    *lab.Port
	clients []*client
	pods    map[string]*lab.Namespace // created by addPods
	// extra clients are used by checks, not by the matrix.
	extra   []*client
	servers []*server
	// neighbour is the other program; state is data of the set-up.
	neighbour *lab.Process
	state     map[string]string
}

// nodeName is the name of the Node object.
const nodeName = "node"

// client sends requests. It may be a different host for each family.
type client struct {
	name   string
	hosts  [2]*lab.Namespace // IPv4, IPv6; nil: no requests in this family
	inside bool              // a pod or the node, to the Service API
}

// server is an endpoint.
type server struct {
	name      string
	addresses [2]netip.Addr // invalid: none in this family
}

// here and there are the prefixes of endpoints' names, on the node and on others.
const (
	here  = "here"
	there = "there"
)

// plan holds a site's addresses: IPv4 first.
type plan struct {
	gateways, node, lan [2]string // of the node's network, with their prefix lengths
	beyond, there       [2]string // another node's pods
	pods                [2]string // the node's pod ranges
	externalNet         [2]string // external IPs, in formats of a number
	clusterCIDR         string
	// balancers, if set, are the LoadBalancer IPs of all Services. With ownToo these
	// include the node's own addresses.
	balancers [2]string
	ownToo    bool
	// hostNetwork puts endpoints on the nodes' own addresses.
	hostNetwork bool
	// shift moves the endpoints' ports.
	shift uint16
	// bare leaves out the endpoint "there", which the set-up makes.
	bare bool
	// flags are further flags of kube-ipvs.
	flags []string
	// asks excludes questions.
	asks func(*client, string) bool
}

var ordinaryPlan = plan{
	gateways: [2]string{"192.168.50.1/24", "fd00:50::1/64"}, node: [2]string{"192.168.50.11/24", "fd00:50::11/64"},
	lan:    [2]string{"192.168.50.9/24", "fd00:50::9/64"},
	beyond: [2]string{"10.244.2.1/24", "fd00:244:2::1/64"}, there: [2]string{"10.244.2.5/24", "fd00:244:2::5/64"},
	pods:        [2]string{"10.244.1.0/24", "fd00:244:1::/64"},
	externalNet: [2]string{"203.0.113.%d", "fd00:203:3::%d"},
	clusterCIDR: "10.244.0.0/16,fd00:244::/32",
}

// newSite builds the fabric, the node's primary interface and all hosts outside the node.
func newSite(t *testing.T, p plan) *site {
	t.Helper()
	l := lab.New(t)
	s := &site{Lab: l, t: t, plan: p, Fabric: l.Fabric("fabric"), Node: l.Node(nodeName), state: map[string]string{}, pods: map[string]*lab.Namespace{}}
	s.Fabric.Uplink()
	s.Node.Sysctl("net.ipv4.icmp_ratelimit", "0")
	s.Node.Sysctl("net.ipv6.icmp.ratelimit", "0")
	s.Uplink = s.Fabric.Segment(p.gateways[:]...)
	s.Eth0 = s.Uplink.Attach(s.Node.Namespace, "eth0", p.node[:]...)
	s.Uplink.DefaultRoute(s.Node.Namespace, "eth0")
	s.addClient("node", true, s.Node.Namespace)
	s.addClient("lan", false, s.Uplink.Client("lan", p.lan[:]...))
	outside := s.Fabric.Segment("198.51.100.1/24", "fd00:51::1/64")
	s.addClient("outside", false, outside.Client("outside", "198.51.100.9/24", "fd00:51::9/64"))
	if !p.bare {
		s.addServer(there, s.Fabric.Segment(p.beyond[:]...).Client(there, p.there[:]...), addr(p.there[0]), addr(p.there[1]))
	}
	s.routeVIPs(p)
	return s
}

// routeVIPs routes VIPs to the node, and one to the balancer.
func (s *site) routeVIPs(p plan) {
	s.t.Helper()
	for family, node := range p.node {
		for n := range allServices {
			for _, vip := range []string{clusterIPs(n + 1)[family], balancerIPs(n + 1)[family], p.externalIPs(n + 1)[family]} {
				s.Fabric.Route(fmt.Sprintf("%s via %s", vip, addr(node)))
				s.Eth0.Accept(vip)
			}
		}
	}
	balancer := s.Namespace("balancer")
	segment := s.Fabric.Segment("203.0.114.1/24", "fd00:203:9::1/64")
	port := segment.Attach(balancer, "eth0", "203.0.114.9/24", "fd00:203:9::9/64")
	port.Accept(foreignIPs[:]...)
	segment.DefaultRoute(balancer, "eth0")
	for family, vip := range foreignIPs {
		balancer.Address("lo", vip)
		s.Fabric.Route(fmt.Sprintf("%s via %s", vip, [...]string{"203.0.114.9", "fd00:203:9::9"}[family]))
	}
	balancer.Serve("balancer", lab.TCP, foreignPort)
}

func addr(prefix string) netip.Addr { return netip.MustParsePrefix(prefix).Addr() }

func (s *site) addClient(name string, inside bool, host *lab.Namespace) {
	s.clients = append(s.clients, &client{name, [2]*lab.Namespace{host, host}, inside})
}

// addClients adds a client with a separate host for each family.
func (s *site) addClients(name string, inside bool, v4, v6 *lab.Namespace) {
	s.clients = append(s.clients, &client{name, [2]*lab.Namespace{v4, v6}, inside})
}

// addServer makes a host answer for all Services.
func (s *site) addServer(name string, host *lab.Namespace, addresses ...netip.Addr) {
	s.t.Helper()
	e := &server{name: name}
	for _, a := range addresses {
		if a.Is4() {
			e.addresses[0] = a
		} else {
			e.addresses[1] = a
		}
	}
	s.servers = append(s.servers, e)
	for n := range allServices {
		for _, protocol := range protocols {
			host.Serve(name, protocol, s.plan.targetPort(n+1))
		}
	}
	host.Sysctl("net.ipv4.tcp_synack_retries", "1")
}

// addBridgePods creates the node's pods on a bridge.
func (s *site) addBridgePods(p plan) {
	s.t.Helper()
	bridge := s.Node.Bridge("cni0", "10.244.1.1/24", "fd00:244:1::1/64")
	s.addPods(p, func(name string, addresses ...string) *lab.Pod { return bridge.Pod(name, addresses...) })
}

// addPods creates a client and an endpoint on the node.
func (s *site) addPods(p plan, pod func(name string, addresses ...string) *lab.Pod) {
	s.t.Helper()
	for family, node := range p.node {
		s.Fabric.Route(fmt.Sprintf("%s via %s", p.pods[family], addr(node)))
		s.Eth0.Accept(p.pods[family])
	}
	s.addClient("pod", true, pod("pod", "10.244.1.2", "fd00:244:1::2").Namespace)
	endpoint := pod(here, "10.244.1.3", "fd00:244:1::3")
	s.pods[here] = endpoint.Namespace
	if !p.hostNetwork {
		s.addServer(here, endpoint.Namespace, endpoint.Addresses...)
	}
}

// nodeIPs are the node's addresses.
func (p plan) nodeIPs() [2]string {
	return [2]string{addr(p.node[0]).String(), addr(p.node[1]).String()}
}
