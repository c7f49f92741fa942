//go:build e2e

package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
			"Written by `make bench-plane`; do not edit. What is not measured says so.", []Measure{Connects, Connect99, Rules, RulesMet, OneMedian, OneTail}))
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
	b.measure(iptPeer, n, 60+5*thousand, (*run).planeOfLegacy)
	b.measure(nftPeer, n, 60+60*thousand, (*run).planeInTime)
}

// programLimit is how long a peer's first sync is waited for here.
const programLimit = 3 * time.Hour

// planeInTime waits longer than other measures do.
func (r *run) planeInTime() {
	r.limit = programLimit
	r.plane()
}

// legacyBackend is where iptables and its kin are those that use the kernel's older
// interface. Of what kube-proxy's iptables mode writes, iptables-nft-restore needs more
// than a linear time: for 4,000 Services 32 s, for 10,000 not done after 150 s,
// where iptables-legacy-restore takes 3 s and 8 s.
const legacyBackend = "/tmp/iptables-legacy"

// planeOfLegacy is plane by that backend, at every size, so that sizes compare.
func (r *run) planeOfLegacy() {
	path := os.Getenv("PATH")
	must(r.t, linkLegacy(legacyBackend))
	must(r.t, os.Setenv("PATH", legacyBackend+":"+path))
	defer os.Setenv("PATH", path)
	s := *r.subject
	s.name += " (legacy)"
	r.subject = &s
	r.planeInTime()
}

// linkLegacy makes a folder of iptables' programs by their plain names.
func linkLegacy(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	multi, err := exec.LookPath("xtables-legacy-multi")
	if err != nil {
		return err
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(multi, filepath.Join(dir, family+verb)); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
	}
	return nil
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
	r.atRest()
}

// atRest measures the data plane once more while the program does not run, though
// what it has programmed stays: what differs is the processor time that it takes to
// compare everything every half minute.
func (r *run) atRest() {
	must(r.t, r.process.Signal(unix.SIGSTOP))
	defer func() { must(r.t, r.process.Signal(unix.SIGCONT)) }()
	s := *r.subject
	s.name += ", stopped"
	r.subject = &s
	r.dataPlane()
}
