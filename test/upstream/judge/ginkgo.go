package judge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// report is the part of Ginkgo's JSON report that is evaluated.
type report struct {
	SpecReports []specReport
}

type specReport struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

// name is the text that Ginkgo's focus matches, without the suite's name.
func (r specReport) name() string {
	return strings.Join(append(r.ContainerHierarchyTexts, r.LeafNodeText), " ")
}

// specs returns the specs of a report, without Ginkgo's setup nodes.
func (r report) specs() (specs []specReport) {
	for _, spec := range r.SpecReports {
		if spec.LeafNodeType == "It" {
			specs = append(specs, spec)
		}
	}
	return specs
}

// Tests is the program with upstream's tests, and the way in which it reaches a cluster.
type Tests struct {
	// Command returns the command that runs the program with arguments.
	Command func(ctx context.Context, args ...string) (*exec.Cmd, error)
	// Arguments are arguments of all runs.
	Arguments []string
	// Dir is the directory for reports, and for the output of failed specs.
	Dir string
	// Checkout is the directory of the checkout. Paths in reasons are recorded relative
	// to it, so that verdicts are independent of the machine.
	Checkout string
}

// List returns the names of the specs that match focus and not skip.
func (t *Tests) List(ctx context.Context, focus, skip string) ([]string, error) {
	listed, _, err := t.run(ctx, "--ginkgo.dry-run", "--ginkgo.focus="+focus, "--ginkgo.skip="+skip)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, spec := range listed.specs() {
		if spec.State == "passed" {
			names = append(names, spec.name())
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("no spec matches %q", focus)
	}
	return names, nil
}

// specLimit is longer than the longest spec takes on an emulated node.
const specLimit = 30 * time.Minute

// Run runs one spec once.
func (t *Tests) Run(ctx context.Context, name string) (Attempt, error) {
	limited, cancel := context.WithTimeout(ctx, specLimit)
	defer cancel()
	ran, out, err := t.run(limited, "--ginkgo.focus= "+regexp.QuoteMeta(name)+"$")
	if ctx.Err() != nil {
		return Attempt{}, ctx.Err()
	}
	if limited.Err() != nil {
		return Attempt{State: Failed, Reason: fmt.Sprintf("not ended within %s", specLimit), Seconds: specLimit.Seconds()}, nil
	}
	if err != nil {
		return Attempt{}, fmt.Errorf("%w\n%s", err, out)
	}
	for _, spec := range ran.specs() {
		if spec.name() == name && spec.State != "pending" {
			attempt := attemptOf(spec)
			attempt.Reason = strings.ReplaceAll(attempt.Reason, filepath.Clean(t.Checkout)+"/", "")
			return attempt, t.keep(name, attempt, out)
		}
	}
	return Attempt{}, fmt.Errorf("%s: not in the report\n%s", name, out)
}

// keep saves the output of a failed spec.
func (t *Tests) keep(name string, attempt Attempt, out []byte) error {
	if attempt.State != Failed {
		return nil
	}
	return os.WriteFile(filepath.Join(t.Dir, strings.ReplaceAll(name, "/", "_")+".log"), out, 0o644)
}

func attemptOf(spec specReport) Attempt {
	attempt := Attempt{State: Failed, Reason: firstLine(spec.Failure.Message), Seconds: spec.RunTime.Seconds()}
	switch spec.State {
	case "passed":
		attempt.State, attempt.Reason = Passed, ""
	case "skipped":
		attempt.State = Skipped
	}
	return attempt
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// run runs the program and reads its report. The exit code matters only if there is no
// report.
func (t *Tests) run(ctx context.Context, args ...string) (r report, out []byte, err error) {
	dir, err := os.MkdirTemp(t.Dir, "run-")
	if err != nil {
		return r, nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "report.json")
	cmd, err := t.Command(ctx, append(append(t.Arguments, "--ginkgo.json-report="+path), args...)...)
	if err != nil {
		return r, nil, err
	}
	cmd.Dir = dir
	out, runErr := cmd.CombinedOutput()
	content, err := os.ReadFile(path)
	if err != nil {
		return r, out, errors.Join(err, runErr)
	}
	var reports []report
	if err := json.Unmarshal(content, &reports); err != nil {
		return r, out, fmt.Errorf("the tests' report: %w", err)
	}
	for _, one := range reports {
		r.SpecReports = append(r.SpecReports, one.SpecReports...)
	}
	return r, out, nil
}
