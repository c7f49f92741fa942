//go:build e2e

package e2e

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourReach tests issues that need only a cluster and Services. During all of
// them, node1 has a hostPort's DNAT rule for port 80 of every local address, before the
// rules of any Service.
func TestBehaviourReach(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	c.caller1.Serve("hostport", lab.TCP, webPort)
	addHostPort(node1, c.caller1)
	for _, port := range []uint16{22, 6443} {
		node1.Serve("host", lab.TCP, port)
	}
	for i, via := range nodeIPs(node1) {
		c.Fabric.Route(externalIPs(5)[i] + " via " + via)
	}
	objects := reachServices(c)
	c.program(t, []*lab.BridgeNode{node1, c.Nodes[2]}, objects)
	for _, issue := range []struct {
		name string
		test func(*testing.T, *cluster)
	}{
		{"Issue63241NodesOwnSource", testNodesSource},
		{"Issue53775Hairpin", testHairpin},
		{"Issue121371StrictInternalLocal", testStrictInternal},
		{"Issue93456ExternalLocalFromInside", testExternalFromInside},
		{"Issue124260ExternalIPLocal", testExternalIPLocal},
		{"Issue132068PortOfANodePort", testPortOfANodePort},
		{"Issue104755SCTP", testSCTP},
		{"Issue66103HostPort", testHostPort},
		{"Issue114815NodeAddress", testNodeAddress},
	} {
		t.Run(issue.name, func(t *testing.T) { issue.test(t, c) })
	}
	t.Run("Issue80158SharedIP", func(t *testing.T) {
		checkShared(t, c, true)
		c.program(t, []*lab.BridgeNode{node1}, objects[:len(objects)-3]) // without the last Service and its slices
		checkShared(t, c, false)
	})
}

// addHostPort forwards port 80 of a node to a pod, as the portmap plugin does, by rules
// at the head of their chains.
func addHostPort(node *lab.BridgeNode, pod *lab.Pod) {
	for i, program := range []string{"iptables", "ip6tables"} {
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			node.Exec(program, "-w", "-t", "nat", "-I", chain, "-p", "tcp", "--dport", "80", "-m", "addrtype", "--dst-type", "LOCAL",
				"-j", "DNAT", "--to-destination", at(pod.Addresses[i].String(), webPort))
		}
	}
}

// reachServices returns the Services, by number. The last one shares the addresses of
// another.
func reachServices(c *cluster) []runtime.Object {
	external := func(n int) *corev1.Service {
		svc := newExposed(fmt.Sprintf("external%d", n), n)
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		return svc
	}
	strict := newExposed("strict", 3)
	strict.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	samePort := newDualStack("sameport", 6)
	for i := range samePort.Spec.Ports {
		samePort.Spec.Ports[i].Port = 30001
	}
	onNode := newLoadBalancer(newDualStack("onnode", 9), nodeIPs(c.Nodes[0])...)
	neighbour := newLoadBalancer(newDualStack("neighbour", 8), balancerIPs(7)...)
	for i := range neighbour.Spec.Ports {
		neighbour.Spec.Ports[i].Port = 81
	}
	var objects []runtime.Object
	for _, s := range []struct {
		svc  *corev1.Service
		pods []podEndpoint
	}{
		{newExposed("both", 1), []podEndpoint{ready(c.web1), ready(c.web2)}},
		{newExposed("alone", 2), []podEndpoint{ready(c.web1)}},
		{strict, []podEndpoint{ready(c.web2)}},
		{external(4), []podEndpoint{ready(c.web2)}},
		{external(5), []podEndpoint{ready(c.web1)}},
		{samePort, []podEndpoint{ready(c.web2)}},
		{onNode, []podEndpoint{ready(c.web1)}},
		{newLoadBalancer(newDualStack("shared", 7), balancerIPs(7)...), []podEndpoint{ready(c.web1)}},
		{neighbour, []podEndpoint{ready(c.web2)}},
	} {
		objects = append(objects, withSlices(s.svc, s.pods...)...)
	}
	return objects
}

// testNodesSource: endpoints see the node's own address, not the VIP, which the kernel
// chooses as the source towards a local address. (#65158)
func testNodesSource(t *testing.T, c *cluster) {
	node1 := c.Nodes[0]
	for family, own := range nodeIPs(node1) {
		want := map[string]string{"web1": node1.Gateways()[family].String(), "web2": own}
		for _, vip := range []string{clusterIPs(1)[family], balancerIPs(1)[family], externalIPs(1)[family]} {
			for _, protocol := range lab.Protocols {
				checkSources(t, vip, node1.Namespace, protocol, at(vip, 80), want)
			}
		}
	}
}

// testHairpin: the only endpoint connects to its own Service, on every path. (#85877,
// #134884)
func testHairpin(t *testing.T, c *cluster) {
	node1 := c.Nodes[0]
	for family := range 2 {
		want := map[string]string{"web1": node1.Gateways()[family].String()}
		for _, address := range []string{
			at(clusterIPs(2)[family], 80), at(balancerIPs(2)[family], 80), at(externalIPs(2)[family], 80), at(nodeIPs(node1)[family], 30002),
		} {
			for _, protocol := range lab.Protocols {
				checkSources(t, address, c.web1.Namespace, protocol, address, want)
			}
		}
	}
}

