//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestIssue119656SourceRanges changes a Service's source ranges again and again. No
// packet of a client that is always allowed is dropped, and a client that is never
// allowed never gets a reply. (Also kubernetes#88698. TestThreeNodes tests which clients
// are allowed, from where and over which protocol.)
func TestIssue119656SourceRanges(t *testing.T) {
	c := newOfflineCluster(t)
	r := rangedService{node: c.Nodes[0], svc: newLoadBalancer(newDualStack("web", 1), balancerIPs(1)...)}
	objects := withSlices(r.svc, ready(c.web2))
	r.dir = writeManifests(t, objects...)
	r.node.StartProxy(func(*lab.Process) error { return hasPassed(r.node.Node) },
		"--manifests", r.dir, "--hostname-override", r.node.Name, "--cluster-cidr", podCIDRs)
	stranger := c.Fabric.Segment("198.51.101.1/24", "fd00:52::1/64").Client("stranger", "198.51.101.9/24", "fd00:52::9/64")
	const client4, client6 = "198.51.100.0/24", "fd00:51::/64"
	ranges := [][]string{
		{client4, client6},
		{"198.51.100.0/25", "fd00:51::/96"}, // other ranges that contain the client
		{client4, client6, "203.0.113.0/24"},
	}

	loads := c.loadBoth(c.Client, lab.DialTimeout)
	for _, change := range slices.Concat(ranges, [][]string{nil}, ranges) {
		r.set(t, change)
	}
	for _, load := range loads {
		if tally := load.Stop(); tally.Outcomes[lab.OK] == 0 || len(tally.Outcomes) != 1 {
			t.Errorf("who may come: %v, %v", tally.Outcomes, tally.Failures)
		}
	}
	if n := r.dropped(t); n != 0 {
		t.Errorf("%d packets of an allowed client were dropped", n)
	}

	loads = c.loadBoth(stranger, time.Second)
	for _, change := range slices.Concat(ranges, ranges) {
		r.set(t, change)
	}
	for _, load := range loads {
		if tally := load.Stop(); tally.Outcomes[lab.OK] > 0 || len(tally.Outcomes) == 0 {
			t.Errorf("who may not come: %v", tally.Outcomes)
		}
	}
	if r.dropped(t) == 0 {
		t.Error("no packet of a forbidden client was dropped")
	}
	r.set(t, []string{client4})
	checkNoAnswer(t, "over IPv6, with ranges of IPv4 alone", c.Client, lab.TCP, at(balancerIPs(1)[1], 80))
	r.set(t, []string{client4, "::/0"})
	checkSources(t, "over IPv6, with a range of everything", stranger, lab.TCP, at(balancerIPs(1)[1], 80), map[string]string{"web2": r.node.IPv6.String()})
}

// TestBehaviourHealthCheckPortOfAnother has a Service with source ranges whose port is the
// health check node port of another Service. That port is accepted on the node's own addresses
// only: a client outside the ranges gets no answer at the LoadBalancer IP, however it is
// claimed, and one within the ranges does.
func TestBehaviourHealthCheckPortOfAnother(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	const port = 30443
	ranged := newLoadBalancer(newService("ranged", corev1.ProtocolTCP, port, clusterIPs(1)...), balancerIPs(1)...)
	ranged.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "fd00:51::/64"}
	checked := newLoadBalancer(newService("checked", corev1.ProtocolTCP, 80, clusterIPs(2)...), balancerIPs(2)...)
	checked.Spec.ExternalTrafficPolicy, checked.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, port
	objects := append(withSlices(ranged, ready(c.web1)), withSlices(checked, ready(c.web1))...)
	stranger := c.Fabric.Segment("198.51.101.1/24", "fd00:52::1/64").Client("stranger", "198.51.101.9/24", "fd00:52::9/64")
	for _, claim := range []string{"auto", "address", "port"} {
		c.program(t, []*lab.BridgeNode{node1}, objects, "--claim-load-balancers", claim)
		for _, vip := range balancerIPs(1) {
			checkNoAnswer(t, "claimed by "+claim+", outside the ranges", stranger, lab.TCP, at(vip, port))
			if answer := c.Client.Dial(lab.TCP, at(vip, port)); answer.Server != "web1" {
				t.Errorf("claimed by %s, within the ranges: %s: %s", claim, vip, answer)
			}
		}
	}
}

// rangedService is a Service in a node's folder of manifests.
type rangedService struct {
	node *lab.BridgeNode
	svc  *corev1.Service
	dir  string
}

// set changes the ranges, and waits until the node has them.
func (r rangedService) set(t *testing.T, ranges []string) {
	t.Helper()
	r.svc.Spec.LoadBalancerSourceRanges = ranges
	file := filepath.Join(t.TempDir(), "svc.yaml")
	writeManifest(t, file, runtime.Object(r.svc))
	if err := os.Rename(file, filepath.Join(r.dir, "00.yaml")); err != nil {
		t.Fatal(err)
	}
	lab.Eventually(t, syncLimit, fmt.Sprintf("the node has %v", ranges), func() error {
		members := r.node.Exec("ipset", "save", "KUBE-LOAD-BALANCER-SOURCE-CIDR") + r.node.Exec("ipset", "save", "KUBE-6-LOAD-BALANCER-SOURCE-CID")
		all := 0 // three members for each range (TCP, UDP, SCTP), except /0
		for _, text := range ranges {
			if !strings.HasSuffix(text, "/0") {
				all += 3
			}
			if !strings.HasSuffix(text, "/0") && strings.Count(members, ","+text+"\n") != 3 {
				return fmt.Errorf("%s is not in\n%s", text, members)
			}
		}
		if n := strings.Count(members, "\nadd "); n != all {
			return fmt.Errorf("%d members, want %d:\n%s", n, all, members)
		}
		return nil
	})
}

var dropCounter = regexp.MustCompile(`(?m)^\[(\d+):\d+\] -A KUBE-SOURCE-RANGES-FIREWALL -j DROP$`)

// dropped returns the number of dropped packets in both families.
func (r rangedService) dropped(t *testing.T) int {
	t.Helper()
	sum := 0
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		found := dropCounter.FindAllStringSubmatch(r.node.Exec(program, "-c"), -1)
		if len(found) != 2 {
			t.Fatalf("%s: %d rules that drop, want those of filter and mangle", program, len(found))
		}
		for _, match := range found {
			var n int
			fmt.Sscan(match[1], &n)
			sum += n
		}
	}
	return sum
}

// loadBoth keeps connecting to the LoadBalancer IPs of Service 1 in both families.
func (c *cluster) loadBoth(from *lab.Namespace, limit time.Duration) []*lab.Load {
	var loads []*lab.Load
	for _, ip := range balancerIPs(1) {
		loads = append(loads, from.PacedLoad(20*time.Millisecond, limit, 1, lab.TCP, at(ip, 80)))
	}
	return loads
}
