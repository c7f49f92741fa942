package proxy

import (
	"fmt"
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

// BenchmarkOneChangeOfManyEndpoints replaces one endpoint of a Service whose endpoints are in
// slices of a hundred, as their controller writes them. The fakes' part is included.
func BenchmarkOneChangeOfManyEndpoints(b *testing.B) {
	for _, endpoints := range []int{100, 5000} {
		b.Run(fmt.Sprint(endpoints), func(b *testing.B) {
			p, w := still(b, 100)
			sliceOf := func(first, version int) *discoveryv1.EndpointSlice {
				addresses := make([]string, 100)
				for i := range addresses {
					addresses[i] = fmt.Sprintf("10.%d.%d.%d", 200+version, first/100, 1+i)
					version = 0 // only the first one changes
				}
				s := newSlice("web7", addresses...)
				s.Name = fmt.Sprintf("web7-%d", first)
				return s
			}
			for first := 0; first < endpoints; first += 100 {
				w.sink.SetEndpointSlice(sliceOf(first, 0))
			}
			if !p.prepare(b.Context()) {
				b.Fatal("the kernel cannot be read")
			}
			p.start(b.Context())
			changes := [2]*discoveryv1.EndpointSlice{sliceOf(endpoints/2, 1), sliceOf(endpoints/2, 0)}
			defer reportCPU(b)()
			for i := 0; b.Loop(); i++ {
				w.sink.SetEndpointSlice(changes[i%2])
				p.turn(klog.NewContext(b.Context(), klog.Background()), p.lastPass)
			}
		})
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
