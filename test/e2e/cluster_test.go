//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// cluster is the ordinary cluster with an API server and a proxy on each node.
//
//	          client (198.51.100.9)
//	             |
//	fabric: cluster IPs, 203.0.113.0-127, fd00:203:1::/64   -> node1
//	        203.0.113.128-255, fd00:203:3::/64              -> node3
//	   +---------+---------+
//	 node1     node2     node3
//	web1       web2
//	caller1              caller3
type cluster struct {
	*lab.ThreeNodes
	api              *api
	web1, web2       *lab.Pod
	caller1, caller3 *lab.Pod
	proxies          [3]*lab.Process
	flags            []string // additional flags of the proxies
}

// webPort is the endpoints' port for every protocol.
const webPort = 8000

// syncLimit is the maximum time until a change is in the kernel of a busy emulated node.
const syncLimit = 30 * time.Second

func newCluster(t *testing.T) *cluster {
	t.Helper()
	api := newAPI(t)
	c := newOfflineCluster(t)
	c.api = api
	for _, node := range c.Nodes {
		api.addNode(newNode(node))
	}
	return c
}

// newOfflineCluster returns a cluster without the API server.
func newOfflineCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{ThreeNodes: lab.NewThreeNodes(t)}
	for _, node := range c.Nodes {
		// Tests cause and check many refusals per second.
		node.Sysctl("net.ipv4.icmp_ratelimit", "0")
		node.Sysctl("net.ipv6.icmp.ratelimit", "0")
	}
	c.routeVIPs()
	c.web1, c.caller1 = c.Nodes[0].AddPod("web1"), c.Nodes[0].AddPod("caller1")
	c.web2, c.caller3 = c.Nodes[1].AddPod("web2"), c.Nodes[2].AddPod("caller3")
	for _, pod := range []*lab.Pod{c.web1, c.web2} {
		for _, protocol := range lab.Protocols {
			pod.Serve(pod.Name, protocol, webPort)
		}
	}
	return c
}

func newNode(node *lab.BridgeNode) *corev1.Node {
	return &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: node.Name},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: node.IPv4.String()},
			{Type: corev1.NodeInternalIP, Address: node.IPv6.String()},
		}},
	}
}

// program runs kube-ipvs with --once on nodes to serve the objects.
func (c *cluster) program(t *testing.T, nodes []*lab.BridgeNode, objects []runtime.Object, args ...string) {
	t.Helper()
	dir := writeManifests(t, objects...)
	for _, node := range nodes {
		runOnce(t, node.Node, dir, append([]string{"--cluster-cidr", podCIDRs}, args...)...)
	}
}

// withSlices returns a Service and its slices with pods as endpoints.
func withSlices(svc *corev1.Service, pods ...podEndpoint) []runtime.Object {
	objects := []runtime.Object{svc}
	for _, slice := range dualStackSlices(svc, webPort, pods...) {
		objects = append(objects, slice)
	}
	return objects
}

// routeVIPs routes external traffic for VIPs to nodes, as a load balancer or an announced
// route does.
func (c *cluster) routeVIPs() {
	first, last := c.Nodes[0], c.Nodes[2]
	for prefix, node := range map[string]*lab.BridgeNode{"10.96.0.0/16": first, "203.0.113.0/25": first, "203.0.113.128/25": last} {
		c.Fabric.Route(fmt.Sprintf("%s via %s", prefix, node.IPv4))
	}
	for prefix, node := range map[string]*lab.BridgeNode{"fd00:10:96::/112": first, "fd00:203:1::/64": first, "fd00:203:3::/64": last} {
		c.Fabric.Route(fmt.Sprintf("%s via %s", prefix, node.IPv6))
	}
}

// The addresses of Service number n, IPv4 first.
func clusterIPs(n int) []string { return ips("10.96.1.%d", "fd00:10:96::%d", n) }

// balancerIPs and externalIPs are routed to node1 and to node3.
func balancerIPs(n int) []string { return ips("203.0.113.%d", "fd00:203:1::%d", n) }
func externalIPs(n int) []string { return ips("203.0.113.%d", "fd00:203:3::%d", 128+n) }

func ips(v4, v6 string, n int) []string {
	return []string{fmt.Sprintf(v4, n), fmt.Sprintf(v6, n)}
}

// newDualStack returns Service number n with both families and every protocol on port 80.
func newDualStack(name string, n int) *corev1.Service {
	svc := newService(name, corev1.ProtocolTCP, 80, clusterIPs(n)...)
	for _, protocol := range lab.Protocols[1:] {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: strings.ToLower(string(protocol)), Protocol: corev1.Protocol(protocol), Port: 80,
		})
	}
	return svc
}

