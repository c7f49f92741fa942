package judge

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// program simulates upstream's tests: the states of each spec in the order of its runs;
// the last one applies to all later runs.
type program struct {
	t      *testing.T
	states map[string][]string
	runs   map[string]int
}

func (p *program) command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	var path string
	var specs []string
	for _, arg := range args {
		if value, ok := strings.CutPrefix(arg, "--ginkgo.json-report="); ok {
			path = value
		}
	}
	for name, states := range p.states {
		state := "skipped"
		if p.chosen(args, name) {
			state = states[min(p.runs[name], len(states)-1)]
			p.runs[name]++
		}
		specs = append(specs, fmt.Sprintf(
			`{"ContainerHierarchyTexts":["[sig-network]"],"LeafNodeType":"It","LeafNodeText":%q,"State":%q,"RunTime":2000000000,"Failure":{"Message":"no answer to /checkout/bin/client\nfrom it"}}`,
			name, state))
	}
	report := fmt.Sprintf(`[{"SpecReports":[{"LeafNodeType":"BeforeSuite","State":"passed"},%s]}]`, strings.Join(specs, ","))
	if err := os.WriteFile(path, []byte(report), 0o644); err != nil {
		p.t.Fatal(err)
	}
	return exec.CommandContext(ctx, "true"), nil
}

func (p *program) chosen(args []string, name string) bool {
	for _, arg := range args {
		if arg == `--ginkgo.focus= \[sig-network\] `+name+`$` {
			return true
		}
	}
	return false
}

func TestVerdicts(t *testing.T) {
	p := &program{t: t, runs: map[string]int{}, states: map[string][]string{
		"passes": {"passed"}, "fails": {"failed"}, "recovers": {"failed", "passed"}, "is skipped": {"skipped"},
		"hangs": {"timedout"}, "wants three nodes": {"skipped", "passed"}, "passes with three nodes": {"skipped", "passed", "skipped"},
	}}
	path := filepath.Join(t.TempDir(), "results.json")
	fresh := func() *Results { return &Results{Proxy: "kube-ipvs", Build: "1"} }
	run := func(results *Results, nodes int) {
		t.Helper()
		runner := &Runner{Tests: &Tests{Command: p.command, Dir: t.TempDir(), Checkout: "/checkout"}, Results: results, Parallel: 1, Nodes: nodes, Log: t.Logf}
		var names []string
		for name := range p.states {
			names = append(names, "[sig-network] "+name)
		}
		if err := runner.Run(t.Context(), names); err != nil {
			t.Fatal(err)
		}
	}
	results, err := Open(path, fresh())
	if err != nil {
		t.Fatal(err)
	}
	run(results, 2)
	for name, want := range map[string]struct {
		state    State
		attempts int
		reason   string
	}{
		"passes": {Passed, 1, ""}, "fails": {Failed, 3, "no answer to bin/client"}, "recovers": {Flaky, 2, "no answer to bin/client"},
		"is skipped": {Skipped, 1, "no answer to bin/client"}, "hangs": {Failed, 3, "no answer to bin/client"},
		"wants three nodes": {Skipped, 1, "no answer to bin/client"},
	} {
		got := results.Specs["[sig-network] "+name]
		if got.State() != want.state || len(got.Attempts) != want.attempts || got.Reason() != want.reason {
			t.Errorf("%s: %s after %d attempts, because of %q; want %+v", name, got.State(), len(got.Attempts), got.Reason(), want)
		}
	}

	// Another run of the same build continues where this one ended; with more nodes, it
	// repeats skipped specs. Verdicts of another build replace these.
	before := p.runs["passes"]
	again, err := Open(path, fresh())
	if err != nil {
		t.Fatal(err)
	}
	run(again, 2)
	if p.runs["is skipped"] != 1 {
		t.Errorf("what was skipped was run again, with as many nodes: %v", p.runs)
	}
	run(again, 3)
	if got := again.Specs["[sig-network] wants three nodes"]; got.State() != Passed || len(got.Attempts) != 1 {
		t.Errorf("with three nodes: %+v", got)
	}
	if p.runs["passes"] != before || p.runs["fails"] != 3 {
		t.Errorf("specs with a verdict were run again: %v", p.runs)
	}
	other, err := Open(path, &Results{Build: "2"})
	if err != nil {
		t.Fatal(err)
	}
	run(other, 2)
	if got := other.Specs["[sig-network] passes with three nodes"]; got.Build != "1" || got.State() != Passed {
		t.Errorf("skipped with two nodes, over a pass with three: %+v", got)
	}
	if p.runs["passes"] != before+1 || other.Specs["[sig-network] passes"].Build != "2" || len(other.Specs) != len(p.states) {
		t.Errorf("another build: %v %v", p.runs, other.Specs)
	}
}

func TestUnknownFirst(t *testing.T) {
	results := &Results{Build: "2", Specs: map[string]Verdict{"a": {Build: "1"}, "c": {Build: "2"}}}
	if got := results.unknownFirst([]string{"a", "b", "c", "d"}); !slices.Equal(got, []string{"b", "d", "a", "c"}) {
		t.Error(got)
	}
}

func TestColumns(t *testing.T) {
	ours := &Results{Proxy: "kube-ipvs", Version: "v1", Build: "1", Applies: []string{"a | b", "c", "d"}, Specs: map[string]Verdict{
		"a | b": {Build: "1", Attempts: []Attempt{{State: Failed, Reason: "no answer"}, {State: Failed, Reason: "no file"}, {State: Failed, Reason: "no answer"}, {State: Passed}}},
		"d":     {Version: "v0", Build: "0", Attempts: []Attempt{{State: Passed, Nodes: 3}}},
	}}
	peer := &Results{Proxy: "kube-proxy-ipvs", Specs: map[string]Verdict{"c": {Attempts: []Attempt{{State: Passed}}}}}
	page := pageOf([]*Results{ours, peer})
	for _, line := range []string{
		"| kube-ipvs | 1 | 1 | 0 | 0 | 1 |", `| a \| b | flaky |  |`, "| c |  | pass |", "| d | pass (3 nodes, v0) |  |", `| a \| b | flaky | no answer; no file |`,
	} {
		if !strings.Contains(page, "\n"+line+"\n") {
			t.Errorf("no line %q in\n%s", line, page)
		}
	}
}
