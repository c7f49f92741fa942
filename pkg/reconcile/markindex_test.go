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

// externalLocal returns a Service with a LoadBalancer IP on port 80 and
// externalTrafficPolicy Local. The given endpoints are on this node, 10.244.9.9 is on
// another.
func externalLocal(name string, protocol ip.Protocol, vip string, here ...string) service.Service {
	s := clusterIP(name, "10.96.0.1", here...)
	s.ExternalLocal = true
	s.LoadBalancers = []netip.Addr{netip.MustParseAddr(vip)}
	port := &s.Ports[0]
	port.Protocol = protocol
	for i := range port.Endpoints {
		port.Endpoints[i].Node = "node1"
	}
	port.Endpoints = append(port.Endpoints, service.Endpoint{Addr: netip.MustParseAddrPort("10.244.9.9:8000"), Node: "node2", Ready: true, Serving: true})
	return s
}

// unready makes the endpoints on this node not ready.
func unready(s service.Service) service.Service {
	s.Ports = slices.Clone(s.Ports)
	s.Ports[0].Endpoints = slices.Clone(s.Ports[0].Endpoints)
	for i := range s.Ports[0].Endpoints {
		if e := &s.Ports[0].Endpoints[i]; e.Node == "node1" {
			e.Ready, e.Serving = false, false
		}
	}
	return s
}

func fwm(mark uint32) ipvs.Key { return fwmKey(ip.IPv4, mark) }

const (
	here = "10.244.0.2:8000"
	vip  = "203.0.113.5"
	// first is the fwmark with index 1.
	first = 0xb
)

func TestMarkStandsAroundItsVirtualServer(t *testing.T) {
	w := newWorld(t)
	w.start(externalLocal("a", ip.TCP, vip, here))
	inOrder := func(texts ...string) {
		t.Helper()
		for i := 1; i < len(texts); i++ {
			if a, b := w.position(texts[i-1]), w.position(texts[i]); a < 0 || b < a {
				t.Errorf("%q at %d, %q at %d\n%s", texts[i-1], a, texts[i], b, strings.Join(w.order, "\n"))
			}
		}
	}
	inOrder("add 203.0.113.5,tcp:80 skbmark 0xb to set KUBE-IPVS-LOCAL", "add virtual server FWM 0xb", "add local route 203.0.113.5/32")
	if n := len(w.realServers(key(ip.TCP, vip+":80"))); n != 1 {
		t.Errorf("external clients get %d real servers, want 1", n)
	}
	if n := len(w.realServers(fwm(first))); n != 2 {
		t.Errorf("internal clients get %d real servers, want 2", n)
	}
	w.order = nil
	w.reconciler.Delete(externalLocal("a", ip.TCP, vip).Name)
	w.reconciler.Flush()
	inOrder("delete local route 203.0.113.5/32", "delete virtual server FWM 0xb", "delete 203.0.113.5,tcp:80 from set KUBE-IPVS-LOCAL")
	if w.reconciler.marks.kernelUses(key(ip.TCP, vip+":80"), first) {
		t.Error("the mark counts as used although the kernel has nothing with it")
	}
}

// TestMemberOutlivesItsVirtualServer refuses the deletion of the virtual
// server: without the member nothing proves that it is ours.
func TestMemberOutlivesItsVirtualServer(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.TCP, vip, here)
	w.start(s)
	w.refuse = func(change string) error {
		if strings.HasPrefix(change, "delete virtual server FWM") {
			return unix.ENOMEM
		}
		return nil
	}
	w.reconciler.Delete(s.Name)
	w.reconciler.Flush()
	if !w.reconciler.marks.kernelUses(key(ip.TCP, vip+":80"), first) || w.reconciler.marks.used()[key(ip.TCP, vip+":80")] != first {
		t.Fatal("the member went before its virtual server")
	}
	w.refuse = nil
	w.restart()
	w.start()
	if got := w.IPVS.Dump() + w.IPSet.Dump(); strings.Contains(got, "203.0.113.5") || strings.Contains(got, "-f ") {
		t.Errorf("left after a restart:\n%s", got)
	}
}

func TestRestartKeepsMarks(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.TCP, vip, here)
	w.start(s)
	w.order = nil
	w.restart()
	w.start(s)
	if len(w.order) != 0 {
		t.Errorf("a restart wrote %q", w.order)
	}
}

