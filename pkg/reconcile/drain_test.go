package reconcile

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// TestDeadlineOfADrainingRealServer has connections that stay open for days. They last while the
// endpoint exists, ready or not, and after it has left the Service while it answers its clients.
// They end if it has not answered for the time of the deadline.
func TestDeadlineOfADrainingRealServer(t *testing.T) {
	w := newWorld(t)
	w.now = time.Unix(1e9, 0)
	k, dest := key(ip.TCP, "10.96.0.1:80"), netip.MustParseAddrPort("10.244.0.2:8000")
	both := func() service.Service { return clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000") }
	notReady := both()
	notReady.Ports[0].Endpoints[0].Ready = false
	without := clusterIP("a", "10.96.0.1", "10.244.0.3:8000")
	w.start(both())
	conns := ipvs.Connections{Active: 1}
	const minutes = 60 * 24
	// goOn checks the real server every minute, after clients have sent and received packets.
	goOn := func(when string, minutes int, in, out uint32, want bool) {
		t.Helper()
		for range minutes {
			w.now = w.now.Add(time.Minute)
			conns.In, conns.Out = conns.In+in, conns.Out+out
			w.IPVS.SetConnections(k, dest, conns)
			if err := w.drain().Err(); err != nil {
				t.Fatal(err)
			}
		}
		if _, is := w.realServers(k)[dest]; is != want {
			t.Errorf("%s: there %v", when, is)
		}
	}
	const limit = int(deadline / time.Minute)
	w.IPVS.SetConnections(k, dest, conns)
	w.mustApply(notReady)
	goOn("unready, does not answer", minutes, 1, 0, true)
	w.mustApply(without)
	goOn("the kernel does not count", minutes, 0, 0, true)
	goOn("answers", minutes, 3, 2, true)
	goOn("only sends", minutes, 0, 1, true)
	goOn("got a packet that needs no answer", 1, 1, 0, true)
	goOn("silent since then", minutes, 0, 0, true)
	goOn("answers again", 1, 1, 1, true)
	goOn("has not answered for less than the deadline", limit, 1, 0, true)
	w.mustApply(notReady)
	goOn("came back unready", minutes, 1, 0, true)
	w.mustApply(without)
	goOn("has not answered since less than the deadline", limit, 1, 0, true)
	if _, err := w.observe(); err != nil { // a full comparison changes nothing
		t.Fatal(err)
	}
	w.reconciler.Flush()
	goOn("has not answered for the time of the deadline", 2, 1, 0, false)
	if n := w.reconciler.drainer.count; n != 0 {
		t.Errorf("%d draining", n)
	}
}

// TestErrorsAreNoAnswers sends ICMP errors to clients of a deleted pod. IPVS counts them as packets
// of the real server. The connections must end at the deadline, unless conntrack shows acknowledged
// packets or has no information.
func TestErrorsAreNoAnswers(t *testing.T) {
	const minutes = 3 * int(deadline/time.Minute)
	stuck := func(int) time.Duration { return 4 * time.Minute }
	established := sysctl.State{establishedTimeout: "86400"}
	for _, tc := range []struct {
		name       string
		in, out    uint32 // each minute
		timeout    func(minute int) time.Duration
		parameters sysctl.State
		kept       bool
	}{
		{"errors", 1, 1, stuck, established, false},
		{"errors, beside an idle connection", 1, 1, func(minute int) time.Duration { return 20*time.Hour - time.Duration(minute)*time.Minute }, established, false},
		{"answers", 1, 1, func(int) time.Duration { return 24*time.Hour - time.Second }, established, true},
		{"more packets to clients than from them", 1, 2, stuck, established, true},
		{"an upload", 1000, 500, stuck, established, true},
		{"not tracked", 1, 1, func(int) time.Duration { return 0 }, established, true},
		{"short timeouts", 1, 1, stuck, sysctl.State{establishedTimeout: "300"}, true},
		{"no parameter", 1, 1, stuck, nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.now = time.Unix(1e9, 0)
			k, dest := key(ip.TCP, "10.96.0.1:80"), netip.MustParseAddrPort("10.244.0.2:8000")
			w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000"))
			for key, value := range tc.parameters {
				w.Sysctl.Set(key, value)
			}
			flow := flowTo("10.244.0.9:1000", "10.96.0.1:80", "10.244.0.2:8000")
			flow.Protocol = ip.TCP
			w.Conntrack.Add(flow)
			minute := 0
			w.Conntrack.Timeout = func(conntrack.Entry) time.Duration { return tc.timeout(minute) }
			conns := ipvs.Connections{Active: 1}
			w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
			for minute = range minutes {
				w.now = w.now.Add(time.Minute)
				conns.In, conns.Out = conns.In+tc.in, conns.Out+tc.out
				w.IPVS.SetConnections(k, dest, conns)
				if err := w.drain().Err(); err != nil {
					t.Fatal(err)
				}
			}
			if _, kept := w.realServers(k)[dest]; kept != tc.kept {
				t.Errorf("kept: %v", kept)
			}
		})
	}
}

