package proxy

import (
	"fmt"
	"testing"
	"time"

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

// BenchmarkLook measures a look, which runs once a second. Its cost grows with the
// number of virtual servers; the kernel's own part is not included.
func BenchmarkLook(b *testing.B) {
	for _, services := range []int{100, 44125} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			p, _ := still(b, services)
			if !p.prepare(b.Context()) {
				b.Fatal("the kernel cannot be read")
			}
			p.start(b.Context())
			b.ReportAllocs()
			for b.Loop() {
				if p.reconciler.Suspicious() {
					b.Fatal("something differs")
				}
			}
		})
	}
}

// BenchmarkCompare compares a reading of the kernel that has no differences. A change
// waits for at most one step; the longest step is reported.
func BenchmarkCompare(b *testing.B) {
	const services = 44125
	p, _ := still(b, services)
	if !p.prepare(b.Context()) {
		b.Fatal("the kernel cannot be read")
	}
	p.start(b.Context())
	var longest time.Duration
	pieces := 0
	for b.Loop() {
		b.StopTimer()
		o, err := p.reconciler.BeginObserve()()
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		began := time.Now()
		d := p.reconciler.BeginAdopt(o)
		for more := true; more; began = time.Now() {
			more = d.Step()
			longest = max(longest, time.Since(began))
			pieces++
		}
		if n := d.End(); n != 0 {
			b.Fatalf("%d differences", n)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(pieces), "ns/piece")
	b.ReportMetric(float64(longest.Nanoseconds()), "ns/longest")
}
