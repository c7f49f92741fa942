//go:build e2e

package bench

import (
	"fmt"
	"os"
	"testing"
)

// TestPlane measures connections through a VIP, of all modes in one run, and how the
// slowest of many changes comes about; it leaves a page in $LAB_OUT.
func TestPlane(t *testing.T) {
	sizes := numbers(t, "BENCH_SIZES")
	results := NewResults()
	describe(results, sizes, sizes)
	b := &bench{t: t, results: results, account: newAccount(t), api: newAPI(t)}
	b.progress = &progress{keep: func(done, all int) {
		results.Fact("ended", now())
		results.Fact("done", fmt.Sprintf("%d of %d parts", done, all))
		keep(t, "dataplane.md", results.Page("The data plane, and the slowest change",
			"Written by `make bench-plane`; do not edit. What is not measured says so.", []Measure{Connects, Connect99, Rules, OneMedian, OneTail}))
	}}
	b.progress.add("warming up", 30, warmUp)
	for _, n := range sizes {
		b.planPlane(n)
	}
	b.progress.run(t)
}

func (b *bench) planPlane(n int) {
	thousand := float64(n) / 1000
	b.progress.add(fmt.Sprintf("%d Services are created", n), 2*thousand, func(*testing.T) { b.api.grow(n) })
	b.progress.add(fmt.Sprintf("bare IPVS, %d", n), 10+0.3*thousand, func(t *testing.T) { b.bare(t, n) })
	b.measure(byRoute, n, 60+2*thousand, (*run).slowest)
	b.measure(withoutCollections(), n, 60+2*thousand, (*run).slowest)
	b.measure(ipvsPeer, n, 60+15*thousand, (*run).planeAfterUs)
	b.measure(iptPeer, n, 60+30*thousand, (*run).plane)
	b.measure(nftPeer, n, 60+25*thousand, (*run).plane)
}

// withoutCollections is our program, which never collects its garbage.
func withoutCollections() *subject {
	s := *byRoute
	s.name += ", GOGC=off"
	return &s
}

// slowestOf is how many changes are made to find the slowest of a hundred.
const slowestOf = 500

// slowest makes enough changes that the slowest of a hundred is no accident, where there
// are as many Services: of one that changes again, the last change may still drain.
func (r *run) slowest() {
	if r.subject.name != byRoute.name {
		must(r.t, os.Setenv("GOGC", "off"))
		defer os.Unsetenv("GOGC")
	}
	r.seldom("1h")
	r.start()
	r.passed(r.limit)
	r.dataPlane()
	if r.n >= slowestOf {
		r.oneChange(slowestOf)
	}
}

// planeAfterUs is plane for kube-proxy's IPVS mode, which takes ten minutes to begin with
// 10,000 Services. It takes over from us, as on a node that goes back to it, and what
// only we have is cleaned up.
func (r *run) planeAfterUs() {
	peer := r.subject
	r.subject = byAddress
	r.start()
	r.passed(r.limit)
	r.stop()
	r.subject = peer
	r.start()
	r.passed(r.limit)
	if code, output := r.node.RunProxy("--cleanup"); code != 0 {
		r.t.Fatalf("--cleanup ended with %d:\n%s", code, output)
	}
	if seen := r.sees(); seen < r.n {
		r.t.Fatalf("%d of %d Services are left:\n%s", seen, r.n, r.process.Log())
	}
	r.dataPlane()
}
