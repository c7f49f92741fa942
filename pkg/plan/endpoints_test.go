package plan_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// backends parses endpoints 10.0.0.1, 10.0.0.2 and so on. Each is NODE STATE, followed
// by hints: zone=ZONE or node=NODE. STATE is ready, draining (terminating, but
// serving), unready or gone.
func backends(list ...string) []service.Endpoint {
	var out []service.Endpoint
	for i, text := range list {
		words := strings.Fields(text)
		e := service.Endpoint{
			Addr:        netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80),
			Node:        words[0],
			Ready:       words[1] == "ready",
			Serving:     words[1] == "ready" || words[1] == "draining",
			Terminating: words[1] == "draining" || words[1] == "gone",
			Hints:       &service.Hints{},
		}
		for _, hint := range words[2:] {
			if zone, ok := strings.CutPrefix(hint, "zone="); ok {
				e.Hints.Zones = append(e.Hints.Zones, zone)
			} else {
				e.Hints.Nodes = append(e.Hints.Nodes, strings.TrimPrefix(hint, "node="))
			}
		}
		out = append(out, e)
	}
	return out
}

// The node is node-1 in zone a. Endpoints are listed by their last number: first those
// of the cluster IP, then those of a node port with externalTrafficPolicy Local, which
// falls back to the cluster's.
func TestChosenEndpoints(t *testing.T) {
	for _, tc := range []struct {
		name    string
		in      []service.Endpoint
		cluster string
		local   string
	}{
		{"none", nil, "", ""},
		{"ready", backends("node-1 ready", "node-2 ready"), "1 2", "1"},
		{"ready here only", backends("node-1 ready"), "1", "1"},
		{"ready elsewhere only", backends("node-2 ready"), "1", "1"},
		{"unready", backends("node-1 unready", "node-2 unready"), "", ""},
		{"draining while others are ready", backends("node-1 draining", "node-2 ready"), "2", "1"},
		{"all draining", backends("node-1 draining", "node-2 draining", "node-2 gone"), "1 2", "1"},
		{"all gone", backends("node-1 gone", "node-2 gone"), "", ""},
		{"unready is not draining", backends("node-1 unready", "node-2 draining"), "2", "2"},

		{"zone", backends("node-1 ready zone=a", "node-2 ready zone=a", "node-3 ready zone=b"), "1 2", "1"},
		{"zone, one of several", backends("node-2 ready zone=b zone=a", "node-3 ready zone=b"), "1", "1"},
		{"zone, one has no hint", backends("node-2 ready zone=a", "node-3 ready"), "1 2", "1 2"},
		{"zone, none is for us", backends("node-2 ready zone=b", "node-3 ready zone=c"), "1 2", "1 2"},
		{"zone, who is not ready needs no hint", backends("node-2 ready zone=a", "node-3 ready zone=b", "node-3 draining"), "1", "1"},
		{"hints do not bind local traffic", backends("node-1 ready zone=b", "node-2 ready zone=a"), "2", "1"},
		{"node before zone", backends("node-1 ready zone=a node=node-1", "node-2 ready zone=a node=node-2"), "1", "1"},
		{"node, one has none: by zone", backends("node-1 ready zone=b node=node-1", "node-2 ready zone=a"), "2", "1"},
		{"node, none is for us: by zone", backends("node-2 ready zone=a node=node-2", "node-3 ready zone=b node=node-3"), "1", "1"},
		{"hints do not bind draining ones", backends("node-2 draining zone=b", "node-3 draining zone=a"), "1 2", "1 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := defaultConfig()
			node := netip.MustParseAddr("192.0.2.11")
			facts := plan.Facts{NodeName: "node-1", Zone: "a", NodePorts: []netip.Addr{node}}
			vip := netip.MustParseAddr("10.96.0.10")
			part := plan.ForService(&cfg, &facts, &service.Service{
				ClusterIPs: []netip.Addr{vip}, ExternalLocal: true,
				Ports: []service.Port{{Protocol: ip.TCP, Port: 80, NodePort: 30080, Endpoints: tc.in}},
			})
			part = plan.AssignMarks(&cfg, part, nil)
			if got := lastNumbers(part, ipvs.Key{Protocol: ip.TCP, Addr: vip, Port: 80}); got != tc.cluster {
				t.Errorf("cluster endpoints: %q, want %q", got, tc.cluster)
			}
			if got := lastNumbers(part, ipvs.Key{Protocol: ip.TCP, Addr: node, Port: 30080}); got != tc.local {
				t.Errorf("node-local endpoints: %q, want %q", got, tc.local)
			}
		})
	}
}

