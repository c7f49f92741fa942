//go:build e2e

package e2e

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// balancerNet is the cluster with a load balancer in the nodes' subnet that has the
// addresses of some Services.
type balancerNet struct {
	*cluster
	balancer, neighbour *lab.Namespace
}

// inSubnet returns addresses of the nodes' subnet, IPv4 first.
func inSubnet(n int) []string { return ips("192.168.50.%d", "fd00:50::%d", n) }

// The load balancer's addresses: claimed by a Service, and left to the load balancer by
// two Services. No host has unheldVIP.
const claimedVIP, proxyVIP, annotatedVIP, unheldVIP = 200, 202, 203, 201

// TestBehaviourBalancer tests a load balancer beside the nodes, issue by issue.
func TestBehaviourBalancer(t *testing.T) {
	c := newOfflineCluster(t)
	var own []string
	for _, n := range []int{claimedVIP, proxyVIP, annotatedVIP} {
		own = append(own, inSubnet(n)[0]+"/24", inSubnet(n)[1]+"/64")
	}
	b := &balancerNet{cluster: c, balancer: c.Segment.Client("balancer", own...)}
	b.neighbour = c.Segment.Client("neighbour", inSubnet(99)[0]+"/24", inSubnet(99)[1]+"/64")
	b.balancer.Serve("balancer", lab.TCP, 80)
	// The load balancer shares a link with the nodes, which must not answer ARP for its
	// addresses.
	c.program(t, []*lab.BridgeNode{c.Nodes[0], c.Nodes[2]}, b.services(), "--claim-load-balancers=port")
	t.Run("Issue59976NoARP", b.testNoARP)
	t.Run("Issue79783Probes", b.testProbes)
	t.Run("Issue66607LeftToTheBalancer", b.testLeftToIt)
}

func (b *balancerNet) services() []runtime.Object {
	probed := newLoadBalancer(newDualStack("probed", 1), inSubnet(claimedVIP)...)
	probed.Spec.Ports[0].NodePort, probed.Spec.Ports[1].NodePort = 30001, 30001
	local := newLoadBalancer(newDualStack("local", 2), inSubnet(claimedVIP)...)
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	for i := range local.Spec.Ports {
		local.Spec.Ports[i].Port, local.Spec.Ports[i].NodePort = 81, 30002
	}
	proxied := newLoadBalancer(newDualStack("proxied", 3), inSubnet(proxyVIP)...)
	for i := range proxied.Status.LoadBalancer.Ingress {
		proxied.Status.LoadBalancer.Ingress[i].IPMode = ptr.To(corev1.LoadBalancerIPModeProxy)
	}
	annotated := newLoadBalancer(newDualStack("annotated", 4), inSubnet(annotatedVIP)...)
	annotated.Annotations = map[string]string{"kube-ipvs.io/ip-mode": "Proxy"}
	var objects []runtime.Object
	for _, svc := range []*corev1.Service{probed, local, proxied, annotated, newLoadBalancer(newDualStack("unheld", 5), inSubnet(unheldVIP)...)} {
		objects = append(objects, withSlices(svc, ready(b.web1))...)
	}
	return objects
}

// testNoARP: nodes do not answer ARP for a VIP, with the default arp_ignore, and serve it
// for clients with a route to the node. (metallb#153)
func (b *balancerNet) testNoARP(t *testing.T) {
	node1 := b.Nodes[0]
	if got := node1.ReadSysctl("net.ipv4.conf.all.arp_ignore"); got != "0" {
		t.Errorf("arp_ignore is %s", got)
	}
	for family, vip := range inSubnet(unheldVIP) {
		if answer := b.neighbour.DialWithin(refusalLimit, lab.TCP, at(vip, 80)); answer.Err == nil {
			t.Errorf("%s: %s", vip, answer)
		}
		if known := b.neighbour.Exec("ip", "neighbour", "show", vip); strings.Contains(known, "lladdr") {
			t.Errorf("a host has answered for %s: %s", vip, known)
		}
		via := []string{node1.IPv4.String(), node1.IPv6.String()}[family]
		b.neighbour.Exec("ip", "route", "add", vip, "via", via)
		if answer := b.neighbour.Dial(lab.TCP, at(vip, 80)); answer.Server != "web1" {
			t.Errorf("%s by way of the node: %s", vip, answer)
		}
	}
}

// testProbes: the load balancer probes the nodes from an address of its own that a
// Service also has.
func (b *balancerNet) testProbes(t *testing.T) {
	node1 := b.Nodes[0]
	for family, own := range nodeIPs(node1) {
		for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
			for port, seen := range map[uint16]string{30001: node1.Gateways()[family].String(), 30002: ""} {
				answer := b.balancer.Dial(protocol, at(own, port))
				if seen == "" {
					seen = answer.Local.Addr().String() // kept
				}
				if answer.Server != "web1" || answer.SeenSource.Addr().String() != seen {
					t.Errorf("%s %s: %s, want source %s", protocol, at(own, port), answer, seen)
				}
			}
		}
	}
	if answer := b.balancer.Dial(lab.TCP, at(node1.IPv4.String(), 30001)); answer.Local.Addr().String() != inSubnet(claimedVIP)[0] {
		t.Errorf("the load balancer probes from %s, which is not a VIP", answer.Local)
	}
}

// testLeftToIt: pods and nodes reach the load balancer itself, selected by ipMode in the
// status and by the Service's annotation.
func (b *balancerNet) testLeftToIt(t *testing.T) {
	for _, n := range []int{proxyVIP, annotatedVIP} {
		for _, vip := range inSubnet(n) {
			for _, from := range []*lab.Namespace{b.caller1.Namespace, b.Nodes[0].Namespace} {
				if answer := from.Dial(lab.TCP, at(vip, 80)); answer.Server != "balancer" {
					t.Errorf("%s from %s: %s", vip, from.Name, answer)
				}
			}
		}
	}
}
