//go:build e2e

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// run is one run of the measurements, of one subject with one number of Services.
type run struct {
	*site
	*Results
	api     *api
	account *account
	n       int           // Services
	foreign int           // added foreign virtual servers
	reading time.Duration // of the kernel by the last comparison
	limit   time.Duration
	// counting is true on a processor that executes one instruction in a nanosecond.
	counting bool
}

func (r *run) put(m Measure, value float64) { r.Put(m, r.subject.name, r.n, value) }

// count stores a CPU time in milliseconds as millions of instructions. It does nothing on a processor
// that does not count them.
func (r *run) count(m Measure, value float64) {
	if r.counting {
		r.put(m, value)
	}
}

// log prints figures.
func (r *run) log(measures ...Measure) {
	for _, m := range measures {
		v, measured := r.Get(m, r.subject.name, r.n)
		r.t.Logf("%s: %s %s (%t)", m.Name, Round(v), m.Unit, measured)
	}
}

// floors measures the minimum that the kernel needs, with VIPs as addresses or as routes.
func floors(t testing.TB, results *Results, n int, addresses bool) {
	t.Helper()
	vips := map[string]func(int) error{Floor: floorRoutes}
	if addresses {
		vips[FloorAddresses] = floorAddresses
	}
	for subject, local := range vips {
		node := lab.New(t).Namespace("floor")
		total := 0.0
		for _, part := range []struct {
			measure Measure
			write   func(int) error
		}{{FloorIPVS, floorIPVS}, {FloorSets, floorSets}, {FloorVIPs, local}} {
			begin := time.Now()
			must(t, node.Do(func() error { return part.write(n) }))
			took := time.Since(begin).Seconds()
			results.Put(part.measure, subject, n, took)
			total += took
		}
		results.Put(Kernel, subject, n, total)
	}
}

// coldStart starts the program on an empty node and returns the requests that it sends to
// the kernel.
func (r *run) coldStart() (seen tally) {
	r.t.Helper()
	seen = r.startTapped()
	if seen := r.sees(); seen < r.n {
		r.t.Fatalf("%s has programmed %d of %d Services:\n%s", r.subject.name, seen, r.n, r.process.Log())
	}
	if !seen.DNS.IsZero() { // otherwise the write was too large to be captured completely
		r.put(FirstDNS, seen.DNS.Sub(r.started).Seconds())
	}
	r.put(Programs, float64(sum(r.account.by(r.process.PID()))))
	r.put(Memory, memory(r.t, r.process.PID()))
	r.put(PeakMemory, peakMemory(r.t, r.process.PID()))
	return seen
}

// startTapped starts the program, and measures the time and the CPU time of writing to
// the kernel separately from the time before.
func (r *run) startTapped() tally {
	r.t.Helper()
	tp := openTap(r.t, r.node.Namespace)
	kernel := kernelMemoryAtRest(r.t)
	defer func() { r.put(KernelMemory, kernelMemory(r.t)-kernel) }()
	r.start()
	if r.subject.peer {
		r.put(ColdStart, r.passed(r.limit).Sub(r.started).Seconds())
		return tp.close()
	}
	tp.await(r.limit, func(t tally) bool { return !t.First.IsZero() })
	tp.hold()
	before := cpu(r.t, r.process.PID())
	ended := r.passed(r.limit)
	used := cpu(r.t, r.process.PID()) - before
	r.put(KernelCPU, used.Seconds())
	r.count(KernelCounted, milliseconds(used))
	r.put(ColdStart, ended.Sub(r.started).Seconds())
	seen := tp.close()
	r.put(Kernel, ended.Sub(seen.First).Seconds())
	return seen
}

// oneChange changes endpoints one after the other and measures each change.
func (r *run) oneChange(samples int) {
	r.t.Helper()
	took, wrote := r.oneByOne(samples)
	r.put(OneMedian, Percentile(took, 0.5))
	r.put(OneTail, Percentile(took, 0.99))
	if samples >= 1000 {
		r.put(OneWorst, Percentile(took, 0.999))
	}
	r.put(APIWrite, Percentile(wrote, 0.5))
}

