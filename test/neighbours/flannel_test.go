//go:build e2e

package neighbours

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// flannelPlan puts the endpoint "there" behind a VXLAN, and uses the nodes' addresses as
// LoadBalancer IPs, as k3s' ServiceLB does. No external client connects: the proxy of the other
// node would serve it, and is not part of this test.
func flannelPlan(hostNetwork bool) plan {
	p := ordinaryPlan
	p.bare, p.hostNetwork, p.ownToo = true, hostNetwork, true
	p.balancers = [2]string{"192.168.50.12", "fd00:50::12"}
	p.asks = func(c *client, destination string) bool { return c.inside || destination != toBalancerIP }
	return p
}

// TestNeighbourFlannel is flannel's VXLAN backend.
func TestNeighbourFlannel(t *testing.T) {
	onlyLong(t)
	for i, hostNetwork := range []bool{false, true} {
		name, endpoints := "pods", "Endpoints are pods, one of them behind the VXLAN."
		if hostNetwork {
			name, endpoints = "host network", "Endpoints are on the nodes' own addresses, with the Service's port."
		}
		t.Run(name, func(t *testing.T) {
			setup{
				key: "flannel-" + strings.ReplaceAll(name, " ", "-"), plan: flannelPlan(hostNetwork),
				Result: Result{Order: 30 + i, Title: "flannel (VXLAN), load balancer IPs that are nodes' addresses, " + name,
					What: "flannel v0.28.10: its own packages `pkg/backend/vxlan` and `pkg/trafficmngr/iptables` ran on two nodes and made links, FDB entries and routes " +
						"for both families, and rules that masquerade and forward. " +
						"Load balancer IPs are the addresses of both nodes; the other node's are asked. " + endpoints,
					Missing: "flannel's watch of the API server; external clients at the other node's address, which its own program would serve."},
				build: buildFlannel, restart: restartFlannel,
				wanted: func(q Question) bool { return q.Destination != toExternalIP || q.Policy == policyOf(clusterService) },
			}.run(t)
		})
	}
}

// TestNeighbourFlannelOrdinary is flannel with load balancer IPs of their own network.
func TestNeighbourFlannelOrdinary(t *testing.T) {
	onlyLong(t)
	p := ordinaryPlan
	p.bare = true
	setup{
		key: "flannel", plan: p,
		Result: Result{Order: 29, Title: "flannel (VXLAN)",
			What: "flannel v0.28.10: its own packages `pkg/backend/vxlan` and `pkg/trafficmngr/iptables` ran on two nodes and made links, FDB entries and routes " +
				"for both families, and rules that masquerade and forward. Endpoints are pods, one of them behind the VXLAN.",
			Missing: "flannel's watch of the API server."},
		build: buildFlannel, restart: restartFlannel,
	}.run(t)
}

func buildFlannel(s *side) {
	other := s.Lab.Node("other")
	s.Uplink.Attach(other.Namespace, "eth0", "192.168.50.12/24", "fd00:50::12/64")
	s.Uplink.DefaultRoute(other.Namespace, "eth0")
	pod := other.Bridge("cni0", "10.244.2.1/24", "fd00:244:2::1/64").Pod(there, "10.244.2.5", "fd00:244:2::5")
	s.addBridgePods(s.plan)
	if s.plan.hostNetwork {
		s.addServer(here, s.Node.Namespace, addr(s.plan.node[0]), addr(s.plan.node[1]))
		s.addServer(there, other.Namespace, netip.MustParseAddr("192.168.50.12"), netip.MustParseAddr("fd00:50::12"))
	} else {
		s.addServer(there, pod.Namespace, pod.Addresses...)
	}
	for _, to := range []string{"10.244.2.0/24 via 192.168.50.12", "fd00:244:2::/64 via fd00:50::12"} {
		s.Fabric.Route(to)
	}
	s.neighbour = s.startFlannel(s.Node, 1, 2)
	s.startFlannel(other, 2, 1)
}

// startFlannel starts flannel and waits for the routes to the other node's pods.
func (s *site) startFlannel(node *lab.Node, own, other int) *lab.Process {
	s.t.Helper()
	return node.StartProgram(func(*lab.Process) error {
		for _, family := range []string{"-4", "-6"} {
			if out, err := node.TryExec("ip", family, "route"); err != nil || !strings.Contains(out, "dev flannel") {
				return fmt.Errorf("no route by VXLAN: %s", out)
			}
		}
		return nil
	}, path("flannel"), fmt.Sprint(own), fmt.Sprint(other))
}

func restartFlannel(s *side) {
	s.neighbour.Terminate()
	s.neighbour = s.startFlannel(s.Node, 1, 2)
}
