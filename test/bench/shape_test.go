//go:build e2e

package bench

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// The numbers of Services that are compared. With fewer, the fixed costs of a start would
// dominate.
const fewServices, someServices, manyServices = 100, 1000, 4000

// TestShapes fails if a cost grows with the number of Services that should not. It
// compares counts, and CPU times of a processor that counts its instructions: any other
// emulated processor accounts time in which other processes of the machine run.
func TestShapes(t *testing.T) {
	b := newBench(t)
	warmUp(t)
	costs := map[int]cost{}
	for _, n := range []int{fewServices, someServices, manyServices} {
		b.api.grow(n)
		t.Run(fmt.Sprint(n), func(t *testing.T) { costs[n] = b.shape(t, n) })
	}
	few, some, many := costs[fewServices], costs[someServices], costs[manyServices]
	t.Logf("costs: %+v", costs)
	if many.writes > few.writes*1.1 {
		t.Errorf("a change costs %.2f writes to the kernel with %d Services, and %.2f with %d", many.writes, manyServices, few.writes, fewServices)
	}
	// With 40 times as many Services, even a twentieth of a change's cost that grows with
	// them exceeds this limit.
	if many.cpu > few.cpu*5/2 {
		t.Errorf("a change costs %s of processor time with %d Services, and %s with %d", many.cpu, manyServices, few.cpu, fewServices)
	}
	if many.start > some.start*1.1 {
		t.Errorf("at the start a Service takes %.2f requests with %d, and %.2f with %d", many.start, manyServices, some.start, someServices)
	}
}

// mostIdle is the allowed cost of idle with all checks, in % of a processor that executes one
// instruction in a nanosecond, as the lab's does that counts instructions (-icount). Emulated
// without counting, a processor executes about a third of that, so this is the target, 1 % of
// an emulated core. The cost depends little on the number of Services, because comparisons
// are as much rarer as they are larger.
const mostIdle = 0.3

// cost holds the compared costs.
type cost struct {
	start  float64       // requests of the cold start, for each Service
	writes float64       // to the kernel, for one change
	cpu    time.Duration // for one change
}

// shape checks that operations without work write nothing, and returns the costs of the
// others.
func (b *bench) shape(t *testing.T, n int) cost {
	r := b.begin(t, byRoute, n)
	r.seldom("1h")
	r.limit = 10 * time.Minute
	seen := r.coldStart()
	c := r.changes()
	c.start = float64(seen.total()+sum(seen.Reads)) / float64(n)
	const first = 2 // the virtual servers of the API server and of DNS
	if before := seen.BeforeDNS; before > max(first, n/100) {
		t.Errorf("%d of %d virtual servers are written before that of DNS", before, n)
	}
	if n != manyServices {
		return c
	}
	r.compare()
	r.seldom("30s")
	if seen := r.restart(); seen.total() != 0 {
		t.Errorf("a restart with everything programmed writes to the kernel: %v", seen.Writes)
	}
	r.idle(idleTime / 3)
	idle, _ := b.results.Get(Idle, byRoute.name, n)
	checked, _ := b.results.Get(IdleChecked, byRoute.name, n)
	t.Logf("idle: %.2f %% of a core, with comparisons of everything %.2f %%", idle, checked)
	if checked > mostIdle {
		t.Errorf("with %d Services idle takes %.2f %% of a core, all checks included, want at most %.2f", n, checked, mostIdle)
	}
	seen = r.idle(5 * time.Second)
	if work, _ := b.results.Get(IdleWork, byRoute.name, n); work != 0 {
		t.Errorf("programs are run or the kernel is written to while nothing happens: %v", seen.Writes)
	}
	return c
}

// rounds is how often a hundred changes are made. The cheapest round counts, because
// garbage collection or a busy machine makes others more expensive.
const rounds = 4

// changes makes changes of a hundred Services, and checks that no more is written to the
// kernel than necessary.
func (r *run) changes() cost {
	r.t.Helper()
	tp := openTap(r.t, r.node.Namespace)
	pid := r.process.PID()
	r.account.by(pid)
	least := time.Duration(math.MaxInt64)
	for range rounds {
		tp.forget()
		before := cpu(r.t, pid)
		r.changeAll(tp, fewServices)
		least = min(least, cpu(r.t, pid)-before)
	}
	const total = rounds * fewServices
	r.drained(tp, total)
	seen := tp.close()
	if needed := 3 * total; seen.total()*10 > needed*11 {
		r.t.Errorf("%d changes need %d writes to the kernel, and %d were made: %v", total, needed, seen.total(), seen.Writes)
	}
	if programs := r.account.by(pid); sum(programs) > 0 {
		r.t.Errorf("programs are run for changes: %v", programs)
	}
	return cost{writes: float64(seen.total()) / total, cpu: least / fewServices}
}
