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
	w.reconciler.SetNode(plan.Node{}, 0)
	w.reconciler.Flush()
	w.set(services...)
	w.reconciler.Flush()
	w.reconciler.Prune()
}

// claimsOf returns the claims of a VIP in the kernel, and the claimSets that list it.
func (w *world) claimsOf(a netip.Addr) []string {
	w.t.Helper()
	is, err := w.Routing.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	sets, err := w.IPSet.Observe(func(string) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for r := range is.Routes {
		if r.Dst.Addr() == a {
			out = append(out, string(w.reconciler.vips.claimOf(r.Table)))
		}
	}
	for _, set := range []plan.SetName{plan.PortVIPs, plan.SharedVIPs, plan.VIPAddresses} {
		if _, member := sets[set.In(ip.IPv4)].Entries[ipset.Entry{Addr: a}]; member {
			out = append(out, string(set))
		}
	}
	slices.Sort(out)
	return out
}

func (w *world) refuses(address string) bool {
	w.t.Helper()
	sets, err := w.IPSet.Observe(func(string) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	_, member := sets[plan.Refused.In(ip.IPv4)].Entries[plan.EntryOf(key(ip.TCP, address))]
	return member
}

// TestServicesShareAnotherNodesAddress: one Service shows by its endpoints that a VIP is another
// node's address. Services with other endpoints have the VIP too, at other ports. Its claim is by
// port, in whatever order they are added, changed and removed, and a change of one Service does
// not set the others again.
func TestServicesShareAnotherNodesAddress(t *testing.T) {
	const node = "192.168.1.12"
	addr := netip.MustParseAddr(node)
	host, pods, none := loadBalancer("host", "10.96.0.1", node, node+":80"), loadBalancer("pods", "10.96.0.2", node, here), loadBalancer("none", "10.96.0.3", node)
	pods.Ports[0].Port, none.Ports[0].Port = 8080, 8081
	elsewhere := loadBalancer("host", "10.96.0.1", node, "10.244.9.9:80")
	route, port := []string{string(plan.SharedVIPs), string(plan.VIPAddresses), "route"}, []string{string(plan.PortVIPs), "port"}
	slices.Sort(route)
	auto := func() *world {
		w := newWorld(t)
		w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = plan.ClaimAuto, plan.ClaimAuto
		w.restart()
		return w
	}
	for name, order := range map[string][]service.Service{"host first": {host, pods, none}, "host last": {pods, none, host}} {
		t.Run(name, func(t *testing.T) {
			w := auto()
			w.start()
			check := func(when string, want []string) {
				t.Helper()
				if got := w.claimsOf(addr); !slices.Equal(got, want) {
					t.Errorf("%s: claimed by %v, want %v", when, got, want)
				}
				if got, want := w.refuses(node+":8081"), slices.Contains(want, "port"); got != want {
					t.Errorf("%s: a port without an endpoint is listed: %v, want %v", when, got, want)
				}
				if w.refuses(node + ":8080") {
					t.Errorf("%s: a port with an endpoint is listed", when)
				}
			}
			for _, s := range order {
				w.mustApply(s)
			}
			check("all are added", port)
			w.mustApply(elsewhere)
			check("the endpoint is being replaced", port)
			w.mustApply(host)
			check("it is back", port)
			if differences, err := w.observe(); err != nil || differences != 0 {
				t.Errorf("%d differences after all, %v", differences, err)
			}
			want := w.kernel()
			w.restart()
			w.order = nil
			w.start(order...)
			if got := w.kernel(); got != want {
				t.Errorf("after a restart:\n%s\nwant\n%s", got, want)
			}
			for _, c := range w.order {
				if strings.Contains(c, node) && strings.Contains(c, "route") {
					t.Errorf("a restart writes %q", c)
				}
			}
			w.mustApply(elsewhere)
			other := elsewhere
			other.LoadBalancers = []netip.Addr{netip.MustParseAddr(vip)}
			w.mustApply(other)
			check("the Service has another VIP", route)
			w.mustApply(elsewhere)
			check("it has the VIP again, with other endpoints", route)
			w.mustApply(host)
			check("and the endpoint", port)
			w.reconciler.Delete(host.Name)
			w.reconciler.Flush()
			w.checkHeld()
			check("the Service is deleted", route)
			w.reconciler.Delete(pods.Name)
			w.reconciler.Delete(none.Name)
			w.reconciler.Flush()
			if got := w.claimsOf(addr); got != nil {
				t.Errorf("all are deleted: claimed by %v", got)
			}
		})
	}
}

// A Service that names another's load balancer IP in its spec, with an endpoint there, does not
// change its claim.
func TestExternalIPDoesNotMoveALoadBalancerIP(t *testing.T) {
	const balancer = "192.168.1.12"
	addr := netip.MustParseAddr(balancer)
	victim := loadBalancer("victim", "10.96.0.1", balancer, here)
	other := clusterIP("other", "10.96.0.2", balancer+":80")
	other.Ports[0].Port, other.ExternalIPs = 8080, []netip.Addr{addr}
	w := newWorld(t)
	w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = plan.ClaimAuto, plan.ClaimAuto
	w.restart()
	w.start()
	w.mustApply(victim)
	w.mustApply(other)
	if got := w.claimsOf(addr); !slices.Contains(got, "route") {
		t.Errorf("claimed by %v, want the route too", got)
	}
	other.Name.Name, other.LoadBalancers, other.ExternalIPs = "status", other.ExternalIPs, nil
	w.mustApply(other)
	if got := w.claimsOf(addr); slices.Contains(got, "route") {
		t.Errorf("claimed by %v, although another load balancer IP is an endpoint", got)
	}
}