// realServers returns the real servers among endpoints.
func realServers(list []plan.Endpoint) (out []plan.Endpoint) {
	for _, e := range list {
		if e.Flags&plan.IsRealServer != 0 {
			out = append(out, e)
		}
	}
	return out
}

// lastNumbers returns the last numbers of a virtual server's real servers.
func lastNumbers(part plan.ServicePlan, key ipvs.Key) string {
	var out []string
	for _, vs := range part.VirtualServers {
		for _, rs := range realServers(vs.Endpoints) {
			if vs.Key == key {
				out = append(out, fmt.Sprint(rs.Addr.Addr().As4()[3]))
			}
		}
	}
	return strings.Join(out, " ")
}

// TestIssue89392LostEndpoints checks which endpoints are not drained: those that must
// not get traffic and are on an unreachable node, while there are others.
func TestIssue89392LostEndpoints(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   []service.Endpoint
		want string
	}{
		{"unready", backends("node-1 ready", "node-2 unready", "node-3 unready"), "2"},
		{"terminating", backends("node-1 ready", "node-2 gone", "node-3 gone"), "2"},
		{"terminating, and serving as far as is known", backends("node-1 ready", "node-2 draining"), ""},
		{"ready as far as is known", backends("node-1 ready", "node-2 ready"), ""},
		{"of a node that is not named", append(backends("node-1 ready"), service.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.2:80")}), ""},
		{"no other is ready", backends("node-1 unready", "node-2 unready"), ""},
		{"another one drains", backends("node-1 draining", "node-2 unready"), "2"},
		{"another one is ready in a zone that is not ours", backends("node-3 ready zone=b", "node-2 unready"), "2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, facts := defaultConfig(), plan.Facts{NodeName: "node-1", Zone: "a", UnreachableNodes: []string{"", "node-2"}}
			part := plan.ForService(&cfg, &facts, &service.Service{
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
				Ports:      []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: tc.in}},
			})
			var got []string
			for _, e := range part.VirtualServers[0].Endpoints {
				if e.Flags&plan.IsUnreachable != 0 {
					got = append(got, fmt.Sprint(e.Addr.Addr().As4()[3]))
				}
			}
			if got := strings.Join(got, " "); got != tc.want {
				t.Errorf("lost: %q, want %q", got, tc.want)
			}
		})
	}
}

// An endpoint without a node name is never node-local, not even if the node itself has
// no name.
func TestEndpointsWithoutNode(t *testing.T) {
	cfg := defaultConfig()
	part := plan.ForService(&cfg, &plan.Facts{}, &service.Service{
		HealthCheckNodePort: 32000,
		Ports: []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{
			{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Ready: true, Serving: true},
		}}},
	})
	if part.HealthCheck.ReadyHere != 0 {
		t.Errorf("%d local endpoints", part.HealthCheck.ReadyHere)
	}
}

