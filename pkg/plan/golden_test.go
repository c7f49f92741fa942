package plan_test

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

var update = flag.Bool("update", false, "write the golden files anew")

// The whole plan of each scenario in testdata equals its golden file.
func TestGolden(t *testing.T) {
	used := map[string]bool{}
	for _, name := range scenarios(t) {
		s := load(t, name)
		for _, mode := range s.modes {
			golden := name + ".golden"
			if len(s.modes) > 1 {
				golden = name + "." + string(mode) + ".golden"
			}
			used[golden] = true
			t.Run(strings.TrimSuffix(golden, ".golden"), func(t *testing.T) {
				s.config.SNAT.Mode = mode
				compareGolden(t, filepath.Join("testdata", golden), text(&s.config, &s.node, s.services))
			})
		}
	}
	checkNoOtherGolden(t, used)
}

func scenarios(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".yaml")
	}
	return files
}

func compareGolden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s (-want +got); run with -update if this is meant\n%s", file, diff)
	}
}

// checkNoOtherGolden reports golden files that no scenario writes any more.
func checkNoOtherGolden(t *testing.T, used map[string]bool) {
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !used[filepath.Base(f)] {
			t.Errorf("%s belongs to no scenario", f)
		}
	}
}

// Every member belongs to a set that the node has, and set names are unique: IPv6 names
// are truncated and could collide.
func TestSetsExist(t *testing.T) {
	for _, name := range scenarios(t) {
		s := load(t, name)
		part := plan.NodeWide(&s.config, &s.node)
		known := map[string]bool{}
		for _, set := range part.Sets {
			if known[set.Name] {
				t.Errorf("%s: set %s is listed twice", name, set.Name)
			}
			known[set.Name] = true
		}
		facts := plan.FactsOf(&s.config, &s.node)
		for i := range s.services {
			for _, m := range slices.Concat(part.Members, plan.Service(&s.config, &facts, &s.services[i]).Members) {
				if !known[m.Set] {
					t.Errorf("%s: %s is a member of %s, which is not among the sets", name, m.Entry, m.Set)
				}
			}
		}
	}
}

// iptables-save quotes a comment only if necessary. A rule written differently would
// always seem changed.
func TestCommentsAreCanonical(t *testing.T) {
	s := load(t, "dualstack")
	part := plan.NodeWide(&s.config, &s.node)
	for _, j := range part.NAT.Jumps {
		checkComments(t, string(j.Rule))
	}
	for _, rules := range part.NAT.Chains {
		for _, r := range rules {
			checkComments(t, string(r))
		}
	}
}

func checkComments(t *testing.T, rule string) {
	for i, quoted := range strings.Split(rule, `"`) {
		if i%2 == 1 && (!strings.Contains(quoted, " ") || strings.ContainsAny(quoted, `\'`)) {
			t.Errorf("iptables-save prints another comment: %s", rule)
		}
	}
}
