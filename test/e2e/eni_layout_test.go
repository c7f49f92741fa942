//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestENILayouts has a pod behind a secondary interface call a load balancer's
// address under the rules, tables and marks of each CNI, with nothing
// configured, rp_filter strict and a fabric that drops sources that do not
// belong to the interface. Where the ENI carries its own address request and
// reply pass by it; Terway's carries the node's, of which the replies come to
// eth0. What enters from outside by the ENI is answered by it.
func TestENILayouts(t *testing.T) {
	for _, layout := range []lab.Layout{lab.SeedLayout, lab.AWSLayout, lab.TerwayLayout, lab.CiliumLayout} {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/IPv6=%v", layout.Name, v6), func(t *testing.T) {
				c := lab.NewENICluster(t, lab.ENIOptions{IPv6: v6, CheckSources: true, Layout: &layout})
				client := newClientBy(c, "eth1")
				want := eniPath{"eth0", c.NodeAddress}
				if layout.ENIAddress {
					want = eniPath{"eth1", c.ENIAddress}
				}
				code, output := c.Node.RunProxy("--manifests", eniManifests(t, c), "--once", "--hostname-override", "node")
				if code != 0 || strings.Contains(output, "in the way") {
					t.Errorf("kube-ipvs --once ended with %d:\n%s", code, output)
				}
				checkENI(t, c, want)
				checkEntersBy(t, c, client, "eth1", false)
			})
		}
	}
}
