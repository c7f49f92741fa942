package proxy

import (
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

// gcSettings returns GOGC, or MaxUint64 if it is off, and the memory limit.
func gcSettings() (percent, limit uint64) {
	samples := []metrics.Sample{{Name: "/gc/gogc:percent"}, {Name: "/gc/gomemlimit:bytes"}}
	metrics.Read(samples)
	return samples[0].Value.Uint64(), samples[1].Value.Uint64()
}

// TestCollector: an idle process collects garbage only when its heap has grown by half, and a
// working one as usual.
func TestCollector(t *testing.T) {
	t.Cleanup(func() { debug.SetGCPercent(100); debug.SetMemoryLimit(math.MaxInt64) })
	debug.SetGCPercent(100)
	debug.SetMemoryLimit(math.MaxInt64)
	expect := func(when string, ok func(percent, limit uint64) bool) {
		t.Helper()
		if percent, limit := gcSettings(); !ok(percent, limit) {
			t.Errorf("%s: GOGC is %d, the limit %d", when, percent, limit)
		}
	}
	asUsual := func(percent, limit uint64) bool { return percent == restingGC && limit == math.MaxInt64 }
	c := &collector{}
	c.started()
	expect("after the start", asUsual)
	began := c.worked
	c.restIfDue(began.Add(idleAfter / 2))
	if c.idle || c.restAt() != began.Add(idleAfter) {
		t.Error("idle before its time")
	}
	for range 2 {
		c.restIfDue(c.worked.Add(idleAfter))
		c.freeing.Wait()
		expect("idle", func(percent, limit uint64) bool {
			used := uint64(idleLimit())
			return int32(percent) == -1 && limit > used/2 && limit < 2*used
		})
		if !c.restAt().IsZero() {
			t.Error("an idle process is to rest again")
		}
		c.work(time.Now())
		expect("after work", asUsual)
	}
	c.restIfDue(c.worked.Add(idleAfter))
	c.work(time.Now()) // perhaps before memory was freed
	c.freeing.Wait()
	expect("after a short rest", asUsual)
}

// TestCollectorSparesSmallHeaps: where little is live, the garbage of a comparison with the kernel
// does not cause a collection each time.
func TestCollectorSparesSmallHeaps(t *testing.T) {
	t.Cleanup(func() { debug.SetGCPercent(100); debug.SetMemoryLimit(math.MaxInt64) })
	debug.SetGCPercent(100)
	debug.SetMemoryLimit(math.MaxInt64)
	c := &collector{}
	c.started()
	c.restIfDue(c.worked.Add(idleAfter))
	c.freeing.Wait()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const comparisons, garbage = 4, 1 << 20
	for range comparisons {
		for range garbage / 1024 {
			dropped = make([]byte, 1024)
		}
	}
	if runtime.ReadMemStats(&after); after.NumGC-before.NumGC > 1 {
		t.Errorf("%d collections for %d comparisons", after.NumGC-before.NumGC, comparisons)
	}
	c.work(time.Now())
}

var dropped []byte

// TestCollectorIsTold: settings of the environment stay.
func TestCollectorIsTold(t *testing.T) {
	t.Cleanup(func() { debug.SetGCPercent(100); debug.SetMemoryLimit(math.MaxInt64) })
	for _, set := range []struct {
		percent int
		limit   int64
	}{{80, math.MaxInt64}, {100, 1 << 40}} {
		debug.SetGCPercent(set.percent)
		debug.SetMemoryLimit(set.limit)
		c := &collector{}
		c.started()
		if c.restIfDue(time.Now().Add(time.Hour)); c.idle {
			t.Errorf("GOGC=%d and a limit of %d are changed", set.percent, set.limit)
		}
	}
}
