//go:build e2e

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// previousBuild returns the build that upgrades start from: of the commit in `make
// peer-previous UPGRADE_FROM=COMMIT`, or the current one.
func previousBuild() string { return lab.Peer("previous") }

// TestReliabilityUpgrade upgrades and downgrades between two builds of kube-ipvs, and
// changes numbers that are written to the kernel: marks, a routing table, priorities of
// policy rules. Connections of every kind stay open, new ones are always answered, also
// while no build runs, and no stale state is left. The scheduler does not change, because
// the kernel has none for a moment while it is replaced, nor does the claim of VIPs:
// docs/guides/upgrade.md.
func TestReliabilityUpgrade(t *testing.T) {
	c := newServed(t, "")
	node := c.takenOver()[0]
	rules := func() string { return node.Exec("ip", "rule") + node.Exec("ip", "-6", "rule") }
	before := rules()
	other := []string{
		"--iptables-masquerade-bit", "15", "--local-mark", "0x10000/0xff0000", "--claim-mark", "0x1000000",
		"--claim-rule-priority", "97", "--reply-rule-priority", "470", "--claim-table", "80081",
	}
	steps := []struct {
		name, program string
		flags         []string
	}{
		{"the previous build", previousBuild(), nil},
		{"upgraded", lab.Program(), nil},
		{"upgraded, with other numbers", lab.Program(), other},
		{"downgraded, with other numbers", previousBuild(), other},
		{"downgraded", previousBuild(), nil},
	}
	for i, s := range steps {
		if i > 0 {
			c.young[node].Stop()
			c.intact(t, "before "+s.name)
		}
		t.Logf("%s: %s", time.Now().Format(clockTime), s.name)
		c.startBuild(node, s.program, s.flags...)
		if i == 0 {
			c.keepAsking(node)
		}
		c.intact(t, s.name)
		c.hold(t, node)
	}
	c.answered(t)
	c.young[node].Stop()
	for _, h := range c.held {
		h.connection.Reset()
	}
	lab.Eventually(t, timeWait+syncLimit, "kube-ipvs --cleanup leaves nothing", func() error {
		if code, output := node.RunProxy("--cleanup"); code != 0 {
			return fmt.Errorf("it ended with %d:\n%s", code, output)
		}
		return nil
	})
	hasNothingOfOurs(t, node)
	if after := rules(); after != before {
		t.Errorf("policy rules are\n%swere\n%s", after, before)
	}
	if routes := node.Exec("ip", "route", "show", "table", "all", "proto", "81") + node.Exec("ip", "-6", "route", "show", "table", "all", "proto", "81"); routes != "" {
		t.Errorf("routes are left:\n%s", routes)
	}
}
