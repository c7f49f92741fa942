package nat

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestRestoreInput(t *testing.T) {
	s := fakeSubject(ip.IPv4)
	old := Jump{Chain: s.chain(NAT, "PREROUTING"), Rule: "-j KUBE-IPVS-OLD"}
	have := State{
		Chains:    map[Chain][]Rule{s.chain(NAT, "KUBE-IPVS-OLD"): {"-j RETURN"}},
		Jumps:     []Jump{old},
		Misplaced: []Jump{{Chain: s.chain(NAT, "PREROUTING"), Rule: portals}, old},
	}
	pre := old.Chain
	is := func(rules ...Rule) map[Chain][]Rule { return map[Chain][]Rule{pre: rules} }
	const inserted = Rule("-s 192.0.2.1/32 -j DNAT --to-destination 192.0.2.2")
	for name, test := range map[string]struct {
		changes  []Change
		existing map[Chain][]Rule
	}{
		"none":    {},
		"fresh":   {changes: Diff(State{}, s.wanted())},
		"repair":  {changes: Diff(have, s.wanted()), existing: is(old.Rule, inserted, portals, old.Rule)},
		"cleanup": {changes: Diff(have, State{}), existing: is(old.Rule, inserted, portals, old.Rule)},
		// first replaces old behind the inserted rule, and portals moves there from the head.
		"beside": {
			changes: []Change{
				{Op: InsertJump, Chain: pre, Rules: []Rule{first}, After: []Rule{"-j KUBE-IPVS-ABSENT"}, Before: []Rule{old.Rule}},
				{Op: InsertJump, Chain: pre, Rules: []Rule{portals}, After: []Rule{first}},
				{Op: DeleteJump, Chain: pre, Rules: []Rule{old.Rule}},
			},
			existing: is(portals, inserted, old.Rule),
		},
		"twice": {
			changes:  []Change{{Op: InsertJump, Chain: pre, Rules: []Rule{old.Rule}}, {Op: InsertJump, Chain: pre, Rules: []Rule{old.Rule}}, {Op: DeleteJump, Chain: pre, Rules: []Rule{old.Rule}}},
			existing: is(old.Rule, old.Rule),
		},
	} {
		t.Run(name, func(t *testing.T) { golden(t, name+".restore", RestoreInput(test.changes, test.existing)) })
	}
}