// A pod behind two ports counts as one endpoint.
func TestHealthCheckCountsAddresses(t *testing.T) {
	cfg := defaultConfig()
	part := plan.ForService(&cfg, &plan.Facts{NodeName: "node-1"}, &service.Service{
		HealthCheckNodePort: 32000,
		Ports: []service.Port{
			{Protocol: ip.TCP, Port: 80, Endpoints: backends("node-1 ready", "node-1 draining", "node-2 ready")},
			{Protocol: ip.UDP, Port: 80, Endpoints: backends("node-1 ready", "node-1 ready", "node-2 ready")},
		},
	})
	if want := (plan.HealthCheck{Port: 32000, ReadyHere: 2}); !reflect.DeepEqual(part.HealthCheck, want) {
		t.Errorf("got %+v, want %+v", part.HealthCheck, want)
	}
	here := func(addr string) service.Endpoint {
		return service.Endpoint{Addr: netip.MustParseAddrPort(addr), Node: "node-1", Ready: true, Serving: true}
	}
	part = plan.ForService(&cfg, &plan.Facts{NodeName: "node-1"}, &service.Service{
		HealthCheckNodePort: 32000,
		Ports: []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{
			here("10.244.0.2:80"), here("10.244.0.3:80"), here("[fd00::2]:80"), here("[fd00::3]:80"),
		}}},
	})
	if want := (plan.HealthCheck{Port: 32000, ReadyHere: 2}); !reflect.DeepEqual(part.HealthCheck, want) {
		t.Errorf("two dual-stack pods: got %+v, want %+v", part.HealthCheck, want)
	}
	part = plan.ForService(&cfg, &plan.Facts{NodeName: "node-1"}, &service.Service{
		HealthCheckNodePort: 32000, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports: []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{here("[fd00::2]:80")}}},
	})
	if part.HealthCheck.ReadyHere != 0 {
		t.Errorf("an endpoint of a family that the Service does not have counts: %+v", part.HealthCheck)
	}
}

