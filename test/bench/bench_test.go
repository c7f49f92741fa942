//go:build e2e

package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestBench measures everything except what TestCounted counts, and writes a page and a plot to $LAB_OUT.
func TestBench(t *testing.T) {
	sizes, peerSizes := numbers(t, "BENCH_SIZES"), numbers(t, "BENCH_PEER_SIZES")
	results := NewResults()
	describe(results, sizes, peerSizes)
	write := func(done, all int) {
		results.Fact("ended", now())
		results.Fact("done", fmt.Sprintf("%d of %d parts", done, all))
		keep(t, "measurements.md", results.Markdown(Targets(peerSizes, slices.Max(sizes))))
		keep(t, "measurements.svg", results.SVG())
	}
	b := newBench(t)
	b.results, b.progress = results, &progress{keep: write}
	b.progress.add("warming up", 30, warmUp)
	all := slices.Compact(slices.Sorted(slices.Values(slices.Concat(sizes, peerSizes))))
	for _, n := range all {
		b.plan(n, slices.Contains(sizes, n), slices.Contains(peerSizes, n))
	}
	b.progress.add(fmt.Sprintf("%d mixed Services", mixedServices), 150, func(t *testing.T) {
		b.api.replace(mixedServices, mixedService)
		b.mixed(t)
	})
	b.progress.add(fmt.Sprintf("%d Services of %d endpoints", wideServices, wideEndpoints), 900, func(t *testing.T) {
		b.api.replace(wideServices, wideService)
		b.wideStarts(t, wideServices)
	})
	b.progress.run(t)
}

// The numbers of Services with which their cold starts are measured: mixed ones, and those of 50 endpoints each.
const mixedServices, wideServices = 10000, 5000

// mixed measures a start with mixed Services.
func (b *bench) mixed(t *testing.T) {
	r := b.begin(t, byRoute, mixedServices)
	kernel := kernelMemoryAtRest(t)
	r.start()
	r.put(MixedStart, r.passed(r.limit).Sub(r.started).Seconds())
	r.put(MixedCPU, cpu(t, r.process.PID()).Seconds())
	r.put(MixedMemory, memory(t, r.process.PID()))
	r.put(MixedPeak, peakMemory(t, r.process.PID()))
	r.put(MixedKernelMemory, kernelMemory(t)-kernel)
}