// TestForeignMarkIsLeftAlone has a virtual server with a fwmark that none of our members
// carries.
func TestForeignMarkIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: fwm(77), VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}}})
	w.start(externalLocal("a", ip.TCP, vip, here))
	if _, there := w.reconciler.servers.foreign[fwm(77)]; !there || !strings.Contains(w.IPVS.Dump(), "-A -f 77 -s wlc") {
		t.Errorf("not there any more:\n%s", w.IPVS.Dump())
	}
	if !w.reconciler.marks.inUse(ip.IPv4, 77) || w.reconciler.marks.inUse(ip.IPv4, first+1) {
		t.Error("foreign marks are taken for ours")
	}
}

// TestFWMarkOfAnotherProgram: a virtual server with a fwmark gets all packets to the node with this
// mark, so it must not be one that another program sets.
func TestFWMarkOfAnotherProgram(t *testing.T) {
	for rules, want := range map[string]uint32{
		"": first,
		"-A PREROUTING -i eth0 -j MARK --set-xmark 0xb/0xffffffff\n":                                                  0xd,
		"-A PREROUTING -i eth0 -j MARK --set-xmark 0x400b/0xffffffff\n-A OUTPUT -j CONNMARK --set-xmark 0xd/0xffff\n": 0xf,
	} {
		w := newWorld(t)
		if err := w.NAT[ip.IPv4].Restore("*mangle\n" + rules + "COMMIT\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.observe(); err != nil {
			t.Fatal(err)
		}
		s := externalLocal("a", ip.TCP, vip, here)
		assigned, err := w.reconciler.assignMarks(s.Name, plan.ForService(&w.cfg, &w.facts, &s))
		marks := map[uint32]bool{}
		for _, vs := range assigned.VirtualServers {
			marks[vs.Key.FWMark] = true
		}
		if err != nil || !marks[want] || len(marks) != 2 {
			t.Errorf("%q: marks %v, want %#x: %v", rules, marks, want, err)
		}
	}
}

// TestMemberThatIsThereAfterAll: a member exists although its addition seemed to fail. The
// virtual server that waits for it is programmed once the member is observed.
func TestMemberThatIsThereAfterAll(t *testing.T) {
	w := newWorld(t)
	w.refuse = func(change string) error {
		if strings.Contains(change, "KUBE-IPVS-LOCAL") && strings.Contains(change, vip) {
			return unix.EINTR
		}
		return nil
	}
	w.start(externalLocal("a", ip.TCP, vip, here))
	w.refuse = nil
	if w.reconciler.servers.exists(fwm(first)) {
		t.Fatal("the virtual server did not wait for its member")
	}
	set := w.reconciler.node.sets[plan.Local.In(ip.IPv4)]
	w.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: set, Entry: plan.EntryOf(key(ip.TCP, vip+":80")), Mark: first}})
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if !w.reconciler.servers.exists(fwm(first)) {
		t.Errorf("the virtual server is not there:\n%s", w.IPVS.Dump())
	}
}

// TestUnreadyEndpointDrains: the node's last endpoint is not ready for a while. The virtual
// server and its connections stay.
func TestUnreadyEndpointDrains(t *testing.T) {
	w := newWorld(t)
	s, dest := externalLocal("a", ip.TCP, vip, here), netip.MustParseAddrPort(here)
	w.start(s)
	w.IPVS.SetConnections(fwm(first), dest, ipvs.Connections{Active: 1})
	w.mustApply(unready(s))
	w.drain()
	if rs, there := w.realServers(fwm(first))[dest]; !there || rs.Weight != 0 {
		t.Errorf("with a connection open: %v, there %v, want weight 0", rs, there)
	}
	w.mustApply(s)
	if rs := w.realServers(fwm(first))[dest]; rs.Weight != 1 {
		t.Errorf("ready again: %v", rs)
	}
	w.mustApply(unready(s))
	w.IPVS.SetConnections(fwm(first), dest, ipvs.Connections{})
	w.drain()
	if n := len(w.realServers(fwm(first))); n != 0 {
		t.Errorf("%d real servers after the last connection", n)
	}
}

