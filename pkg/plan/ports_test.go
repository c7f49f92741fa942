package plan_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// TestClientSocketsKeepNoPort checks that a UDP socket of a client, which is bound to all addresses,
// does not keep a Service's port at an address of the node. One bound to that address does.
func TestClientSocketsKeepNoPort(t *testing.T) {
	const node = "192.168.0.11"
	for listens, want := range map[string]int{"0.0.0.0": 0, "::": 0, node: 1} {
		cfg := plan.Config{NodeName: "node1", Families: []ip.Family{ip.IPv4}, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAuto, ExternalIPs: plan.ClaimAuto}}
		n := plan.Node{
			Inventory:   routing.Inventory{Links: []routing.Link{{Index: 2, Name: "eth0", Up: true, Addresses: []routing.Address{{Prefix: netip.MustParsePrefix(node + "/24"), Global: true}}}}},
			Listeners:   []routing.Listener{{Protocol: ip.UDP, Addr: netip.MustParseAddr(listens), Port: 40000}},
			ClientPorts: []routing.PortRange{{First: 32768, Last: 60999}},
		}
		facts := plan.NewFacts(&cfg, &n)
		got := plan.ForService(&cfg, &facts, &service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, ExternalIPs: []netip.Addr{netip.MustParseAddr(node)},
			Ports: []service.Port{{Name: "a", Protocol: ip.UDP, Port: 40000}},
		})
		if len(got.Rejected) != want {
			t.Errorf("a socket on %s: rejected %q", listens, got.Rejected)
		}
	}
}

// TestVIPOfAnAPIServer: under auto, an address of an API server is claimed by port. Otherwise it would
// be local as a whole, and the connections of the node to the API server would be routed to the node.
func TestVIPOfAnAPIServer(t *testing.T) {
	const api, other = "192.168.0.1", "192.168.0.2"
	cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAuto, ExternalIPs: plan.ClaimAuto}}
	facts := plan.NewFacts(&cfg, &plan.Node{APIServer: []netip.AddrPort{netip.MustParseAddrPort(api + ":6443")}})
	s := service.Service{
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports:      []service.Port{{Name: "a", Protocol: ip.TCP, Port: 80}},
	}
	for _, field := range []*[]netip.Addr{&s.ExternalIPs, &s.LoadBalancers} {
		*field = []netip.Addr{netip.MustParseAddr(api), netip.MustParseAddr(other)}
		want := []plan.VIP{
			{Addr: netip.MustParseAddr("10.96.0.10"), Claim: plan.ClaimAddress},
			{Addr: netip.MustParseAddr(api), Claim: plan.ClaimPort},
			{Addr: netip.MustParseAddr(other), Claim: plan.ClaimRoute},
		}
		if got := plan.ForService(&cfg, &facts, &s).VIPs; !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
		*field = nil
	}
}

