package proxy

import (
	"fmt"
	"testing"

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
