//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// TestReliabilityNamedAddresses creates Services whose external IPs belong to others: a
// port of the node, another Service's addresses, and another node's addresses, once with an
// endpoint and once without, which would make them refuse. Of another node's address, only the
// Services' own ports are taken. While the process runs, it listens only on documented ports.
func TestReliabilityNamedAddresses(t *testing.T) {
	record := reliability.Begin(t, reliability.Security, "named")
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	node1.Serve("host", lab.TCP, 22)
	node2 := c.Nodes[1]
	node2.Serve("host2", lab.TCP, 9000)
	objects := withSlices(newLoadBalancer(newDualStack("victim", 1), balancerIPs(1)...), ready(c.web1))
	// By name, each of them precedes the owner.
	for i, name := range []string{"a-thief", "a-closer"} {
		svc := newDualStack(name, 2+i)
		svc.Spec.ExternalIPs = slices.Concat(nodeIPs(node1), nodeIPs(node2), balancerIPs(1), clusterIPs(1))
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "ssh", Protocol: corev1.ProtocolTCP, Port: 22})
		if name == "a-thief" {
			objects = append(objects, withSlices(svc, ready(c.web2))...)
		} else {
			objects = append(objects, svc)
		}
	}
	before := listening(t, node1.Node)
	node1.StartProxy(func(*lab.Process) error { return hasPassed(node1.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", "node1", "--cluster-cidr", podCIDRs)
	asked, taken := 0, 0
	for family := range 2 {
		for _, ask := range []struct {
			from    *lab.Namespace
			address string
			want    string
		}{
			{c.caller1.Namespace, at(nodeIPs(node1)[family], 22), "host"},
			{c.Client, at(nodeIPs(node1)[family], 22), "host"},
			{c.caller1.Namespace, at(balancerIPs(1)[family], 80), "web1"},
			{c.Client, at(balancerIPs(1)[family], 80), "web1"},
			{c.caller1.Namespace, at(clusterIPs(1)[family], 80), "web1"},
			{c.caller1.Namespace, at(clusterIPs(2)[family], 80), "web2"},
			{c.caller1.Namespace, at(nodeIPs(node2)[family], 9000), "host2"},
			{node1.Namespace, at(nodeIPs(node2)[family], 9000), "host2"},
			{c.Client, at(nodeIPs(node2)[family], 9000), "host2"},
		} {
			for range 2 {
				asked++
				if answer := ask.from.DialWithin(lostAfter, lab.TCP, ask.address); answer.Server != ask.want {
					taken++
					t.Errorf("%s from %s: %s, want %s", ask.address, ask.from.Name, answer, ask.want)
				}
			}
		}
	}
	now := slices.DeleteFunc(listening(t, node1.Node), func(l string) bool { return slices.Contains(before, l) })
	if want := []string{"127.0.0.1:10249", "127.0.0.1:10266", "[::]:10256"}; !slices.Equal(now, want) {
		t.Errorf("listens at %v, want %v", now, want)
	}
	if out := node1.Exec("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:10249/debug/pprof/"); strings.TrimSpace(out) != "404" {
		t.Errorf("profiles are served, with %s", out)
	}
	record(
		reliability.Figure{Name: "addresses that two Services set as their external IPs", Value: float64(2 * len(slices.Concat(nodeIPs(node1), nodeIPs(node2), balancerIPs(1), clusterIPs(1)))), Shows: "the node's, another node's, and another Service's"},
		reliability.Figure{Name: "connections to these addresses, and to their ports", Value: float64(asked), Shows: "from a pod, the node and an external client, IPv4 and IPv6; at another node, to a port that no Service has"},
		reliability.Figure{Name: "of these, not answered by the owner of the address", Value: float64(taken)},
		reliability.Figure{Name: "ports that the process listens on", Value: float64(len(now)), Shows: strings.Join(now, ", ") + ": as documented"},
	)
}

// listening returns the TCP and UDP ports on which the node listens.
func listening(t *testing.T, node *lab.Node) []string {
	t.Helper()
	var list []routing.Listener
	err := node.Do(func() (err error) {
		list, err = (&routing.Netlink{}).Listeners()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range list {
		text := at(l.Addr.String(), l.Port)
		if l.Protocol != ip.TCP {
			text = fmt.Sprintf("%s %s", l.Protocol, text)
		}
		out = append(out, text)
	}
	return out
}
