package reconcile

import (
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// startLarge starts a world with many Services.
func startLarge(t testing.TB, services int) *world {
	w := newWorld(t)
	w.order = nil
	w.start()
	for n := range services {
		w.set(numbered(n))
		if n%256 == 255 || n == services-1 {
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return w
}

// TestStatePeriodGrowsWithSize checks that the time between two comparisons grows
// with the size of the state, up to maxPeriods.
func TestStatePeriodGrowsWithSize(t *testing.T) {
	for services, want := range map[int]int{0: 1, 10: 1, 3000: 4} { // each has a virtual server and one or two members
		r := startLarge(t, services).reconciler
		if got := int(r.statePeriod(r.stateEntries()) / r.periods.Sync); got < want || got > want+1 {
			t.Errorf("%d Services: every %d periods, want %d", services, got, want)
		}
	}
}

// TestStatePeriodGrowsWithReading checks that a node where reading the kernel is slow
// compares a large state less often, but at least once per maxStatePeriod.
func TestStatePeriodGrowsWithReading(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	r := w.reconciler
	if r.stateTook = time.Minute; r.statePeriod(r.stateEntries()) != r.periods.Sync {
		t.Errorf("a small state is compared every %s, want %s", r.statePeriod(r.stateEntries()), r.periods.Sync)
	}
	r.servers.existing = stateSize
	for took, want := range map[time.Duration]time.Duration{
		time.Millisecond: 2 * r.periods.Sync, time.Second: stateShare * time.Second, time.Minute: maxStatePeriod,
	} {
		if r.stateTook = took; r.statePeriod(r.stateEntries()) != want {
			t.Errorf("after a reading of %s the period is %s, want %s", took, r.statePeriod(r.stateEntries()), want)
		}
	}
}

// TestForeignRulesChangeConstantly makes another program change its rules again and
// again. After a few comparisons without differences, comparisons become less frequent,
// until one finds a difference or a deletion is reported.
func TestForeignRulesChangeConstantly(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	r, now := w.reconciler, time.Now()
	// compared reports changes of rules every second for a while and counts the comparisons.
	compared := func(seconds int) (n int) {
		for range seconds {
			now = now.Add(time.Second)
			for e, step := (External{Rules: true}), true; step; e, step = (External{}), r.resync != nil {
				if done := r.Step(now, e); done.Compared != nil {
					n++
				}
				if r.ready != nil {
					<-r.ready
				}
			}
		}
		return n
	}
	if n := compared(60); n < 4 || n > 9 {
		t.Errorf("%d comparisons in a minute", n)
	}
	if n := compared(60); n > 4 {
		t.Errorf("%d comparisons in the next minute", n)
	}
	r.Step(now, External{MaybeDeleted: true})
	if n := compared(6); n < 2 {
		t.Errorf("%d comparisons after a deletion", n)
	}
}

// BenchmarkSpotCheck measures a spot check, which runs once a second. Its cost grows with the
// number of virtual servers; the kernel's own part is not included.
func BenchmarkSpotCheck(b *testing.B) {
	r := startLarge(b, 10000).reconciler
	b.ReportAllocs()
	for b.Loop() {
		if r.spotChecker.differs() != (extent{}) {
			b.Fatal("something differs")
		}
	}
}

// BenchmarkCompare compares a reading of the kernel that has no differences. A change
// waits for at most one step; the longest step is reported.
func BenchmarkCompare(b *testing.B) {
	r := startLarge(b, 10000).reconciler
	var longest time.Duration
	pieces := 0
	for b.Loop() {
		b.StopTimer()
		o, err := r.beginObserve(everything)()
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		began := time.Now()
		d := r.beginResync(o)
		for more := true; more; began = time.Now() {
			more = d.step()
			longest = max(longest, time.Since(began))
			pieces++
		}
		if n := d.end(); n != 0 {
			b.Fatalf("%d differences", n)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(pieces), "ns/piece")
	b.ReportMetric(float64(longest.Nanoseconds()), "ns/longest")
}

// comparison lets the next comparison begin at a time, and returns what it read. It must find
// no difference.
func (w *world) comparison(t *testing.T, now time.Time) extent {
	t.Helper()
	r := w.reconciler
	vips := r.vips.existing
	for range 1000 {
		done := r.Step(now, External{})
		if r.ready != nil {
			<-r.ready
		}
		if c := done.Compared; c != nil {
			if c.Differences != 0 || r.vips.existing != vips {
				t.Errorf("%d differences, %d VIPs, want %d", c.Differences, r.vips.existing, vips)
			}
			return r.readExtent
		}
	}
	t.Fatal("nothing is compared")
	return extent{}
}

// TestSetsAreNotReadForAVirtualServer: after a spot check that finds virtual servers missing, only
// virtual servers are read, and those of other programs stay.
func TestSetsAreNotReadForAVirtualServer(t *testing.T) {
	w := startLarge(t, 10)
	w.reconciler.Prune()
	foreign := key(ip.TCP, "192.0.2.1:1")
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: foreign, VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
	now := time.Now().Add(spotCheckPeriod)
	if got := w.comparison(t, now); got != (extent{servers: true}) {
		t.Errorf("a comparison reads %+v, want only virtual servers", got)
	}
	if s, err := w.IPVS.Observe(); err != nil || len(s) != 11 || s[foreign].Scheduler == "" {
		t.Errorf("%d virtual servers (%v), want ours and the foreign one", len(s), err)
	}
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: foreign}})
	for s := range w.reconciler.servers.allExisting() {
		w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: s.key}})
	}
	now = now.Add(w.reconciler.periods.Sync / 2)
	w.repaired(t, now, 10)
	if s, err := w.IPVS.Observe(); err != nil || len(s) != 10 {
		t.Errorf("%d virtual servers (%v), want 10", len(s), err)
	}
}

