//go:build e2e

package e2e

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourClusterIPsByRoute changes from addresses on kube-ipvs0 to routes and back
// while a pod and the node keep connecting. A cluster IP that is a route
// behaves as one that is an address: its other ports are refused, whatever
// listens on the node, and it is pinged.
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
		t.Errorf("by route, there are addresses:\n%s", addresses)
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
			t.Errorf("while that was changed: %v, the first failures: %v", tally.Outcomes, tally.Failures)
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
