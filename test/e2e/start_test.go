//go:build e2e

package e2e

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestStartOrder connects clients while a proxy programs a fresh node. Traffic that needs
// masquerading is masqueraded from the first packet on: an endpoint that saw a client's
// own address would reply to it directly, not through the node (kubernetes#133773).
func TestStartOrder(t *testing.T) {
	c := newCluster(t)
	svc := newExposed("early", 1)
	for _, slice := range dualStackSlices(svc, webPort, ready(c.web2)) {
		c.api.addSlice(slice)
	}
	c.api.addService(svc)
	node1, node2 := c.Nodes[0], c.Nodes[1]
	endpoints := []string{at(c.web2.Addresses[0].String(), webPort), at(c.web2.Addresses[1].String(), webPort)}
	seen := node2.Watch(lab.TCP, endpoints...)

	// Until a VIP is local, the node would forward its packets to the fabric, which returns them. A
	// packet that becomes local on such a round already has a conntrack entry without NAT.
	for _, vip := range slices.Concat(clusterIPs(1), balancerIPs(1)) {
		node1.Route("blackhole " + vip)
	}

	knocks := c.knock([]wayIn{
		{c.Client, at(clusterIPs(1)[0], 80)}, {c.Client, at(clusterIPs(1)[1], 80)},
		{c.Client, at(balancerIPs(1)[0], 80)}, {c.Client, at(nodeIPs(node1)[1], 30001)},
		{node1.Namespace, at(clusterIPs(1)[0], 80)},
	})
	c.startProxy(0)
	knocks()

	requests := 0
	for _, p := range seen.Packets() {
		if p.Out || !slices.Contains(endpoints, p.To.String()) {
			continue
		}
		requests++
		if from := p.From.Addr(); from != node1.IPv4 && from != node1.IPv6 {
			t.Errorf("not masqueraded: %s", p)
		}
	}
	if requests == 0 {
		t.Error("no request has reached the endpoint")
	}
}

// knockLimit is short, so that an address is tried again soon after it begins to work.
const knockLimit = 50 * time.Millisecond

// knock keeps connecting to every address, and returns a function that waits until each
// has been answered once, and stops.
func (c *cluster) knock(ways []wayIn) (end func()) {
	var clients, answered sync.WaitGroup
	stop := make(chan struct{})
	for _, w := range ways {
		answered.Add(1)
		first := sync.OnceFunc(answered.Done)
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if w.from.DialWithin(knockLimit, lab.TCP, w.address).Err == nil {
					first()
				} else {
					time.Sleep(knockLimit / 10) // the failure may have been immediate
				}
			}
		})
	}
	return func() {
		answered.Wait()
		close(stop)
		clients.Wait()
	}
}