// oneByOne changes endpoints one after the other. It returns how long each change took until
// it was in the kernel, and until it was answered by the API server, in milliseconds.
func (r *run) oneByOne(samples int) (took, wrote []float64) {
	r.t.Helper()
	tp := openTap(r.t, r.node.Namespace)
	defer tp.close()
	for i := range samples {
		time.Sleep(r.subject.pause)
		change := r.api.renewal(i * 7 % r.n)
		tp.forget()
		tp.expect(change.address, true)
		begin := time.Now()
		must(r.t, r.api.write(r.t.Context(), change))
		wrote = append(wrote, milliseconds(time.Since(begin)))
		times, ok := tp.met(r.limit)
		if !ok {
			r.t.Fatalf("%s has not programmed %s", r.subject.name, change.address)
		}
		took = append(took, milliseconds(times[change.address].Sub(begin)))
	}
	r.drained(tp, samples)
	return took, wrote
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// restarted is the number of pods that a rolling restart replaces.
const restarted = 500

// rolling replaces pods and counts the requests to the kernel.
func (r *run) rolling() {
	r.t.Helper()
	tp := openTap(r.t, r.node.Namespace)
	r.account.by(r.process.PID())
	before := cpu(r.t, r.process.PID())
	r.changeAll(tp, min(restarted, r.n))
	r.count(ChangeCPU, milliseconds(cpu(r.t, r.process.PID())-before)/float64(min(restarted, r.n)))
	r.drained(tp, min(restarted, r.n))
	seen := tp.close()
	r.put(Rolling, float64(seen.total()))
	r.put(HotPath, float64(sum(r.account.by(r.process.PID()))))
}

// drained waits until kube-ipvs has deleted a number of draining real servers, so that no
// later measurement includes that.
func (r *run) drained(tp *tap, count int) {
	r.t.Helper()
	if !r.subject.peer && !tp.await(r.limit, func(t tally) bool { return t.Writes[goneReal] >= count }) {
		r.t.Fatalf("%s keeps real servers that nobody wants", r.subject.name)
	}
}

// changeAll changes one endpoint of each of a number of Services.
func (r *run) changeAll(tp *tap, services int) {
	r.t.Helper()
	changes := make([]renewal, services)
	for i := range changes {
		changes[i] = r.api.renewal(i)
		tp.expect(changes[i].address, true)
	}
	r.api.parallel(0, services, func(ctx context.Context, i int) error { return r.api.write(ctx, changes[i]) })
	if times, ok := tp.met(r.limit); !ok {
		r.t.Fatalf("%s has programmed %d of %d changes", r.subject.name, len(times), services)
	}
}

// ratePerSecond is the requested rate of changes.
const ratePerSecond = 1000

// rateLimit is the maximum time to wait for the last change.
const rateLimit = 5 * time.Minute

// perWrites is the number of changes in one write to etcd. They share a revision, which changes through
// the API server never do. If the API server ends a watch within them, because the client is slow, the
// watch resumes after the revision, and the client does not learn of the others. Then atRate fails: on a
// machine with other load this happens.
const perWrites = 50

// rate makes changes at ratePerSecond and measures when each one is in the kernel.
func (r *run) rate(duration time.Duration) {
	r.t.Helper()
	began, times := r.atRate(duration)
	made := len(began)
	last := began[made-1].at
	var took []float64
	latest := last
	for _, c := range began {
		if at, written := times[c.address]; written {
			took = append(took, milliseconds(at.Sub(c.at)))
			latest = later(latest, at)
		}
	}
	r.put(Rate, float64(made)/last.Sub(began[0].at).Seconds())
	r.put(Overtaken, 100*float64(made-len(took))/float64(made))
	r.put(RateMedian, Percentile(took, 0.5))
	r.put(RateTail, Percentile(took, 0.99))
	r.put(Backlog, milliseconds(latest.Sub(last)))
}

// atRate makes changes at ratePerSecond and returns when each one was in the kernel. It
// writes them to etcd in batches, because sixteen API clients on an emulated machine make
// only ninety a second. A change that is still pending when the next change of its
// Service arrives is planned together with it and never appears in the kernel: it was
// overtaken.
func (r *run) atRate(duration time.Duration) ([]begun, map[netip.Addr]time.Time) {
	r.t.Helper()
	writes := r.api.prepare(r.n, int(duration.Seconds())*ratePerSecond)
	tp := openTap(r.t, r.node.Namespace)
	tp.hold()
	began := r.keepRate(writes, duration)
	for i, c := range began {
		tp.expect(c.address, i+r.n >= len(began))
	}
	tp.release()
	times, ok := tp.met(rateLimit)
	if seen := tp.close(); !ok || seen.Dropped {
		r.t.Fatalf("%s: the last change of %d of %d Services is not programmed, or was not seen (%t); the kernel has %d of them",
			r.subject.name, tp.missing, r.n, seen.Dropped, r.programmed(tp.unseen()))
	}
	return began, times
}

// programmed returns how many of some endpoints the kernel has with a weight: those were written, but not
// captured. The kernel does not pass all requests to the tap if memory is fragmented (netlink_to_full_skb).
func (r *run) programmed(endpoints []netip.Addr) int {
	n, list := 0, r.node.Exec("ipvsadm", "-Sn")
	for _, a := range endpoints {
		if strings.Contains(list, " -r "+a.String()+":8000 -m -w 1") {
			n++
		}
	}
	return n
}

var drainingServers = regexp.MustCompile(`(?m)^kube_ipvs_draining_real_servers (\S+)$`)

// undrained waits until no real server drains, so that the next measurement does not
// include their deletion.
func (r *run) undrained() {
	r.t.Helper()
	r.eventually(r.limit, r.subject.name+" drains nothing", func() error {
		text, err := r.metrics()
		if err != nil {
			return err
		}
		if found := drainingServers.FindStringSubmatch(text); found == nil || found[1] != "0" {
			return fmt.Errorf("draining real servers: %v", found)
		}
		return nil
	})
}

// begun is a requested change.
type begun struct {
	address netip.Addr // the new endpoint
	at      time.Time
}

// keepRate makes changes at ratePerSecond for a duration, each of another Service, and
// returns when it requested each one.
func (r *run) keepRate(writes []writing, duration time.Duration) []begun {
	r.t.Helper()
	var began []begun
	begin := time.Now()
	for i, w := range writes {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * perWrites * time.Second / ratePerSecond)))
		now := time.Now()
		if now.Sub(begin) > duration {
			break
		}
		for _, address := range w.addresses {
			began = append(began, begun{address, now})
		}
		must(r.t, send("txn", w.body))
	}
	return began
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// dropDrained deletes the draining real servers while the program is stopped. Otherwise the
// program would delete them over many minutes; see pace in pkg/reconcile.
func (r *run) dropDrained() {
	r.t.Helper()
	r.stop()
	r.node.Exec("sh", "-c", "ipvsadm -Sn | sed -n '/ -w 0$/s/^-a \\(-. [^ ]* -r [^ ]*\\) .*/-d \\1/p' | ipvsadm -R")
	r.start()
	r.passed(r.limit)
	r.settled()
	r.undrained()
}

