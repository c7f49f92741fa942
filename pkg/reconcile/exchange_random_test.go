package reconcile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	ksets "k8s.io/apimachinery/pkg/util/sets"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Four Services take and release the same few addresses and ports, at random and in any order. After
// each step the kernel has what it has after a start with these Services.
func TestExchangedAddressesAndPorts(t *testing.T) {
	for seed, claim := range []plan.ClaimMode{plan.ClaimPort, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimAuto} {
		random := rand.New(rand.NewPCG(uint64(seed), 5))
		w := exchangeWorld(t, claim)
		w.start()
		have := map[int]service.Service{}
		for step := range 40 {
			for range 1 + random.IntN(4) {
				exchange(w, random, have)
			}
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
			w.reconciler.Settle()
			w.checkHeld()
			fresh := exchangeWorld(t, claim)
			for i := range 4 {
				if s, ok := have[i]; ok {
					fresh.set(s)
				}
			}
			if err := fresh.start().Err(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(fresh.kernel(), w.kernel()); diff != "" {
				t.Fatalf("claimed by %s, step %d, after a start (-), now (+):\n%s", claim, step, diff)
			}
		}
	}
}

// exchangeWorld returns a world whose node serves node ports.
func exchangeWorld(t *testing.T, claim plan.ClaimMode) *world {
	w := newWorld(t)
	w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = claim, claim
	w.restart()
	node := netip.MustParseAddr("192.0.2.1")
	w.facts.NodePorts, w.facts.NodeIPs = []netip.Addr{node}, ksets.New(node)
	return w
}

// exchange deletes, creates or changes one Service, and sometimes programs it.
func exchange(w *world, random *rand.Rand, have map[int]service.Service) {
	i := random.IntN(4)
	was, ok := have[i]
	if ok && random.IntN(3) == 0 {
		delete(have, i)
		w.reconciler.Delete(was.Name)
		return
	}
	s := randomService(random, i)
	if ok {
		s.Created = was.Created
	}
	have[i] = s
	w.set(s)
	if random.IntN(3) == 0 {
		w.reconciler.Flush()
	}
}

// randomService returns a Service of UDP, whose real servers do not drain.
func randomService(random *rand.Rand, i int) service.Service {
	one := func(list ...string) netip.Addr { return netip.MustParseAddr(list[random.IntN(len(list))]) }
	s := service.Service{
		Name: types.NamespacedName{Namespace: "default", Name: fmt.Sprint("s", i)}, Created: time.Unix(random.Int64N(3), 0),
		ClusterIPs: []netip.Addr{one("10.96.0.1", "10.96.0.2", "10.96.0.3")},
	}
	if random.IntN(2) == 0 {
		s.LoadBalancers = []netip.Addr{one("203.0.113.1", "203.0.113.2")}
	}
	if random.IntN(2) == 0 {
		s.ExternalIPs = []netip.Addr{one("203.0.113.1", "203.0.113.3")}
	}
	if random.IntN(3) == 0 {
		s.SourceRanges = []netip.Prefix{netip.PrefixFrom(one("10.0.0.0", "11.0.0.0"), 8)}
	}
	s.AffinitySeconds = uint32(100 * random.IntN(2))
	s.HealthCheckNodePort = uint16(32000 + random.IntN(2))
	for n := range 1 + random.IntN(2) {
		p := service.Port{Protocol: ip.UDP, Port: uint16(80 + n)}
		if random.IntN(2) == 0 {
			p.NodePort = uint16(30000 + 2*random.IntN(2) + n)
		}
		for e := range 3 {
			if random.IntN(2) == 0 {
				at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(1 + e)}), 53)
				p.Endpoints = append(p.Endpoints, service.Endpoint{Addr: at, Ready: true, Serving: true, Node: fmt.Sprint("node", 1+e%2)})
			}
		}
		s.Ports = append(s.Ports, p)
	}
	return s
}
