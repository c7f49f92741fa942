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

// State is how an attempt ended, or what is to be said of a spec in the end.
type State string

// A spec that passed only when it was repeated is Flaky, never Passed.
const (
	Passed  State = "pass"
	Failed  State = "fail"
	Skipped State = "skip"
	Flaky   State = "flaky"
)

// Attempt is one run of a spec.
type Attempt struct {
	State State `json:"state"`
	// Reason is the first line of why it failed or was skipped.
	Reason  string  `json:"reason,omitempty"`
	Seconds float64 `json:"seconds"`
	// Nodes is how many the cluster had; 0 if that was not noted.
	Nodes int `json:"nodes,omitempty"`
}

// maxAttempts is how often a spec is run before its failure is believed.
const maxAttempts = 3

// Verdict is what became of a spec under one build of a proxy.
type Verdict struct {
	Version  string    `json:"version"`
	Build    string    `json:"build"`
	Attempts []Attempt `json:"attempts"`
}

// State is the verdict in a word.
func (v Verdict) State() State {
	last := v.Attempts[len(v.Attempts)-1].State
	if last == Passed && len(v.Attempts) > 1 {
		return Flaky
	}
	return last
}

// Reason is the last one that was given.
func (v Verdict) Reason() string {
	for i := len(v.Attempts) - 1; i >= 0; i-- {
		if reason := v.Attempts[i].Reason; reason != "" {
			return reason
		}
	}
	return ""
}

// Reasons are all that were given, in the order of the attempts, each once: the
// second try of what has half run may fail by something else.
func (v Verdict) Reasons() (reasons []string) {
	for _, attempt := range v.Attempts {
		if attempt.Reason != "" && !slices.Contains(reasons, attempt.Reason) {
			reasons = append(reasons, attempt.Reason)
		}
	}
	return reasons
}

// outweighs tells whether an attempt says less than a verdict, be it another build's:
// it was skipped with fewer nodes than the spec has passed with.
func (v Verdict) outweighs(attempt Attempt) bool {
	if attempt.State != Skipped || len(v.Attempts) == 0 {
		return false
	}
	last := v.Attempts[len(v.Attempts)-1]
	return last.State == Passed && last.Nodes > attempt.Nodes
}

// settled tells whether nothing is to be gained by another attempt with so many
// nodes. A spec that was skipped may have wanted more than there were.
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

// Results are a proxy's.
type Results struct {
	Proxy string `json:"proxy"`
	// Version and Build are those that were run last; a verdict is of one build only.
	Version    string `json:"version"`
	Build      string `json:"build"`
	Kubernetes string `json:"kubernetes"`
	// Nodes says what they run; how many there were is each attempt's.
	Nodes string `json:"nodes"`
	Date  string `json:"date"`
	// Applies are the names of all specs that there are to run.
	Applies []string `json:"applies"`
	// Specs are by their full names.
	Specs map[string]Verdict `json:"specs"`

	path string
	mu   sync.Mutex
}

// Open reads the verdicts kept in a file, or begins new ones if there are none of
// these tests.
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

// add keeps an attempt, on the disk as well, and returns the verdict so far.
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

// unknownFirst has the specs that no build has a verdict on before the others.
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

// current is the verdict of this build: that of another one is kept until there is
// a newer.
func (r *Results) current(name string) Verdict {
	if verdict := r.Specs[name]; verdict.Build == r.Build {
		return verdict
	}
	return Verdict{Version: r.Version, Build: r.Build}
}
