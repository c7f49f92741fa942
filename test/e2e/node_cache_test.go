//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestIssueEksctl542NodeLocalDNSCache runs a server like NodeLocal DNSCache in its
// default set-up: on the cluster IP, which a dummy interface has, with untracked packets.
// Pods and the node reach it instead of the endpoints. When it stops, they reach the
// endpoints. The Service's other port is served all the time.
func TestIssueEksctl542NodeLocalDNSCache(t *testing.T) {
	t.Run("untracked", func(t *testing.T) { testNodeCache(t, true) })
	t.Run("tracked", func(t *testing.T) { testNodeCache(t, false) }) // -setupiptables=false
}

func testNodeCache(t *testing.T, untracked bool) {
	c := newOfflineCluster(t)
	node := c.Nodes[0]
	svc := newDualStack("dns", 1)
	objects := withSlices(svc, ready(c.web1))
	clusterIP := netip.MustParseAddr(clusterIPs(1)[0])
	const port = 80
	node.Exec("ip", "link", "add", "nodelocaldns", "type", "dummy")
	node.Exec("ip", "address", "add", clusterIP.String()+"/32", "dev", "nodelocaldns")
	var cache []*lab.Server
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		cache = append(cache, node.ServeOn("cache", protocol, netip.AddrPortFrom(clusterIP, port)))
		if !untracked {
			continue
		}
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			direction := "--dport"
			node.Exec("iptables", "-t", "raw", "-A", chain, "-d", clusterIP.String(), "-p", string(protocol), direction, fmt.Sprint(port), "-j", "NOTRACK")
		}
		node.Exec("iptables", "-t", "raw", "-A", "OUTPUT", "-s", clusterIP.String(), "-p", string(protocol), "--sport", fmt.Sprint(port), "-j", "NOTRACK")
	}
	node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", "node1", "--cluster-cidr", podCIDRs, "--ipvs-sync-period", "5s")
	check := func(want string) error {
		for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
			for _, from := range []*lab.Namespace{c.caller1.Namespace, node.Namespace} {
				if answer := from.DialWithin(lostAfter, protocol, at(clusterIP.String(), port)); answer.Server != want {
					return fmt.Errorf("%s from %s: %s, want %s", protocol, from.Name, answer, want)
				}
			}
		}
		// The cache does not serve the other family.
		if answer := c.caller1.DialWithin(lostAfter, lab.TCP, at(clusterIPs(1)[1], port)); answer.Server != "web1" {
			return fmt.Errorf("IPv6: %s, want web1", answer)
		}
		return nil
	}
	if err := check("cache"); err != nil {
		t.Error(err)
	}
	for _, s := range cache {
		s.Stop()
	}
	node.Exec("ip", "link", "delete", "nodelocaldns")
	node.Exec("iptables", "-t", "raw", "-F")
	lab.Eventually(t, syncLimit, "the endpoints to be reached once the cache is gone", func() error { return check("web1") })
}