// restart restarts the program while the kernel has the complete desired state.
func (r *run) restart() tally {
	r.t.Helper()
	r.stop()
	tp := openTap(r.t, r.node.Namespace)
	r.start()
	r.put(Restart, r.passed(r.limit).Sub(r.started).Seconds())
	seen := tp.close()
	r.put(Rewrites, float64(seen.total()))
	return seen
}

// emptied deletes all virtual servers and measures how long their repair takes.
func (r *run) emptied() {
	r.t.Helper()
	r.settled()
	tp := openTap(r.t, r.node.Namespace)
	begin := time.Now()
	r.node.Exec("ipvsadm", "-C")
	if !tp.await(r.limit, func(t tally) bool { return t.Writes[newReal] >= r.n*endpointsOfEach }) {
		r.t.Fatalf("%s has not put back what was deleted", r.subject.name)
	}
	r.put(Emptied, tp.close().Spans[newReal][1].Sub(begin).Seconds())
}

var comparisons = regexp.MustCompile(`(?m)^kube_ipvs_compare_duration_seconds_(sum|count) (\S+)$`)

// compared returns the number of comparisons with the kernel, and the time that reading it
// took in all of them.
func (r *run) compared() (count float64, reading time.Duration) {
	text, err := r.metrics()
	if err != nil {
		return 0, 0
	}
	for _, found := range comparisons.FindAllStringSubmatch(text, -1) {
		n, _ := strconv.ParseFloat(found[2], 64)
		if found[1] == "count" {
			count = n
		} else {
			reading = time.Duration(n * float64(time.Second))
		}
	}
	return count, reading
}

