//go:build e2e

package e2e

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourOwnTables is a node whose second interface has a table with only a default route, as
// netplan and cloud-init write it, and addresses of two networks. Its router drops packets of
// connections that it has not seen begin.
func TestBehaviourOwnTables(t *testing.T) {
	c := newTwoNICs(t)
	c.node.Exec("ip", "address", "add", "172.31.0.99/24", "dev", "eth1")
	c.node.Route("default via 10.13.0.1 dev eth1 table 101", "default via fd00:13::1 dev eth1 table 101")
	c.node.Rule("pref 32765 from 10.13.0.5 lookup 101", "pref 32765 from fd00:13::5 lookup 101")
	for _, iptables := range []string{"iptables", "ip6tables"} {
		c.router.Exec(iptables, "-w", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
		c.router.Exec(iptables, "-w", "-A", "FORWARD", "-p", "tcp", "!", "--syn", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
	}
	host := c.lan.Client("host", "172.31.0.9/24")
	host.Serve("host", lab.TCP, webPort)
	beyond := newService("beyond", corev1.ProtocolTCP, 80, "10.32.0.99")
	c.startWith(t, []runtime.Object{beyond, newSlice(beyond, "IPv4", webPort, endpoint{address: "172.31.0.9"})})

	vips := []string{"203.0.113.1:80", "[fd00:203:1::1]:80"}
	for name, c := range map[string]struct {
		client  *lab.Namespace
		targets []string
	}{
		"near": {c.near, vips}, // not to node ports: replies from eth1's own address go by its table, also under kube-proxy
		"far":  {c.far, append(vips, "10.13.0.5:30001", "[fd00:13::5]:30001")},
	} {
		for _, target := range c.targets {
			if answer := c.client.Dial(lab.TCP, target); answer.Err != nil {
				t.Errorf("%s to %s: %s", name, target, answer)
			}
		}
	}
	answer := c.node.Dial(lab.TCP, "10.32.0.99:80")
	if want := netip.MustParseAddr("172.31.0.99"); answer.Err != nil || answer.SeenSource.Addr() != want {
		t.Errorf("the node to a host of the second network: %s, want the source %s", answer, want)
	}
}
