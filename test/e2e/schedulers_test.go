//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestIssue121591Schedulers tests which endpoint a scheduler selects, and which of two
// conflicting Services is served. The subtests are named after their issues and share a
// cluster.
func TestIssue121591Schedulers(t *testing.T) {
	c := newCluster(t)
	c.flags = []string{"--ipvs-min-sync-period", "100ms"}
	c.startProxies()
	t.Run("121591 126378 88580 each node begins elsewhere", c.testFirstPick)
	t.Run("75502 58329 118784 scheduler by annotation", c.testScheduler)
	t.Run("138688 mh-fallback", c.testFallback)
	t.Run("121591 weights", c.testWeights)
	t.Run("limit of connections", c.testMaxConnections)
	t.Run("110814 76517 one packet", c.testOnePacket)
	t.Run("scheduler that there is not", c.testBadScheduler)
	t.Run("two Services claim one address and port", c.testConflict)
}

// testFirstPick makes each node's first connection to each of many virtual servers, all
// with the same two endpoints.
func (c *cluster) testFirstPick(t *testing.T) {
	svc := newService("firstpick", corev1.ProtocolTCP, 1000, clusterIPs(1)...)
	const ports = 10
	for i := int32(1); i < ports; i++ {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: corev1.ProtocolTCP, Port: 1000 + i})
	}
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	differ := 0
	picks := map[string]int{}
	for port := range uint16(ports) {
		var first []string
		for _, node := range c.Nodes {
			server := node.Dial(lab.TCP, at(clusterIPs(1)[0], 1000+port)).Server
			first = append(first, server)
			picks[node.Name+" "+server]++
		}
		if slices.Contains(first, "") {
			t.Errorf("port %d: answered by %q", 1000+port, first)
		}
		if len(slices.Compact(first)) > 1 {
			differ++
		}
	}
	// By chance they differ at three of four virtual servers.
	if differ < ports/2 {
		t.Errorf("at %d of %d virtual servers the nodes begin at different endpoints", differ, ports)
	}
	for _, node := range c.Nodes {
		if picks[node.Name+" web1"] == 0 || picks[node.Name+" web2"] == 0 {
			t.Errorf("%s always begins at one endpoint: %v", node.Name, picks)
		}
	}
}

// testMaxConnections opens more connections than two endpoints may have, in both
// families, and one more after raising the limit. A restart finds the limits as desired
// and writes nothing.
func (c *cluster) testMaxConnections(t *testing.T) {
	svc := newAnnotated("limited", 31, map[string]string{"max-connections": "3"})
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	for _, vip := range clusterIPs(31) {
		accepted := map[string]int{}
		refused := 0
		for range 8 {
			connection, err := c.caller1.Connect(lab.DialTimeout, lab.TCP, at(vip, 80))
			if err != nil {
				refused++
				continue
			}
			t.Cleanup(connection.Close)
			accepted[connection.Ask(lab.DialTimeout).Server]++
		}
		if accepted["web1"] != 3 || accepted["web2"] != 3 || refused != 2 {
			t.Errorf("%s: accepted %v, refused %d, want 3 each and 2", vip, accepted, refused)
		}
	}
	c.api.changeService("limited", func(svc *corev1.Service) { svc.Annotations["kube-ipvs.io/max-connections"] = "5" })
	for _, vip := range clusterIPs(31) {
		lab.Eventually(t, syncLimit, vip+" takes connections again", func() error { return c.caller1.Dial(lab.TCP, at(vip, 80)).Err })
	}
}

// testOnePacket sends many datagrams from one socket, as a syslog client does, to a cluster
// IP from a pod. With the annotation all endpoints receive some, without it one endpoint
// receives all. An external client is masqueraded: the kernel drops its datagrams that leave
// by another interface than the first (nf_nat_oif_changed), as docs/reference/annotations.md
// says.
func (c *cluster) testOnePacket(t *testing.T) {
	const port, datagrams = 8514, 40
	servers := []*lab.Server{c.web1.Serve("web1", lab.UDP, port), c.web2.Serve("web2", lab.UDP, port)}
	for i, annotations := range []map[string]string{{}, {"one-packet": "true"}} {
		n := 32 + i
		svc := newLoadBalancer(newService(fmt.Sprintf("datagrams%d", n), corev1.ProtocolUDP, 80, clusterIPs(n)...), balancerIPs(n)...)
		svc.Annotations = prefixed(annotations)
		c.serve(t, svc, dualStackSlices(svc, port, ready(c.web1), ready(c.web2)), 2, 2, 2)
		for _, way := range []wayIn{
			{from: c.caller1.Namespace, address: at(clusterIPs(n)[0], 80)}, {from: c.caller1.Namespace, address: at(clusterIPs(n)[1], 80)},
		} {
			received, err := sendFromOneSocket(t, way, datagrams, servers)
			if err != nil {
				t.Errorf("%s %s: %v", svc.Name, way.address, err)
			}
			// Round robin, but other traffic to the virtual server may take a turn.
			spread := min(received[0], received[1]) >= datagrams/4
			if spread != (len(annotations) > 0) {
				t.Errorf("%s %s, annotations %v: the endpoints received %v", svc.Name, way.address, annotations, received)
			}
		}
	}
}

