//go:build e2e

package bench

import (
	"fmt"
	"slices"
	"testing"
)

// profiled writes a 20 s profile that begins together with a function.
func (r *run) profiled(file string, do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.keepProfile("profile?seconds=20", file)
	}()
	do()
	<-done
}

// TestIdle measures an idle program with all its checks, and a restart, and writes
// profiles. It is a part of TestBench for developers. With LABFLAGS=-icount a processor
// executes one instruction in a nanosecond, however busy the machine is.
func TestIdle(t *testing.T) {
	b := newBench(t)
	b.eachSize(func(t *testing.T, n int) {
		s := *byRoute
		s.args = append(slices.Clone(s.args), "--profiling")
		floors(t, b.results, n, false)
		floor, _ := b.results.Get(Kernel, Floor, n)
		t.Logf("raw floor: %s s", Round(floor)) // says how fast the machine is
		r := b.begin(t, &s, n)
		r.seldom("1h")
		r.coldStart()
		r.profiled(fmt.Sprintf("check-%d.prof", n), r.compare)
		r.seldom("30s")
		r.profiled(fmt.Sprintf("restart-%d.prof", n), func() { r.restart() })
		r.idle(0) // waits for the first comparison
		r.profiled(fmt.Sprintf("idle-%d.prof", n), func() { r.idle(idleTime) })
		r.log(ColdStart, KernelCPU, Memory, PeakMemory, Check, Restart, Rewrites, Idle, IdleChecked, IdleWork)
	})
}
