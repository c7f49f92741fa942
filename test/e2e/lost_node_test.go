//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// TestReliabilityLostNode fails a node, and reports it as the node controller does.
// Connections to its endpoints are reset, and no others. At the same time an endpoint on
// another node, which is reachable, is not ready.
func TestReliabilityLostNode(t *testing.T) {
	record := reliability.Begin(t, reliability.Draining, "lost-node")
	c := newCluster(t)
	c.flags = append(c.flags, "--reset-lost-node-connections")
	c.startProxy(0)
	web3 := c.Nodes[2].AddPod("web3")
	web3.Serve("web3", lab.TCP, webPort)
	web := newTCP("web", 1)
	slices := dualStackSlices(web, webPort, ready(c.web1), ready(c.web2), ready(web3))
	for _, slice := range slices {
		c.api.addSlice(slice)
	}
	c.api.addService(web)
	served := func(servers int) {
		t.Helper()
		lab.Eventually(t, syncLimit, fmt.Sprintf("%d endpoints are programmed", servers), func() error { return served(c.Nodes[0].Node, web, servers) })
	}
	served(3)
	open := c.connect(t, web, 3*reliability.Times(2, 10))

	node2 := c.Nodes[1]
	node2.Exec("tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "loss", "100%") // all its packets are lost from now on
	c.api.hear(node2.Name, corev1.ConditionUnknown)
	since := time.Now()
	for _, slice := range dualStackSlices(web, webPort, ready(c.web1), notReady(c.web2), notReady(web3)) {
		c.api.setSlice(slice)
	}
	served(1)
	for _, connection := range open["web2"] {
		lab.Eventually(t, syncLimit, "a connection to web2 is reset", func() error {
			if answer := connection.Ask(lostAfter); answer.Outcome() != lab.Reset {
				return fmt.Errorf("%s", answer)
			}
			return nil
		})
	}
	took, stayed := time.Since(since), 0
	for _, name := range []string{"web1", "web3"} {
		for _, connection := range open[name] {
			stayed++
			if answer := connection.Ask(busyLimit); answer.Server != name {
				t.Errorf("a connection to %s: %s", name, answer)
			}
		}
	}
	if n := counted(t, c.Nodes[0].Node, "kube_ipvs_drain_cut_connections_total"); n < float64(len(open["web2"])) {
		t.Errorf("%d connections were reset, and %v counted", len(open["web2"]), n)
	}

	node2.Exec("tc", "qdisc", "delete", "dev", "eth0", "root")
	c.api.hear(node2.Name, corev1.ConditionTrue)
	for _, slice := range slices {
		c.api.setSlice(slice)
	}
	served(3)
	back := len(c.connect(t, web, 6)["web2"])
	record(
		reliability.Figure{Name: "TCP connections to an unreachable node, reset", Value: float64(len(open["web2"])), Shows: "IPv4 and IPv6, with an API server"},
		reliability.Figure{Name: "time until the last one was reset", Value: took.Seconds(), Unit: "s", Shows: "after its endpoint became unready; includes up to 4 s until kube-ipvs requests the Node"},
		reliability.Figure{Name: "connections of the same Service that continued meanwhile", Value: float64(stayed), Shows: "half of them to an endpoint that was not ready either, on a reachable node"},
		reliability.Figure{Name: "new connections to the node after it became reachable again", Value: float64(back)},
	)
}

// newTCP returns dual-stack Service number n with TCP only.
func newTCP(name string, n int) *corev1.Service {
	return newService(name, corev1.ProtocolTCP, 80, clusterIPs(n)...)
}

func notReady(pod *lab.Pod) podEndpoint { return podEndpoint{pod, endpoint{notReady: true}} }

// connect opens connections from a pod of node1 to each cluster IP of a Service, and
// returns them by the endpoint that answered.
func (c *cluster) connect(t *testing.T, svc *corev1.Service, each int) map[string][]*lab.Connection {
	t.Helper()
	open := map[string][]*lab.Connection{}
	for _, vip := range svc.Spec.ClusterIPs {
		for range each {
			connection, err := c.caller1.Connect(busyLimit, lab.TCP, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			answer := connection.Ask(busyLimit)
			if answer.Err != nil {
				t.Fatalf("on a new connection: %s", answer)
			}
			open[answer.Server] = append(open[answer.Server], connection)
		}
	}
	for _, name := range []string{"web1", "web2", "web3"} {
		if len(open[name]) == 0 {
			t.Fatalf("none of %d connections to each address is to %s", each, name)
		}
	}
	return open
}

// hear sets the Ready condition of a node, as the node controller and kubelets do.
func (a *api) hear(node string, status corev1.ConditionStatus) {
	a.t.Helper()
	nodes := a.client.CoreV1().Nodes()
	n, err := nodes.Get(a.t.Context(), node, metav1.GetOptions{})
	a.must(err)
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
	_, err = nodes.UpdateStatus(a.t.Context(), n, metav1.UpdateOptions{})
	a.must(err)
}
