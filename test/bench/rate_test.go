//go:build e2e

package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestRate makes 1,000 changes a second for a minute, and measures the CPU time of the process
// for each. It writes profiles. With LABFLAGS=-icount a processor executes one instruction in a
// nanosecond, so the CPU time counts instructions; the API server outside is not counted.
// BENCH_PROGRAMS names the programs to measure, relative to the checkout.
func TestRate(t *testing.T) {
	b := newBench(t)
	b.eachSize(func(t *testing.T, n int) {
		for _, program := range strings.Fields(os.Getenv("BENCH_PROGRAMS")) {
			t.Run(filepath.Base(program), func(t *testing.T) { b.rateOf(t, program, n) })
		}
	})
}

func (b *bench) rateOf(t *testing.T, program string, n int) {
	s := *byRoute
	s.program = filepath.Join(os.Getenv("LAB_SRC"), program)
	s.args = append(slices.Clone(s.args), "--profiling")
	r := b.begin(t, &s, n)
	r.seldom("1h")
	r.coldStart()
	r.settled()
	profiles := make(chan struct{})
	go func() {
		defer close(profiles)
		for i := range 3 {
			r.keepProfile("profile?seconds=20", fmt.Sprintf("rate-%s-%d-%d.prof", filepath.Base(program), n, i))
		}
	}()
	before := cpu(t, r.process.PID())
	r.rate(time.Minute)
	used := cpu(t, r.process.PID()) - before
	<-profiles
	const changes = 60 * ratePerSecond
	t.Logf("CPU time of one change until the last one is in the kernel: %.3f ms", milliseconds(used)/changes)
	r.log(Rate, Overtaken, RateMedian, RateTail, Backlog)
	t.Logf("memory: %.1f MB, peak %.1f MB", memory(t, r.process.PID()), peakMemory(t, r.process.PID()))
}
