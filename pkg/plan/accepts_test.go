package plan_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// TestAcceptingChains: a jump that is omitted where every packet is accepted leads to a chain
// that does nothing else, and every chain of filter that does nothing else has such a jump,
// except KUBE-FORWARD, which is always there.
func TestAcceptingChains(t *testing.T) {
	s := load(t, "cluster")
	part := plan.ForNode(&s.Config, &s.Node)
	var accepting []string
	for _, j := range part.NAT.Jumps {
		rules := part.NAT.Chains[j.To()]
		accepts := len(rules) > 0 && j.To().Name != "KUBE-FORWARD"
		for _, r := range rules {
			accepts = accepts && strings.HasSuffix(string(r), "-j ACCEPT")
		}
		if accepts != j.Accepts {
			t.Errorf("-A %s %s: accepts only: %t, as written: %t", j.Chain, j.Rule, accepts, j.Accepts)
		}
		if accepts && !slices.Contains(accepting, j.To().Name) {
			accepting = append(accepting, j.To().Name)
		}
	}
	slices.Sort(accepting)
	if want := []string{"KUBE-IPVS-ACCEPT", "KUBE-NODE-PORT"}; !slices.Equal(accepting, want) {
		t.Errorf("chains that only accept: %v, want %v", accepting, want)
	}
	s.Config.LeaveToInputPolicy = true
	part = plan.ForNode(&s.Config, &s.Node)
	for _, j := range part.NAT.Jumps {
		if j.To().Name == "KUBE-IPVS-ACCEPT" {
			t.Errorf("left to the policy: -A %s %s", j.Chain, j.Rule)
		}
	}
}
