package reconcile

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// cluster returns a Service with externalTrafficPolicy Cluster.
func cluster(s service.Service) service.Service {
	s.ExternalLocal = false
	return s
}

// quarantined returns a Service whose endpoints on this node have left their slice.
func quarantined(s service.Service) service.Service {
	s.Ports = slices.Clone(s.Ports)
	s.Ports[0].Endpoints = slices.DeleteFunc(slices.Clone(s.Ports[0].Endpoints), func(e service.Endpoint) bool { return e.Node == "node1" })
	return s
}

func masqueraded(s service.Service) service.Service {
	s.Masquerade = true
	return s
}

// used is a real server of the fwmark virtual server, which a connection uses.
var used = netip.MustParseAddrPort(here)

// local starts with a Service of policy Local that has a connection through its fwmark.
func local(t *testing.T, protocol ip.Protocol) (*world, service.Service) {
	w := newWorld(t)
	s := externalLocal("a", protocol, vip, here)
	w.start(s)
	if _, there := w.realServers(fwm(first))[used]; !there {
		t.Fatalf("the virtual server with the mark has no %s\n%s", used, w.IPVS.Dump())
	}
	w.IPVS.SetConnections(fwm(first), used, ipvs.Connections{Active: 1})
	return w, s
}

// retires checks that the virtual server with the first fwmark exists only for its
// connection, across a resync and a restart, and is deleted when that ends.
func (w *world) retires(s service.Service) {
	w.t.Helper()
	check := func(when string) {
		w.t.Helper()
		if rs, there := w.realServers(fwm(first))[used]; !there || rs.Weight != 0 {
			w.t.Fatalf("%s: real server %v, there %v, want weight 0\n%s", when, rs, there, w.IPVS.Dump())
		}
		if got := w.IPSet.Dump(); strings.Contains(got, "skbmark 0xb") {
			w.t.Errorf("%s: packets are still marked:\n%s", when, got)
		}
		if !w.reconciler.marks.kernelUses(key(ip.TCP, vip+":80"), first) || !w.reconciler.marks.inUse(ip.IPv4, first) {
			w.t.Errorf("%s: the mark is free", when)
		}
	}
	check("after the change")
	w.drain()
	check("after a look at its connections")
	if n, err := w.observe(); n != 0 || err != nil {
		w.t.Errorf("a comparison finds %d differences, %v", n, err)
	}
	w.reconciler.Flush()
	check("after a comparison")
	w.restart()
	w.start(s)
	check("after a restart")
	if got, want := w.reconciler.drainer.count, 1; got != want {
		w.t.Errorf("%d drain after a restart, want %d", got, want)
	}
	w.IPVS.SetConnections(fwm(first), used, ipvs.Connections{})
	w.drain()
	if got := w.IPVS.Dump(); strings.Contains(got, "-f 11 ") {
		w.t.Errorf("after the last connection:\n%s", got)
	}
	if got := w.IPSet.Dump(); strings.Contains(got, "0.0.0.11") {
		w.t.Errorf("the record is left:\n%s", got)
	}
	if w.reconciler.servers.exists(fwm(first)) || len(w.reconciler.marks.retired) != 0 {
		w.t.Errorf("the mark is not free: %v", w.reconciler.marks.retired)
	}
}

// TestRetire makes a fwmark virtual server undesired while a connection uses it, for each
// possible reason.
func TestRetire(t *testing.T) {
	for name, becomes := range map[string]func(service.Service) service.Service{
		"policy Cluster":           cluster,
		"last local endpoint gone": quarantined,
		"masqueraded":              masqueraded,
	} {
		t.Run(name, func(t *testing.T) {
			w, s := local(t, ip.TCP)
			w.mustApply(becomes(s))
			w.retires(becomes(s))
		})
	}
	t.Run("--local-mark off", func(t *testing.T) {
		w, s := local(t, ip.TCP)
		w.cfg.LocalMark = plan.LocalMark{}
		w.restart()
		w.start(s)
		w.retires(s)
	})
	t.Run("another --local-mark", func(t *testing.T) {
		w, s := local(t, ip.TCP)
		w.cfg.LocalMark = plan.LocalMark{Value: 0x10000, Mask: 0xff0000}
		w.restart()
		w.start(s)
		w.retires(s)
		if got := w.IPVS.Dump(); !strings.Contains(got, "-A -f 196608 ") {
			t.Errorf("no virtual server with the new mark:\n%s", got)
		}
	})
}

// TestKilledWhileMarkChanges kills the process after each write of a change of
// --local-mark in turn. The next process still knows the virtual server with the old
// fwmark as ours, and deletes it.
func TestKilledWhileMarkChanges(t *testing.T) {
	killed := true
	for writes := 0; killed; writes++ {
		w, s := local(t, ip.TCP)
		w.IPVS.SetConnections(fwm(first), used, ipvs.Connections{})
		w.cfg.LocalMark = plan.LocalMark{Value: 0x10000, Mask: 0xff0000}
		w.restart()
		w.order, killed = nil, false
		w.refuse = func(string) error {
			if len(w.order) < writes {
				return nil
			}
			killed = true
			return unix.EIO
		}
		w.start(s)
		w.refuse = nil
		w.restart()
		if err := w.start(s).Err(); err != nil {
			t.Fatal(err)
		}
		w.drain()
		if got := w.IPVS.Dump(); strings.Contains(got, "-f 11 ") || !strings.Contains(got, "-A -f 196608 ") {
			t.Errorf("killed after %d writes, the last is %q:\n%s", writes, w.order[:min(writes, len(w.order))], got)
		}
	}
}

