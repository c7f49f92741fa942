//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourENILayouts connects from a pod on an ENI to a LoadBalancer IP under the
// rules, tables and marks of each CNI, without configuration, with strict rp_filter and a
// fabric that drops foreign sources. If the ENI carries its own address, request and
// reply use it. Terway's carries the node's address, to which replies arrive on eth0.
// External traffic that enters by the ENI is answered through it.
func TestBehaviourENILayouts(t *testing.T) {
	for _, layout := range []lab.Layout{lab.SeedLayout, lab.AWSLayout, lab.TerwayLayout, lab.CiliumLayout} {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/IPv6=%v", layout.Name, v6), func(t *testing.T) {
				c := lab.NewENICluster(t, lab.ENIOptions{IPv6: v6, CheckSources: true, Layout: &layout})
				client := newClientBy(c, "eth1")
				want := eniPath{"eth0", c.NodeAddress}
				if layout.ENIAddress {
					want = eniPath{"eth1", c.ENIAddress}
				}
				code, output := c.Node.RunProxy("--manifests", eniManifests(t, c), "--once", "--hostname-override", "node")
				if code != 0 || strings.Contains(output, "in the way") {
					t.Errorf("kube-ipvs --once ended with %d:\n%s", code, output)
				}
				checkENI(t, c, want)
				checkEntersBy(t, c, client, "eth1")
			})
		}
	}
}

// TestBehaviourForeignMarkOnReplies tests the known disagreement of docs/proof.md: a program
// sets the bit of its policy rule on replies that enter by the ENI, and a strict
// reverse-path check drops them. A loose one does not.
func TestBehaviourForeignMarkOnReplies(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true, Layout: &lab.AWSLayout})
	programENI(t, c)
	c.Node.Exec("iptables", "-w", "-t", "mangle", "-I", "PREROUTING", "-i", "eth1", "-j", "MARK", "--set-xmark", "0x80/0x80")
	if answer := c.Pod.DialWithin(briefly, lab.TCP, c.VIP); answer.Err == nil {
		t.Errorf("the pod's request: %s: docs/proof.md says that it fails", answer)
	}
	c.Node.Sysctl("net.ipv4.conf.eth1.rp_filter", "2")
	checkENI(t, c, eniPath{"eth1", c.ENIAddress})
}

// newClientBy adds an external client whose connections the cloud's load balancer
// delivers to one of the node's interfaces.
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

// checkEntersBy connects an external client to the LoadBalancer IP and checks that
// requests and replies use one interface.
func checkEntersBy(t *testing.T, c *lab.ENICluster, client *lab.Namespace, link string) {
	t.Helper()
	onNode := c.Node.Watch(lab.TCP, c.VIP)
	for range 4 {
		answer := client.Dial(lab.TCP, c.VIP)
		if answer.Err != nil {
			t.Fatalf("the client's request: %s\n%s", answer, onNode)
		}
		if answer.SeenSource.Addr() == answer.Local.Addr() {
			t.Errorf("%s: the client's address was kept", answer)
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
