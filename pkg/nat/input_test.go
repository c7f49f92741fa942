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
	for name, test := range map[string]struct {
		changes []Change
		copies  Copies
	}{
		"none":    {},
		"fresh":   {changes: Diff(State{}, s.wanted())},
		"repair":  {changes: Diff(have, s.wanted()), copies: Copies{old: 2, have.Misplaced[0]: 1}},
		"cleanup": {changes: Diff(have, State{}), copies: Copies{old: 2, have.Misplaced[0]: 1}},
		"twice": {
			changes: []Change{{InsertJump, old.Chain, []Rule{old.Rule}}, {InsertJump, old.Chain, []Rule{old.Rule}}, {DeleteJump, old.Chain, []Rule{old.Rule}}},
			copies:  Copies{old: 2},
		},
	} {
		t.Run(name, func(t *testing.T) { golden(t, name+".restore", RestoreInput(test.changes, test.copies)) })
	}
}
