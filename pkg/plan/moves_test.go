package plan_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// TestMovingJumps lists which jumps are moved before rules that other programs insert, and which stay
// behind them as under kube-proxy. A chain of a jump that moves neither accepts packets nor changes
// their addresses, so the inserted rule keeps its effect.
func TestMovingJumps(t *testing.T) {
	moves := map[bool]map[string]bool{true: {}, false: {}}
	for _, name := range []string{"cluster", "eni", "branch", "external-local"} {
		s := load(t, name)
		s.Config.LocalhostNodePorts = true
		if name != "cluster" {
			s.Config.VIPs.LoadBalancers = plan.ClaimPort
		}
		part := plan.ForNode(&s.Config, &s.Node)
		staying := map[string]bool{}
		for _, j := range part.NAT.Jumps {
			moves[j.Moves][string(j.Chain.Table)+" "+j.Chain.Name+" "+j.To().Name] = true
			if chain := j.Chain.String(); !j.Moves {
				staying[chain] = true
			} else if staying[chain] {
				t.Errorf("%s: -A %s %s: jumps that move must be before those that stay", name, chain, j.Rule)
			}
			for _, r := range part.NAT.Chains[j.To()] {
				if ends := strings.HasSuffix(string(r), "-j ACCEPT") || strings.Contains(string(r), "NAT") || strings.Contains(string(r), "MASQUERADE"); ends && j.Moves {
					t.Errorf("%s: %s: %s: takes packets from rules that the jump is moved before", name, j.To(), r)
				}
			}
		}
	}
	for moving, want := range map[bool][]string{
		true: {
			"mangle FORWARD KUBE-IPVS-MSS", // large uploads would hang
			"mangle FORWARD KUBE-IPVS-RETURN",
			"mangle FORWARD KUBE-IPVS-UNROUTED",
			"mangle OUTPUT KUBE-IPVS-BIND",
			"mangle OUTPUT KUBE-IPVS-BOUND",
			"mangle OUTPUT KUBE-IPVS-CLAIM",
			"mangle OUTPUT KUBE-IPVS-FOREIGN",
			"mangle OUTPUT KUBE-IPVS-PROBED",
			"mangle OUTPUT KUBE-IPVS-SENT",
			"mangle POSTROUTING KUBE-IPVS-STRAY",
			"mangle POSTROUTING KUBE-IPVS-UNROUTED",
			"mangle PREROUTING KUBE-IPVS-BRANCH",
			"mangle PREROUTING KUBE-IPVS-CLAIM",
			"mangle PREROUTING KUBE-IPVS-DEVICE",
			"mangle PREROUTING KUBE-IPVS-FOREIGN",
			"mangle PREROUTING KUBE-IPVS-PROBED",
			"mangle PREROUTING KUBE-IPVS-RESTORE",
			"raw PREROUTING KUBE-IPVS-CLAIM",
		},
		false: {
			"filter FORWARD KUBE-FORWARD",
			"filter INPUT KUBE-IPVS-ACCEPT",  // appended
			"filter INPUT KUBE-IPVS-CLAIMED", // KUBE-IPVS-SENT clears the mark too
			"filter INPUT KUBE-IPVS-FILTER",
			"filter INPUT KUBE-NODE-PORT",
			"filter INPUT KUBE-PROXY-FIREWALL",
			"mangle INPUT KUBE-IPVS-INTERNAL",   // node-local endpoints answer, as under kube-proxy
			"mangle OUTPUT KUBE-IPVS-INTERNAL",  // the same
			"mangle OUTPUT KUBE-PROXY-FIREWALL", // kube-proxy does not restrict the node
			"nat OUTPUT KUBE-SERVICES",
			"nat POSTROUTING KUBE-POSTROUTING",
			"nat PREROUTING KUBE-SERVICES",
			"raw OUTPUT KUBE-IPVS-LOCALHOST", // kube-proxy does not serve node ports there
		},
	} {
		if diff := cmp.Diff(want, slices.Sorted(maps.Keys(moves[moving]))); diff != "" {
			t.Errorf("jumps that move: %t (-want +got):\n%s", moving, diff)
		}
	}
}