// TestIssue89392LostRealServer resets the connections to an endpoint on an unreachable node,
// and no others.
func TestIssue89392LostRealServer(t *testing.T) {
	w := newWorld(t)
	k := key(ip.TCP, "10.96.0.1:80")
	web := clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000", "10.244.0.4:8000")
	for i, node := range []string{"node-2", "node-3", "node-4"} {
		web.Ports[0].Endpoints[i].Node = node
	}
	w.start(web)
	for _, e := range web.Ports[0].Endpoints[:2] {
		w.IPVS.SetConnections(k, e.Addr, ipvs.Connections{Active: 2, Inactive: 1})
	}
	unready := clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000", "10.244.0.4:8000")
	for i, e := range web.Ports[0].Endpoints {
		e.Ready, e.Serving = i == 2, i == 2
		unready.Ports[0].Endpoints[i] = e
	}
	w.mustApply(unready)
	w.drain()
	if n := w.reconciler.drainer.count; n != 2 {
		t.Fatalf("%d drain while no node is lost, want 2", n)
	}
	w.facts.UnreachableNodes = []string{"node-2"}
	w.mustApply(unready)
	if err := w.drain().Err(); err != nil {
		t.Fatal(err)
	}
	dest := web.Ports[0].Endpoints[0].Addr
	if _, there := w.realServers(k)[dest]; there || len(w.realServers(k)) != 2 {
		t.Errorf("node-2 is lost: %v", w.realServers(k))
	}
	if got, want := w.reconciler.drainer.takeCuts(), []Cut{{k, dest, 3, true}}; !slices.Equal(got, want) {
		t.Errorf("cut: %v, want %v", got, want)
	}
}

// TestUDPDrain keeps a flow to an endpoint that is terminating and serving, and ends it with
// the endpoint.
func TestUDPDrain(t *testing.T) {
	w := newWorld(t)
	w.cfg.UDPDrain = true
	k, dest := key(ip.UDP, "10.96.0.10:53"), netip.MustParseAddrPort("10.244.0.2:53")
	dns := func(change func(*service.Endpoint), endpoints ...string) service.Service {
		s := clusterIP("dns", "10.96.0.10", endpoints...)
		s.Ports[0].Protocol, s.Ports[0].Port = ip.UDP, 53
		change(&s.Ports[0].Endpoints[0])
		return s
	}
	asIs := func(*service.Endpoint) {}
	w.start(dns(asIs, "10.244.0.2:53", "10.244.0.3:53"))
	flow := flowTo("10.244.0.9:1000", "10.96.0.10:53", "10.244.0.2:53")
	w.Conntrack.Add(flow)
	for _, step := range []struct {
		name   string
		now    service.Service
		weight int // -1: not there
		flows  int
	}{
		{"terminating", dns(func(e *service.Endpoint) { e.Ready, e.Terminating = false, true }, "10.244.0.2:53", "10.244.0.3:53"), 0, 1},
		{"ready again", dns(asIs, "10.244.0.2:53", "10.244.0.3:53"), 1, 1},
		{"terminating, not serving", dns(func(e *service.Endpoint) { e.Ready, e.Serving, e.Terminating = false, false, true }, "10.244.0.2:53", "10.244.0.3:53"), -1, 0},
	} {
		w.mustApply(step.now)
		rs, there := w.realServers(k)[dest]
		if there != (step.weight >= 0) || there && rs.Weight != step.weight || len(w.Conntrack.Entries()) != step.flows {
			t.Errorf("%s: there %v with weight %d, %d flows", step.name, there, rs.Weight, len(w.Conntrack.Entries()))
		}
	}
}

