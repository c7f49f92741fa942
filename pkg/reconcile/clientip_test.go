package reconcile

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// policyChanges are the ways to change a Service: by its object, or while no process runs.
var policyChanges = map[string]func(*world, service.Service) error{
	"running": func(w *world, s service.Service) error { return w.apply(s).Err() },
	"restarted": func(w *world, s service.Service) error {
		nodePorts := w.facts.NodePorts
		w.restart()
		w.facts.NodePorts = nodePorts
		return w.start(s).Err()
	},
}

// inOrder fails unless both writes were made, the first one first.
func (w *world) inOrder(first, second string) {
	w.t.Helper()
	if a, b := w.position(first), w.position(second); a < 0 || b < a {
		w.t.Errorf("%q at %d, %q at %d\n%s", first, a, second, b, strings.Join(w.order, "\n"))
	}
}

// TestClientAddressIsPreservedOnlyForLocalEndpoints changes the traffic policy: at no moment may
// the client address be preserved on the way to another node's endpoint.
func TestClientAddressIsPreservedOnlyForLocalEndpoints(t *testing.T) {
	for name, change := range policyChanges {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.cfg.LocalMark = plan.LocalMark{} // the virtual server has this node's endpoints
			w.facts.NodePorts = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			s := externalLocal("a", ip.TCP, vip, here)
			s.ExternalIPs = []netip.Addr{netip.MustParseAddr("203.0.113.6")}
			s.Ports[0].NodePort = 30080
			w.start()
			w.mustApply(cluster(s))
			becomes := func(s service.Service) {
				t.Helper()
				w.order = nil
				if err := change(w, s); err != nil {
					t.Fatal(err)
				}
			}
			for _, at := range []struct{ server, member string }{
				{"203.0.113.5:80", "203.0.113.5,tcp:80%KUBE-LOAD-BALANCER-LOCAL"},
				{"203.0.113.6:80", "203.0.113.6,tcp:80%KUBE-EXTERNAL-IP-LOCAL"},
				{"192.0.2.1:30080", "30080%KUBE-NODE-PORT-LOCAL-TCP"},
			} {
				member, set, _ := strings.Cut(at.member, "%")
				becomes(s)
				w.inOrder("set weight 0 of real server 10.244.9.9:8000 of TCP "+at.server, "add "+member+" to set "+set)
				becomes(cluster(s))
				w.inOrder("delete "+member+" from set "+set, "set weight 1 of real server 10.244.9.9:8000 of TCP "+at.server)
			}
		})
	}
}

// TestClientAddressIsNotPreservedWithoutFWMark changes the policy of a Service that has only
// endpoints of this node, so that virtual servers do not change: internal clients must not
// lose the fwmark, which masquerades them at a node port, while the client address is still
// preserved there.
func TestClientAddressIsNotPreservedWithoutFWMark(t *testing.T) {
	for name, change := range policyChanges {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.facts.NodePorts = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			s := externalLocal("a", ip.TCP, vip, here)
			s.Ports[0].Endpoints = s.Ports[0].Endpoints[:1]
			s.Ports[0].NodePort = 30080
			w.start(s)
			w.order = nil
			if err := change(w, cluster(s)); err != nil {
				t.Fatal(err)
			}
			for _, member := range []struct{ keeps, marks string }{
				{"30080 from set KUBE-NODE-PORT-LOCAL-TCP", "192.0.2.1,tcp:30080 from set KUBE-IPVS-LOCAL"},
				{vip + ",tcp:80 from set KUBE-LOAD-BALANCER-LOCAL", vip + ",tcp:80 from set KUBE-IPVS-LOCAL"},
			} {
				w.inOrder("delete "+member.keeps, "delete "+member.marks)
			}
		})
	}
}

// TestInternalClientsMoveWithTheirService changes the policy while no process runs: internal
// clients use the virtual server of the address before other Services are read.
func TestInternalClientsMoveWithTheirService(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.TCP, vip, here)
	w.start(s)
	w.restart()
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	w.order = nil
	w.mustApply(cluster(s)) // before Prune
	w.inOrder("add real server 10.244.9.9:8000 to TCP "+vip+":80", "delete "+vip+",tcp:80 from set KUBE-IPVS-LOCAL")
}

// TestClientAddressIsNotPreservedAfterRefusal makes the kernel refuse to drain another node's
// endpoint: the client address is preserved only once a retry has succeeded.
func TestClientAddressIsNotPreservedAfterRefusal(t *testing.T) {
	w := newWorld(t)
	w.cfg.LocalMark = plan.LocalMark{}
	w.facts.NodePorts = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	s := externalLocal("a", ip.TCP, vip, here)
	s.Ports[0].NodePort = 30080
	w.start(cluster(s))
	w.refuse = func(change string) error {
		if strings.Contains(change, "set weight 0 of real server 10.244.9.9:8000") {
			return unix.ENOMEM
		}
		return nil
	}
	members := []string{"add " + vip + ",tcp:80 to set KUBE-LOAD-BALANCER-LOCAL", "add 30080 to set KUBE-NODE-PORT-LOCAL-TCP"}
	if len(w.apply(s)) == 0 {
		t.Fatal("the refusal was not seen")
	}
	w.mustApply(clusterIP("other", "10.96.0.9", "10.244.0.9:8000"))
	for _, member := range members {
		if w.position(member) >= 0 {
			t.Errorf("refused: %q\n%s", member, strings.Join(w.order, "\n"))
		}
	}
	w.refuse = nil
	w.reconciler.retry(s.Name)
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	for _, member := range members {
		w.inOrder("set weight 0 of real server 10.244.9.9:8000", member)
	}
}
