package plan_test

import (
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// awaiting returns a node whose rules on demand are not demanded yet, and on which all other
// sets are in use.
func awaiting(n plan.Node) *plan.Node {
	n.OnDemand, n.Uses = true, plan.SetsInUse{}
	for _, f := range ip.Families {
		for _, s := range plan.Sets(f) {
			n.Uses[s.Name] = true
		}
		for _, d := range plan.Demands {
			delete(n.Uses, d.Set.In(f))
		}
	}
	return &n
}

// textOf returns the rules of a family that are not in another plan, with their chains.
func textOf(s, other nat.State, f ip.Family) []string {
	var out []string
	list := func(s nat.State) (all []string) {
		for c, rules := range s.Chains {
			for _, r := range rules {
				if c.Family == f {
					all = append(all, string(c.Table)+" -A "+c.Name+" "+string(r))
				}
			}
		}
		for _, j := range s.Jumps {
			if j.Chain.Family == f {
				all = append(all, string(j.Chain.Table)+" -A "+j.Chain.Name+" "+string(j.Rule))
			}
		}
		return all
	}
	have := list(other)
	for _, r := range list(s) {
		if !slices.Contains(have, r) {
			before, after, _ := strings.Cut(r, "-m comment --comment \"")
			_, after, found := strings.Cut(after, "\" ")
			if found {
				r = before + after
			}
			out = append(out, r)
		}
	}
	slices.Sort(out)
	return out
}

// TestDemands compares the rules that are written until others are demanded with those that
// are written then.
func TestDemands(t *testing.T) {
	s := load(t, "cluster")
	s.Config.LocalhostNodePorts = true
	before, after := plan.ForNode(&s.Config, awaiting(s.Node)), plan.ForNode(&s.Config, &s.Node)
	if diff := gocmp.Diff([]string{
		"filter -A KUBE-IPVS-DEMAND -i eth0 -j RETURN",
		"filter -A KUBE-IPVS-DEMAND -j DROP",
		"filter -A KUBE-IPVS-DEMAND -j SET --add-set KUBE-IPVS-DEMAND-IPS dst",
		"filter -A KUBE-IPVS-FILTER -i lo -m conntrack --ctstate NEW --ctorigsrc 127.0.0.0/8 --ctorigdst 127.0.0.1 -m ipvs --ipvs -j DROP",
		"filter -A KUBE-IPVS-NO-PORT ! -p icmp -m set --match-set KUBE-IPVS-SHARED-IPS dst -j KUBE-IPVS-DEMAND",
		"mangle -A KUBE-IPVS-SENT -j MARK --set-xmark 0x0/0x4",
		"mangle -A OUTPUT -m mark ! --mark 0x0/0x4 -m ipvs --ipvs -j KUBE-IPVS-SENT",
		"nat -A KUBE-IPVS-DEMAND -i eth0 -j RETURN",
		"nat -A KUBE-IPVS-DEMAND -m addrtype --src-type LOCAL -j SET --add-set KUBE-IPVS-DEMAND-INTERNAL dst",
		"nat -A KUBE-IPVS-DEMAND -s 10.244.0.0/16 -j SET --add-set KUBE-IPVS-DEMAND-INTERNAL dst",
		"nat -A KUBE-POSTROUTING -o lo ! -p icmp -m set --match-set KUBE-IPVS-SHARED-IPS dst -j MASQUERADE --random-fully",
		"nat -A KUBE-SERVICES -i eth0 -m set --match-set KUBE-IPVS-SHARED-IPS src -j SET --add-set KUBE-IPVS-DEMAND-IPS src",
		"nat -A KUBE-SERVICES -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-DEMAND",
		"nat -A KUBE-SERVICES -s 127.0.0.0/8 -d 127.0.0.1/32 -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j SET --add-set KUBE-IPVS-DEMAND-LO dst",
	}, textOf(before.NAT, after.NAT, ip.IPv4)); diff != "" {
		t.Errorf("until they are demanded (-want +got):\n%s", diff)
	}
	for _, r := range textOf(after.NAT, before.NAT, ip.IPv4) {
		chain := strings.Fields(r)[2]
		if !slices.Contains([]string{"KUBE-IPVS-FOREIGN", "KUBE-IPVS-PROBED", "KUBE-IPVS-DEVICE", "KUBE-IPVS-LOCALHOST", "KUBE-IPVS-INTERNAL", "KUBE-IPVS-SENT", "PREROUTING", "INPUT", "OUTPUT"}, chain) {
			t.Errorf("only on demand: %s", r)
		}
	}
	skips := func(p plan.NodePlan) bool {
		return slices.ContainsFunc(p.Rules, func(r routing.Rule) bool { return r.Action == routing.SkipLocal })
	}
	if skips(before) || !skips(after) || before.Loopback != nil || after.Loopback == nil {
		t.Errorf("policy rules before and after: %t %t, loopback: %v %v", skips(before), skips(after), before.Loopback, after.Loopback)
	}
	const mark = "net/ipv4/conf/eth0/src_valid_mark"
	if before.Sysctls[mark] != "" || after.Sysctls[mark] != "1" {
		t.Errorf("%s before and after: %q %q", mark, before.Sysctls[mark], after.Sysctls[mark])
	}
	if want := []string{
		"KUBE-IPVS-DEMAND-IPS", "KUBE-IPVS-DEMAND-LO", "KUBE-IPVS-DEMAND-INTERNAL",
		"KUBE-6-IPVS-DEMAND-IPS", "KUBE-6-IPVS-DEMAND-LO", "KUBE-6-IPVS-DEMAND-INTERNAL",
	}; !slices.Equal(before.Demands, want) || after.Demands != nil {
		t.Errorf("demands before and after: %v %v, want %v", before.Demands, after.Demands, want)
	}
}
