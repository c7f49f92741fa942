package plan_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// withNetwork returns a node whose network is described as in testdata.
func withNetwork(lines ...string) *scenario {
	s := &scenario{Config: defaultConfig()}
	s.Config.Families = ip.Families
	for _, line := range lines {
		s.AddNetwork(strings.Fields(line))
	}
	return s
}

func TestNodePortAddresses(t *testing.T) {
	network := []string{
		"link lo 127.0.0.1/8 ::1/128",
		"link eth0 192.0.2.11/24 2001:db8::11/64 fe80::11/64",
		"link eth1 198.51.100.11/24 169.254.7.7/32",
		"link eth2 192.0.2.11/32", // again
	}
	for _, tc := range []struct {
		name string
		set  plan.NodePortAddresses
		want string
	}{
		{"all", plan.NodePortAddresses{}, "[169.254.7.7 192.0.2.11 198.51.100.11 2001:db8::11]"},
		{"IPv4 prefix", plan.NodePortAddresses{Prefixes: prefixes([]string{"192.0.2.0/24"})}, "[192.0.2.11 2001:db8::11]"},
		{"both", plan.NodePortAddresses{Prefixes: prefixes([]string{"198.51.100.0/24", "2001:db8:1::/48"})}, "[198.51.100.11]"},
		{"loopback never", plan.NodePortAddresses{Prefixes: prefixes([]string{"127.0.0.0/8", "::1/128"})}, "[]"},
		{"everything but loopback", plan.NodePortAddresses{Prefixes: prefixes([]string{"0.0.0.0/0", "::/0"})},
			"[169.254.7.7 192.0.2.11 198.51.100.11 2001:db8::11]"},
		{"primary", plan.NodePortAddresses{Primary: true}, "[198.51.100.11 2001:db8::11]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := withNetwork(network...)
			s.Node.Addresses = []netip.Addr{netip.MustParseAddr("198.51.100.11"), netip.MustParseAddr("2001:db8::11")}
			s.Config.NodePortAddresses = tc.set
			if got := fmt.Sprint(plan.NewFacts(&s.Config, &s.Node).NodePorts); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// The configured address takes precedence, then the Node object, then the default route's
// interface, then any other.
func TestPrimary(t *testing.T) {
	links := []string{"link lo 127.0.0.1/8", "link eth0 169.254.1.1/16", "link eth1 192.0.2.11/24", "link eth2 198.51.100.11/24"}
	for _, tc := range []struct {
		name    string
		config  string
		node    string
		network []string
		want    string
	}{
		{"the configured one", "198.51.100.11", "203.0.113.1", links, "198.51.100.11"},
		{"the configured one, of the other family", "2001:db8::1", "203.0.113.1", links, "203.0.113.1"},
		{"the Node's", "", "203.0.113.1", append(links, "default dev eth2 via 198.51.100.1"), "203.0.113.1"},
		{"the default route's", "", "", append(links, "default dev eth2 via 198.51.100.1"), "198.51.100.11"},
		{"not that of another table", "", "", append(links, "default dev eth2 via 198.51.100.1 table 7"), "192.0.2.11"},
		{"any of global scope", "", "", links, "192.0.2.11"},
		{"the Node's, of the other family", "", "2001:db8::1", links, "192.0.2.11"},
		{"none", "", "", links[:2], "invalid IP"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := withNetwork(tc.network...)
			if tc.config != "" {
				s.Config.NodeAddress = netip.MustParseAddr(tc.config)
			}
			if tc.node != "" {
				s.Node.Addresses = []netip.Addr{netip.MustParseAddr(tc.node)}
			}
			if got := plan.NewFacts(&s.Config, &s.Node).Primary[ip.IPv4].String(); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

func TestChanged(t *testing.T) {
	base := func() *scenario {
		s := withNetwork("link eth0 192.0.2.11/24", "default dev eth0 via 192.0.2.1")
		s.Node.Zone = "a"
		return s
	}
	for _, tc := range []struct {
		name   string
		change func(*scenario)
		want   plan.Deps
	}{
		{"nothing", func(*scenario) {}, 0},
		{"zone", func(s *scenario) { s.Node.Zone = "b" }, plan.OnZone},
		{"address", func(s *scenario) { s.AddNetwork(strings.Fields("link eth1 198.51.100.1/24")) }, plan.OnNodeIPs | plan.OnNodePorts},
		{"address of a link alone", func(s *scenario) { s.AddNetwork(strings.Fields("link eth1 fe80::1/64")) }, 0},
		{"address that lingers", func(s *scenario) { s.Node.Lingering = []netip.Addr{netip.MustParseAddr("198.51.100.1")} }, plan.OnNodeIPs | plan.OnNodePorts},
		{"primary", func(s *scenario) { s.Node.Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.1")} }, plan.OnPrimary},
		{"a thousand Services", func(s *scenario) { s.Node.Services = 1000 }, 0},
		{"more Services", func(s *scenario) { s.Node.Services = 1001 }, plan.OnServiceCount},
		{"a node is lost", func(s *scenario) { s.Node.UnreachableNodes = []string{"node-2"} }, plan.OnUnreachableNodes},
		{"link without an address", func(s *scenario) { s.AddNetwork(strings.Fields("link eth1")) }, 0},
		{"pod CIDRs", func(s *scenario) { s.Node.PodCIDRs = prefixes([]string{"10.244.1.0/24"}) }, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, after := base(), base()
			tc.change(after)
			a, b := plan.NewFacts(&before.Config, &before.Node), plan.NewFacts(&after.Config, &after.Node)
			if got := plan.DiffFacts(&a, &b); got != tc.want {
				t.Errorf("changed %s, want %s", dependsText(got), dependsText(tc.want))
			}
		})
	}
}

func TestVersion(t *testing.T) {
	for _, tc := range []struct {
		v    plan.Version
		want bool // at least 5.9
	}{
		{plan.Version{}, true}, {plan.Version{Major: 5, Minor: 9}, true}, {plan.Version{Major: 6, Minor: 1}, true},
		{plan.Version{Major: 5, Minor: 8}, false}, {plan.Version{Major: 4, Minor: 19}, false}, {plan.Version{Major: 5, Minor: 10}, true},
	} {
		if got := tc.v.AtLeast(5, 9); got != tc.want {
			t.Errorf("%v at least 5.9: %t", tc.v, got)
		}
	}
}

func TestConnReuseModeByKernel(t *testing.T) {
	for _, tc := range []struct {
		v    plan.Version
		want string
	}{
		{plan.Version{}, ""}, {plan.Version{Major: 3, Minor: 10}, ""}, {plan.Version{Major: 4, Minor: 1}, "0"},
		{plan.Version{Major: 5, Minor: 8}, "0"}, {plan.Version{Major: 5, Minor: 9}, ""}, {plan.Version{Major: 6, Minor: 12}, ""},
	} {
		s := withNetwork("link eth0 192.0.2.11/24")
		s.Node.Kernel = tc.v
		if got := plan.ForNode(&s.Config, &s.Node).Sysctls["net/ipv4/vs/conn_reuse_mode"]; got != tc.want {
			t.Errorf("%v: conn_reuse_mode %q, want %q", tc.v, got, tc.want)
		}
	}
}

// The kernel accepts names of 31 bytes. kube-proxy truncates IPv6 names in the same
// way.
func TestSetNames(t *testing.T) {
	for name, want := range map[plan.SetName]string{
		plan.ClusterIP:  "KUBE-6-CLUSTER-IP",
		plan.SourceCIDR: "KUBE-6-LOAD-BALANCER-SOURCE-CID",
		plan.PortVIPs:   "KUBE-6-IPVS-PORT-IPS",
	} {
		if got := name.In(ip.IPv6); got != want {
			t.Errorf("%s is %s in IPv6, want %s", name, got, want)
		}
		if got := name.In(ip.IPv4); got != string(name) {
			t.Errorf("%s is %s in IPv4", name, got)
		}
	}
	for _, f := range ip.Families {
		for _, s := range plan.Sets(f) {
			if len(s.Name) > 31 {
				t.Errorf("%s is too long", s.Name)
			}
		}
	}
}

func TestPathsOf(t *testing.T) {
	eni := []string{"link eth0 10.0.0.1/24", "link eth1", "default dev eth0 via 10.0.0.254", "default dev eth1 via 10.0.1.254 table 101"}
	with := func(more ...string) []string { return append(slices.Clone(eni), more...) }
	for _, tc := range []struct {
		name    string
		network []string
		change  func(*scenario)
		want    string
	}{
		{"no rule leads there", eni, nil, "[] []"},
		{"a rule of a mark only", with("rule 100 fwmark 0x1/0x1 lookup 101"), nil, "[] []"},
		{"a rule from everywhere", with("rule 100 from 0.0.0.0/0 lookup 101"), nil, "[] []"},
		{"pods, sorted, each once", with("rule 9 from 10.0.1.8 lookup 101", "rule 10 from 10.0.1.7 lookup 101",
			"rule 11 from 10.0.1.8 to 10.0.0.0/8 lookup 101"), nil, "[] [10.0.1.7/32 10.0.1.8/32]"},
		{"all but some", with("rule 9 from 10.0.1.8 lookup 101"),
			func(s *scenario) { s.Node.Inventory.Rules[0].Invert = true }, "[] []"},
		{"a rule that is not wholly known", with("rule 9 from 10.0.1.8 lookup 101"),
			func(s *scenario) { s.Node.Inventory.Rules[0].Other = true }, "[] []"},
		{"another way by the primary interface", with("default dev eth0 via 10.0.0.253 table 102", "rule 9 from 10.0.1.8 lookup 102"), nil, "[] []"},
		{"two tables of one interface", with("default dev eth1 via 10.0.1.253 table 102",
			"rule 9 from 10.0.1.8 lookup 102", "rule 9 from 10.0.1.7 lookup 101"), nil, "[] [10.0.1.7/32 10.0.1.8/32]"},
		{"the second table's source", with("default dev eth1 via 10.0.1.253 src 10.0.1.3 table 102",
			"rule 9 from 10.0.1.8 lookup 102", "rule 9 from 10.0.1.7 lookup 101"), nil, "[eth1 10.0.1.3] []"},
		{"the route's source", []string{"link eth0 10.0.0.1/24", "link eth1 10.0.1.1/24", "default dev eth0 via 10.0.0.254",
			"default dev eth1 via 10.0.1.254 src 10.0.1.2 table 101", "rule 9 from 10.0.1.8 lookup 101"}, nil, "[eth1 10.0.1.2] []"},
		{"not a link-local address", []string{"link eth0 10.0.0.1/24", "link eth1 169.254.1.1/16", "default dev eth0 via 10.0.0.254",
			"default dev eth1 via 10.0.1.254 table 101", "rule 9 from 10.0.1.8 lookup 101"}, nil, "[] [10.0.1.8/32]"},
		{"not a secondary address", []string{"link eth0 10.0.0.1/24", "link eth1 10.0.1.9/24 10.0.1.1/24", "default dev eth0 via 10.0.0.254",
			"default dev eth1 via 10.0.1.254 table 101", "rule 9 from 10.0.1.8 lookup 101"},
			func(s *scenario) { s.Node.Inventory.Links[1].Addresses[0].Secondary = true }, "[eth1 10.0.1.1] []"},
		{"by name", []string{"link eth0 10.0.0.1/24", "link eth2 10.0.2.1/24", "link eth1 10.0.1.1/24", "default dev eth0 via 10.0.0.254",
			"default dev eth2 via 10.0.2.254 table 101", "default dev eth1 via 10.0.1.254 table 102",
			"rule 9 from 10.0.2.8 lookup 101", "rule 9 from 10.0.1.8 lookup 102"}, nil, "[eth1 10.0.1.1 eth2 10.0.2.1] []"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := withNetwork(tc.network...)
			if tc.change != nil {
				tc.change(s)
			}
			paths := plan.PathsOf(&s.Config, &s.Node, ip.IPv4)
			sources := []string{}
			for _, e := range paths.SNAT {
				sources = append(sources, e.Link+" "+e.SNAT.String())
			}
			if got := fmt.Sprint(sources, " ", paths.ReplyRouted); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// Families are independent: an IPv6 table does not affect IPv4.
func TestPathsByFamily(t *testing.T) {
	s := withNetwork("link eth0 10.0.0.1/24 2001:db8::1/64", "link eth1 2001:db8:1::1/64",
		"default dev eth0 via 10.0.0.254", "default dev eth0 via 2001:db8::fe", "default dev eth1 via 2001:db8:1::fe table 101",
		"rule 9 from 2001:db8:1::8 lookup 101")
	if p := plan.PathsOf(&s.Config, &s.Node, ip.IPv4); len(p.SNAT)+len(p.ReplyRouted) > 0 {
		t.Errorf("IPv4 has %+v", p)
	}
	p := plan.PathsOf(&s.Config, &s.Node, ip.IPv6)
	if len(p.SNAT) != 1 || p.SNAT[0].SNAT != netip.MustParseAddr("2001:db8:1::1") {
		t.Errorf("IPv6 has %+v", p)
	}
}

// Two ENIs swap their names, as after one was detached and another one attached. A source that
// is configured or annotated by MAC address stays with its ENI.
func TestSNATSourceByMAC(t *testing.T) {
	first, second := netip.MustParseAddr("10.0.1.10"), netip.MustParseAddr("10.0.2.10")
	for _, annotated := range []bool{false, true} {
		for _, macs := range [][2]string{{"02:00:00:00:00:01", "02:00:00:00:00:02"}, {"02:00:00:00:00:02", "02:00:00:00:00:01"}} {
			s := withNetwork("link eth0 10.0.0.1/24", "link eth1", "link eth2", "default dev eth0 via 10.0.0.254",
				"default dev eth1 via 10.0.1.254 table 101", "rule 9 from 10.0.1.8 lookup 101",
				"default dev eth2 via 10.0.2.254 table 102", "rule 9 from 10.0.2.8 lookup 102")
			want := map[string]netip.Addr{}
			for i := range s.Node.Inventory.Links {
				l := &s.Node.Inventory.Links[i]
				for n, name := range []string{"eth1", "eth2"} {
					if l.Name == name {
						l.MAC = macs[n]
						want[name] = map[string]netip.Addr{"02:00:00:00:00:01": first, "02:00:00:00:00:02": second}[macs[n]]
					}
				}
			}
			sources := map[string][]netip.Addr{"02:00:00:00:00:01": {first}, "02:00:00:00:00:02": {second}, "eth1": {netip.MustParseAddr("10.0.9.9")}}
			if annotated {
				s.Node.SNATSources = sources
			} else {
				s.Config.SNAT.Sources = sources
			}
			got := map[string]netip.Addr{}
			for _, e := range plan.PathsOf(&s.Config, &s.Node, ip.IPv4).SNAT {
				got[e.Link] = e.SNAT
			}
			if !maps.Equal(got, want) {
				t.Errorf("annotated %t, %v: SNAT sources %v, want %v", annotated, macs, got, want)
			}
		}
	}
}

// manyLinks returns a node with many interfaces, like one with many pods.
func manyLinks(n int) *plan.Node {
	node := &plan.Node{}
	for i := range n {
		node.Inventory.Links = append(node.Inventory.Links, routing.Link{
			Index: i + 1, Name: fmt.Sprintf("veth%d", i),
			Addresses: []routing.Address{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 32), Global: true}},
		})
	}
	return node
}

func BenchmarkFactsOf1000Links(b *testing.B) {
	cfg, node := defaultConfig(), manyLinks(1000)
	b.ReportAllocs()
	for b.Loop() {
		plan.NewFacts(&cfg, node)
	}
}
