package plan_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Rules for pods routed by input interface are written only if there are such pods.
func TestBranches(t *testing.T) {
	const request, answer, sent = "9: fwmark 0x3060/0x3060 lookup 255", "480: to 10.12.200.44/32 fwmark 0x3060/0x3060 lookup 101", "32760: from 10.12.200.44/32 iif lo lookup 101"
	for name, tc := range map[string]struct {
		change func(*scenario)
		want   []string
	}{
		"strict mode":                  {func(*scenario) {}, []string{sent, answer, request}},
		"table local comes first":      {func(s *scenario) { s.Node.Inventory.Rules[2].Priority = 0; sortRules(s) }, []string{sent, answer}},
		"reply routing is off":         {func(s *scenario) { s.Config.SNAT.Mode = plan.SNATOff }, nil},
		"the pod has no route":         {func(s *scenario) { s.Node.Inventory.Attached = nil }, nil},
		"a rule has another condition": {func(s *scenario) { s.Node.Inventory.Rules[1].To = prefixes([]string{"10.12.0.0/16"})[0] }, nil},
		"the pod is routed by its source": {func(s *scenario) {
			s.AddNetwork(strings.Fields("rule 1536 from 10.12.200.44 lookup 101"))
		}, nil},
		"the table leads out by the primary interface": {func(s *scenario) { s.Node.Inventory.Defaults[2].Link = "eth0" }, nil},
		"the interface is an uplink": {func(s *scenario) {
			s.Node.Inventory.Attached[0].Link, s.Node.Inventory.Rules[1].IIf = "eth1", "eth1"
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := load(t, "branch")
			tc.change(s)
			part := plan.ForNode(&s.Config, &s.Node)
			var got []string
			for _, r := range part.Rules {
				if text := strings.TrimPrefix(r.String(), "IPv4 rule "); r.Mark == s.Config.SNAT.Mark || strings.Contains(text, "iif lo lookup") {
					got = append(got, text)
				}
			}
			slices.Sort(got)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("policy rules (-want +got):\n%s", diff)
			}
			members := 0
			for _, m := range part.Members {
				if m.Set == string(plan.BranchSources) {
					members++
				}
			}
			if (members > 0) != (len(tc.want) > 0) {
				t.Errorf("%d pods in %s with the rules %v", members, plan.BranchSources, got)
			}
		})
	}
}

// An ENI keeps the value of branches if it has it. Then no pod is served as a branch.
func TestENIHasBranchValue(t *testing.T) {
	s := load(t, "branch")
	s.Node.Bound = []plan.Binding{{Family: s.Config.Families[0], Link: "eth1", Index: 3, Table: 2, Mark: s.Config.SNAT.Mark}}
	for _, r := range plan.ForNode(&s.Config, &s.Node).Rules {
		if r.To.IsValid() || r.IIf == "lo" && r.From.IsValid() {
			t.Errorf("a rule for a branch: %s", r)
		}
	}
	for i := range 20 {
		s.AddNetwork(strings.Fields(fmt.Sprintf("link ens%d 10.13.%d.2/24", i, i)))
		s.AddNetwork(strings.Fields(fmt.Sprintf("default dev ens%d via 10.13.%d.1 table %d", i, i, 500+i)))
		s.AddNetwork(strings.Fields(fmt.Sprintf("rule 2000 from 10.13.%d.2 lookup %d", i, 500+i)))
	}
	s.Node.Bound = nil
	for _, b := range plan.ForNode(&s.Config, &s.Node).Bound {
		if b.Mark == s.Config.SNAT.Mark {
			t.Errorf("%s has the value of branches", b.Link)
		}
	}
}

func sortRules(s *scenario) {
	slices.SortStableFunc(s.Node.Inventory.Rules, func(a, b routing.Rule) int { return a.Priority - b.Priority })
}
