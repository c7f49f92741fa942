package plan_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Node ports are served on the loopback address if --nodeport-addresses selects it and
// the node has an address that replies can return to.
func TestLocalhostIsServed(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*scenario)
		want   bool
	}{
		"by default":    {func(*scenario) {}, true},
		"turned off":    {func(s *scenario) { s.Config.LocalhostNodePorts = false }, false},
		"primary alone": {func(s *scenario) { s.Config.NodePortAddresses.Primary = true }, false},
		"others selected": {func(s *scenario) {
			s.Config.NodePortAddresses.Prefixes = prefixes([]string{"192.0.2.0/24", "2001:db8::/64"})
		}, false},
		"selected": {func(s *scenario) { s.Config.NodePortAddresses.Prefixes = prefixes([]string{"127.0.0.0/8", "::1/128"}) }, true},
		"the Node's address is elsewhere": {func(s *scenario) {
			s.Node.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8::99")}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := load(t, "cluster")
			s.Config.LocalhostNodePorts = true
			tc.change(s)
			part, facts := plan.ForNode(&s.Config, &s.Node), plan.NewFacts(&s.Config, &s.Node)
			for _, family := range ip.Families {
				_, exchanged := part.Loopback[family]
				_, marked := part.NAT.Chains[nat.Chain{Family: family, Table: nat.Raw, Name: "KUBE-IPVS-LOCALHOST"}]
				served := slices.Contains(facts.NodePorts, family.Loopback())
				if exchanged != tc.want || marked != tc.want || served != tc.want {
					t.Errorf("%s: exchanged %t, marked %t, served %t, want %t", family, exchanged, marked, served, tc.want)
				}
			}
		})
	}
}

// A virtual server that only the node can reach needs no number, no bitmap and no
// rejection.
func TestLocalhostVirtualServers(t *testing.T) {
	s := load(t, "cluster")
	s.Config.LocalhostNodePorts = true
	facts := plan.NewFacts(&s.Config, &s.Node)
	for i := range s.Services {
		svc := &s.Services[i]
		part := plan.ForService(&s.Config, &facts, svc)
		for _, o := range part.Internal {
			if o.Key.Addr.IsLoopback() {
				t.Errorf("%s: %s has a virtual server for external clients", svc.Name, o.Key)
			}
		}
		for _, vs := range part.VirtualServers {
			if vs.Key.Addr.IsLoopback() && len(realServers(vs.Endpoints)) == 0 {
				t.Errorf("%s: %s has no endpoint", svc.Name, vs.Key)
			}
		}
		served := slices.ContainsFunc(part.VirtualServers, func(vs plan.VirtualServer) bool { return vs.Key.Addr.IsLoopback() })
		if want := svc.Name.Name == "web" || svc.Name.Name == "here"; want && !served {
			t.Errorf("%s has no node port on the loopback address", svc.Name)
		}
	}
}

// A process of the node that listens on the loopback address, or on all addresses, keeps its
// port there, and only there.
func TestLocalhostLeavesPortsToPrograms(t *testing.T) {
	const port = 30080
	for _, tc := range []struct {
		name string
		at   string
		of   ip.Protocol
		want [2]bool // IPv4, IPv6: whether the node port is served on the loopback address
	}{
		{"at the loopback address", "127.0.0.1", ip.TCP, [2]bool{false, true}},
		{"at all addresses", "0.0.0.0", ip.TCP, [2]bool{false, true}},
		{"at all of both families", "::", ip.TCP, [2]bool{false, false}},
		{"at another address", "192.0.2.11", ip.TCP, [2]bool{true, true}},
		{"of another protocol", "127.0.0.1", ip.UDP, [2]bool{true, true}},
	} {
		s := load(t, "cluster")
		s.Config.LocalhostNodePorts = true
		s.Node.Listeners = []routing.Listener{{Protocol: tc.of, Addr: netip.MustParseAddr(tc.at), Port: port}}
		facts := plan.NewFacts(&s.Config, &s.Node)
		svc := service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:96::10")},
			Ports: []service.Port{{Protocol: ip.TCP, Port: 80, NodePort: port, Endpoints: []service.Endpoint{
				{Addr: netip.MustParseAddrPort("10.244.1.5:80"), Ready: true}, {Addr: netip.MustParseAddrPort("[fd00:244:1::5]:80"), Ready: true},
			}}},
		}
		part := plan.ForService(&s.Config, &facts, &svc)
		for i, family := range ip.Families {
			served := map[bool]int{}
			for _, vs := range part.VirtualServers {
				if vs.Key.Port == port && vs.Key.Family() == family {
					served[vs.Key.Addr.IsLoopback()]++
				}
			}
			if (served[true] > 0) != tc.want[i] || served[false] == 0 {
				t.Errorf("%s: %s: served at the loopback address: %t, at others: %t", tc.name, family, served[true] > 0, served[false] > 0)
			}
		}
		if (len(part.Rejected) > 0) == (tc.want == [2]bool{true, true}) {
			t.Errorf("%s: unserved %q", tc.name, part.Rejected)
		}
		empty := plan.NewFacts(&s.Config, &plan.Node{Addresses: s.Node.Addresses, Inventory: s.Node.Inventory})
		if again := plan.DiffFacts(&empty, &facts)&part.Deps&plan.OnLoopback != 0; again == (tc.want == [2]bool{true, true}) && tc.of == ip.TCP {
			t.Errorf("%s: requeued when the program begins to listen: %t", tc.name, again)
		}
	}
}

