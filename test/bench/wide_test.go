//go:build e2e

package bench

import (
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// wideEndpoints is the number of endpoints of each Service in TestWide.
const wideEndpoints = 50

// wideLimit is the maximum time of a cold start in TestWide. kube-proxy's nftables mode is
// known to take 13 minutes with 5,000 Services on a processor that is not emulated
// (kubernetes#135639).
const wideLimit = 40 * time.Minute

// TestWide measures the cold start with Services of 50 endpoints each, of kube-ipvs and of
// kube-proxy's nftables mode in one guest. A start that exceeds wideLimit is reported as such.
func TestWide(t *testing.T) {
	b := newBench(t)
	b.api.objects = wideService
	b.eachSize(b.wideStarts)
}

// wideStarts measures the cold start of both programs with n Services of wideEndpoints each.
func (b *bench) wideStarts(t *testing.T, n int) {
	for _, s := range []*subject{byRoute, nftPeer} {
		t.Run(s.name, func(t *testing.T) { b.wide(t, s, n) })
	}
	ours, _ := b.results.Get(WideStart, byRoute.name, n)
	theirs, finished := b.results.Get(WideStart, nftPeer.name, n)
	least := ""
	if !finished {
		theirs, least = wideLimit.Seconds(), "at least "
	}
	t.Logf("with %d Services of %d endpoints, kube-ipvs starts %s%.1f times faster than nftables mode", n, wideEndpoints, least, theirs/ours)
}

func (b *bench) wide(t *testing.T, s *subject, n int) {
	r := b.begin(t, s, n)
	r.start()
	end, err := r.passedWithin(wideLimit)
	took := end.Sub(r.started)
	if err != nil {
		took = wideLimit
		t.Logf("%s has not programmed %d Services of %d endpoints within %s: %v", s.name, n, wideEndpoints, wideLimit, err)
	} else {
		r.put(WideStart, took.Seconds())
		r.put(WideCPU, cpu(t, r.process.PID()).Seconds())
		r.put(WideMemory, memory(t, r.process.PID()))
	}
	t.Logf("cold start of %s, %d Services of %d endpoints: %.1f s, %.1f s of CPU time, %.0f MB, at most %.0f MB",
		s.name, n, wideEndpoints, took.Seconds(), cpu(t, r.process.PID()).Seconds(), memory(t, r.process.PID()), peakMemory(t, r.process.PID()))
	if err == nil {
		if seen := r.sees(); seen < n {
			t.Errorf("%s has programmed %d of %d Services", s.name, seen, n)
		}
	}
}

// wideService returns Service number n with an EndpointSlice of wideEndpoints endpoints.
func wideService(n int) (*corev1.Service, []*discoveryv1.EndpointSlice) {
	s := newSlice(n, 0)
	s.Endpoints = nil
	for i := range wideEndpoints {
		s.Endpoints = append(s.Endpoints, newEndpoint(n, i, numbered(netip.MustParseAddr("10.128.0.0"), n*wideEndpoints+i)))
	}
	return newService(n), []*discoveryv1.EndpointSlice{s}
}