// repaired lets the reconciler repair a number of differences, and fails if it reads sets for that.
func (w *world) repaired(t *testing.T, now time.Time, differences int) {
	t.Helper()
	for range 1000 {
		done := w.reconciler.Step(now, External{})
		if w.reconciler.ready != nil {
			<-w.reconciler.ready
		}
		if c := done.Compared; c != nil {
			if c.Differences != differences || w.reconciler.readExtent.sets {
				t.Errorf("%d differences, reads %+v; want %d, without sets", c.Differences, w.reconciler.readExtent, differences)
			}
			return
		}
	}
	t.Fatal("nothing is compared")
}

// TestRoutingIsReadWhenItMayHaveChanged: what package routing knows is compared with the
// state on a small node. On a large one it is compared with the first comparison, after a
// report that anything may have been deleted, and rarely besides. VIPs that are not read must
// not count as deleted.
func TestRoutingIsReadWhenItMayHaveChanged(t *testing.T) {
	for services, small := range map[int]bool{10: true, 3000: false} { // each has three entries
		w := startLarge(t, services)
		r := w.reconciler
		r.Prune()
		now := time.Now()
		for i, want := range []bool{true, small, small} {
			if got := w.comparison(t, now.Add(time.Duration(1+10*i)*r.periods.Sync)); !got.sets || got.routing != want {
				t.Errorf("%d Services: comparison %d reads %+v, want routing: %t", services, 1+i, got, want)
			}
		}
		now = now.Add(22 * r.periods.Sync)
		r.Step(now, External{MaybeDeleted: true})
		if got := w.comparison(t, now); !got.sets || !got.routing {
			t.Errorf("%d Services: after a deletion, a comparison reads %+v", services, got)
		}
		if got := w.comparison(t, now.Add(maxPeriods*r.periods.Sync)); !got.routing {
			t.Errorf("%d Services: after %d periods, a comparison reads %+v", services, maxPeriods, got)
		}
	}
}