// sendFromOneSocket returns how many of the datagrams each server received.
func sendFromOneSocket(t *testing.T, way wayIn, datagrams int, servers []*lab.Server) (received []int, err error) {
	t.Helper()
	socket, err := way.from.Connect(lab.DialTimeout, lab.UDP, way.address)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	before := make([]int, len(servers))
	for i, s := range servers {
		before[i] = s.Served()
	}
	for range datagrams {
		if err := socket.Send(); err != nil {
			return nil, err
		}
	}
	lab.Eventually(t, lab.DialTimeout, way.address+" received all datagrams", func() error {
		sum := 0
		received = nil
		for i, s := range servers {
			received = append(received, s.Served()-before[i])
			sum += received[i]
		}
		if sum != datagrams {
			return fmt.Errorf("received %v of %d", received, datagrams)
		}
		return nil
	})
	return received, nil
}

// newAnnotated returns Service number n with our annotations.
func newAnnotated(name string, n int, annotations map[string]string) *corev1.Service {
	svc := newService(name, corev1.ProtocolTCP, 80, clusterIPs(n)...)
	svc.Annotations = prefixed(annotations)
	return svc
}

// prefixed returns our annotations with their prefix.
func prefixed(annotations map[string]string) map[string]string {
	out := map[string]string{}
	for key, value := range annotations {
		out["kube-ipvs.io/"+key] = value
	}
	return out
}

// options returns the options of Service number n on a node.
func (c *cluster) options(node *lab.BridgeNode, n int) string {
	vs := virtualServer{lab.TCP, netip.MustParseAddrPort(at(clusterIPs(n)[0], 80))}
	return readIPVS(node.Node)[vs].options
}

// testScheduler hashes the client's address: the client reaches the same endpoint from
// every port and through every node.
func (c *cluster) testScheduler(t *testing.T) {
	svc := newAnnotated("hashed", 2, map[string]string{"scheduler": "mh", "scheduler-flags": "mh-fallback"})
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	if got, want := c.options(c.Nodes[2], 2), "-s mh -b mh-fallback"; got != want {
		t.Errorf("programmed is %q, want %q", got, want)
	}
	answered := map[string]int{}
	for range 2 * manyRequests {
		answered[c.caller3.Dial(lab.TCP, at(clusterIPs(2)[0], 80)).Server]++
	}
	if len(answered) != 1 || answered[""] > 0 {
		t.Errorf("answered by %v, want one endpoint", answered)
	}
}

// testFallback drains the endpoint to which mh assigns the client. The client's open
// connection continues, and its next one reaches another endpoint.
func (c *cluster) testFallback(t *testing.T) {
	svc := newAnnotated("fallback", 3, map[string]string{"scheduler": "mh"})
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	if got, want := c.options(c.Nodes[2], 3), "-s mh -b mh-fallback,mh-port"; got != want {
		t.Errorf("programmed is %q, want %q", got, want)
	}
	vip := at(clusterIPs(3)[0], 80)
	open, err := c.caller3.Connect(lab.DialTimeout, lab.TCP, vip)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	drains, stays := c.web1, c.web2
	if open.Ask(lab.DialTimeout).Server == "web2" {
		drains, stays = stays, drains
	}
	for _, slice := range dualStackSlices(svc, webPort, terminating(drains), ready(stays)) {
		c.api.setSlice(slice)
	}
	lab.Eventually(t, syncLimit, drains.Name+" drains", func() error { return served(c.Nodes[2].Node, svc, 1) })
	for range 2 * manyRequests {
		if answer := c.caller3.Dial(lab.TCP, vip); answer.Server != stays.Name {
			t.Errorf("while %s drains: %s", drains.Name, answer)
		}
	}
	if answer := open.Ask(lab.DialTimeout); answer.Server != drains.Name {
		t.Errorf("an open connection, while %s drains: %s", drains.Name, answer)
	}
}