// TestEndpointsOfVirtualServer: with UDPDrain, a terminating endpoint is a real server of weight
// 0, without the limit of connections. One on an unreachable node is none.
func TestEndpointsOfVirtualServer(t *testing.T) {
	cfg, facts := defaultConfig(), plan.Facts{NodeName: "node-1", UnreachableNodes: []string{"node-3"}}
	cfg.UDPDrain = true
	part := plan.ForService(&cfg, &facts, &service.Service{
		ClusterIPs:     []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		MaxConnections: 7,
		Ports: []service.Port{{Protocol: ip.UDP, Port: 80, Endpoints: backends(
			"node-1 ready", "node-2 draining", "node-3 unready")}},
	})
	var got []string
	for _, e := range part.VirtualServers[0].Endpoints {
		got = append(got, fmt.Sprintf("%s is %d, weight %d, limit %d", e.Dest(), e.Flags, e.Weight, e.MaxConnections))
	}
	all := plan.IsEndpoint
	want := []string{
		fmt.Sprintf("10.0.0.1:80 is %d, weight 1, limit 7", all|plan.IsRealServer),
		fmt.Sprintf("10.0.0.2:80 is %d, weight 0, limit 0", all|plan.IsRealServer),
		fmt.Sprintf("10.0.0.3:80 is %d, weight 0, limit 0", all|plan.IsUnreachable),
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// The virtual servers of a port keep one list of endpoints, which is most of their memory.
func TestVirtualServersShareEndpoints(t *testing.T) {
	facts := plan.Facts{NodeName: "node-1", NodePorts: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	s := service.Service{
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports:      []service.Port{{Protocol: ip.TCP, Port: 80, NodePort: 30080, Endpoints: backends("node-1 ready", "node-2 ready")}},
	}
	cfg := defaultConfig()
	p := plan.ForService(&cfg, &facts, &s)
	if len(p.VirtualServers) != 2 || &p.VirtualServers[0].Endpoints[0] != &p.VirtualServers[1].Endpoints[0] {
		t.Errorf("two virtual servers with one list of endpoints expected: %+v", p.VirtualServers)
	}
}

// TestHealthCheckAddresses: as under kube-proxy, --nodeport-addresses applies to health check
// node ports.
func TestHealthCheckAddresses(t *testing.T) {
	inside, outside := netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("203.0.113.11")
	for _, tc := range []struct {
		name string
		only plan.NodePortAddresses
		want []netip.Addr
	}{
		{"all", plan.NodePortAddresses{}, nil},
		{"a CIDR of all addresses", plan.NodePortAddresses{Prefixes: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}, nil},
		{"a CIDR of no address", plan.NodePortAddresses{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}, []netip.Addr{}},
		{"a CIDR", plan.NodePortAddresses{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}, []netip.Addr{inside}},
		{"primary", plan.NodePortAddresses{Primary: true}, []netip.Addr{inside}},
	} {
		cfg := defaultConfig()
		cfg.NodePortAddresses, cfg.LocalhostNodePorts = tc.only, false
		facts := plan.NewFacts(&cfg, &plan.Node{Addresses: []netip.Addr{inside}, Inventory: routing.Inventory{Links: []routing.Link{
			{Index: 2, Name: "eth0", Up: true, Addresses: []routing.Address{{Prefix: netip.PrefixFrom(inside, 24), Global: true}}},
			{Index: 3, Name: "eth1", Up: true, Addresses: []routing.Address{{Prefix: netip.PrefixFrom(outside, 24), Global: true}}},
		}}})
		part := plan.ForService(&cfg, &facts, &service.Service{HealthCheckNodePort: 32000})
		if got := part.HealthCheck; got.Restricted != (tc.want != nil) || !slices.Equal(got.Addresses, tc.want) {
			t.Errorf("%s: %+v, want %v", tc.name, got, tc.want)
		}
		if tc.want != nil && part.Deps&plan.OnNodePorts == 0 {
			t.Errorf("%s: a change of the node's addresses is not noticed", tc.name)
		}
	}
}

// TestSourceRangesForAll: a list that excludes no client of one family excludes none of the other.
func TestSourceRangesForAll(t *testing.T) {
	for ranges, want := range map[string][]string{
		"0.0.0.0/0":            nil,
		"::/0":                 nil,
		"0.0.0.0/0 ::/0":       nil,
		"10.0.0.0/8":           {"KUBE-6-LOAD-BALANCER-FW", "KUBE-LOAD-BALANCER-FW"},
		"0.0.0.0/0 fd00::/8":   {"KUBE-6-LOAD-BALANCER-FW"},
		"0.0.0.0/0 10.0.0.0/8": nil,
	} {
		cfg := defaultConfig()
		cfg.Families = ip.Families
		s := service.Service{
			LoadBalancers: []netip.Addr{netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("2001:db8::5")},
			Ports:         []service.Port{{Protocol: ip.TCP, Port: 80}},
		}
		for _, r := range strings.Fields(ranges) {
			s.SourceRanges = append(s.SourceRanges, netip.MustParsePrefix(r))
		}
		var restricted []string
		for _, m := range plan.ForService(&cfg, &plan.Facts{NodeName: "node-1"}, &s).Members {
			if strings.HasSuffix(m.Set, "LOAD-BALANCER-FW") {
				restricted = append(restricted, m.Set)
			}
		}
		if !slices.Equal(restricted, want) {
			t.Errorf("%s: restricted by %q, want %q", ranges, restricted, want)
		}
	}
}

// TestRemoteFallback checks when clients at a cluster IP get endpoints of other nodes although
// internalTrafficPolicy is Local: as under kube-proxy, if the node has none, external clients can
// reach the Service, and they get such endpoints too.
func TestRemoteFallback(t *testing.T) {
	for _, c := range []struct {
		service  string
		fallback bool
		change   func(*service.Service)
		want     int
	}{
		{"away", false, func(*service.Service) {}, 0},
		{"away", true, func(*service.Service) {}, 1},
		{"away", true, func(s *service.Service) { s.Ports[0].NodePort = 0 }, 0},
		{"away", true, func(s *service.Service) { s.ExternalLocal = true }, 0},
		{"here", true, func(*service.Service) {}, 1},
	} {
		s := load(t, "internal-local")
		s.Config.RemoteFallback = c.fallback
		facts := plan.NewFacts(&s.Config, &s.Node)
		for i := range s.Services {
			if s.Services[i].Name.Name != c.service {
				continue
			}
			c.change(&s.Services[i])
			reals := 0
			for _, vs := range plan.ForService(&s.Config, &facts, &s.Services[i]).VirtualServers {
				for _, e := range vs.Endpoints {
					if slices.Contains(s.Services[i].ClusterIPs, vs.Key.Addr) && e.Flags&plan.IsRealServer != 0 {
						reals++
					}
				}
			}
			if reals != c.want {
				t.Errorf("%s, fallback %v: %d real servers, want %d", c.service, c.fallback, reals, c.want)
			}
		}
	}
}
