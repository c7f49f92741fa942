//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourClusterIPsByRoute changes from addresses on kube-ipvs0 to routes and back
// while a pod and the node keep connecting. A cluster IP that is a route behaves like one
// that is an address: its other ports are refused, whatever listens on the node, and it
// answers ping.
func TestBehaviourClusterIPsByRoute(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node, far := c.Nodes[0], c.Nodes[1].AddPod("far")
	pod := node.AddPod("caller")
	far.Serve("far", lab.TCP, 8000)
	node.Serve("host", lab.TCP, 443)
	svc := newDualStack("web", 80)
	objects := []runtime.Object{svc}
	for i, family := range []string{"IPv4", "IPv6"} {
		objects = append(objects, newSlice(svc, family, 8000, endpoint{address: far.Addresses[i].String()}))
	}
	dir := writeManifests(t, objects...)
	claim := func(how string) {
		runOnce(t, node.Node, dir, "--cluster-cidr", podCIDRs, "--claim-cluster-ips", how)
	}

	claim("address")
	var loads []*lab.Load
	for _, vip := range svc.Spec.ClusterIPs {
		for _, from := range []*lab.Namespace{pod.Namespace, node.Namespace} {
			loads = append(loads, from.PacedLoad(5*time.Millisecond, lab.DialTimeout, 1, lab.TCP, at(vip, 80)))
		}
	}
	claim("route")
	if addresses := node.Exec("ip", "address", "show", "kube-ipvs0"); strings.Contains(addresses, svc.Spec.ClusterIP) {
		t.Errorf("claimed by route, but there are addresses:\n%s", addresses)
	}
	for _, vip := range svc.Spec.ClusterIPs {
		for _, from := range []*lab.Namespace{pod.Namespace, node.Namespace} {
			if answer := from.Dial(lab.TCP, at(vip, 443)); answer.Outcome() != lab.Refused {
				t.Errorf("another port of %s, from %s: %s, want it refused", vip, from.Name, answer)
			}
		}
		ping := "ping"
		if strings.Contains(vip, ":") {
			ping = "ping6"
		}
		if output, err := pod.TryExec(ping, "-c", "1", "-W", "3", vip); err != nil {
			t.Errorf("ping of %s: %v\n%s", vip, err, output)
		}
	}
	claim("address")
	for _, load := range loads {
		if tally := load.Stop(); len(tally.Failures) > 0 || tally.Outcomes[lab.OK] == 0 {
			t.Errorf("during the change: %v, the first failures: %v", tally.Outcomes, tally.Failures)
		}
	}

	claim("route")
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	for _, family := range []string{"-4", "-6"} {
		if routes := node.Exec("ip", family, "route", "show", "table", "all", "proto", "81"); routes != "" {
			t.Errorf("after --cleanup:\n%s", routes)
		}
	}
}

// TestBehaviourClusterIPsAuto exceeds the number of Services for addresses while a pod
// and the node keep connecting.
func TestBehaviourClusterIPsAuto(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node, far := c.Nodes[0], c.Nodes[1].AddPod("far")
	pod := node.AddPod("caller")
	far.Serve("far", lab.TCP, 8000)
	svc := newService("web", corev1.ProtocolTCP, 80, clusterIPs(1)[0])
	dir := writeManifests(t, svc, newSlice(svc, "IPv4", 8000, endpoint{address: far.Addresses[0].String()}))
	var others []byte
	for i := range plan.AddressesAtMost - 1 {
		other := newService(fmt.Sprint("other", i), corev1.ProtocolTCP, 80, fmt.Sprintf("10.96.%d.%d", 2+i/250, 1+i%250))
		data, err := json.Marshal(other)
		if err != nil {
			t.Fatal(err)
		}
		others = append(append(others, data...), "\n---\n"...)
	}
	if err := os.WriteFile(filepath.Join(dir, "others.yaml"), others, 0o644); err != nil {
		t.Fatal(err)
	}
	node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) },
		"--manifests", dir, "--hostname-override", node.Name, "--cluster-cidr", podCIDRs, "--claim-cluster-ips", "auto")
	has := func(addresses, routes int) func() error {
		return func() error {
			a := strings.Count(node.Exec("ip", "-4", "address", "show", "kube-ipvs0"), "inet ")
			r := strings.Count(node.Exec("ip", "-4", "route", "show", "table", "local", "proto", "81"), "\n")
			if a != addresses || r != routes {
				return fmt.Errorf("%d addresses and %d routes, want %d and %d", a, r, addresses, routes)
			}
			return nil
		}
	}
	if err := has(plan.AddressesAtMost, 0)(); err != nil {
		t.Error(err)
	}
	vip := at(svc.Spec.ClusterIP, 80)
	loads := []*lab.Load{
		pod.PacedLoad(5*time.Millisecond, lab.DialTimeout, 1, lab.TCP, vip),
		node.PacedLoad(5*time.Millisecond, lab.DialTimeout, 1, lab.TCP, vip),
	}
	writeManifest(t, filepath.Join(dir, "more.yaml"), newService("more", corev1.ProtocolTCP, 80, "10.96.100.1"))
	c.Eventually(time.Minute, "all cluster IPs are routes", has(0, plan.AddressesAtMost+1))
	for _, load := range loads {
		if tally := load.Stop(); len(tally.Failures) > 0 || tally.Outcomes[lab.OK] == 0 {
			t.Errorf("during the change: %v, the first failures: %v", tally.Outcomes, tally.Failures)
		}
	}
}
