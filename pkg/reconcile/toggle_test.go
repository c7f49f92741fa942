package reconcile

import (
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// A traffic policy that changes to Cluster and back leaves what was there before, whatever
// connections are open meanwhile.
func TestPolicyThereAndBack(t *testing.T) {
	for name, becomes := range map[string]func(*world){
		"at once":                    func(*world) {},
		"after a round":              func(w *world) { w.drain() },
		"after a resync":             func(w *world) { _, _ = w.observe(); w.reconciler.Flush() },
		"after a resync and a round": func(w *world) { _, _ = w.observe(); w.drain(); w.reconciler.Flush() },
	} {
		for _, protocol := range []ip.Protocol{ip.TCP, ip.UDP} {
			t.Run(name+", "+protocol.String(), func(t *testing.T) {
				w, s := local(t, protocol)
				for dest := range w.realServers(fwm(first)) {
					w.IPVS.SetConnections(fwm(first), dest, ipvs.Connections{Active: 1})
				}
				for dest := range w.realServers(key(protocol, vip+":80")) {
					w.IPVS.SetConnections(key(protocol, vip+":80"), dest, ipvs.Connections{Active: 1})
				}
				before := w.kernel()
				for range 3 {
					w.mustApply(cluster(s))
					for dest := range w.realServers(key(protocol, vip+":80")) {
						w.IPVS.SetConnections(key(protocol, vip+":80"), dest, ipvs.Connections{Active: 1})
					}
					becomes(w)
					w.mustApply(s)
					becomes(w)
					for _, k := range []ipvs.Key{key(protocol, vip+":80")} {
						for dest, rs := range w.realServers(k) {
							if rs.Weight > 0 && dest != netip.MustParseAddrPort(here) {
								t.Errorf("%s still leads to %s\n%s", k, dest, w.kernel())
							}
							w.IPVS.SetConnections(k, dest, ipvs.Connections{})
						}
					}
					w.drain()
					if after := w.kernel(); after != before {
						t.Fatalf("before:\n%s\nafter:\n%s", before, after)
					}
				}
			})
		}
	}
}
