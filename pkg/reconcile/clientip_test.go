package reconcile

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// TestClientAddressIsPreservedOnlyForLocalEndpoints changes the traffic policy: at no moment may
// the client address be preserved on the way to another node's endpoint.
func TestClientAddressIsPreservedOnlyForLocalEndpoints(t *testing.T) {
	w := newWorld(t)
	w.cfg.LocalMark = plan.LocalMark{} // the virtual server has this node's endpoints
	w.facts.NodePorts = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	s := externalLocal("a", ip.TCP, vip, here)
	s.ExternalIPs = []netip.Addr{netip.MustParseAddr("203.0.113.6")}
	s.Ports[0].NodePort = 30080
	w.start()
	w.mustApply(cluster(s))
	inOrder := func(first, second string) {
		t.Helper()
		if a, b := w.position(first), w.position(second); a < 0 || b < a {
			t.Errorf("%q at %d, %q at %d\n%s", first, a, second, b, strings.Join(w.order, "\n"))
		}
	}
	for _, at := range []struct{ server, member string }{
		{"203.0.113.5:80", "203.0.113.5,tcp:80%KUBE-LOAD-BALANCER-LOCAL"},
		{"203.0.113.6:80", "203.0.113.6,tcp:80%KUBE-EXTERNAL-IP-LOCAL"},
		{"192.0.2.1:30080", "30080%KUBE-NODE-PORT-LOCAL-TCP"},
	} {
		member, set, _ := strings.Cut(at.member, "%")
		w.order = nil
		w.mustApply(s)
		inOrder("set weight 0 of real server 10.244.9.9:8000 of TCP "+at.server, "add "+member+" to set "+set)
		w.order = nil
		w.mustApply(cluster(s))
		inOrder("delete "+member+" from set "+set, "set weight 1 of real server 10.244.9.9:8000 of TCP "+at.server)
	}
}

// TestClientAddressIsNotPreservedWithoutFWMark changes the policy of a Service that has only
// endpoints of this node, so that virtual servers do not change: internal clients must not
// lose the fwmark, which masquerades them at a node port, while the client address is still
// preserved there.
func TestClientAddressIsNotPreservedWithoutFWMark(t *testing.T) {
	w := newWorld(t)
	w.facts.NodePorts = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	s := externalLocal("a", ip.TCP, vip, here)
	s.Ports[0].Endpoints = s.Ports[0].Endpoints[:1]
	s.Ports[0].NodePort = 30080
	w.start(s)
	w.order = nil
	w.mustApply(cluster(s))
	for _, member := range []struct{ keeps, marks string }{
		{"30080 from set KUBE-NODE-PORT-LOCAL-TCP", "192.0.2.1,tcp:30080 from set KUBE-IPVS-LOCAL"},
		{vip + ",tcp:80 from set KUBE-LOAD-BALANCER-LOCAL", vip + ",tcp:80 from set KUBE-IPVS-LOCAL"},
	} {
		if a, b := w.position("delete "+member.keeps), w.position("delete "+member.marks); a < 0 || b < a {
			t.Errorf("%q at %d, %q at %d\n%s", member.keeps, a, member.marks, b, strings.Join(w.order, "\n"))
		}
	}
}