// warmUp loads the programs and the kernel's modules, so that the first measurement does
// not include that.
func warmUp(t *testing.T) {
	floors(t, NewResults(), 1, true)
	for _, s := range []*subject{byRoute, ipvsPeer} {
		out, err := exec.Command(s.program, "--version").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// bench is the state that all measurements share.
type bench struct {
	t        *testing.T
	results  *Results
	account  *account
	api      *api
	progress *progress
}

func newBench(t *testing.T) *bench {
	return &bench{t: t, results: NewResults(), account: newAccount(t), api: newAPI(t)}
}

// eachSize runs a test with each number of Services in BENCH_SIZES.
func (b *bench) eachSize(do func(t *testing.T, n int)) {
	warmUp(b.t)
	for _, n := range numbers(b.t, "BENCH_SIZES") {
		b.api.grow(n)
		b.t.Run(fmt.Sprint(n), func(t *testing.T) { do(t, n) })
	}
}

// plan queues all measurements for a number of Services. The seconds are the expected
// duration of each part in an emulated guest.
func (b *bench) plan(n int, ours, peers bool) {
	thousand := float64(n) / 1000
	b.progress.add(fmt.Sprintf("%d Services are created", n), 2*thousand, func(*testing.T) { b.api.grow(n) })
	if ours {
		b.progress.add(fmt.Sprintf("raw floor, %d", n), 2+0.5*thousand+0.045*thousand*thousand, func(t *testing.T) {
			floors(t, b.results, n, n <= mostAddresses)
		})
		b.measure(byRoute, n, 600+8*thousand, (*run).everything)
		if n <= mostAddresses {
			b.measure(byAddress, n, 100+5*thousand, (*run).byAddress)
		}
	}
	if peers {
		b.measure(nftPeer, n, 60+25*thousand, (*run).short)
		b.measure(ipvsPeer, n, 60+90*thousand+8*thousand*thousand, (*run).short)
	}
}

// mostAddresses is the maximum number of Services that are also measured with cluster IPs
// as addresses.
const mostAddresses = 10000

func (b *bench) measure(s *subject, n int, seconds float64, what func(*run)) {
	b.progress.add(fmt.Sprintf("%s, %d Services", s.name, n), seconds, func(t *testing.T) {
		what(b.begin(t, s, n))
	})
}

func (b *bench) begin(t *testing.T, s *subject, n int) *run {
	return &run{site: newSite(t, s), Results: b.results, api: b.api, account: b.account, n: n, limit: time.Hour}
}

// everything measures kube-ipvs completely. While changes are measured there is no
// periodic check; its cost is measured separately.
func (r *run) everything() {
	r.seldom("1h")
	r.coldStart()
	r.ruleCounts()
	r.oneChange(1000)
	r.rolling()
	if r.n >= 10000 {
		r.rate(time.Minute)
	}
	r.compare()
	r.put(Churned, memory(r.t, r.process.PID()))
	if r.n >= 10000 {
		r.atRate(time.Minute)
		r.compare()
		r.put(Rechurned, memory(r.t, r.process.PID()))
		r.dropDrained()
	}
	r.seldom("30s")
	r.restart()
	r.idle(idleTime)
	r.emptied()
	r.disturbed(1000)
}

// byAddress measures only what depends on how VIPs are claimed.
func (r *run) byAddress() {
	r.seldom("1h")
	r.coldStart()
	r.ruleCounts()
	r.oneChange(100)
	r.rolling()
}

// seldom sets the period of the comparison for the next start.
func (r *run) seldom(period string) {
	s := *r.subject
	s.args = append(slices.Clone(s.args), "--ipvs-sync-period", period)
	r.subject = &s
}

// short is the subset that is measured of kube-proxy, whose changes can take minutes
// each. Its restart takes about as long as its cold start, so it is measured with few Services only.
func (r *run) short() {
	r.coldStart()
	r.ruleCounts()
	r.oneChange(3)
	if r.n <= 1000 {
		r.restart()
	}
	r.idle(peerIdleTime)
	r.put(Churned, memory(r.t, r.process.PID()))
}

// describe records facts about the machine and the run.
func describe(results *Results, sizes, peerSizes []int) {
	results.Fact("date", time.Now().UTC().Format("2006-01-02"))
	results.Fact("kube-ipvs", os.Getenv("BENCH_VERSION"))
	results.Fact("kube-proxy, API server", os.Getenv("BENCH_PEER_VERSION"))
	results.Fact("kernel", strings.TrimSpace(read("/proc/sys/kernel/osrelease")))
	results.Fact("machine", fmt.Sprintf("%s (%s), %d processors, in the lab's way %q; the API server is outside of it", model(), runtime.GOARCH, runtime.NumCPU(), os.Getenv("LAB")))
	results.Fact("machine around it", os.Getenv("BENCH_HOST"))
	results.Fact("objects", fmt.Sprintf("each Service with one TCP port and %d endpoints, in one EndpointSlice, one in a hundred endpoints on the node, with the labels, owners, managedFields and references of a cluster's; written to its etcd, read and changed through the API server", endpointsOfEach))
	results.Fact("numbers of Services", fmt.Sprintf("%v for kube-ipvs, %v for kube-proxy", sizes, peerSizes))
	results.Fact("began", now())
}

// now returns the time and the machine's load.
func now() string {
	return fmt.Sprintf("%s, load average in the lab %s", time.Now().UTC().Format("15:04 UTC"), strings.TrimSpace(read("/proc/loadavg")))
}

func model() string {
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return "unknown"
}

// read returns the content of a file that every kernel has.
func read(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func keep(t testing.TB, name, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(os.Getenv("LAB_OUT"), name), []byte(text), 0o644))
}

// numbers reads a list such as "100 1000" from the environment.
func numbers(t testing.TB, name string) []int {
	t.Helper()
	var list []int
	for _, word := range strings.Fields(os.Getenv(name)) {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 {
			t.Fatalf("%s: %q is not a number of Services", name, word)
		}
		list = append(list, n)
	}
	if len(list) == 0 {
		t.Fatalf("%s names no number of Services", name)
	}
	return list
}
