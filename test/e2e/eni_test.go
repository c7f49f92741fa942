//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// eniManifests writes the ENI cluster's Service: a LoadBalancer IP and two backends
// beyond the fabric.
func eniManifests(t testing.TB, c *lab.ENICluster) string {
	t.Helper()
	vip := netip.MustParseAddrPort(c.VIP)
	clusterIP, family := "10.96.0.80", "IPv4"
	if vip.Addr().Is6() {
		clusterIP, family = "fd00:10:96::80", "IPv6"
	}
	svc := newLoadBalancer(newService("web", corev1.ProtocolTCP, int32(vip.Port()), clusterIP), vip.Addr().String())
	var endpoints []endpoint
	for _, e := range c.Endpoints {
		endpoints = append(endpoints, endpoint{address: netip.MustParseAddrPort(e).Addr().String()})
	}
	port := netip.MustParseAddrPort(c.Endpoints[0]).Port()
	return writeManifests(t, svc, newSlice(svc, family, int32(port), endpoints...))
}

// eniPath is the expected path of the ENI cluster's flows: both directions on one
// interface, with an address that belongs to it.
type eniPath struct {
	link   string
	source netip.Addr
}

// TestENICluster tests the problem that started this project: a pod on an ENI connects to
// a LoadBalancer IP, with strict rp_filter and a fabric that drops foreign sources. It
// times out under kube-proxy's rules (TestLabENIClusterUnderKubeProxy) and is answered
// under ours, without any configuration. TestENIMatrixOneENI tests the variations.
func TestENICluster(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6=%v", v6), func(t *testing.T) {
			c := lab.NewENICluster(t, lab.ENIOptions{IPv6: v6, CheckSources: true})
			programENI(t, c)
			checkENI(t, c, eniPath{"eth0", c.NodeAddress})
		})
	}
}

// TestENIClusterConfiguredSource configures a SNAT source for the interface without an
// address.
func TestENIClusterConfiguredSource(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	programENI(t, c, "--snat-source", "eth1="+c.ENIAddress.String())
	checkENI(t, c, eniPath{"eth1", c.ENIAddress})
}

// TestENIClusterAnnotatedSource sets the SNAT source with the Node's annotation.
func TestENIClusterAnnotatedSource(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	dir := eniManifests(t, c)
	writeManifest(t, filepath.Join(dir, "node.yaml"), &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{
			Name:        "node",
			Annotations: map[string]string{"kube-ipvs.io/snat-sources": "eth1=" + c.ENIAddress.String()},
		},
	})
	runOnce(t, c.Node, dir)
	checkENI(t, c, eniPath{"eth1", c.ENIAddress})
}

func programENI(t *testing.T, c *lab.ENICluster, args ...string) {
	t.Helper()
	runOnce(t, c.Node, eniManifests(t, c), args...)
}

// runOnce programs a node once from manifests.
func runOnce(t *testing.T, n *lab.Node, dir string, args ...string) {
	t.Helper()
	args = append([]string{"--manifests", dir, "--once", "--hostname-override", n.Name}, args...)
	if code, output := n.RunProxy(args...); code != 0 {
		t.Fatalf("%s: kube-ipvs --once ended with %d:\n%s", n.Name, code, output)
	}
}

// checkENI connects from the pod and from the node to the LoadBalancer IP several times,
// and checks the path of each packet.
func checkENI(t *testing.T, c *lab.ENICluster, want eniPath) {
	t.Helper()
	onNode := c.Node.Watch(lab.TCP, append([]string{c.VIP}, c.Endpoints...)...)
	answered := map[string]bool{}
	for range 6 {
		answer := c.Pod.Dial(lab.TCP, c.VIP)
		if answer.Err != nil {
			t.Fatalf("the pod's request: %s\n%s", answer, onNode)
		}
		if answer.SeenSource.Addr() != want.source {
			t.Errorf("the backend saw %s, want %s", answer.SeenSource, want.source)
		}
		answered[answer.Server] = true
	}
	if len(answered) != len(c.Endpoints) {
		t.Errorf("answered by %v, want all %d backends", answered, len(c.Endpoints))
	}
	for _, p := range onNode.Packets() {
		fromUs := p.Out && (p.Interface == "eth0" || p.Interface == "eth1")
		if fromUs && (p.Interface != want.link || p.From.Addr() != want.source) {
			t.Errorf("left by another way: %s", p)
		}
		if !p.Out && p.Interface != want.link && p.From.Addr() != netip.MustParseAddrPort(c.VIP).Addr() && (p.Interface == "eth0" || p.Interface == "eth1") {
			t.Errorf("came back by another way: %s", p)
		}
	}
	if path := onNode.Path(); path.ReplyOut != c.Pod.HostInterface {
		t.Errorf("path %+v, want the reply to leave by %s", path, c.Pod.HostInterface)
	}
	if n := c.Eth0.Spoofed() + c.Eth1.Spoofed(); n != 0 {
		t.Errorf("the fabric dropped %d packets for their source", n)
	}
	// The node itself. For a local IPv6 destination the kernel chooses any of its
	// addresses as the source, which may be routed out of the ENI.
	if answer := c.Node.Dial(lab.TCP, c.VIP); answer.Err != nil || answer.SeenSource.Addr() != c.NodeAddress && (answer.SeenSource.Addr().Is4() || answer.SeenSource.Addr() != c.ENIAddress) {
		t.Errorf("the node's request: %s, want source %s", answer, c.NodeAddress)
	}
}
