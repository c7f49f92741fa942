package bench

import "fmt"

// Target is a limit of a figure, or of the ratio of two figures.
type Target struct {
	Name     string
	AtLeast  float64 // 0: AtMost holds
	AtMost   float64
	Measured func(*Results) (float64, bool) // nil: nothing measures it
}

// Row returns the target's row of the table.
func (t *Target) row(r *Results) string {
	want := "at most " + Round(t.AtMost)
	if t.AtLeast > 0 {
		want = "at least " + Round(t.AtLeast)
	}
	if t.Measured == nil {
		return fmt.Sprintf("| %s | %s | %s | |\n", t.Name, want, NotMeasured)
	}
	v, ok := t.Measured(r)
	if !ok {
		return fmt.Sprintf("| %s | %s | %s | |\n", t.Name, want, NotMeasured)
	}
	verdict := "met"
	if t.Misses(v) {
		verdict = "**missed**"
	}
	return fmt.Sprintf("| %s | %s | %s | %s |\n", t.Name, want, Round(v), verdict)
}

// Misses reports whether a figure violates the target.
func (t *Target) Misses(v float64) bool {
	if t.AtLeast > 0 {
		return v < t.AtLeast
	}
	return v > t.AtMost
}

// figure identifies a figure in the results.
type figure struct {
	measure  Measure
	subject  string
	services int
}

func (f figure) of(r *Results) (float64, bool) { return r.Get(f.measure, f.subject, f.services) }

// ratio returns the quotient of two figures.
func ratio(a, b figure) func(*Results) (float64, bool) {
	return func(r *Results) (float64, bool) {
		x, okX := a.of(r)
		y, okY := b.of(r)
		if !okX || !okY || y == 0 {
			return 0, false
		}
		return x / y, true
	}
}

// perService returns the quotient of two figures, divided by the number of Services.
func perService(a, b figure) func(*Results) (float64, bool) {
	return func(r *Results) (float64, bool) {
		v, ok := ratio(a, b)(r)
		return v * float64(b.services) / float64(a.services), ok
	}
}

// memoryOfOne returns how much memory each Service beyond the first 100 adds.
func memoryOfOne(services int) func(*Results) (float64, bool) {
	return func(r *Results) (float64, bool) {
		few, okFew := r.Get(Memory, Ours, 100)
		many, okMany := r.Get(Memory, Ours, services)
		return (many - few) * 1024 / float64(services-100), okFew && okMany && services > 100
	}
}

// The names of subjects.
const (
	Ours           = "kube-ipvs, route"
	OursByAddress  = "kube-ipvs, address"
	NFTables       = "kube-proxy, nftables"
	IPVS           = "kube-proxy, ipvs"
	Bare           = "bare IPVS"
	Floor          = "raw floor, routes"
	FloorAddresses = "raw floor, addresses"
)

// Million instructions that a processor executes in a millisecond: one that is emulated on an idle
// machine, and one that is not. The first is from the CPU times of cold starts, the second the least
// of three benchmarks of pkg/proxy, run on the lab's counting processor and outside of it (3 to 5).
const emulated, native = 1 / 3., 3.

