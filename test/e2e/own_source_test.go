//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// ownSource is a node whose own connections are tested.
type ownSource struct {
	node      *lab.Node
	addresses []netip.Addr  // its own, of each family
	endpoints [2][]endpoint // of IPv4 and IPv6
	protocols []lab.Protocol
	policy    corev1.ServiceExternalTrafficPolicy
}

// check connects from the node to every kind of VIP. The server must see an address of
// the node to which replies return, and not the VIP, which the kernel chooses as the
// source towards a local address.
func (o ownSource) check(t *testing.T, args ...string) {
	t.Helper()
	svc := newExposed("web", 1)
	svc.Spec.ExternalTrafficPolicy = o.policy
	objects := []runtime.Object{svc}
	for i, family := range []string{"IPv4", "IPv6"} {
		if len(o.endpoints[i]) > 0 {
			objects = append(objects, newSlice(svc, family, 8000, o.endpoints[i]...))
		}
	}
	runOnce(t, o.node, writeManifests(t, objects...), args...)
	for i, own := range o.addresses {
		if len(o.endpoints[i]) == 0 {
			continue
		}
		for _, vip := range []string{clusterIPs(1)[i], balancerIPs(1)[i], externalIPs(1)[i]} {
			for _, protocol := range o.protocols {
				answer := o.node.Dial(protocol, at(vip, 80))
				if answer.Err != nil || answer.SeenSource.Addr() != own {
					t.Errorf("%s to %s: %s, want it seen as %s", protocol, vip, answer, own)
				}
			}
		}
	}
}

// TestBehaviourNodesOwnSource tests an ordinary node, with endpoints on another node, in
// a pod on this node, and in the node's own network, with and without a known pod range.
func TestBehaviourNodesOwnSource(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node := c.Nodes[0]
	near, far := node.AddPod("near"), c.Nodes[1].AddPod("far")
	for _, host := range []*lab.Namespace{near.Namespace, far.Namespace, node.Namespace} {
		for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
			host.Serve(host.Name, protocol, 8000)
		}
	}
	both := []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal}
	nodeIPs := []netip.Addr{node.IPv4, node.IPv6}
	for _, tc := range []struct {
		name      string
		addresses []netip.Addr // of the endpoint
		on        string
		seen      []netip.Addr
	}{
		{"another node's pod", far.Addresses, c.Nodes[1].Name, nodeIPs},
		{"this node's pod", near.Addresses, node.Name, addresses("10.244.1.1", "fd00:244:1::1")},
		{"this node's own network", nodeIPs, node.Name, nodeIPs},
	} {
		for _, args := range [][]string{nil, {"--cluster-cidr", podCIDRs}} {
			for _, policy := range both {
				t.Run(fmt.Sprintf("%s/%s/%v", tc.name, policy, args), func(t *testing.T) {
					o := ownSource{node: node.Node, addresses: tc.seen, protocols: []lab.Protocol{lab.TCP, lab.UDP}, policy: policy}
					for i := range o.endpoints {
						o.endpoints[i] = []endpoint{{address: tc.addresses[i].String(), node: tc.on}}
					}
					o.check(t, args...)
				})
			}
		}
	}
}

// TestNodesOwnSourceENI tests a node with a secondary interface.
func TestNodesOwnSourceENI(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, address := range []bool{false, true} {
			t.Run(fmt.Sprintf("IPv6=%v/eth1 has an address=%v", v6, address), func(t *testing.T) {
				c := lab.NewENICluster(t, lab.ENIOptions{IPv6: v6, Eth1Address: address, CheckSources: true})
				o := ownSource{node: c.Node, addresses: []netip.Addr{c.NodeAddress, c.NodeAddress}, protocols: []lab.Protocol{lab.TCP}}
				family := 0
				if v6 {
					family = 1
				}
				for _, e := range c.Endpoints {
					o.endpoints[family] = append(o.endpoints[family], endpoint{address: netip.MustParseAddrPort(e).Addr().String()})
				}
				o.check(t)
				if n := c.Eth0.Spoofed() + c.Eth1.Spoofed(); n != 0 {
					t.Errorf("the fabric dropped %d packets for their source", n)
				}
			})
		}
	}
}

func addresses(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, text := range texts {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}