// TestLocalhostLeavesPortsToServersOfUDP: a UDP socket on all addresses is a server's if its port is none
// that the kernel gives to clients.
func TestLocalhostLeavesPortsToServersOfUDP(t *testing.T) {
	s := load(t, "cluster")
	s.Config.LocalhostNodePorts = true
	s.Node.ClientPorts = []routing.PortRange{{First: 32768, Last: 60999}}
	for _, protocol := range ip.Protocols {
		s.Node.Listeners = []routing.Listener{{Protocol: ip.UDP, Addr: netip.IPv4Unspecified(), Port: 30080}}
		facts := plan.NewFacts(&s.Config, &s.Node)
		part := plan.ForService(&s.Config, &facts, &service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
			Ports: []service.Port{{Protocol: protocol, Port: 80, NodePort: 30080, Endpoints: []service.Endpoint{
				{Addr: netip.MustParseAddrPort("10.244.1.5:80"), Ready: true},
			}}},
		})
		served := slices.ContainsFunc(part.VirtualServers, func(vs plan.VirtualServer) bool { return vs.Key.Addr.IsLoopback() })
		if want := protocol != ip.UDP; served != want {
			t.Errorf("%s: served at 127.0.0.1: %v, want %v", protocol, served, want)
		}
	}
}

// TestLocalhostLeavesPortsToClients: node ports that the kernel may give to clients are not served
// on the loopback address, and the node says so if they are in the usual range.
func TestLocalhostLeavesPortsToClients(t *testing.T) {
	s := load(t, "cluster")
	s.Config.LocalhostNodePorts = true
	s.Node.ClientPorts = []routing.PortRange{{First: 1024, Last: 30079}, {First: 30081, Last: 60999}}
	facts := plan.NewFacts(&s.Config, &s.Node)
	for port, want := range map[int32]bool{30079: false, 30080: true, 30081: false, 61000: true} {
		svc := service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
			Ports: []service.Port{{Protocol: ip.TCP, Port: 80, NodePort: uint16(port), Endpoints: []service.Endpoint{
				{Addr: netip.MustParseAddrPort("10.244.1.5:80"), Ready: true},
			}}},
		}
		part := plan.ForService(&s.Config, &facts, &svc)
		served := map[bool]bool{}
		for _, vs := range part.VirtualServers {
			if vs.Key.Port == uint16(port) {
				served[vs.Key.Addr.IsLoopback()] = true
			}
		}
		if served[true] != want || !served[false] {
			t.Errorf("%d: served at the loopback address: %t, want %t; at others: %t", port, served[true], want, served[false])
		}
		other := s.Node
		other.ClientPorts = nil
		if was := plan.NewFacts(&s.Config, &other); plan.DiffFacts(&was, &facts)&part.Deps&plan.OnLoopback == 0 {
			t.Errorf("%d: not requeued when the ports of clients change", port)
		}
	}
	warns := func(cfg plan.Config) bool {
		node := plan.ForNode(&cfg, &s.Node)
		return slices.ContainsFunc(plan.Warnings(&cfg, &s.Node, &node, plan.Foreign{}), func(w string) bool {
			return strings.HasPrefix(w, "node ports 30000-30079,30081-32767 are not served on the loopback address")
		})
	}
	without := s.Config
	without.LocalhostNodePorts = false
	if !warns(s.Config) || warns(without) {
		t.Errorf("warned: %t, want true; without node ports on the loopback address: %t, want false", warns(s.Config), warns(without))
	}
}