// Targets returns the targets, for the numbers of Services with which kube-proxy was measured and for a
// large number.
func Targets(peers []int, large int) []Target {
	at := func(m Measure, subject string, n int) figure { return figure{m, subject, n} }
	name := func(format string, n int) string { return fmt.Sprintf(format, thousands(n)) }
	var out []Target
	for _, peer := range peers {
		out = append(out,
			Target{Name: name("Cold start of kube-proxy's IPVS mode, in ours, %s Services", peer), AtLeast: 200, Measured: ratio(at(ColdStart, IPVS, peer), at(ColdStart, Ours, peer))},
			Target{Name: name("Cold start of its nftables mode, in ours, %s", peer), AtLeast: 10, Measured: ratio(at(ColdStart, NFTables, peer), at(ColdStart, Ours, peer))},
			Target{Name: name("One change of kube-proxy's IPVS mode, in ours, median, %s", peer), AtLeast: 500, Measured: ratio(at(OneMedian, IPVS, peer), at(OneMedian, Ours, peer))},
			Target{Name: name("One change of its nftables mode, in ours, median, %s", peer), AtLeast: 20, Measured: ratio(at(OneMedian, NFTables, peer), at(OneMedian, Ours, peer))})
	}
	out = append(out, []Target{
		{Name: "Kernel part of the cold start, in raw floors, 10,000", AtMost: 1.3, Measured: ratio(at(Kernel, Ours, 10000), at(Kernel, Floor, 10000))},
		{Name: name("Kernel part of the cold start, in raw floors, %s", large), AtMost: 1.3, Measured: ratio(at(Kernel, Ours, large), at(Kernel, Floor, large))},
		{Name: "Cold start as a whole, in raw floors, 10,000", AtMost: 2, Measured: ratio(at(ColdStart, Ours, 10000), at(Kernel, Floor, 10000))},
		{Name: name("Cold start as a whole, in raw floors, %s", large), AtMost: 2, Measured: ratio(at(ColdStart, Ours, large), at(Kernel, Floor, large))},
		{Name: name("DNS in the kernel, in the cold start, %s", large), AtMost: 0.01, Measured: ratio(at(FirstDNS, Ours, large), at(ColdStart, Ours, large))},
		{Name: "Cold start for each Service, 44,125 against 10,000", AtMost: 1.2, Measured: perService(at(ColdStart, Ours, 44125), at(ColdStart, Ours, 10000))},
		{Name: "Cold start of nftables mode with 5,000 Services of 50 endpoints, in ours", AtLeast: 10, Measured: ratio(at(WideStart, NFTables, 5000), at(WideStart, Ours, 5000))},
		{Name: name("One change, median, %s against 100", large), AtMost: 1.5, Measured: ratio(at(OneMedian, Ours, large), at(OneMedian, Ours, 100))},
		{Name: name("One change, 99th percentile, %s against 100", large), AtMost: 1.5, Measured: ratio(at(OneTail, Ours, large), at(OneTail, Ours, 100))},
		{Name: name("One change, 99.9th percentile, with a check and pod churn, %s: ms", large), AtMost: 100, Measured: at(OneDisturbed, Ours, large).of},
		{Name: "1,000 changes a second for a minute, 10,000: ms until the last is in the kernel", AtMost: 1000, Measured: at(Backlog, Ours, 10000).of},
		{Name: "The same, 44,125", AtMost: 1000, Measured: at(Backlog, Ours, 44125).of},
		{Name: name("Rolling restart of 500 pods: messages, %s", large), AtMost: 1650, Measured: at(Rolling, Ours, large).of},
		{Name: name("Restart: writes, %s", large), AtMost: 0, Measured: at(Rewrites, Ours, large).of},
		{Name: "Restart, in the cold start, 10,000", AtMost: 0.25, Measured: ratio(at(Restart, Ours, 10000), at(ColdStart, Ours, 10000))},
		{Name: name("Restart, in the cold start, %s", large), AtMost: 0.25, Measured: ratio(at(Restart, Ours, large), at(ColdStart, Ours, large))},
		{Name: "All virtual servers deleted by another program, 10,000: s until they are back", AtMost: 3, Measured: at(Emptied, Ours, 10000).of},
		{Name: "Idle with all checks, 10,000: % of a core", AtMost: 1, Measured: at(IdleChecked, Ours, 10000).of},
		{Name: name("Idle with all checks, %s: %% of a core", large), AtMost: 2, Measured: at(IdleChecked, Ours, large).of},
		{Name: name("Idle: programs and writes, %s", large), AtMost: 0, Measured: at(IdleWork, Ours, large).of},
		{Name: name("Memory of a Service with two endpoints, %s: kB", large), AtMost: 1.2, Measured: memoryOfOne(large)},
		{Name: name("Most memory during the start, in that after it, %s", large), AtMost: 1.3, Measured: ratio(at(PeakMemory, Ours, large), at(Memory, Ours, large))},
	}...)
	for _, peer := range peers {
		most := 0.3
		if peer < 10000 {
			most = 0.5
		}
		out = append(out,
			Target{Name: name("Memory, in that of kube-proxy's IPVS mode, %s", peer), AtMost: most, Measured: ratio(at(Memory, Ours, peer), at(Memory, IPVS, peer))},
			Target{Name: name("Memory, in that of its nftables mode, %s", peer), AtMost: most, Measured: ratio(at(Memory, Ours, peer), at(Memory, NFTables, peer))})
	}
	return append(out, []Target{
		{Name: name("Memory after churn against before, %s", large), AtMost: 1.1, Measured: ratio(at(Churned, Ours, large), at(Memory, Ours, large))},
		{Name: name("Memory after as much churn again, against that, %s", large), AtMost: 1.1, Measured: ratio(at(Rechurned, Ours, large), at(Churned, Ours, large))},
		{Name: name("Programs run for 500 changes, %s", large), AtMost: 0, Measured: at(HotPath, Ours, large).of},
	}...)
}

// CountedTargets returns the targets of the page of counted instructions, for the largest number of
// Services.
func CountedTargets(large int) []Target {
	at := func(m Measure, n int) figure { return figure{m, Ours, n} }
	name := func(format string, n int) string { return fmt.Sprintf(format, thousands(n)) }
	floor := figure{FloorCounted, Floor, large}
	out := []Target{
		{Name: name("Kernel part of the cold start, in raw floors, %s", large), AtMost: 1.3, Measured: ratio(at(KernelCounted, large), floor)},
		{Name: name("Cold start, in raw floors, %s", large), AtMost: 2, Measured: ratio(at(StartCounted, large), floor)},
		{Name: "Restart, in the cold start, 10,000", AtMost: 0.25, Measured: ratio(at(RestartCounted, 10000), at(StartCounted, 10000))},
		{Name: "Idle with all checks, 10,000: million instructions a second (1 % of an emulated core)", AtMost: 10 * emulated, Measured: at(IdleCounted, 10000).of},
		{Name: "All virtual servers deleted by another program, 10,000: s until they are back", AtMost: 3, Measured: at(Emptied, 10000).of},
		{Name: name("One change, %s: million instructions (0.75 ms of an emulated processor)", large), AtMost: 0.75 * emulated, Measured: at(ChangeCPU, large).of},
		{Name: name("A pod starts on a node with %s VIPs: million instructions, on the loop and beside it (2 ms)", large), AtMost: 2 * native, Measured: at(PodStart, large).of},
		{Name: "One change in a Service of 5,000 endpoints: million instructions (0.5 ms)", AtMost: 0.5 * native, Measured: at(ManyEndpoints, large).of},
		{Name: name("Memory of a Service with two endpoints, %s: kB", large), AtMost: 1.2, Measured: memoryOfOne(large)},
		{Name: name("Most memory during the start, in that after it, %s", large), AtMost: 1.3, Measured: ratio(at(PeakMemory, large), at(Memory, large))},
	}
	if large != 10000 {
		out = append(out,
			Target{Name: name("Restart, in the cold start, %s", large), AtMost: 0.25, Measured: ratio(at(RestartCounted, large), at(StartCounted, large))},
			Target{Name: name("Idle with all checks, %s: million instructions a second (2 %%)", large), AtMost: 20 * emulated, Measured: at(IdleCounted, large).of})
	}
	return out
}
