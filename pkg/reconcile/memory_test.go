package reconcile

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/test/heap"
)

// The kernel of the benchmarks accepts every change and keeps nothing, so that what is
// measured is the Reconciler's own.
type (
	forgetfulIPVS    struct{ IPVS }
	forgetfulIPSet   struct{ IPSet }
	forgetfulRouting struct{ Routing }
)

func (forgetfulIPVS) Apply([]ipvs.Change) []ipvs.Failure          { return nil }
func (forgetfulIPSet) Apply([]ipset.Change) []ipset.Failure       { return nil }
func (forgetfulRouting) Apply([]routing.Change) []routing.Failure { return nil }

// numbered returns the number n of a cluster's Services, with two endpoints.
func numbered(n int) service.Service {
	backend := func(last byte) service.Endpoint {
		return service.Endpoint{
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(128 + n>>14), byte(n >> 6), byte(n<<2) | last}), 8080), Ready: true, Serving: true,
		}
	}
	return service.Service{
		Name:       types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("web-%d", n)},
		Created:    time.Unix(int64(n), 0),
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})},
		Ports:      []service.Port{{Name: "http", Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{backend(1), backend(2)}}},
	}
}

// large returns a Reconciler that has programmed n Services, 256 at a time.
func large(t testing.TB, w *world, n int) *Reconciler {
	a := New(&w.cfg, Kernel{
		IPVS: forgetfulIPVS{w.IPVS}, IPSet: forgetfulIPSet{w.IPSet}, Routing: forgetfulRouting{w.Routing},
		Sysctl: w.Sysctl, Conntrack: w.Conntrack, NAT: map[ip.Family]NAT{ip.IPv4: nat.NewFake(ip.IPv4)},
	}, Periods{})
	a.setNode(plan.ForNode(&w.cfg, &plan.Node{}))
	for i := range n {
		s := numbered(i)
		a.Set(&Owner{Name: s.Name, Created: s.Created}, plan.ForService(&w.cfg, &w.facts, &s))
		if i%256 == 255 || i == n-1 {
			if err := a.Flush().Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := a.Prune().Err(); err != nil {
		t.Fatal(err)
	}
	return a
}

// BenchmarkMemory plans and programs Services with two endpoints each. bytes/Service is what
// the Reconciler keeps of a Service.
func BenchmarkMemory(b *testing.B) {
	const services = 10000
	w := newWorld(b)
	w.cfg.Families = []ip.Family{ip.IPv4}
	b.ReportAllocs()
	var kept int64
	for b.Loop() {
		b.StopTimer()
		before := heap.InUse()
		b.StartTimer()
		a := large(b, w, services)
		b.StopTimer()
		kept = heap.InUse() - before
		runtime.KeepAlive(a)
		b.StartTimer()
	}
	b.ReportMetric(float64(kept)/services, "bytes/Service")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*services), "ns/Service")
}

// BenchmarkSync changes one endpoint of one Service.
func BenchmarkSync(b *testing.B) {
	const services = 10000
	w := newWorld(b)
	w.cfg.Families = []ip.Family{ip.IPv4}
	a := large(b, w, services)
	var parts [2]plan.ServicePlan
	for i := range parts {
		s := numbered(7)
		s.Ports[0].Endpoints[1] = numbered(services + i).Ports[0].Endpoints[1]
		parts[i] = plan.ForService(&w.cfg, &w.facts, &s)
	}
	owner := &Owner{Name: numbered(7).Name, Created: numbered(7).Created}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		a.Set(owner, parts[i%2])
		if err := a.Flush().Err(); err != nil {
			b.Fatal(err)
		}
	}
}