// newExposed returns a dual-stack Service with all kinds of addresses: cluster IPs,
// LoadBalancer IPs, external IPs and node port 30000+n.
func newExposed(name string, n int) *corev1.Service {
	svc := newLoadBalancer(newDualStack(name, n), balancerIPs(n)...)
	svc.Spec.ExternalIPs = externalIPs(n)
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = int32(30000 + n)
	}
	return svc
}

// dualStackSlices returns a slice for each family with pods as a Service's endpoints.
func dualStackSlices(svc *corev1.Service, port int32, pods ...podEndpoint) []*discoveryv1.EndpointSlice {
	var slices []*discoveryv1.EndpointSlice
	for i, family := range []string{"IPv4", "IPv6"} {
		var endpoints []endpoint
		for _, p := range pods {
			e := p.endpoint
			e.address = p.pod.Addresses[i].String()
			if p.pod.Node != nil {
				e.node = p.pod.Node.Name
			}
			endpoints = append(endpoints, e)
		}
		slices = append(slices, newSlice(svc, family, port, endpoints...))
	}
	return slices
}

// podEndpoint is a pod behind a Service, with the conditions of its endpoint.
type podEndpoint struct {
	pod *lab.Pod
	endpoint
}

func ready(pod *lab.Pod) podEndpoint       { return podEndpoint{pod: pod} }
func terminating(pod *lab.Pod) podEndpoint { return podEndpoint{pod, endpoint{terminating: true}} }

// podCIDRs contain the pods of all nodes.
const podCIDRs = "10.244.0.0/16,fd00:244::/32"

// startProxies runs kube-ipvs on every node and waits for the first sync of each.
func (c *cluster) startProxies() {
	for i := range c.Nodes {
		c.startProxy(i)
	}
}

func (c *cluster) startProxy(i int) {
	node := c.Nodes[i]
	args := append([]string{
		"--hostname-override", node.Name, "--kubeconfig", lab.Kubeconfig(),
		"--cluster-cidr", podCIDRs,
	}, c.flags...)
	c.proxies[i] = node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) }, args...)
}

// hasPassed returns an error until the proxy has completed a sync.
func hasPassed(node *lab.Node) error {
	return hasPassedAt(node, 10256)
}

// hasPassedAt is hasPassed for a proxy with another healthz port. /healthz says nothing of the first
// sync after a restart.
func hasPassedAt(node *lab.Node, port int) error {
	out, err := node.TryExec("curl", "-s", "--max-time", "5", fmt.Sprintf("http://127.0.0.1:%d/readyz", port))
	if err == nil && strings.Contains(out, "the first sync is not finished") {
		err = fmt.Errorf("not yet: %s", out)
	}
	return err
}

// serve creates a Service with its slices, and waits until each node has the
// given number of real servers for it, and all of its addresses.
func (c *cluster) serve(t *testing.T, svc *corev1.Service, slices []*discoveryv1.EndpointSlice, realServers ...int) {
	t.Helper()
	for _, slice := range slices {
		c.api.addSlice(slice)
	}
	c.api.addService(svc)
	for i, node := range c.Nodes {
		lab.Eventually(t, syncLimit, node.Name+" serves "+svc.Name, func() error {
			return served(node.Node, svc, realServers[i])
		})
	}
}

// served returns an error that names missing state. A VIP is the last state that a proxy
// writes for a Service, so everything else exists when its addresses do.
func served(node *lab.Node, svc *corev1.Service, realServers int) error {
	table, addresses := readIPVS(node), vips(node)
	for _, ip := range addressesOf(svc) {
		if !addresses[ip] {
			return fmt.Errorf("%s is not on kube-ipvs0", ip)
		}
	}
	for _, text := range svc.Spec.ClusterIPs {
		for _, port := range svc.Spec.Ports {
			vs := virtualServer{lab.Protocol(port.Protocol), netip.AddrPortFrom(netip.MustParseAddr(text), uint16(port.Port))}
			if entry, ok := table[vs]; !ok || entry.active() != realServers {
				return fmt.Errorf("%s has %s, want %d real servers", vs, entry, realServers)
			}
		}
	}
	return nil
}

// addressesOf returns the VIPs of a Service on a node.
func addressesOf(svc *corev1.Service) []netip.Addr {
	texts := append(append([]string{}, svc.Spec.ClusterIPs...), svc.Spec.ExternalIPs...)
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		texts = append(texts, ingress.IP)
	}
	var addresses []netip.Addr
	for _, text := range texts {
		addresses = append(addresses, netip.MustParseAddr(text))
	}
	return addresses
}

// at joins an address and a port.
func at(ip string, port uint16) string {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), port).String()
}