// testStrictInternal: if the only endpoint is on another node, the cluster IP is refused,
// also of a Service that external clients can reach. On external addresses all endpoints
// serve.
func testStrictInternal(t *testing.T, c *cluster) {
	for family, ip := range clusterIPs(3) {
		for _, from := range []*lab.Namespace{c.caller1.Namespace, c.Nodes[0].Namespace} {
			if answer := from.Dial(lab.TCP, at(ip, 80)); answer.Outcome() != lab.Refused {
				t.Errorf("%s from %s: %s, want refused", ip, from.Name, answer)
			}
		}
		if answer := c.Client.Dial(lab.TCP, at(balancerIPs(3)[family], 80)); answer.Server != "web2" {
			t.Errorf("from outside: %s", answer)
		}
	}
}

// testExternalFromInside: on a node without an endpoint, pods and the node reach
// endpoints of other nodes, with a source that gets replies. External clients get no
// reply. (#71596, #75262, #92857)
func testExternalFromInside(t *testing.T, c *cluster) {
	node1, pod := c.Nodes[0], c.caller1
	for family, own := range nodeIPs(node1) {
		vip, external, nodePort := at(balancerIPs(4)[family], 80), at(externalIPs(4)[family], 80), at(own, 30004)
		for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
			for _, address := range []string{vip, external} {
				checkSources(t, address+" from the pod", pod.Namespace, protocol, address, map[string]string{"web2": pod.Addresses[family].String()})
				checkSources(t, address+" from the node", node1.Namespace, protocol, address, map[string]string{"web2": own})
			}
			for _, from := range []*lab.Namespace{node1.Namespace, pod.Namespace} {
				checkSources(t, nodePort+" from "+from.Name, from, protocol, nodePort, map[string]string{"web2": own})
			}
		}
		checkNoAnswer(t, "from outside", c.Client, lab.TCP, vip)
	}
}

// testExternalIPLocal: an external IP keeps the client's address. (#121909)
func testExternalIPLocal(t *testing.T, c *cluster) {
	for family, client := range []string{"198.51.100.9", "fd00:51::9"} {
		for _, protocol := range lab.Protocols {
			checkSources(t, string(protocol), c.Client, protocol, at(externalIPs(5)[family], 80), map[string]string{"web1": client})
		}
	}
}

// testPortOfANodePort: a cluster IP's port has the number of another Service's node port.
func testPortOfANodePort(t *testing.T, c *cluster) {
	for family, ip := range clusterIPs(6) {
		for _, protocol := range lab.Protocols {
			checkSources(t, string(protocol), c.caller1.Namespace, protocol, at(ip, 30001),
				map[string]string{"web2": c.caller1.Addresses[family].String()})
		}
	}
}

// testSCTP uses every kind of address, including node ports. (#81474) It leaves out nodes
// as clients: they list all their addresses in the handshake, see
// docs/concepts/traffic-policies.md.
func testSCTP(t *testing.T, c *cluster) {
	for _, w := range c.ways(1) {
		for _, from := range c.callers() {
			if from.node != nil && from.pod == nil {
				continue
			}
			for family, ip := range w.addresses {
				if err := c.checkAnswers(w, from, lab.SCTP, family, at(ip, w.port)); err != nil {
					t.Errorf("%s, from %s: %v", w.name, from.name, err)
				}
			}
		}
	}
}

// testHostPort: the hostPort serves the node's address, and not a VIP's port. (#61938)
func testHostPort(t *testing.T, c *cluster) {
	node1 := c.Nodes[0]
	for family := range 2 {
		if answer := c.Client.Dial(lab.TCP, at(node1.Gateways()[family].String(), 80)); answer.Server != "hostport" {
			t.Errorf("the hostPort itself: %s", answer)
		}
		for _, vip := range []string{clusterIPs(2)[family], balancerIPs(2)[family], externalIPs(5)[family]} {
			for _, from := range []*lab.Namespace{c.Client, node1.Namespace} {
				if answer := from.Dial(lab.TCP, at(vip, 80)); answer.Server != "web1" {
					t.Errorf("%s from %s: %s", vip, from.Name, answer)
				}
			}
		}
	}
}

// testNodeAddress: a node address serves as a LoadBalancer IP, and its SSH and API server
// remain reachable from everywhere. (#117613)
func testNodeAddress(t *testing.T, c *cluster) {
	for _, ip := range nodeIPs(c.Nodes[0]) {
		for _, from := range []*lab.Namespace{c.Client, c.caller1.Namespace, c.caller3.Namespace, c.Nodes[1].Namespace, c.Nodes[0].Namespace} {
			for port, want := range map[uint16]string{22: "host", 6443: "host", 80: "web1"} {
				if answer := from.Dial(lab.TCP, at(ip, port)); answer.Server != want {
					t.Errorf("%s from %s: %s, want %s", at(ip, port), from.Name, answer, want)
				}
			}
		}
	}
}

// checkShared tests an IP of two Services, or of the remaining one after the other was
// deleted. (#65263)
func checkShared(t *testing.T, c *cluster, both bool) {
	t.Helper()
	for _, ip := range balancerIPs(7) {
		for _, from := range []*lab.Namespace{c.Client, c.caller1.Namespace, c.Nodes[0].Namespace} {
			if answer := from.Dial(lab.TCP, at(ip, 80)); answer.Server != "web1" {
				t.Errorf("%s from %s: %s", at(ip, 80), from.Name, answer)
			}
			if answer := from.DialWithin(refusalLimit, lab.TCP, at(ip, 81)); (answer.Server == "web2") != both {
				t.Errorf("%s from %s: %s, want an answer: %t", at(ip, 81), from.Name, answer, both)
			}
		}
	}
}
