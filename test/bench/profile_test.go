//go:build e2e

package bench

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestProfile profiles a cold start and the memory of the process after it, and writes a
// page and the profiles.
func TestProfile(t *testing.T) {
	b := newBench(t)
	b.eachSize(b.profile)
}

func (b *bench) profile(t *testing.T, n int) {
	floors(t, b.results, n, false)
	least, _ := b.results.Get(Kernel, Floor, n)
	s := *byRoute
	s.args = append(slices.Clone(byRoute.args), "--profiling", "--ipvs-sync-period", "1h")
	r := b.begin(t, &s, n)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 2 {
			r.keepProfile("profile?seconds=15", fmt.Sprintf("cpu-%d-%d.prof", n, i))
		}
	}()
	seen := r.coldStart()
	cold, _ := b.results.Get(ColdStart, s.name, n)
	part, _ := b.results.Get(Kernel, s.name, n)
	used, _ := b.results.Get(KernelCPU, s.name, n)
	held, _ := b.results.Get(Memory, s.name, n)
	t.Logf("%d Services: cold start %.2f s, the kernel's part %.2f s (processor %.2f s), raw floor %.2f s, memory %.1f MB", n, cold, part, used, least, held)
	for _, what := range slices.SortedFunc(maps.Keys(seen.Spans), func(a, b string) int { return seen.Spans[a][0].Compare(seen.Spans[b][0]) }) {
		span := seen.Spans[what]
		t.Logf("%7.2f s to %7.2f s: %6d × %s", span[0].Sub(r.started).Seconds(), span[1].Sub(r.started).Seconds(), cmp.Or(seen.Writes[what], seen.Reads[what]), what)
	}
	t.Logf("%s", r.process.Log())
	<-done
	if n >= 10000 {
		r.profileRate()
	}
	r.keepProfile("heap?gc=1", fmt.Sprintf("heap-%d.prof", n))
	t.Logf("memory after a collection: %.1f MB", memory(t, r.process.PID()))
	text, _ := r.metrics()
	keep(t, fmt.Sprintf("metrics-%d.txt", n), text)
}

// profileRate profiles many changes.
func (r *run) profileRate() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.keepProfile("profile?seconds=20", fmt.Sprintf("cpu-rate-%d.prof", r.n))
	}()
	r.rate(20 * time.Second)
	<-done
	r.compare()
	r.t.Logf("memory after the changes: %.1f MB", memory(r.t, r.process.PID()))
	r.keepProfile("heap", fmt.Sprintf("heap-rate-%d.prof", r.n))
	r.atRate(20 * time.Second)
	r.compare()
	r.t.Logf("memory after as many again: %.1f MB", memory(r.t, r.process.PID()))
	for _, m := range []Measure{Rate, Overtaken, RateMedian, RateTail, Backlog} {
		value, _ := r.Get(m, r.subject.name, r.n)
		r.t.Logf("%s: %.1f", m.Name, value)
	}
}

// keepProfile writes one of the program's profiles to $LAB_OUT for go tool pprof, as soon
// as the program returns it.
func (s *site) keepProfile(profile, file string) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		response, err := s.pages.Get("http://127.0.0.1:10249/debug/pprof/" + profile)
		if err != nil {
			continue
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		if response.StatusCode == http.StatusOK {
			_ = os.WriteFile(filepath.Join(os.Getenv("LAB_OUT"), file), text, 0o644)
		}
		return
	}
}
