//go:build prove

package prove

import (
	"cmp"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// reconfigure returns an Update that restarts the process with another configuration.
func reconfigure(name string, change func(*plan.Config) bool) Update {
	return Update{Name: "restart: " + name, Restart: true, Apply: func(s *Scenario) bool { return change(&s.Config) }}
}

// claiming returns a restart with another claim mode of LoadBalancer IPs and external IPs.
func claiming(to plan.ClaimMode) Update {
	return reconfigure("VIPs are claimed by "+string(to), func(c *plan.Config) bool {
		changed := c.VIPs.LoadBalancers != to || c.VIPs.ExternalIPs != to
		c.VIPs.LoadBalancers, c.VIPs.ExternalIPs = to, to
		return changed
	})
}

// symmetric returns a restart with another SNAT mode.
func symmetric(to plan.SNATMode) Update {
	return reconfigure("SNAT mode "+string(to), func(c *plan.Config) bool {
		changed := c.SNAT.Mode != to
		c.SNAT.Mode = to
		return changed
	})
}

// Restarts are the restarts with another configuration that are applied to scenarios.
var Restarts = []Update{
	claiming(plan.ClaimAuto), claiming(plan.ClaimAddress), claiming(plan.ClaimRoute), claiming(plan.ClaimPort),
	symmetric(plan.SNATAuto), symmetric(plan.SNATSource), symmetric(plan.SNATFWMark), symmetric(plan.SNATOff),
	reconfigure("the same configuration", func(*plan.Config) bool { return true }),
	reconfigure("masquerade all", func(c *plan.Config) bool { c.MasqueradeAll = !c.MasqueradeAll; return true }),
	reconfigure("no cluster CIDR", func(c *plan.Config) bool {
		changed := c.LocalTraffic.Mode != plan.DetectNone
		c.LocalTraffic = plan.LocalTraffic{}
		return changed
	}),
	reconfigure("another scheduler", func(c *plan.Config) bool {
		c.Scheduler = cmp.Or(map[string]string{"rr": "wrr"}[c.Scheduler], "rr")
		return true
	}),
	reconfigure("no local mark", func(c *plan.Config) bool {
		changed := c.LocalMark != plan.LocalMark{}
		c.LocalMark = plan.LocalMark{}
		return changed
	}),
	reconfigure("another local mark", func(c *plan.Config) bool {
		c.LocalMark = plan.LocalMark{Value: 0x90000, Mask: 0xf0000 | 0xf00000}
		return true
	}),
	reconfigure("another claim mark and table", func(c *plan.Config) bool {
		c.VIPs.Mark, c.VIPs.Table, c.VIPs.Priority = 0x1000000, 80081, 98
		return true
	}),
	reconfigure("other reply marks", func(c *plan.Config) bool {
		c.SNAT.Mark, c.SNAT.Priority = 0x6000000, 481
		return true
	}),
}

// restarted names the fixed scenarios to which Restarts are applied.
var restarted = []string{"aws-vpc", "claims claim port", "external-local", "aws fwmark"}

// updatesOf returns the updates that are applied to a scenario.
func updatesOf(s *Scenario) []Update {
	if slices.Contains(restarted, s.Name) {
		return slices.Concat(Updates, Restarts)
	}
	if s.Name == "restarts" {
		return slices.Concat(Updates, Additions, Takeovers())
	}
	return Updates
}
