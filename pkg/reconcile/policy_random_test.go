package reconcile

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// A Service with policy Local changes at random while connections are open. When its first
// state returns, new connections of external clients reach only this node's endpoint, and
// those of internal clients all endpoints.
func TestPolicyAfterRandomChanges(t *testing.T) {
	for seed := range uint64(20) {
		for _, protocol := range []ip.Protocol{ip.TCP, ip.UDP} {
			random := rand.New(rand.NewPCG(seed, 9))
			w, s := local(t, protocol)
			states := []func(service.Service) service.Service{cluster, quarantined, masqueraded, func(s service.Service) service.Service { return s }}
			address := key(protocol, vip+":80")
			for range 12 {
				w.mustApply(states[random.IntN(len(states))](s))
				for _, k := range []ipvs.Key{address, fwm(first)} {
					for dest := range w.realServers(k) {
						w.IPVS.SetConnections(k, dest, ipvs.Connections{Active: random.IntN(2)})
					}
				}
				switch random.IntN(4) {
				case 0:
					w.drain()
				case 1:
					_, _ = w.observe()
					w.reconciler.Flush()
				}
				w.mustApply(s)
				for dest, rs := range w.realServers(address) {
					if (rs.Weight > 0) != (dest == netip.MustParseAddrPort(here)) {
						t.Fatalf("seed %d: %s leads to %s with weight %d\n%s", seed, address, dest, rs.Weight, w.kernel())
					}
				}
				if len(w.realServers(address)) == 0 || w.realServers(fwm(first))[netip.MustParseAddrPort(here)].Weight == 0 {
					t.Fatalf("seed %d: no way\n%s", seed, w.kernel())
				}
			}
		}
	}
}
