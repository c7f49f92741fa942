package judge

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Runner runs specs and records their verdicts.
type Runner struct {
	Tests   *Tests
	Results *Results
	// Parallel is the number of specs that run at once, except those that must run alone.
	Parallel int
	// Nodes is the number of nodes in the cluster.
	Nodes int
	Log   func(format string, args ...any)

	mu          sync.Mutex
	begin       time.Time
	done, total int
	errs        []error
}

// alone reports whether a spec must be the only one: because it disturbs others, or
// because it counts answers while Pods start. On busy nodes, Pods are ready before they
// listen.
func alone(name string) bool {
	return strings.Contains(name, "[Serial]") || strings.Contains(name, "[Disruptive]") ||
		strings.Contains(name, "connectivity disruption during rolling update")
}

// Run runs each spec until it has a verdict, and skips those that have one. Specs without
// a verdict of any build run first, because they are the most informative.
func (r *Runner) Run(ctx context.Context, names []string) error {
	var together, apart []string
	for _, name := range r.Results.unknownFirst(names) {
		switch {
		case r.Results.verdict(name).settled(r.Nodes):
		case alone(name):
			apart = append(apart, name)
		default:
			together = append(together, name)
		}
	}
	r.begin, r.total = time.Now(), len(together)+len(apart)
	r.Log("%d specs, of which %d have their verdict already", len(names), len(names)-r.total)
	r.each(ctx, r.Parallel, together)
	r.each(ctx, 1, apart)
	return errors.Join(append(r.errs, ctx.Err())...)
}

func (r *Runner) each(ctx context.Context, parallel int, names []string) {
	queue := make(chan string)
	var workers sync.WaitGroup
	for range parallel {
		workers.Go(func() {
			for name := range queue {
				r.settle(ctx, name)
			}
		})
	}
	for _, name := range names {
		if ctx.Err() == nil {
			queue <- name
		}
	}
	close(queue)
	workers.Wait()
}

// settle runs a spec until its verdict is final.
func (r *Runner) settle(ctx context.Context, name string) {
	for verdict := r.Results.verdict(name); !verdict.settled(r.Nodes) && ctx.Err() == nil; {
		attempt, err := r.Tests.Run(ctx, name)
		attempt.Nodes = r.Nodes
		if err == nil {
			verdict, err = r.Results.add(name, attempt)
		}
		if err != nil {
			r.fail(name, err)
			return
		}
		if verdict.settled(r.Nodes) {
			r.progress(name, verdict)
		}
	}
}

func (r *Runner) fail(name string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errs = append(r.errs, fmt.Errorf("%s: %w", name, err))
}

func (r *Runner) progress(name string, verdict Verdict) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done++
	left := time.Since(r.begin) / time.Duration(r.done) * time.Duration(r.total-r.done)
	r.Log("%d of %d, about %s left: %s %s %s", r.done, r.total, left.Round(time.Second), verdict.State(), name, verdict.Reason())
}