// TestForbiddenExternalIPs uses addresses as external IPs, on ports 22 and 6443, on a
// node where programs listen on these ports.
func TestForbiddenExternalIPs(t *testing.T) {
	const node, other, api = "192.168.0.11", "192.168.0.12", "192.168.0.1"
	for _, tc := range []struct {
		name     string
		claim    plan.ClaimMode
		listens  string // address on which a program listens on port 22
		external string
		served   []string
		unserved []string
	}{
		{"not a node address", plan.ClaimPort, "0.0.0.0", "203.0.113.5", []string{"203.0.113.5:22", "203.0.113.5:6443"}, nil},
		{"a listening port of the node", plan.ClaimPort, "0.0.0.0", node, []string{node + ":6443"}, []string{"TCP " + node + ":22: a program on node node1 listens on this port"}},
		{"listening on that address only", plan.ClaimAddress, node, node, []string{node + ":6443"}, []string{"TCP " + node + ":22: a program on node node1 listens on this port"}},
		{"listening for both families", plan.ClaimPort, "::", node, []string{node + ":6443"}, []string{"TCP " + node + ":22: a program on node node1 listens on this port"}},
		{"listening on another address", plan.ClaimPort, "127.0.0.1", node, []string{node + ":22", node + ":6443"}, nil},
		{"of another node, unknown here", plan.ClaimPort, "0.0.0.0", other, []string{other + ":22", other + ":6443"}, nil},
		{"the API server", plan.ClaimPort, "0.0.0.0", api, []string{api + ":22"}, []string{"TCP " + api + ":6443 is the address of the API server"}},
		{"the API server's kubelet", plan.ClaimPort, "0.0.0.0", api + " 10250", []string{api + ":22"}, []string{
			"TCP " + api + ":10250 is a port of the control plane", "TCP " + api + ":6443 is the address of the API server"}},
		{"another node's kubelet, unknown here", plan.ClaimPort, "0.0.0.0", other + " 10250", []string{other + ":22", other + ":6443", other + ":10250"}, nil},
		{"external IPs are not claimed", plan.ClaimNone, "0.0.0.0", "203.0.113.5", nil, []string{"203.0.113.5: external IPs are not served (--claim-external-ips none)"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimPort, ExternalIPs: tc.claim}}
			n := plan.Node{
				Inventory: routing.Inventory{Links: []routing.Link{{Index: 2, Name: "eth0", Up: true, Addresses: []routing.Address{{Prefix: netip.MustParsePrefix(node + "/24"), Global: true}}}}},
				Listeners: []routing.Listener{{Protocol: ip.TCP, Addr: netip.MustParseAddr(tc.listens), Port: 22}, {Protocol: ip.UDP, Addr: netip.IPv4Unspecified(), Port: 6443}},
				APIServer: []netip.AddrPort{netip.MustParseAddrPort(api + ":6443")},
			}
			ports := []service.Port{{Name: "a", Protocol: ip.TCP, Port: 22}, {Name: "b", Protocol: ip.TCP, Port: 6443}}
			external, kubelet := strings.CutSuffix(tc.external, " 10250")
			if tc.external = external; kubelet {
				ports = append(ports, service.Port{Name: "c", Protocol: ip.TCP, Port: 10250})
			}
			facts := plan.NewFacts(&cfg, &n)
			part := plan.ForService(&cfg, &facts, &service.Service{
				ClusterIPs:  []netip.Addr{netip.MustParseAddr("10.96.0.10")},
				ExternalIPs: []netip.Addr{netip.MustParseAddr(tc.external)},
				Ports:       ports,
			})
			var served []string
			for _, vs := range part.VirtualServers {
				if vs.Key.Addr != netip.MustParseAddr("10.96.0.10") {
					served = append(served, netip.AddrPortFrom(vs.Key.Addr, vs.Key.Port).String())
				}
			}
			if !slices.Equal(served, tc.served) {
				t.Errorf("serves %v, want %v", served, tc.served)
			}
			for i := range tc.unserved {
				tc.unserved[i] = "spec.externalIPs: " + tc.unserved[i]
			}
			if !slices.Equal(part.Rejected, tc.unserved) {
				t.Errorf("unserved %q, want %q", part.Rejected, tc.unserved)
			}
			for _, m := range part.Members {
				if strings.HasPrefix(m.Entry.String(), tc.external+",tcp:22") && !slices.Contains(served, tc.external+":22") {
					t.Errorf("%s has %s", m.Set, m.Entry)
				}
			}
		})
	}
}

