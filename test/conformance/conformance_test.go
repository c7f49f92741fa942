//go:build e2e

package conformance

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestConformance runs both programs through the named sequences of testdata, and then
// through generated sequences of STEPS steps in total. With STEPS=0 it generates none.
// With KEEP_GOING it reports differences and continues.
func TestConformance(t *testing.T) {
	b := newBench(t)
	_, _, err := b.settle()
	must(t, err)
	r := &run{bench: b, t: t, used: map[string]int{}, keepGoing: os.Getenv("KEEP_GOING") != ""}
	named := sequences(t)
	for _, name := range slices.Sorted(maps.Keys(named)) {
		t.Run(name, func(t *testing.T) {
			r.t = t
			if problem := r.play(named[name]); problem != "" {
				t.Error(problem)
			}
		})
	}
	r.began, r.taken = time.Now(), 0
	r.steps, err = strconv.Atoi(os.Getenv("STEPS"))
	must(t, err)
	must(t, flag.Set("rapid.checks", strconv.Itoa(r.steps)))
	must(t, flag.Set("rapid.nofailfile", "true"))
	must(t, flag.Set("rapid.shrinktime", "10m"))
	if r.steps == 0 {
		return
	}
	t.Run("generated", func(t *testing.T) {
		r.t = t
		defer r.keep(t)
		rapid.Check(t, r.generated)
	})
	r.report(t)
}

// run is the state of one test run.
type run struct {
	*bench
	t            *testing.T
	began        time.Time
	steps, taken int
	keepGoing    bool           // report differences without shrinking the sequence
	used         map[string]int // entries of the table
	failed       []Step         // the last failed sequence; the shortest one once shrinking has ended
}

// sequences returns the sequences of testdata: those that failed once, and those written
// for an entry of the table.
func sequences(t *testing.T) map[string][]Step {
	files, err := filepath.Glob("testdata/*.json")
	must(t, err)
	out := map[string][]Step{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		var steps []Step
		if err := json.Unmarshal(text, &steps); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out[strings.TrimSuffix(filepath.Base(file), ".json")] = steps
	}
	return out
}

// generated runs one generated sequence.
func (r *run) generated(t *rapid.T) {
	if r.failed == nil && r.taken >= r.steps {
		return
	}
	steps := drawSequence.Draw(t, "steps")
	if problem := r.play(steps); problem != "" {
		r.failed = steps
		t.Fatal(problem)
	}
}

// play runs the steps and returns a description of the first failure, or "". The first
// step deletes what earlier sequences left.
func (r *run) play(steps []Step) string {
	left := r.clear()
	for i, step := range steps {
		if i == 0 {
			step = append(left, step...)
		}
		unexpected, err := r.step(step, func(d *Difference) { r.used[d.What]++ })
		if err != nil {
			return fmt.Sprintf("step %d: %v", i, err)
		}
		r.progress()
		if len(unexpected) == 0 {
			continue
		}
		problem := fmt.Sprintf("step %d: %s", i, r.describe(unexpected))
		if !r.keepGoing {
			return problem
		}
		r.t.Error(problem)
	}
	return ""
}

// describe formats differences together with the objects that they concern.
func (r *run) describe(diffs []Diff) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d differences that are not allowed:\n", len(diffs))
	about := map[string]bool{}
	for i, d := range diffs {
		if i < mostShown {
			fmt.Fprintln(&text, d)
		}
		for _, c := range r.world.Claims(d.Protocol, d.At) {
			about[c.Service.Name()] = true
		}
	}
	show := func(object any) {
		line, _ := json.Marshal(object)
		fmt.Fprintf(&text, "%s\n", line)
	}
	for name := range about {
		show(r.world.Services[name])
	}
	for _, s := range r.world.Slices {
		if about[serviceName(s.Slot)] {
			show(s)
		}
	}
	return text.String()
}

// mostShown is the maximum number of differences that a failure lists.
const mostShown = 30

// progress logs the progress and the estimated remaining time.
func (r *run) progress() {
	r.taken++
	if r.steps == 0 || r.taken%10 > 0 {
		return
	}
	took := time.Since(r.began)
	left := time.Duration(float64(took) / float64(r.taken) * float64(max(0, r.steps-r.taken)))
	r.t.Logf("%d of %d steps in %s, about %s left", r.taken, r.steps, took.Round(time.Second), left.Round(time.Second))
}

// keep writes the shortest failing sequence to a file that can be added to testdata.
func (r *run) keep(t *testing.T) {
	if r.failed == nil {
		return
	}
	text, err := json.MarshalIndent(r.failed, "", " ")
	must(t, err)
	file := filepath.Join(os.Getenv("LAB_OUT"), "failed.json")
	must(t, os.WriteFile(file, text, 0o644))
	t.Logf("the sequence that fails is in failed.json: put it into test/conformance/testdata under a name that says what it is about\n%s", text)
}

// report logs which entries of the table were used.
func (r *run) report(t *testing.T) {
	for _, d := range Differences {
		if r.used[d.What] == 0 {
			t.Logf("never met: %s", d.What)
		} else {
			t.Logf("met %d times: %s", r.used[d.What], d.What)
		}
	}
}
