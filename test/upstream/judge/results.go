package judge

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
)

// State is the result of an attempt, or the verdict on a spec.
type State string

// A spec that passed only after a failure is Flaky, never Passed.
const (
	Passed  State = "pass"
	Failed  State = "fail"
	Skipped State = "skip"
	Flaky   State = "flaky"
)

// Attempt is one run of a spec.
type Attempt struct {
	State State `json:"state"`
	// Reason is the first line of the reason for failing or skipping.
	Reason  string  `json:"reason,omitempty"`
	Seconds float64 `json:"seconds"`
	// Nodes is the number of nodes in the cluster; 0 if it was not recorded.
	Nodes int `json:"nodes,omitempty"`
}

// maxAttempts is how often a spec runs before its failure is final.
const maxAttempts = 3

// Verdict is the result of a spec under one build of a proxy.
type Verdict struct {
	Version  string    `json:"version"`
	Build    string    `json:"build"`
	Attempts []Attempt `json:"attempts"`
}

// State returns the verdict as one state.
func (v Verdict) State() State {
	last := v.Attempts[len(v.Attempts)-1].State
	if last == Passed && len(v.Attempts) > 1 {
		return Flaky
	}
	return last
}

// Reason returns the last reason.
func (v Verdict) Reason() string {
	for i := len(v.Attempts) - 1; i >= 0; i-- {
		if reason := v.Attempts[i].Reason; reason != "" {
			return reason
		}
	}
	return ""
}

// Reasons returns all distinct reasons in the order of the attempts: a second attempt at
// a partially completed test may fail for another reason.
func (v Verdict) Reasons() (reasons []string) {
	for _, attempt := range v.Attempts {
		if attempt.Reason != "" && !slices.Contains(reasons, attempt.Reason) {
			reasons = append(reasons, attempt.Reason)
		}
	}
	return reasons
}

// outweighs reports whether a verdict, also of another build, is more informative than an
// attempt: the attempt was skipped with fewer nodes than the spec has passed with.
func (v Verdict) outweighs(attempt Attempt) bool {
	if attempt.State != Skipped || len(v.Attempts) == 0 {
		return false
	}
	last := v.Attempts[len(v.Attempts)-1]
	return last.State == Passed && last.Nodes > attempt.Nodes
}

// settled reports whether another attempt with that many nodes is useless. A spec that
// was skipped may have needed more nodes.
func (v Verdict) settled(nodes int) bool {
	if len(v.Attempts) == 0 {
		return false
	}
	switch last := v.Attempts[len(v.Attempts)-1]; last.State {
	case Failed:
		return len(v.Attempts) >= maxAttempts
	case Skipped:
		return last.Nodes >= nodes
	}
	return true
}

// Results are the results of one proxy.
type Results struct {
	Proxy string `json:"proxy"`
	// Version and Build are those of the last run; a verdict belongs to one build.
	Version    string `json:"version"`
	Build      string `json:"build"`
	Kubernetes string `json:"kubernetes"`
	// Nodes describes what the nodes run; each attempt has the number of nodes.
	Nodes string `json:"nodes"`
	Date  string `json:"date"`
	// Applies are the names of all specs to run.
	Applies []string `json:"applies"`
	// Specs maps full names to verdicts.
	Specs map[string]Verdict `json:"specs"`

	path string
	mu   sync.Mutex
}

// Open reads the recorded verdicts from a file, or starts new ones if the file has none
// of these tests.
func Open(path string, fresh *Results) (*Results, error) {
	fresh.path, fresh.Specs = path, map[string]Verdict{}
	kept, err := Read(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && kept.Kubernetes != fresh.Kubernetes {
		return fresh, nil
	}
	if err != nil {
		return nil, err
	}
	fresh.Specs = kept.Specs
	return fresh, nil
}

// Read reads results from a file.
func Read(path string) (*Results, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	results := &Results{path: path}
	return results, json.Unmarshal(content, results)
}

// add records an attempt, also on disk, and returns the verdict so far.
func (r *Results) add(name string, attempt Attempt) (Verdict, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	verdict := r.current(name)
	if last := len(verdict.Attempts) - 1; last >= 0 && verdict.Attempts[last].State == Skipped {
		verdict.Attempts = verdict.Attempts[:last]
	}
	verdict.Attempts = append(verdict.Attempts, attempt)
	if r.Specs[name].outweighs(attempt) {
		return verdict, nil
	}
	r.Specs[name] = verdict
	content, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return verdict, err
	}
	if err := os.MkdirAll(filepath.Dir(r.path), 0o755); err != nil {
		return verdict, err
	}
	if err := os.WriteFile(r.path+".new", append(content, '\n'), 0o644); err != nil {
		return verdict, err
	}
	return verdict, os.Rename(r.path+".new", r.path)
}

// unknownFirst moves specs without a verdict of any build to the front.
func (r *Results) unknownFirst(names []string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var unknown, known []string
	for _, name := range names {
		if _, ran := r.Specs[name]; ran {
			known = append(known, name)
		} else {
			unknown = append(unknown, name)
		}
	}
	return append(unknown, known...)
}

func (r *Results) verdict(name string) Verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current(name)
}

// current returns the verdict of this build. That of another build is kept until there is
// a newer one.
func (r *Results) current(name string) Verdict {
	if verdict := r.Specs[name]; verdict.Build == r.Build {
		return verdict
	}
	return Verdict{Version: r.Version, Build: r.Build}
}