// TestMarkDrift changes the kernel as another program would.
func TestMarkDrift(t *testing.T) {
	w := newWorld(t)
	w.start(externalLocal("a", ip.TCP, vip, here))
	whole := w.kernel()
	set := ipset.Set{Name: string(plan.Local), Type: ipset.HashIPPortMark, Family: ip.IPv4}
	member := ipset.Entry{Addr: netip.MustParseAddr(vip), Protocol: ip.TCP, Port: 80}
	for name, damage := range map[string]func(){
		"the virtual server": func() { w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: fwm(first)}}) },
		"the member":         func() { w.IPSet.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: set, Entry: member}}) },
		"the member's mark":  func() { w.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: set, Entry: member, Mark: 0x39}}) },
		"a member with the same mark": func() {
			other := member
			other.Port = 81
			w.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: set, Entry: other, Mark: first}})
		},
	} {
		damage()
		for range 2 {
			if _, err := w.observe(); err != nil {
				t.Fatal(err)
			}
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
		}
		if got := w.kernel(); got != whole {
			t.Errorf("%s is not repaired:\n%s\nwant\n%s", name, got, whole)
		}
	}
}

// TestMasqueradeChangesTheMark: the same fwmark, with and without the masquerade mark.
func TestMasqueradeChangesTheMark(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.TCP, vip, here)
	w.start(s)
	s.Masquerade = true
	w.mustApply(s)
	w.drain()
	if got := w.IPVS.Dump(); !strings.Contains(got, "-A -f 16395 ") || strings.Contains(got, "-A -f 11 ") {
		t.Errorf("virtual servers\n%s", got)
	}
	if got := w.reconciler.marks.used()[key(ip.TCP, vip+":80")]; got != 0x4000|first {
		t.Errorf("the member carries %#x", got)
	}
}

// TestUDPFlowsOfBothVirtualServers: flows to an endpoint that either of the two virtual
// servers still has are kept.
func TestUDPFlowsOfBothVirtualServers(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.UDP, vip, here)
	w.start(s)
	flow := func(client, endpoint string) conntrack.Entry {
		c := netip.MustParseAddrPort(client)
		return conntrack.Entry{
			Protocol: ip.UDP, OriginalSrc: c, OriginalDst: netip.MustParseAddrPort(vip + ":80"),
			ReplySrc: netip.MustParseAddrPort(endpoint), ReplyDst: c,
		}
	}
	gone, kept := flow("100.64.9.9:1000", here), flow("10.244.0.9:1001", "10.244.9.9:8000")
	w.Conntrack.Add(gone, kept)
	w.mustApply(unready(s))
	if n := len(w.realServers(fwm(first))); n > 1 {
		t.Errorf("%d real servers, want no more than the one that is ready", n)
	}
	if got := w.Conntrack.Entries(); !slices.Equal(got, []conntrack.Entry{kept}) {
		t.Errorf("flows left: %v, want %v", got, kept)
	}
}

// TestMarkIsTheOlderServices: a Service that loses an address and port does not get
// its external clients either.
func TestMarkIsTheOlderServices(t *testing.T) {
	for _, olderFirst := range []bool{true, false} {
		w := newWorld(t)
		w.start()
		older, younger := externalLocal("z", ip.TCP, vip), externalLocal("a", ip.TCP, vip, here)
		older.ExternalLocal = false
		older.Created, younger.Created = owner("", 10).Created, owner("", 20).Created
		if olderFirst {
			w.mustApply(older)
			w.mustApply(younger)
		} else {
			w.mustApply(younger)
			w.mustApply(older)
		}
		w.drain()
		if got := w.IPVS.Dump(); strings.Contains(got, "-f ") {
			t.Errorf("older first %v: the younger has a virtual server:\n%s", olderFirst, got)
		}
		w.reconciler.Delete(older.Name)
		w.reconciler.Flush()
		if got := w.IPVS.Dump(); !strings.Contains(got, "-A -f 11 ") {
			t.Errorf("older first %v: the younger did not take over:\n%s", olderFirst, got)
		}
	}
}

// A kernel without ip_vs_mh refuses the virtual server for internal clients under
// session affinity. The address is served all the same, as under kube-proxy.
func TestAddressWithoutItsMarkedServer(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.refuse = func(change string) error {
		if strings.Contains(change, "virtual server FWM") {
			return unix.ENOENT
		}
		return nil
	}
	if err := w.apply(externalLocal("a", ip.TCP, vip, here)); len(err) == 0 {
		t.Error("the refusal is not reported")
	}
	if w.position("add local route "+vip+"/32") < 0 {
		t.Errorf("the address is not local:\n%s", strings.Join(w.order, "\n"))
	}
	if n := len(w.realServers(key(ip.TCP, vip+":80"))); n != 1 {
		t.Errorf("it has %d real servers, want 1", n)
	}
}
