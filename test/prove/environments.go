//go:build prove

package prove

import (
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// Environments are nodes with different foreign rules, in which our rules take effect.
// Our rules keep their positions.
var Environments = []struct {
	Name   string
	change func(*trace.Node) *trace.Node
}{
	{"no other rules", func(n *trace.Node) *trace.Node { return n }},
	{"policies of DROP", withPolicies},
	{"policies of DROP, marks of others from the start", func(n *trace.Node) *trace.Node { return withOthersMarks(withPolicies(n)) }},
	{"hostPorts of every number", func(n *trace.Node) *trace.Node {
		to := "192.0.2.250"
		if n.Family.Bits() > 32 {
			to = "2001:db8::250"
		}
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			n = withChain(n, nat.NAT, chain, func(rules []nat.Rule) []nat.Rule {
				return append(rules, nat.Rule("-m addrtype --dst-type LOCAL -j DNAT --to-destination "+to))
			})
		}
		return n
	}},
	{"another program's masquerading", func(n *trace.Node) *trace.Node {
		return withChain(n, nat.NAT, "POSTROUTING", func(rules []nat.Rule) []nat.Rule { return append(rules, "-j MASQUERADE") })
	}},
	{"marks of others from the start", withOthersMarks},
	// Without such rules, the node is as in "no other rules", and the environment shows nothing.
	{"our policy rules for reply marks are missing", func(n *trace.Node) *trace.Node {
		return withoutPriority(n, scenario.DefaultConfig().SNAT.Priority)
	}},
	{"our policy rule for claimed ports is missing", func(n *trace.Node) *trace.Node {
		return withoutPriority(n, scenario.DefaultConfig().VIPs.Priority)
	}},
	{"a VIP claimed by port has only its set members yet", func(n *trace.Node) *trace.Node {
		out := withoutPriority(n, scenario.DefaultConfig().VIPs.Priority)
		if out != nil {
			out.IPVS = nil
		}
		return out
	}},
	// Whole marks, which programs that do not use masks write.
	{"another program overwrites the mark on arrival", func(n *trace.Node) *trace.Node {
		return withFirst(n, nat.Raw, "-j MARK --set-xmark 0xfffff0ff/0xffffffff") // without those that say what Cilium's marks are
	}},
	{"another program sets the mark of another interface on arrival", func(n *trace.Node) *trace.Node {
		if withoutPriority(n, scenario.DefaultConfig().SNAT.Priority) == nil && withoutPriority(n, scenario.DefaultConfig().VIPs.Priority) == nil {
			return nil
		}
		return withFirst(n, nat.Raw, "-p tcp -j MARK --set-xmark 0x5021/0xffffffff", "-p udp -j MARK --set-xmark 0x6028/0xffffffff", "-p sctp -j MARK --set-xmark 0x4060/0xffffffff")
	}},
	{"another program overwrites the connmark of new connections", func(n *trace.Node) *trace.Node {
		return withFirst(n, nat.Mangle, "-m conntrack --ctstate NEW -j CONNMARK --set-xmark 0xffffffff/0xffffffff")
	}},
	{"another program sets some bits of our connmarks on new connections", func(n *trace.Node) *trace.Node {
		chains := n.Ruleset[nat.Mangle].Chains
		if chains["KUBE-IPVS-BRANCH"] == nil && chains["KUBE-IPVS-DEVICE"] == nil {
			return nil
		}
		var rules []nat.Rule
		for _, of := range []string{"0x3045/0xffffffff -p tcp", "0x302c/0xffffffff -p udp", "0x2065/0xffffffff -p sctp", "0x106c/0xffffffff -p icmp", "0x106c/0xffffffff -p ipv6-icmp"} {
			mark, match, _ := strings.Cut(of, " ")
			rules = append(rules, nat.Rule(match+" -m conntrack --ctstate NEW -j CONNMARK --set-xmark "+mark))
		}
		return withFirst(n, nat.Mangle, rules...)
	}},
	{"marks of others in INPUT", func(n *trace.Node) *trace.Node {
		return withChain(n, nat.Filter, "INPUT", func(rules []nat.Rule) []nat.Rule {
			return append(rules, "-j MARK --set-xmark 0x100000/0xfff00000")
		})
	}},
}

// withPolicies returns a node whose filter drops what no rule accepts.
func withPolicies(n *trace.Node) *trace.Node {
	return withRules(n, nat.Filter, func(c nat.Contents) nat.Contents {
		c.Policies["INPUT"], c.Policies["FORWARD"] = "DROP", "DROP"
		// The proxy writes these jumps once a policy drops; see nat.State.Open.
		const health = nat.Rule(`-m comment --comment "kubernetes health check service ports" -j KUBE-NODE-PORT`)
		if _, written := c.Chains["KUBE-NODE-PORT"]; written && !slices.Contains(c.Chains["INPUT"], health) {
			c.Chains["INPUT"] = append(slices.Clone(c.Chains["INPUT"]), health) // after our others
		}
		const accept = nat.Rule(`-m comment --comment "kubernetes service traffic" -j KUBE-IPVS-ACCEPT`)
		if _, written := c.Chains["KUBE-IPVS-ACCEPT"]; written && !slices.Contains(c.Chains["INPUT"], accept) {
			c.Chains["INPUT"] = append(slices.Clone(c.Chains["INPUT"]), accept)
		}
		return c
	})
}

// withOthersMarks returns a node on which another program sets its bits of all marks.
func withOthersMarks(n *trace.Node) *trace.Node {
	return withFirst(n, nat.Raw, "-j MARK --set-xmark 0x100000/0xfff00000", "-j CONNMARK --set-xmark 0x100000/0xfff00000")
}

// withFirst returns a node with other rules at the head of PREROUTING and OUTPUT.
func withFirst(n *trace.Node, table nat.Table, first ...nat.Rule) *trace.Node {
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		n = withChain(n, table, chain, func(rules []nat.Rule) []nat.Rule { return slices.Concat(first, rules) })
	}
	return n
}

// withoutPriority returns a node without our policy rules of a priority, or nil if it has none.
func withoutPriority(n *trace.Node, priority int) *trace.Node {
	out := *n
	out.Rules = slices.DeleteFunc(slices.Clone(n.Rules), func(r routing.Rule) bool { return r.Own && r.Priority == priority })
	if len(out.Rules) == len(n.Rules) {
		return nil
	}
	return &out
}
