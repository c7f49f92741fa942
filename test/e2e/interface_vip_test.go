//go:build e2e

package e2e

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourAddressOfALoadBalancer adds LoadBalancer IPs to the node's interface, as kube-vip
// and PureLB do, and removes them again. A program of the node listens on one port of the Service
// on all addresses: it keeps the port at the node's own addresses only. Open connections continue
// when the IPs move to another node, which does not know them.
func TestBehaviourAddressOfALoadBalancer(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	node1.Serve("host", lab.TCP, 22)
	svc := newLoadBalancer(newDualStack("web", 1), balancerIPs(1)...)
	svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "ssh", Protocol: corev1.ProtocolTCP, Port: 22})
	objects := append(withSlices(svc, ready(c.web1)), newNode(node1))
	change := func(operation string) {
		node1.Exec("ip", "addr", operation, balancerIPs(1)[0]+"/32", "dev", "eth0")
		node1.Exec("ip", "addr", operation, balancerIPs(1)[1]+"/128", "dev", "eth0")
	}
	check := func(when string) {
		t.Helper()
		for family, own := range nodeIPs(node1) {
			vip := balancerIPs(1)[family]
			for _, ask := range []struct {
				from          *lab.Namespace
				address, want string
			}{
				{c.Client, at(vip, 80), "web1"}, {c.Client, at(vip, 22), "web1"}, {c.Client, at(own, 22), "host"},
				{c.caller1.Namespace, at(vip, 80), "web1"}, {c.caller1.Namespace, at(vip, 22), "web1"}, {c.caller1.Namespace, at(own, 22), "host"},
				{node1.Namespace, at(vip, 80), "web1"}, {node1.Namespace, at(vip, 22), "web1"}, {node1.Namespace, at(own, 22), "host"},
			} {
				lab.Eventually(t, syncLimit, fmt.Sprintf("%s, %s from %s", when, ask.address, ask.from.Name), func() error {
					if answer := ask.from.DialWithin(lostAfter, lab.TCP, ask.address); answer.Server != ask.want {
						return fmt.Errorf("%s, want %s", answer, ask.want)
					}
					return nil
				})
			}
		}
	}
	change("add")
	node1.StartProxy(func(*lab.Process) error { return hasPassed(node1.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", node1.Name, "--cluster-cidr", podCIDRs)
	check("at the start")
	var open []*lab.Connection
	for _, from := range []*lab.Namespace{c.caller1.Namespace, node1.Namespace} {
		for _, vip := range balancerIPs(1) {
			connection, err := from.ConnectFrom(0, lostAfter, lab.TCP, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, connection)
		}
	}
	node3 := c.Nodes[2]
	for i, next := range nodeIPs(node3) {
		node3.Exec("ip", "addr", "add", balancerIPs(1)[i]+[]string{"/32", "/128"}[i], "dev", "eth0")
		c.Fabric.Route(balancerIPs(1)[i] + " via " + next)
	}
	change("del")
	for _, connection := range open {
		if answer := connection.Ask(lostAfter); answer.Server != "web1" {
			t.Errorf("an open connection, when the IP moves: %s", answer)
		}
		connection.Close()
	}
	for i, own := range nodeIPs(node1) {
		c.Fabric.Route(balancerIPs(1)[i] + " via " + own)
	}
	check("the load balancer has moved the IP to another node")
	change("add")
	check("the IP is back")
}
