//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// followLimit is generous to an emulated machine; what is followed by
// subscription takes well under a second of it.
const followLimit = 20 * time.Second

// TestENIFollowed changes the ENI under a running proxy: its address comes and
// goes, the pod's rule goes and comes, the interface itself is unplugged. Each
// time the pod's next connections take the way that is right then, and the
// periodic comparison, which is an hour away, has no part in it.
func TestENIFollowed(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	vip := netip.MustParseAddrPort(c.VIP).Addr().String()
	c.Node.StartProxy(func(*lab.Process) error {
		if _, err := c.Node.TryExec("ip", "address", "show", "to", vip, "dev", "kube-ipvs0"); err != nil {
			return err
		}
		if answer := c.Node.Dial(lab.TCP, c.VIP); answer.Err != nil {
			return answer.Err
		}
		return nil
	}, "--manifests", eniManifests(t, c), "--hostname-override", "node", "--ipvs-sync-period", "1h", "--ipvs-min-sync-period", "0s")

	seenAs := func(when string, source netip.Addr) {
		t.Helper()
		c.Eventually(followLimit, when, func() error {
			answer := c.Pod.DialWithin(time.Second, lab.TCP, c.VIP)
			if answer.Err == nil && answer.SeenSource.Addr() != source {
				return fmt.Errorf("seen as %s, want %s", answer.SeenSource, source)
			}
			return answer.Err
		})
	}
	seenAs("without an address: over the primary interface", c.NodeAddress)
	c.Node.Address("eth1", c.ENIAddress.String())
	seenAs("with an address: by eth1", c.ENIAddress)
	c.Node.Exec("ip", "address", "del", c.ENIAddress.String()+"/32", "dev", "eth1")
	seenAs("without it again", c.NodeAddress)

	pod := c.Pod.Addresses[0].String()
	c.Node.Exec("ip", "rule", "del", "pref", "2000", "from", pod)
	c.Eventually(followLimit, "no ENI any more", func() error {
		if rules := c.Node.Exec("ip", "rule", "show", "pref", "480"); rules != "" {
			return errors.New(rules)
		}
		return nil
	})
	c.Node.Exec("ip", "rule", "add", "pref", "2000", "from", pod, "lookup", "1003")
	seenAs("the pod is routed by the ENI again", c.NodeAddress)
	c.Node.Exec("ip", "link", "del", "eth1")
	if answer := c.Node.Dial(lab.TCP, c.VIP); answer.Err != nil {
		t.Errorf("the node, after the ENI was unplugged: %s", answer)
	}
}
