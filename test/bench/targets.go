package bench

import "fmt"

// Target is a bound for a figure, or for how many times one is another.
type Target struct {
	Name     string
	AtLeast  float64 // 0: AtMost holds
	AtMost   float64
	Measured func(*Results) (float64, bool)
}

// Row is the target's line in the table.
func (t *Target) row(r *Results) string {
	want := "at most " + Round(t.AtMost)
	if t.AtLeast > 0 {
		want = "at least " + Round(t.AtLeast)
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

// Misses tells whether a figure is out of bounds.
func (t *Target) Misses(v float64) bool {
	if t.AtLeast > 0 {
		return v < t.AtLeast
	}
	return v > t.AtMost
}

// figure is a place in the results.
type figure struct {
	measure  Measure
	subject  string
	services int
}

func (f figure) of(r *Results) (float64, bool) { return r.Get(f.measure, f.subject, f.services) }

// ratio divides one figure by another.
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

// perService has a ratio count for each Service.
func perService(a, b figure) func(*Results) (float64, bool) {
	return func(r *Results) (float64, bool) {
		v, ok := ratio(a, b)(r)
		return v * float64(b.services) / float64(a.services), ok
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

// Targets are bounds for the number of Services at which peers were measured.
func Targets(peer, large int) []Target {
	at := func(m Measure, subject string, n int) figure { return figure{m, subject, n} }
	name := func(format string, n int) string { return fmt.Sprintf(format, thousands(n)) }
	return []Target{
		{Name: name("Cold start of kube-proxy's IPVS mode, in ours, %s Services", peer), AtLeast: 200, Measured: ratio(at(ColdStart, IPVS, peer), at(ColdStart, Ours, peer))},
		{Name: name("Cold start of its nftables mode, in ours, %s", peer), AtLeast: 10, Measured: ratio(at(ColdStart, NFTables, peer), at(ColdStart, Ours, peer))},
		{Name: name("Kernel part of the cold start, in raw floors, %s", large), AtMost: 1.3, Measured: ratio(at(Kernel, Ours, large), at(Kernel, Floor, large))},
		{Name: name("Cold start as a whole, in raw floors, %s", large), AtMost: 2.5, Measured: ratio(at(ColdStart, Ours, large), at(Kernel, Floor, large))},
		{Name: name("DNS in the kernel, in the cold start, %s", large), AtMost: 0.01, Measured: ratio(at(FirstDNS, Ours, large), at(ColdStart, Ours, large))},
		{Name: "Cold start for each Service, 44,125 against 10,000", AtMost: 1.2, Measured: perService(at(ColdStart, Ours, 44125), at(ColdStart, Ours, 10000))},
		{Name: name("One change of kube-proxy's IPVS mode, in ours, median, %s", peer), AtLeast: 500, Measured: ratio(at(OneMedian, IPVS, peer), at(OneMedian, Ours, peer))},
		{Name: name("One change of its nftables mode, in ours, median, %s", peer), AtLeast: 20, Measured: ratio(at(OneMedian, NFTables, peer), at(OneMedian, Ours, peer))},
		{Name: name("One change, median, %s against 100", large), AtMost: 1.5, Measured: ratio(at(OneMedian, Ours, large), at(OneMedian, Ours, 100))},
		{Name: name("One change, 99th percentile, %s against 100", large), AtMost: 1.5, Measured: ratio(at(OneTail, Ours, large), at(OneTail, Ours, 100))},
		{Name: "1,000 changes a second for a minute, 10,000: ms until the last is in the kernel", AtMost: 1000, Measured: at(Backlog, Ours, 10000).of},
		{Name: name("Rolling restart of 500 pods: messages, %s", large), AtMost: 1650, Measured: at(Rolling, Ours, large).of},
		{Name: name("Restart: writes, %s", large), AtMost: 0, Measured: at(Rewrites, Ours, large).of},
		{Name: name("Idle: %% of a core, %s", large), AtMost: 0.1, Measured: at(Idle, Ours, large).of},
		{Name: name("Idle: programs and writes, %s", large), AtMost: 0, Measured: at(IdleWork, Ours, large).of},
		{Name: name("Memory, in that of kube-proxy's IPVS mode, %s", peer), AtMost: 0.5, Measured: ratio(at(Memory, Ours, peer), at(Memory, IPVS, peer))},
		{Name: name("Memory, in that of its nftables mode, %s", peer), AtMost: 0.5, Measured: ratio(at(Memory, Ours, peer), at(Memory, NFTables, peer))},
		{Name: name("Memory after churn against before, %s", large), AtMost: 1.1, Measured: ratio(at(Churned, Ours, large), at(Memory, Ours, large))},
		{Name: name("Memory after as much churn again, against that, %s", large), AtMost: 1.1, Measured: ratio(at(Rechurned, Ours, large), at(Churned, Ours, large))},
		{Name: name("Programs run for 500 changes, %s", large), AtMost: 0, Measured: at(HotPath, Ours, large).of},
	}
}