// TestLoadBalancerIPOnInterface uses an address of the node's interface as a LoadBalancer IP, on
// port 22, on which a program listens. kube-vip and PureLB add LoadBalancer IPs to interfaces.
// Only at the node's own addresses does a program keep the port that listens on all of them.
func TestLoadBalancerIPOnInterface(t *testing.T) {
	const own, vip = "192.168.0.11", "192.168.0.200"
	for _, tc := range []struct {
		name, listens, address string
		node                   []string // addresses of the Node object
		external, served       bool
	}{
		{"on all addresses, a VIP", "0.0.0.0", vip, []string{own}, false, true},
		{"on all addresses of both families, a VIP", "::", vip, []string{own}, false, true},
		{"on the VIP", vip, vip, []string{own}, false, false},
		{"on another address, a VIP", own, vip, []string{own}, false, true},
		{"on all addresses, the node's own", "0.0.0.0", own, []string{own}, false, false},
		{"on all addresses, no Node object", "0.0.0.0", vip, nil, false, false},
		{"on all addresses, an external IP", "0.0.0.0", vip, []string{own}, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAuto, ExternalIPs: plan.ClaimAuto}}
			n := plan.Node{
				Inventory: routing.Inventory{Links: []routing.Link{{Index: 2, Name: "eth0", Up: true, Addresses: []routing.Address{
					{Prefix: netip.MustParsePrefix(own + "/24"), Global: true}, {Prefix: netip.MustParsePrefix(vip + "/32"), Global: true},
				}}}},
				Listeners: []routing.Listener{{Protocol: ip.TCP, Addr: netip.MustParseAddr(tc.listens), Port: 22}},
			}
			for _, a := range tc.node {
				n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
			}
			s := service.Service{
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
				Ports:      []service.Port{{Protocol: ip.TCP, Port: 22}},
			}
			if tc.external {
				s.ExternalIPs = []netip.Addr{netip.MustParseAddr(tc.address)}
			} else {
				s.LoadBalancers = []netip.Addr{netip.MustParseAddr(tc.address)}
			}
			facts := plan.NewFacts(&cfg, &n)
			part := plan.ForService(&cfg, &facts, &s)
			served := slices.ContainsFunc(part.VirtualServers, func(vs plan.VirtualServer) bool { return vs.Key.Addr.String() == tc.address })
			if served != tc.served || (len(part.Rejected) == 0) != tc.served {
				t.Errorf("served: %t, rejected %q; want %t", served, part.Rejected, tc.served)
			}
			unknown := n
			unknown.Addresses = []netip.Addr{netip.MustParseAddr("192.168.0.12")}
			other := plan.NewFacts(&cfg, &unknown)
			if plan.DiffFacts(&facts, &other)&part.Deps == 0 && !tc.external {
				t.Error("the plan does not depend on the addresses of the Node object")
			}
		})
	}
}

// TestNodeLocalDNSCache checks that a program that listens on exactly a cluster IP, on
// a dummy interface, keeps that port while it listens. Neither the interface alone nor
// a program that listens on all addresses does.
func TestNodeLocalDNSCache(t *testing.T) {
	const clusterIP = "10.96.0.10"
	for _, tc := range []struct {
		name, kind, listens string
		protocol            ip.Protocol
		served              []string
	}{
		{"a cache", "dummy", clusterIP, ip.UDP, []string{"TCP 10.96.0.10:53", "TCP 10.96.0.10:9153"}},
		{"of TCP", "dummy", clusterIP, ip.TCP, []string{"TCP 10.96.0.10:9153", "UDP 10.96.0.10:53"}},
		{"at all addresses", "dummy", "0.0.0.0", ip.UDP, []string{"TCP 10.96.0.10:53", "TCP 10.96.0.10:9153", "UDP 10.96.0.10:53"}},
		{"not on a dummy interface", "", clusterIP, ip.UDP, []string{"TCP 10.96.0.10:53", "TCP 10.96.0.10:9153", "UDP 10.96.0.10:53"}},
		{"listening on another address", "dummy", "169.254.20.10", ip.UDP, []string{"TCP 10.96.0.10:53", "TCP 10.96.0.10:9153", "UDP 10.96.0.10:53"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress}}
			var addresses []routing.Address
			for _, a := range []string{clusterIP, "169.254.20.10"} {
				addresses = append(addresses, routing.Address{Prefix: netip.MustParsePrefix(a + "/32"), Global: true})
			}
			n := plan.Node{
				Inventory: routing.Inventory{Links: []routing.Link{{Index: 3, Name: "nodelocaldns", Type: tc.kind, Up: true, Addresses: addresses}}},
				Listeners: []routing.Listener{{Protocol: tc.protocol, Addr: netip.MustParseAddr(tc.listens), Port: 53}},
			}
			facts := plan.NewFacts(&cfg, &n)
			part := plan.ForService(&cfg, &facts, &service.Service{
				ClusterIPs: []netip.Addr{netip.MustParseAddr(clusterIP)},
				Ports: []service.Port{
					{Name: "dns", Protocol: ip.UDP, Port: 53}, {Name: "tcp", Protocol: ip.TCP, Port: 53}, {Name: "metrics", Protocol: ip.TCP, Port: 9153},
				},
			})
			var served []string
			for _, vs := range part.VirtualServers {
				served = append(served, vs.Key.String())
			}
			slices.Sort(served)
			if !slices.Equal(served, tc.served) {
				t.Errorf("serves %q, want %q", served, tc.served)
			}
			members := 0
			for _, m := range part.Members {
				if m.Set == plan.ClusterIP.In(ip.IPv4) {
					members++
				}
			}
			if members != 3 {
				t.Errorf("members %v, want one for each port: others are refused on a VIP", part.Members)
			}
			without := plan.NewFacts(&cfg, &plan.Node{Inventory: n.Inventory})
			if changed := plan.DiffFacts(&without, &facts)&plan.OnDummyListeners != 0; changed != (tc.kind == "dummy" && tc.listens != "0.0.0.0") {
				t.Errorf("facts differ: %t", changed)
			}
		})
	}
}

