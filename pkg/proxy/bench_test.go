package proxy

import (
	"fmt"
	"math"
	"runtime"
	"syscall"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/klog/v2"
)

// still returns a proxy over fakes, driven by hand, that knows the given number of
// Services with two endpoints each.
func still(b testing.TB, services int) (*Proxy, *world) {
	b.Helper()
	w := newWorld(b)
	p := New(w.options())
	w.sink = p.inbox
	for i := range services {
		w.service(fmt.Sprintf("web%d", i), fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), "10.244.0.2", "10.244.0.3")
	}
	w.sink.Synced()
	return p, w
}

// BenchmarkStart plans everything and writes it to fakes.
func BenchmarkStart(b *testing.B) {
	for _, services := range []int{1000, 10000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				p, _ := still(b, services)
				b.StartTimer()
				if !p.prepare(b.Context()) {
					b.Fatal("the kernel cannot be read")
				}
				p.start(b.Context())
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*services), "ns/Service")
		})
	}
}

// BenchmarkOneChange changes the address of one endpoint of one Service. The number of
// Services should make no difference.
func BenchmarkOneChange(b *testing.B) {
	for _, services := range []int{100, 44125} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			p, w := still(b, services)
			if !p.prepare(b.Context()) {
				b.Fatal("the kernel cannot be read")
			}
			p.start(b.Context())
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				w.slice("web7", "10.244.0.2", fmt.Sprintf("10.244.1.%d", i%2))
				p.turn(klog.NewContext(b.Context(), klog.Background()), p.lastPass)
			}
		})
	}
}

// reportCPU returns a function that reports the CPU time of the process since, garbage
// collection included. Unlike the elapsed time, it does not grow on a busy machine.
func reportCPU(b *testing.B) func() {
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64((used()-before).Microseconds())/float64(b.N), "cpu-us/op") }
}

// manyEndpoints returns a proxy that has programmed a Service whose endpoints are in slices of a
// hundred, as their controller writes them, and a function that replaces one of the endpoints. If
// mixed, the slices' ranges of addresses overlap, as on a cluster where pods of any age run on any
// node.
func manyEndpoints(b testing.TB, endpoints int, mixed bool) (p *Proxy, change func()) {
	p, w := still(b, 100)
	count := endpoints / 100
	address := func(slice, i int) string {
		if n := i*count + slice; mixed {
			return fmt.Sprintf("10.200.%d.%d", n/250, 1+n%250)
		}
		return fmt.Sprintf("10.200.%d.%d", slice, 1+i)
	}
	sliceOf := func(slice int) *discoveryv1.EndpointSlice {
		addresses := make([]string, 100)
		for i := range addresses {
			addresses[i] = address(slice, i)
		}
		s := newSlice("web7", addresses...)
		s.Name = fmt.Sprintf("web7-%d", slice*100)
		return s
	}
	for slice := range count {
		w.sink.SetEndpointSlice(sliceOf(slice))
	}
	if !p.prepare(b.Context()) {
		b.Fatal("the kernel cannot be read")
	}
	p.start(b.Context())
	versions := [2]*discoveryv1.EndpointSlice{sliceOf(count / 2), sliceOf(count / 2)}
	versions[0].Endpoints[0].Addresses[0] = "10.201.0.1"
	changes := 0
	return p, func() {
		w.sink.SetEndpointSlice(versions[changes%2])
		p.turn(klog.NewContext(b.Context(), klog.Background()), p.lastPass)
		changes++
	}
}

// BenchmarkOneChangeOfManyEndpoints replaces one endpoint of a Service with many. The fakes' part
// is included.
func BenchmarkOneChangeOfManyEndpoints(b *testing.B) {
	for _, c := range []struct {
		name      string
		endpoints int
		mixed     bool
	}{{"100", 100, false}, {"5000", 5000, false}, {"5000-mixed", 5000, true}} {
		b.Run(c.name, func(b *testing.B) {
			_, change := manyEndpoints(b, c.endpoints, c.mixed)
			b.ReportAllocs()
			defer reportCPU(b)()
			for b.Loop() {
				change()
			}
		})
	}
}

// TestOneChangeAllocatesLittle limits the garbage of one change in a Service of 5,000 endpoints.
// Its desired state alone is a list of 140 kB, which each change replaces. The least of several
// changes counts: the garbage collector may free the memory that is reused, at any time.
func TestOneChangeAllocatesLittle(t *testing.T) {
	const limit = 200_000
	_, change := manyEndpoints(t, 5000, true)
	least := uint64(math.MaxUint64)
	for range 20 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		change()
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	if least > limit {
		t.Errorf("a change of one of 5,000 endpoints allocates %d bytes, want at most %d", least, limit)
	}
}

// BenchmarkPodStart lets the loop read the node's network again, as after each start of a pod,
// which changes no fact that a plan depends on. The reading itself is not included; see
// BenchmarkInventory of pkg/routing.
func BenchmarkPodStart(b *testing.B) {
	for _, services := range []int{100, 44125} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			p, _ := still(b, services)
			if !p.prepare(b.Context()) {
				b.Fatal("the kernel cannot be read")
			}
			p.start(b.Context())
			defer reportCPU(b)()
			for b.Loop() {
				p.inbox.networkChanged()
				p.turn(klog.NewContext(b.Context(), klog.Background()), p.lastPass)
			}
		})
	}
}
