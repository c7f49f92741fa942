//go:build e2e

package bench

import (
	"fmt"
	"testing"
	"time"
)

// progress runs the queued measurements and estimates the remaining time from the ratio
// of actual to expected durations.
type progress struct {
	steps []step
	keep  func(done, all int) // called after each step, so that a run that is stopped leaves what it has
}

type step struct {
	name    string
	seconds float64 // expected
	do      func(*testing.T)
}

func (p *progress) add(name string, seconds float64, do func(*testing.T)) {
	p.steps = append(p.steps, step{name, seconds, do})
}

// run continues after a failed step. The figures of that step are then missing.
func (p *progress) run(t *testing.T) {
	begin := time.Now()
	total, done := 0.0, 0.0
	for _, s := range p.steps {
		total += s.seconds
	}
	for i, s := range p.steps {
		took := time.Since(begin)
		left := time.Duration((total - done) * float64(time.Second))
		if done > 0 {
			left = time.Duration(float64(took) * (total - done) / done)
		}
		fmt.Printf("bench: [%6.0fs] %d of %d: %s; about %s left\n", took.Seconds(), i+1, len(p.steps), s.name, left.Round(10*time.Second))
		t.Run(s.name, s.do)
		done += s.seconds
		p.keep(i+1, len(p.steps))
	}
	fmt.Printf("bench: [%6.0fs] done\n", time.Since(begin).Seconds())
}