// TestRetireInOrder checks that no marked packet reaches a virtual server without weights,
// neither when it is retired nor when it is desired again.
func TestRetireInOrder(t *testing.T) {
	w, s := local(t, ip.TCP)
	inOrder := func(texts ...string) {
		t.Helper()
		for i := range texts {
			if at := w.position(texts[i]); at < 0 || i > 0 && at < w.position(texts[i-1]) {
				t.Errorf("%q at %d\n%s", texts[i], at, strings.Join(w.order, "\n"))
			}
		}
		w.order = nil
	}
	w.order = nil
	w.mustApply(cluster(s))
	inOrder("add 203.0.113.5,tcp:80,0.0.0.11 to set KUBE-IPVS-DRAIN", "delete 203.0.113.5,tcp:80 from set KUBE-IPVS-LOCAL",
		"set weight 0 of real server 10.244.0.2:8000")
	w.mustApply(s)
	inOrder("set weight 1 of real server 10.244.0.2:8000", "add 203.0.113.5,tcp:80 skbmark 0xb to set KUBE-IPVS-LOCAL",
		"delete 203.0.113.5,tcp:80,0.0.0.11 from set KUBE-IPVS-DRAIN")
	w.drain()
	if rs := w.realServers(fwm(first))[used]; rs.Weight != 1 || w.reconciler.drainer.count != 0 {
		t.Errorf("back again: weight %d, %d drain", rs.Weight, w.reconciler.drainer.count)
	}
}

// TestRetireWaitsForItsRecord: without a record nothing proves ownership of the virtual
// server.
func TestRetireWaitsForItsRecord(t *testing.T) {
	for _, becomes := range []func(service.Service) service.Service{cluster, masqueraded} {
		w, s := local(t, ip.TCP)
		w.refuse = func(change string) error {
			if strings.Contains(change, "KUBE-IPVS-DRAIN") {
				return unix.ENOMEM
			}
			return nil
		}
		if w.apply(becomes(s)).Err() == nil {
			t.Error("the refusal is not reported")
		}
		if got := w.reconciler.marks.used()[key(ip.TCP, vip+":80")]; got != first {
			t.Errorf("the member was changed without a record: mark %#x", got)
		}
		if rs := w.realServers(fwm(first))[used]; rs.Weight != 1 {
			t.Errorf("packets reach %v", rs)
		}
		w.refuse = nil
		w.reconciler.retry(nodeOwner.Name)
		w.reconciler.retry(s.Name)
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatal(err)
		}
		w.retires(becomes(s))
	}
}

// TestServiceGoesWithItsMark: connections of a Service that is deleted end at once.
func TestServiceGoesWithItsMark(t *testing.T) {
	w, s := local(t, ip.TCP)
	w.mustApply(cluster(s))
	w.reconciler.Delete(s.Name)
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if got := w.IPVS.Dump() + w.IPSet.Dump(); strings.Contains(got, "203.0.113.5") || strings.Contains(got, "-f ") {
		t.Errorf("left:\n%s", got)
	}
}

// TestRetireUDP keeps a flow while its endpoint serves, and no longer.
func TestRetireUDP(t *testing.T) {
	w, s := local(t, ip.UDP)
	client := netip.MustParseAddrPort("100.64.9.9:1000")
	flow := conntrack.Entry{
		Protocol: ip.UDP, OriginalSrc: client, OriginalDst: netip.MustParseAddrPort(vip + ":80"), ReplySrc: used, ReplyDst: client,
	}
	w.Conntrack.Add(flow)
	w.mustApply(cluster(s))
	w.drain()
	if rs, there := w.realServers(fwm(first))[used]; !there || rs.Weight != 0 {
		t.Errorf("policy Cluster: real server %v, there %v, want weight 0", rs, there)
	}
	if n := len(w.Conntrack.Entries()); n != 1 {
		t.Error("the flow is forgotten")
	}
	w.mustApply(unready(cluster(s)))
	if n := len(w.realServers(fwm(first))); n != 0 {
		t.Errorf("its endpoint is not ready: %d real servers", n)
	}
	if n := len(w.Conntrack.Entries()); n != 0 {
		t.Error("the flow is not forgotten")
	}
	w.drain()
	if got := w.IPVS.Dump(); strings.Contains(got, "-f 11 ") {
		t.Errorf("left:\n%s", got)
	}
}

// TestCleanupOfRetired leaves nothing in the kernel.
func TestCleanupOfRetired(t *testing.T) {
	w, s := local(t, ip.TCP)
	w.mustApply(cluster(s))
	w.restart()
	if _, err := w.cleaner().cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := w.IPVS.Dump() + w.IPSet.Dump(); strings.Contains(got, "-f ") || strings.Contains(got, "DRAIN") {
		t.Errorf("left:\n%s", got)
	}
}

// TestRetiredIsDeletedByAnother: the fwmark is as free as if it had never been used, and its
// next virtual server gets a drain entry again.
func TestRetiredIsDeletedByAnother(t *testing.T) {
	w, s := local(t, ip.TCP)
	w.mustApply(cluster(s))
	entry := drainEntry(fwm(first), key(ip.TCP, vip+":80"))
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: fwm(first)}})
	w.IPSet.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: w.reconciler.node.sets[entry.Set], Entry: entry.Entry}})
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	if n := len(w.reconciler.marks.retired); n != 0 {
		t.Errorf("%d are recorded", n)
	}
	w.mustApply(s)
	w.IPVS.SetConnections(fwm(first), used, ipvs.Connections{Active: 1})
	w.mustApply(cluster(s))
	w.retires(cluster(s))
}
