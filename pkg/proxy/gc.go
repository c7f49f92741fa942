package proxy

import (
	"math"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// restingGC is the heap growth in percent that triggers a garbage collection after
// start-up. Little garbage arises then: with Go's default of 100 the heap would hold
// about as much unused as used memory.
const restingGC = 50

// leastGrowth is how much the heap of an idle process may always grow, in bytes. A comparison with the
// kernel leaves a megabyte or two of garbage even if there are few Services. With less, each would
// cause several collections, which together took more time than it.
const leastGrowth = 8 << 20

// idleAfter is the time without a pass after which the process is idle. It is less than the two
// minutes after which the runtime collects without need.
const idleAfter = 100 * time.Second

// collector sets how the runtime collects garbage: as often as by default during start-up, then as
// restingGC says. While the process is idle, the runtime does not collect every two minutes. With
// 44,125 Services that took most of an idle node's CPU time. The heap still grows by no more than
// restingGC, or leastGrowth.
//
// It changes nothing if GOGC or GOMEMLIMIT is set.
type collector struct {
	enabled bool
	worked  time.Time // when the last pass began
	idle    bool      // written by the loop only

	mu      sync.Mutex // for idle and paused
	paused  bool       // no collection takes place without need
	freeing sync.WaitGroup
}

// started ends the settings for start-up, and frees memory in the background.
func (c *collector) started() {
	defer freeMemory()
	if chosen := debug.SetGCPercent(restingGC); chosen != 100 {
		debug.SetGCPercent(chosen)
		return
	}
	c.enabled, c.worked = debug.SetMemoryLimit(-1) == math.MaxInt64, time.Now()
}

// restAt returns when the process will be idle if it does nothing until then, or zero if it is
// idle.
func (c *collector) restAt() time.Time {
	if !c.enabled || c.idle {
		return time.Time{}
	}
	return c.worked.Add(idleAfter)
}

// restIfDue pauses collections if the process is idle. It frees memory first, in the background.
func (c *collector) restIfDue(now time.Time) {
	if at := c.restAt(); at.IsZero() || now.Before(at) {
		return
	}
	c.mu.Lock()
	c.idle = true
	c.mu.Unlock()
	c.freeing.Go(func() {
		debug.FreeOSMemory()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.idle {
			c.paused = true
			debug.SetMemoryLimit(idleLimit())
			debug.SetGCPercent(-1)
		}
	})
}

// work is called before the process does something.
func (c *collector) work(now time.Time) {
	c.worked = now
	if !c.idle {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = false
	if c.paused {
		c.paused = false
		debug.SetGCPercent(restingGC)
		debug.SetMemoryLimit(math.MaxInt64)
	}
}

// idleLimit returns the memory in bytes that the process has when the heap has grown as far as it
// may. It is called after a collection.
func idleLimit() int64 {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	total, released, live := samples[0].Value.Uint64(), samples[1].Value.Uint64(), samples[2].Value.Uint64()
	return int64(total - released + max(live*restingGC/100, leastGrowth))
}

// freeMemory returns memory to the system after a large read. Otherwise it stays
// allocated until the heap grows to that size again, which may never happen. It forces
// a garbage collection, in the background.
func freeMemory() { go debug.FreeOSMemory() }
