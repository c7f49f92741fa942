package plan_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// The variants of a plan show which rules it has with any sets in use. A process that starts
// recognizes by them the rules that an earlier one wrote, and no rules of another configuration.
func TestVariants(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	eachGolden(t, func(name string, s *scenario) {
		uses := func() plan.SetsInUse {
			out := plan.SetsInUse{}
			for _, f := range s.Config.Families {
				for _, set := range plan.Sets(f) {
					if random.IntN(3) > 0 {
						out[set.Name] = true
					}
				}
			}
			return out
		}
		for range 25 {
			n, later := s.Node, s.Node
			n.OnDemand, n.Demanding, n.Uses, later.Uses = random.IntN(2) == 0, random.IntN(2) == 0, uses(), uses()
			later.OnDemand = n.OnDemand
			variants := plan.ForNode(&s.Config, &later).Variants
			if rules := plan.ForNode(&s.Config, &n).NAT; !nat.Among(rules, variants) {
				t.Fatalf("%s: the rules with %v in use are not among the variants", name, n.Uses)
			}
			other := s.Config
			other.VIPs.Ping = !other.VIPs.Ping
			if rules := plan.ForNode(&other, &n).NAT; nat.Among(rules, variants) {
				t.Fatalf("%s: the rules of another configuration are among the variants", name)
			}
		}
	})
}