// TestDrainGoesOn checks few virtual servers with each call, and reaches all of them,
// including those that begin to drain meanwhile.
func TestDrainGoesOn(t *testing.T) {
	w := newWorld(t)
	w.now = time.Unix(1e9, 0)
	names, addresses := []string{"a", "b", "c", "d", "e"}, []string{"10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.0.4", "10.96.0.5"}
	var before []service.Service
	for i := range names {
		before = append(before, clusterIP(names[i], addresses[i], "10.244.0.2:8000", "10.244.0.3:8000"))
	}
	w.start(before...)
	for i := range 4 {
		w.mustApply(clusterIP(names[i], addresses[i], "10.244.0.3:8000"))
	}
	for i, want := range []struct {
		left int
		on   bool
	}{{2, true}, {1, false}, {0, false}} {
		if i == 1 {
			w.mustApply(clusterIP("e", "10.96.0.5", "10.244.0.3:8000"))
		}
		if err := w.reconciler.checkDraining(w.now, deadline, 2).Err(); err != nil {
			t.Fatal(err)
		}
		if left, on := w.reconciler.drainer.count, len(w.reconciler.drainer.toCheck) > 0; left != want.left || on != want.on {
			t.Errorf("call %d: %d drain, goes on: %v; want %+v", i, left, on, want)
		}
	}
}

// TestEndpointThatIsBackStays: the kernel sets the weight of an endpoint that has come back,
// but its answer is lost. The comparison that follows the error finds nothing to write, and
// the endpoint no longer drains.
func TestEndpointThatIsBackStays(t *testing.T) {
	w := newWorld(t)
	k, dest := key(ip.TCP, "10.96.0.1:80"), netip.MustParseAddrPort("10.244.0.2:8000")
	both := clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000")
	w.start(both)
	w.IPVS.SetConnections(k, dest, ipvs.Connections{Active: 1})
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
	w.refuse = func(string) error { return unix.ETIMEDOUT }
	if w.apply(both).Err() == nil {
		t.Error("the error is not reported")
	}
	w.refuse = nil
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.UpdateRealServer, Key: k, Dest: dest, RealServer: ipvs.RealServer{Weight: 1}}})
	w.IPVS.SetConnections(k, dest, ipvs.Connections{})
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	w.drain()
	if rs := w.realServers(k)[dest]; rs.Weight != 1 || w.reconciler.drainer.count != 0 {
		t.Errorf("weight %d, want 1; %d drain\n%s", rs.Weight, w.reconciler.drainer.count, w.IPVS.Dump())
	}
}

// TestDrainingServerIsDeletedByAnother: nothing is left of it, neither a count nor a record.
func TestDrainingServerIsDeletedByAnother(t *testing.T) {
	w := newWorld(t)
	k := key(ip.TCP, "10.96.0.1:80")
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000"))
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: k}})
	w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "a"})
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	if n := w.reconciler.drainer.count; n != 0 {
		t.Errorf("%d drain", n)
	}
	w.reconciler.Flush()
	w.drain()
	w.checkHeld()
}
