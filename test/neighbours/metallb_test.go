//go:build e2e

package neighbours

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// The VIPs that MetalLB announces are in the node's own subnet. No route leads to them: a
// client finds them by ARP and neighbor discovery.
var announced = [2]string{"192.168.50.100", "fd00:50::100"}

// TestNeighbourMetalLB tests MetalLB's speaker in layer 2 mode.
func TestNeighbourMetalLB(t *testing.T) {
	onlyLong(t)
	p := ordinaryPlan
	p.balancers = announced
	setup{
		key: "metallb", plan: p,
		Result: Result{Order: 40, Title: "MetalLB, layer 2",
			What: "MetalLB v0.15.2: the announcer of its speaker (`internal/layer2`) ran on the node and announced load balancer IPs of the node's own subnet, with " +
				"`arp_ignore`, `arp_announce` and `proxy_ndp` as they are by default. A client in the subnet and, by the fabric's router, one outside find them.",
			Missing: "The speaker's watch of the API server, its election among nodes, and BGP."},
		build: func(s *side) {
			s.addBridgePods(s.plan)
			for _, ip := range announced {
				s.Eth0.Accept(ip)
			}
			s.neighbour = startMetalLB(s)
		},
		restart: func(s *side) { s.neighbour.Terminate(); s.neighbour = startMetalLB(s) },
		checks:  []check{found("lan", 0), found("lan", 1)},
	}.run(t)
}

func startMetalLB(s *side) *lab.Process {
	return s.Node.StartProgram(running, path("metallb"), announced[:]...)
}

func running(*lab.Process) error { return nil }

// found checks which host answers for a VIP on the link.
func found(name string, family int) check {
	return check{name: fmt.Sprintf("“%s” learns the node's hardware address for the VIP, IPv%d", name, 4+2*family), good: []string{"yes"}, ask: func(s *side) string {
		host := s.client(name).hosts[family]
		host.DialFrom(s.ports.next(), deadline, lab.TCP, at(announced[family], servicePort(clusterService)))
		out := host.Exec("ip", "neighbour", "show", "to", announced[family])
		mac := s.Node.MAC("eth0").String()
		if strings.Contains(out, mac) {
			return "yes"
		}
		return "no: " + out
	}}
}
