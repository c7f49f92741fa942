//go:build e2e

package e2e

import (
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourNeighborRequests asks for VIPs on the nodes' own link. With the default claims
// the node answers ARP, as under kube-proxy, unless strict ARP is set. No claim makes it answer
// IPv6 neighbor solicitations: ndisc_recv_ns looks for the address on the receiving interface.
func TestBehaviourNeighborRequests(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	objects := withSlices(newExposed("web", 1), ready(c.web1))
	host := c.Segment.Client("host", "192.168.50.99/24", "fd00:50::99/64")
	for _, vip := range balancerIPs(1) {
		host.Exec("ip", "route", "replace", vip, "dev", "eth0")
	}
	for _, tc := range []struct {
		flags    []string
		answered [2]bool // IPv4, IPv6
	}{
		{nil, [2]bool{true, false}},
		{[]string{"--claim-load-balancers", "address"}, [2]bool{true, false}},
		{[]string{"--ipvs-strict-arp"}, [2]bool{false, false}},
	} {
		c.program(t, []*lab.BridgeNode{node1}, objects, tc.flags...)
		for family, vip := range balancerIPs(1) {
			host.Exec("ip", "neighbour", "flush", "dev", "eth0")
			answer := host.DialWithin(refusalLimit, lab.TCP, at(vip, 80))
			known := strings.Contains(host.Exec("ip", "neighbour", "show", vip), "lladdr")
			if want := tc.answered[family]; known != want || (answer.Server == "web1") != want {
				t.Errorf("%v: a request for %s is answered: %t, want %t; a connection: %s", tc.flags, vip, known, want, answer)
			}
		}
	}
}
