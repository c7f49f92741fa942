//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestENILatePacket closes a connection after conntrack has forgotten it, as happens when
// a pod closes late. A FIN starts no connection, so conntrack calls it INVALID and the
// nat table does not see it. IPVS still knows the connection and would send the FIN to
// the endpoint with the pod's own address, which the endpoint does not know and would
// answer with a reset.
func TestENILatePacket(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		for _, address := range []bool{true, false} {
			t.Run(fmt.Sprintf("IPv6=%v/eth1 has an address=%v", ipv6, address), func(t *testing.T) {
				c := lab.NewENICluster(t, lab.ENIOptions{IPv6: ipv6, Eth1Address: address, CheckSources: true})
				programENI(t, c)
				checkLatePacket(t, c)
			})
		}
	}
}

func checkLatePacket(t *testing.T, c *lab.ENICluster) {
	t.Helper()
	connection, err := c.Pod.Connect(lab.DialTimeout, lab.TCP, c.VIP)
	if err != nil {
		t.Fatal(err)
	}
	if answer := connection.Ask(lab.DialTimeout); answer.Err != nil {
		t.Fatal(answer.Err)
	}
	onNode := c.Node.Watch(lab.TCP, append([]string{c.VIP}, c.Endpoints...)...)
	c.Node.Exec("conntrack", "-F")
	connection.Close()
	fin := func(p lab.Packet) bool { return !p.Out && p.Interface == c.Pod.HostInterface }
	if _, seen := onNode.Await(10*time.Second, fin); !seen {
		t.Fatalf("the pod's late packet was not captured\n%s", onNode)
	}
	// The pod retransmits the FIN if there is no reply. By then the first one has had its
	// effect, if any.
	again := 0
	onNode.Await(10*time.Second, func(p lab.Packet) bool {
		if fin(p) {
			again++
		}
		return again > 1
	})
	for _, p := range onNode.Packets() {
		if p.Out && p.From.Addr() == c.Pod.Addresses[0] {
			t.Errorf("left the node with the pod's own address: %s", p)
		}
	}
}
