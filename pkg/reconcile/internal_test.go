package reconcile

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// reached returns the endpoints that a new connection of an internal client reaches, and
// false if no virtual server takes it.
func (w *world) reached(address ipvs.Key) ([]netip.AddrPort, bool) {
	w.t.Helper()
	sets, err := w.IPSet.Observe(func(string) bool { return true })
	if err != nil {
		w.t.Fatal(err)
	}
	servers, err := w.IPVS.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	s, there := servers[address]
	if mark, ok := sets[plan.Local.In(address.Family())].Entries[plan.EntryOf(address)]; ok {
		if marked, exists := servers[fwm(mark)]; exists {
			s, there = marked, true
		}
	}
	var out []netip.AddrPort
	for dest, rs := range s.RealServers {
		if rs.Weight > 0 {
			out = append(out, dest)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out, there
}

// terminating makes the endpoints on this node terminate: external clients use them as long
// as there are no others on the node, internal clients use those of other nodes.
func terminating(s service.Service) service.Service {
	s.Ports = slices.Clone(s.Ports)
	s.Ports[0].Endpoints = slices.Clone(s.Ports[0].Endpoints)
	for i := range s.Ports[0].Endpoints {
		if e := &s.Ports[0].Endpoints[i]; e.Node == "node1" {
			e.Ready, e.Serving, e.Terminating = false, true, true
		}
	}
	return s
}

// TestInternalClientsReachTheirEndpoints makes a virtual server for internal clients
// undesired. After each write, new connections of internal clients reach endpoints from
// before or from after the change, not those that the virtual server of the address is
// about to lose.
func TestInternalClientsReachTheirEndpoints(t *testing.T) {
	for name, becomes := range map[string]func(service.Service) service.Service{
		"policy Cluster":       cluster,
		"local endpoints gone": quarantined,
		"another address":      func(s service.Service) service.Service { s.LoadBalancers = nil; return s },
		"policy Local, masked": masqueraded,
		"all endpoints not there": func(s service.Service) service.Service {
			s.Ports = slices.Clone(s.Ports)
			s.Ports[0].Endpoints = nil
			return s
		},
	} {
		for _, protocol := range []ip.Protocol{ip.TCP, ip.UDP} {
			t.Run(name+" "+protocol.String(), func(t *testing.T) {
				for writes, stopped := 0, true; stopped; writes++ {
					w := newWorld(t)
					s := terminating(externalLocal("a", protocol, vip, here))
					w.start(s)
					address := key(protocol, vip+":80")
					before, _ := w.reached(address)
					if want := []netip.AddrPort{netip.MustParseAddrPort("10.244.9.9:8000")}; !slices.Equal(before, want) {
						t.Fatalf("internal clients reach %v, want %v", before, want)
					}
					stopped = w.applyWrites(writes, becomes(s))
					if got, _ := w.reached(address); slices.Contains(got, used) {
						t.Errorf("after %q internal clients reach %v", w.order, got)
					}
				}
			})
		}
	}
}

// applyWrites makes a Service desired, and lets the kernel refuse every write after the
// first ones. It reports whether there were more.
func (w *world) applyWrites(writes int, s service.Service) (more bool) {
	w.order = nil
	w.refuse = func(string) error {
		if len(w.order) < writes {
			return nil
		}
		more = true
		return unix.EIO
	}
	w.apply(s)
	return more
}

// TestInternalClientsWaitForTheVirtualServer: another program has deleted the virtual server
// of the address, and the kernel refuses to add it again. Internal clients keep theirs.
func TestInternalClientsWaitForTheVirtualServer(t *testing.T) {
	w := newWorld(t)
	s := externalLocal("a", ip.TCP, vip, here)
	w.start(s)
	address := key(ip.TCP, vip+":80")
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: address}})
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.refuse = func(change string) error {
		if strings.HasPrefix(change, "add virtual server TCP "+vip) {
			return unix.ENOMEM
		}
		return nil
	}
	w.apply(cluster(s))
	if got, there := w.reached(address); !there || len(got) != 2 {
		t.Errorf("internal clients reach %v, a virtual server is there: %v", got, there)
	}
	w.refuse = nil
	w.reconciler.retry(s.Name)
	w.reconciler.retry(nodeOwner.Name)
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	sets, _ := w.IPSet.Observe(func(string) bool { return true })
	if _, marked := sets[string(plan.Local)].Entries[ipset.Entry{Addr: address.Addr, Port: 80, Protocol: ip.TCP}]; marked {
		t.Error("internal clients are still marked after the retry")
	}
	if got, there := w.reached(address); !there || len(got) != 2 {
		t.Errorf("after the retry, internal clients reach %v, a virtual server is there: %v", got, there)
	}
}

// TestInternalClientsAreServedByANewVirtualServer makes a virtual server for internal clients
// desired. After each write, their new connections reach endpoints.
func TestInternalClientsAreServedByANewVirtualServer(t *testing.T) {
	for name, was := range map[string]func(service.Service) service.Service{
		"policy Cluster": cluster, "no local endpoint": quarantined, "masqueraded": masqueraded,
	} {
		t.Run(name, func(t *testing.T) {
			for writes, more := 0, true; more; writes++ {
				w := newWorld(t)
				s := externalLocal("a", ip.TCP, vip, here)
				w.start(was(s))
				more = w.applyWrites(writes, s)
				if got, _ := w.reached(key(ip.TCP, vip+":80")); len(got) == 0 {
					t.Errorf("after %q internal clients reach no endpoint", w.order)
				}
				if more {
					continue
				}
				if got, _ := w.reached(key(ip.TCP, vip+":80")); len(got) != 2 || w.reconciler.marks.markOf(key(ip.TCP, vip+":80")) == 0 {
					t.Errorf("at the end internal clients reach %v", got)
				}
				if got := w.IPSet.Dump(); name != "masqueraded" && strings.Contains(got, "0.0.0.11") {
					t.Errorf("the record is left:\n%s", got)
				}
			}
		})
	}
}
