//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// entryCase is a connection from outside that enters the ENI cluster's node by
// one of its interfaces.
type entryCase struct {
	ipv6    bool
	address bool // whether eth1 has its own
	local   bool // the endpoint is the node's pod, whose address is routed by eth1
	policy  corev1.ServiceExternalTrafficPolicy
	by      string // the interface that the cloud's load balancer delivers to
}

func (c entryCase) String() string {
	return fmt.Sprintf("IPv6=%v/eth1 has an address=%v/local=%v/%s/by %s", c.ipv6, c.address, c.local, c.policy, c.by)
}

func entryCases() []entryCase {
	var cases []entryCase
	for _, ipv6 := range []bool{false, true} {
		for _, by := range []string{"eth0", "eth1"} {
			for _, local := range []bool{true, false} {
				cases = append(cases, entryCase{ipv6, by == "eth0", local, corev1.ServiceExternalTrafficPolicyCluster, by})
			}
			cases = append(cases, entryCase{ipv6, by == "eth1", true, corev1.ServiceExternalTrafficPolicyLocal, by})
		}
	}
	return cases
}

// TestENIEntry checks that what enters by an interface is answered by it: to
// the load balancer's address, delivered by either interface, with the
// endpoint here or elsewhere, with rp_filter strict and a fabric that accepts
// the VIP as a source only where it delivers it.
func TestENIEntry(t *testing.T) {
	for _, tc := range entryCases() {
		t.Run(tc.String(), func(t *testing.T) { checkEntry(t, tc) })
	}
}

func checkEntry(t *testing.T, tc entryCase) {
	c := lab.NewENICluster(t, lab.ENIOptions{IPv6: tc.ipv6, Eth1Address: tc.address})
	client := newClientBy(c, tc.by)
	c.Fabric.CheckSources()

	programEntry(t, c, tc)
	checkEntersBy(t, c, client, tc.by, tc.policy == corev1.ServiceExternalTrafficPolicyLocal)
	// The pod's own way to the address is not disturbed.
	if answer := c.Pod.Dial(lab.TCP, c.VIP); answer.Err != nil {
		t.Errorf("the pod's request: %s", answer)
	}
}

// newClientBy makes a client outside, of which the cloud's load balancer
// delivers connections to one of the node's interfaces.
func newClientBy(c *lab.ENICluster, link string) *lab.Namespace {
	vip := netip.MustParseAddrPort(c.VIP).Addr()
	port, next := c.Eth0, c.NodeAddress
	if link == "eth1" {
		port, next = c.Eth1, c.ENIAddress
	}
	c.Fabric.Route(fmt.Sprintf("%s via %s", vip, next))
	gateway, address := "198.51.100.1/24", "198.51.100.9/24"
	if vip.Is6() {
		gateway, address = "fd00:51::1/64", "fd00:51::9/64"
	}
	client := c.Fabric.Segment(gateway).Client("client", address)
	port.Accept(vip.String())
	return client
}

// checkEntersBy has a client from outside call the load balancer's address:
// requests and replies pass one interface.
func checkEntersBy(t *testing.T, c *lab.ENICluster, client *lab.Namespace, link string, addressKept bool) {
	t.Helper()
	onNode := c.Node.Watch(lab.TCP, c.VIP)
	for range 4 {
		answer := client.Dial(lab.TCP, c.VIP)
		if answer.Err != nil {
			t.Fatalf("the client's request: %s\n%s", answer, onNode)
		}
		if kept := answer.SeenSource == answer.Local; kept != addressKept {
			t.Errorf("%s: client's address kept: %v, want %v", answer, kept, addressKept)
		}
	}
	for _, p := range onNode.Packets() {
		if p.Interface != link {
			t.Errorf("passed another interface: %s", p)
		}
	}
	if n := c.Eth0.Spoofed() + c.Eth1.Spoofed(); n != 0 {
		t.Errorf("the fabric dropped %d packets for their source", n)
	}
}

// programEntry runs kube-ipvs with the Service's endpoints: the pod on the
// node, or the backends beyond the fabric.
func programEntry(t *testing.T, c *lab.ENICluster, tc entryCase) {
	t.Helper()
	vip := netip.MustParseAddrPort(c.VIP)
	clusterIP, family := "10.96.0.80", "IPv4"
	if tc.ipv6 {
		clusterIP, family = "fd00:10:96::80", "IPv6"
	}
	svc := newLoadBalancer(newService("web", corev1.ProtocolTCP, int32(vip.Port()), clusterIP), vip.Addr().String())
	svc.Spec.ExternalTrafficPolicy = tc.policy
	svc.Spec.AllocateLoadBalancerNodePorts = ptr.To(false)
	var endpoints []endpoint
	if tc.local {
		c.Pod.Serve("pod", lab.TCP, 8000)
		endpoints = append(endpoints, endpoint{address: c.Pod.Addresses[0].String(), node: "node"})
	} else {
		for _, e := range c.Endpoints {
			endpoints = append(endpoints, endpoint{address: netip.MustParseAddrPort(e).Addr().String(), node: "elsewhere"})
		}
	}
	dir := writeManifests(t, svc, newSlice(svc, family, 8000, endpoints...))
	runOnce(t, c.Node, dir)
}