// TestOnePacket checks that only UDP is affected, and only on request.
func TestOnePacket(t *testing.T) {
	cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "mh", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress}}
	facts := plan.NewFacts(&cfg, &plan.Node{})
	for _, asked := range []bool{false, true} {
		part := plan.ForService(&cfg, &facts, &service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, OnePacket: asked,
			Ports: []service.Port{{Name: "udp", Protocol: ip.UDP, Port: 514}, {Name: "tcp", Protocol: ip.TCP, Port: 514}},
		})
		for _, vs := range part.VirtualServers {
			want := ipvs.DefaultFlags("mh")
			if asked && vs.Key.Protocol == ip.UDP {
				want |= ipvs.FlagOnePacket
			}
			if vs.Flags != want {
				t.Errorf("%s, asked for %t: flags %#x, want %#x", vs.Key, asked, vs.Flags, want)
			}
		}
	}
}

// TestLoadBalancerOfTheAPIServers has a Service in front of the API servers, by whose load balancer IP
// this process reaches them. No other Service may have that address and port.
func TestLoadBalancerOfTheAPIServers(t *testing.T) {
	vip := netip.MustParseAddrPort("192.168.0.100:6443")
	servers := []netip.AddrPort{netip.MustParseAddrPort("192.168.0.1:6443"), netip.MustParseAddrPort("192.168.0.2:6443")}
	cfg := plan.Config{NodeName: "node1", Families: ip.Families, Scheduler: "rr", VIPs: plan.VIPs{ClusterIPs: plan.ClaimAddress, LoadBalancers: plan.ClaimAuto, ExternalIPs: plan.ClaimAuto}}
	facts := plan.NewFacts(&cfg, &plan.Node{APIServer: append([]netip.AddrPort{vip}, servers...)})
	for name, c := range map[string]struct {
		endpoints []netip.AddrPort
		external  bool // named by the Service itself
		serves    bool
	}{
		"API servers":     {servers, false, true},
		"external IP":     {servers, true, false},
		"also another":    {append([]netip.AddrPort{netip.MustParseAddrPort("10.244.0.9:6443")}, servers...), false, false},
		"no endpoint":     {nil, false, false},
		"its own address": {[]netip.AddrPort{vip}, false, false},
	} {
		s := service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, LoadBalancers: []netip.Addr{vip.Addr()},
			Ports: []service.Port{{Name: "a", Protocol: ip.TCP, Port: vip.Port()}},
		}
		if c.external {
			s.LoadBalancers, s.ExternalIPs = nil, s.LoadBalancers
		}
		for _, e := range c.endpoints {
			s.Ports[0].Endpoints = append(s.Ports[0].Endpoints, service.Endpoint{Addr: e, Ready: true})
		}
		got := plan.ForService(&cfg, &facts, &s)
		serves := slices.ContainsFunc(got.VirtualServers, func(v plan.VirtualServer) bool { return v.Key.Addr == vip.Addr() })
		if serves != c.serves || (len(got.Rejected) == 0) != c.serves {
			t.Errorf("%s: served is %v, rejected %q", name, serves, got.Rejected)
		}
	}
}
