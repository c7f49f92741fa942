package reconcile

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// isLocal reports whether a packet of a pod to a VIP and a port of a Service is local: by the
// routes of table local and, if rules and sets give it the claim mark, of the claim table.
// A marked packet skips table local if a policy rule says so.
func (w *world) isLocal(vip netip.Addr) bool {
	w.t.Helper()
	sets, err := w.IPSet.Observe(func(string) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	is, err := w.Routing.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	_, member := sets[plan.PortVIPs.In(ip.IPv4)].Entries[ipset.Entry{Addr: vip}]
	marked := member && strings.Contains(w.NAT[ip.IPv4].Save(), "-A PREROUTING -m set --match-set KUBE-IPVS-PORT-IPS dst")
	_, local := is.Addresses[vip]
	claimed := false
	for r := range is.Routes {
		if r.Dst.Addr() == vip {
			local = local || r.Table == 255
			claimed = claimed || r.Table == w.cfg.VIPs.Table
		}
	}
	skips, leads := false, false
	for r := range is.Rules {
		skips = skips || r.Action == routing.SkipLocal && r.IIf == ""
		leads = leads || r.Table == w.cfg.VIPs.Table
	}
	return marked && leads && claimed || local && (!marked || !skips)
}

// TestClaimsChangeOverRestart restarts the program with another way to claim VIPs. The VIP is
// local after every write.
func TestClaimsChangeOverRestart(t *testing.T) {
	modes := []plan.ClaimMode{plan.ClaimAuto, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimPort}
	for _, from := range modes {
		for _, to := range modes {
			t.Run(string(from)+" to "+string(to), func(t *testing.T) { claimsChange(t, from, to) })
		}
	}
}

func claimsChange(t *testing.T, from, to plan.ClaimMode) {
	s := loadBalancer("a", "10.96.0.1", vip, here)
	addr := netip.MustParseAddr(vip)
	for writes, more := 0, true; more; writes++ {
		w := newWorld(t)
		w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = from, from
		w.startAs(s)
		if !w.isLocal(addr) {
			t.Fatalf("not local at the start\n%s", w.kernel())
		}
		w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = to, to
		more, w.order = false, nil
		w.refuse = func(string) error {
			if len(w.order) < writes {
				return nil
			}
			more = true
			return unix.EIO
		}
		w.startAs(s)
		if !w.isLocal(addr) {
			t.Errorf("not local after %q\n%s", w.order, w.routes())
		}
		if more {
			continue
		}
		var claims []string
		for v := range w.reconciler.vips.allExisting() {
			if v.key.Addr == addr {
				claims = append(claims, string(v.key.Claim))
			}
		}
		if want := strings.Replace(string(to), "auto", "route", 1); !slices.Equal(claims, []string{want}) {
			t.Errorf("claimed by %v, want %s", claims, want)
		}
	}
}

// startAs restarts, and does what the proxy does at startup with rules for the sets in use.
func (w *world) startAs(services ...service.Service) {
	w.t.Helper()
	w.restart()
	if _, err := w.reconciler.Load(); err != nil {
		w.t.Fatal(err)
	}
	w.reconciler.SetNode(plan.Node{})
	w.reconciler.Flush()
	w.set(services...)
	w.reconciler.Flush()
	w.reconciler.Prune()
	w.reconciler.Flush()
}