// compare adds a foreign virtual server, which triggers a full comparison, waits for the
// end of the comparison and measures its CPU time. No other comparison may run at that
// time.
func (r *run) compare() {
	r.t.Helper()
	r.settled()
	pid := r.process.PID()
	count, reading := r.compared()
	before := cpu(r.t, pid)
	r.foreign++
	r.node.Exec("ipvsadm", "-A", "-t", fmt.Sprintf("192.0.2.1:%d", r.foreign), "-s", "rr")
	r.eventually(r.limit, r.subject.name+" has compared the kernel", func() error {
		if n, _ := r.compared(); n == count {
			return fmt.Errorf("%v comparisons", count)
		}
		return nil
	})
	_, after := r.compared()
	r.reading = after - reading
	r.settled()
	check := cpu(r.t, pid) - before
	r.put(Check, check.Seconds())
	r.count(CheckCounted, milliseconds(check))
}

// checkPeriod returns the default time between two full comparisons, as in pkg/reconcile: 30
// s for each 2,000 entries, up to 20 minutes, but at least 300 times what it takes to read
// the kernel, up to an hour. A Service of the benchmark has three entries.
func checkPeriod(services int, reading time.Duration) time.Duration {
	bySize := 30 * time.Second * time.Duration(min(1+3*services/2000, 40))
	return max(bySize, min(300*reading, time.Hour))
}

// idleTime includes the garbage collection that kube-ipvs makes when it becomes idle, two of those
// that the Go runtime makes every two minutes in other idle programs, and eight of the checks every
// 30 s.
const idleTime = 250 * time.Second

// peerIdleTime includes four of the periodic syncs of kube-proxy, and one of the collections that the
// Go runtime makes every two minutes.
const peerIdleTime = 130 * time.Second

// idle measures an idle program with its checks every second and every 30 s, after the
// first full comparison since its start. It adds the proportional cost of a full
// comparison, which was measured before.
func (r *run) idle(duration time.Duration) tally {
	r.t.Helper()
	if !r.subject.peer {
		r.eventually(r.limit, r.subject.name+" has compared the kernel", func() error {
			if n, _ := r.compared(); n == 0 {
				return errors.New("no comparison so far")
			}
			return nil
		})
	}
	r.settled()
	pid := r.process.PID()
	tp := openTap(r.t, r.node.Namespace)
	r.account.by(pid)
	before := cpu(r.t, pid)
	time.Sleep(duration)
	used := cpu(r.t, pid) - before
	seen := tp.close()
	idle := 100 * used.Seconds() / duration.Seconds()
	r.put(Idle, idle)
	if check, measured := r.Get(Check, r.subject.name, r.n); measured {
		checked := idle
		if period := checkPeriod(r.n, r.reading); period > duration { // otherwise the comparisons took place
			checked += 100 * check / period.Seconds()
		}
		r.put(IdleChecked, checked)
		r.count(IdleCounted, 10*checked) // 1 % of 1,000 million
	} else if r.subject.peer {
		r.put(IdleChecked, idle)
	}
	r.put(IdleWork, float64(seen.total()+sum(r.account.by(pid))))
	return seen
}

// settled waits until the program has used almost no CPU time for a while.
func (r *run) settled() {
	r.t.Helper()
	r.eventually(r.limit, r.subject.name+" has nothing to do", func() error {
		before := cpu(r.t, r.process.PID())
		time.Sleep(2 * time.Second)
		if used := cpu(r.t, r.process.PID()) - before; used > 100*time.Millisecond {
			return fmt.Errorf("it has used %s in 2 s", used)
		}
		return nil
	})
}
