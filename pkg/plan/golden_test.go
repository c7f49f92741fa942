package plan_test

import (
	"cmp"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

var update = flag.Bool("update", false, "write the golden files anew")

// The plan of each scenario in testdata equals its golden file. Only scenarios about the
// node, those with "node: true", contain the node's plan: TestGoldenNode compares the
// others' parts.
func TestGolden(t *testing.T) {
	texts := map[string]map[string]string{} // by scenario and name
	eachGolden(t, func(name string, s *scenario) {
		scenario, _, _ := strings.Cut(name, ".")
		if texts[scenario] == nil {
			texts[scenario] = map[string]string{}
		}
		texts[scenario][name] = text(&s.Config, &s.Node, s.Services, s.AboutNode)
	})
	used := map[string]bool{nodeGolden: true}
	for scenario, modes := range texts {
		shared := sharesGolden(scenario, modes)
		for name, got := range modes {
			file := name + ".golden"
			if shared {
				file = scenario + ".golden"
			}
			used[file] = true
			t.Run(name, func(t *testing.T) { compareGolden(t, file, got) })
		}
	}
	checkNoOtherGolden(t, used)
}

// sharesGolden reports whether the SNAT modes of a scenario have one golden file: the file exists
// or, with -update, the modes agree.
func sharesGolden(scenario string, modes map[string]string) bool {
	if !*update {
		_, err := os.Stat(filepath.Join("testdata", scenario+".golden"))
		return err == nil
	}
	texts := slices.Collect(maps.Values(modes))
	return !slices.ContainsFunc(texts, func(text string) bool { return text != texts[0] })
}

// nodeGolden has the node's plan of all scenarios that are not about the node.
const nodeGolden = "node.golden"

// The node's plan of each scenario that is not about the node equals the golden file. The
// file lists each variant of a section once, below the scenarios that have it.
func TestGoldenNode(t *testing.T) {
	all := 0
	having := map[section][]string{} // the scenarios by section
	eachGolden(t, func(name string, s *scenario) {
		if s.AboutNode {
			return
		}
		all++
		partsOf(&s.Config, &s.Node, s.Services)
		for _, sec := range nodeSections(&s.Config, plan.ForNode(&s.Config, &s.Node)) {
			having[sec] = append(having[sec], name)
		}
	})
	var w writer
	for _, sec := range slices.SortedFunc(maps.Keys(having), compareSections) {
		names := strings.Join(having[sec], ", ")
		if len(having[sec]) == all {
			names = "all"
		}
		w.line("%s\n# %s\n%s", strings.TrimSpace(sec.title+" "+sec.chain), names, sec.lines)
	}
	compareGolden(t, nodeGolden, w.String())
}

func compareSections(a, b section) int {
	return cmp.Or(strings.Compare(a.title, b.title), strings.Compare(a.chain, b.chain), strings.Compare(a.lines, b.lines))
}

// eachGolden calls do for each scenario and SNAT mode, with a name such as "eni.auto", or "nodeport"
// if the scenario has one mode.
func eachGolden(t *testing.T, do func(name string, s *scenario)) {
	t.Helper()
	for _, file := range scenarios(t) {
		s := load(t, file)
		for _, mode := range s.Modes {
			name := file
			if len(s.Modes) > 1 {
				name = file + "." + string(mode)
			}
			s.Config.SNAT.Mode = mode
			do(name, s)
		}
	}
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

func compareGolden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
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
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
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
		part := plan.ForNode(&s.Config, &s.Node)
		known := map[string]bool{}
		for _, set := range part.Sets {
			if known[set.Name] {
				t.Errorf("%s: set %s is listed twice", name, set.Name)
			}
			known[set.Name] = true
		}
		facts := plan.NewFacts(&s.Config, &s.Node)
		for i := range s.Services {
			for _, m := range slices.Concat(part.Members, plan.ForService(&s.Config, &facts, &s.Services[i]).Members) {
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
	part := plan.ForNode(&s.Config, &s.Node)
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
