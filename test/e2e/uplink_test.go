//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// renewAddress removes the IPv4 address of the uplink and adds it again with the default
// route, as a DHCP client may do on a renewal.
const renewAddress = `
	route=$(ip route show default)
	ip address del %[1]s/24 dev eth0
	sleep 0.3
	ip address add %[1]s/24 dev eth0
	ip route replace $route`

// TestBehaviourUplink changes a node's uplink under open connections, with default
// settings.
func TestBehaviourUplink(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	web := newExposed("web", 1)
	objects := withSlices(web, ready(c.web1), ready(c.web2))
	args := []string{"--manifests", writeManifests(t, objects...), "--hostname-override", node1.Name, "--cluster-cidr", podCIDRs, "--ipvs-min-sync-period", "0s"}
	start := func(more ...string) *lab.Process {
		return node1.StartProxy(func(*lab.Process) error { return hasPassed(node1.Node) }, append(args, more...)...)
	}
	proxy := start()
	t.Run("its address is renewed", func(t *testing.T) { c.renewed(t, node1) })
	t.Run("its MTU is smaller than the pods'", func(t *testing.T) { c.uploaded(t) })
	proxy.Terminate()
	start("--claim-load-balancers", "port", "--claim-external-ips", "port")
	t.Run("its MTU is smaller than the pods', VIPs claimed by port", func(t *testing.T) { c.uploaded(t) })
}

// renewed keeps a connection of an external client to a node port in use while the node's
// address is absent for a moment. The uplink has a second address, so the default route
// stays, and the client's packets are forwarded through the uplink meanwhile. Without it,
// that happens only between two steps of the kernel. A connection to web2 does not survive:
// it is masqueraded as the removed address, so the kernel deletes it.
func (c *cluster) renewed(t *testing.T, node *lab.BridgeNode) {
	node.Exec("ip", "address", "add", "192.168.51.11/24", "dev", "eth0")
	var open *lab.Connection
	c.Eventually(lab.DialTimeout, "a connection to web1", func() error {
		connection, err := c.Client.Connect(lab.DialTimeout, lab.TCP, at(node.IPv4.String(), 30001))
		if err != nil {
			return err
		}
		t.Cleanup(connection.Close)
		if answer := connection.Ask(lab.DialTimeout); answer.Err != nil || answer.Server != "web1" {
			return fmt.Errorf("answered by %s", answer)
		}
		open = connection
		return nil
	})
	for range 3 {
		renewed, answers := make(chan struct{}), make(chan lab.Answer, 1)
		go func() {
			answer := open.Ask(lab.DialTimeout)
			for done := false; answer.Err == nil && !done; answer = open.Ask(lab.DialTimeout) {
				select {
				case <-renewed:
					done = true
				default:
				}
			}
			answers <- answer
		}()
		node.Exec("sh", "-c", fmt.Sprintf(renewAddress, node.IPv4))
		close(renewed)
		if answer := <-answers; answer.Err != nil {
			t.Fatalf("the connection to web1: %s", answer)
		}
		if answer := c.Client.Dial(lab.TCP, at(node.IPv4.String(), 30001)); answer.Err != nil {
			t.Errorf("a new connection: %s", answer)
		}
	}
}

// uploaded sends much data from a pod to endpoints beyond an uplink with a smaller MTU
// than the pod's interface, which the node announces to the pod. All hosts in the nodes'
// subnet have that MTU; otherwise packets that are too large for another host's link are
// lost silently.
func (c *cluster) uploaded(t *testing.T) {
	for _, node := range c.Nodes {
		node.Uplink.SetMTU(1300)
	}
	for _, family := range []string{"-4", "-6"} {
		c.caller1.Exec("ip", family, "route", "flush", "cache") // an earlier test may have taught it the MTU
	}
	for _, vips := range [][]string{clusterIPs(1), balancerIPs(1), externalIPs(1)} {
		for _, vip := range vips {
			for range 2 { // one to each endpoint
				connection, err := c.caller1.Connect(lab.DialTimeout, lab.TCP, at(vip, 80))
				begin := time.Now()
				if err == nil {
					err = connection.Upload(150_000, 20*time.Second)
				}
				if err != nil {
					t.Errorf("150 kB to %s: %v", vip, err)
				}
				t.Logf("150 kB to %s: %s", vip, time.Since(begin).Round(time.Millisecond))
			}
		}
	}
}