// testWeights gives the endpoints of one node three of four connections.
func (c *cluster) testWeights(t *testing.T) {
	svc := newAnnotated("weights", 4, map[string]string{"scheduler": "wrr", "weights": "node/" + c.Nodes[0].Name + "=3"})
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	for _, vip := range clusterIPs(4) {
		answered := map[string]int{}
		for range 12 {
			answered[c.caller3.Dial(lab.TCP, at(vip, 80)).Server]++
		}
		if answered["web1"] != 9 || answered["web2"] != 3 {
			t.Errorf("%s: answered by %v, want 9 by web1 and 3 by web2", vip, answered)
		}
	}
}

// testBadScheduler names an unknown scheduler. The Service is still served, and one Event
// for all nodes reports it.
func (c *cluster) testBadScheduler(t *testing.T) {
	svc := newAnnotated("badscheduler", 5, map[string]string{"scheduler": "maglev"})
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	if got := c.options(c.Nodes[0], 5); got != "-s rr" {
		t.Errorf("programmed is %q, want the node's own scheduler", got)
	}
	e := c.theEvent(t, svc)
	if e.Type != corev1.EventTypeWarning || !strings.Contains(e.Note, `metadata.annotations[kube-ipvs.io/scheduler]: "maglev" is none of rr, wrr`) {
		t.Errorf("the Event: %s %s: %s", e.Type, e.Reason, e.Note)
	}
}

// theEvent waits for the only Event about a Service. The API server writes Events of its
// own.
func (c *cluster) theEvent(t *testing.T, svc *corev1.Service) eventsv1.Event {
	t.Helper()
	var found []eventsv1.Event
	lab.Eventually(t, syncLimit, "an Event about "+svc.Name, func() error {
		list, err := c.api.client.EventsV1().Events(c.api.namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		found = slices.DeleteFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name != svc.Name || e.ReportingController != "kube-ipvs.io/kube-ipvs"
		})
		if len(found) == 0 {
			return errors.New("none")
		}
		return nil
	})
	if len(found) > 1 || found[0].Regarding.UID == "" {
		t.Errorf("%d Events about %s, want one: %+v", len(found), svc.Name, found)
	}
	return found[0]
}

// testConflict has two Services claim an external IP and port. The older Service is
// served, although its name sorts second. An Event reports it on the younger one, which
// is served after the older one is deleted.
func (c *cluster) testConflict(t *testing.T) {
	vip := externalIPs(6)[0]
	claim := func(name string, n int, pod *lab.Pod) *corev1.Service {
		svc := newService(name, corev1.ProtocolTCP, 80, clusterIPs(n)...)
		svc.Spec.ExternalIPs = []string{vip}
		c.serve(t, svc, dualStackSlices(svc, webPort, ready(pod)), 1, 1, 1)
		return svc
	}
	older := claim("z-older", 6, c.web1)
	time.Sleep(1100 * time.Millisecond) // ages in the API have a resolution of a second
	younger := claim("a-younger", 7, c.web2)
	callers := []*lab.Namespace{c.Client, c.caller1.Namespace, c.Nodes[2].Namespace}
	for _, from := range callers {
		for range manyRequests {
			if answer := from.Dial(lab.TCP, at(vip, 80)); answer.Server != "web1" {
				t.Errorf("from %s: %s, want the older Service's endpoint", from.Name, answer)
			}
		}
	}
	e := c.theEvent(t, younger)
	if e.Reason != "Conflict" || e.Related == nil || e.Related.Name != older.Name || !strings.HasPrefix(e.Note, "TCP "+at(vip, 80)+": already served") {
		t.Errorf("the Event: %+v", e)
	}
	for _, node := range c.Nodes {
		lab.Eventually(t, syncLimit, node.Name+" counts the conflict", func() error { return hasConflicts(node.Node, 1) })
	}
	c.api.must(c.api.client.CoreV1().Services(c.api.namespace).Delete(t.Context(), older.Name, metav1.DeleteOptions{}))
	for _, node := range c.Nodes {
		lab.Eventually(t, syncLimit, node.Name+" counts no conflict", func() error { return hasConflicts(node.Node, 0) })
	}
	for _, from := range callers {
		for range manyRequests {
			if answer := from.Dial(lab.TCP, at(vip, 80)); answer.Server != "web2" {
				t.Errorf("from %s, after the older Service was deleted: %s", from.Name, answer)
			}
		}
	}
}

func hasConflicts(node *lab.Node, n int) error {
	out, err := node.TryExec("curl", "-s", "--max-time", "5", "http://127.0.0.1:10249/metrics")
	if want := fmt.Sprintf("\nkube_ipvs_conflicts %d\n", n); err == nil && !strings.Contains(out, want) {
		err = errors.New("no such line")
	}
	return err
}
