package plan_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// bridgeNode has one bridge with pods and one without.
func bridgeNode(netfilter plan.BridgeNetfilter) *plan.Node {
	return &plan.Node{
		BridgeNetfilter: netfilter,
		Inventory: routing.Inventory{Links: []routing.Link{
			{Index: 2, Name: "cni0", Type: "bridge", Addresses: []routing.Address{
				{Prefix: netip.MustParsePrefix("10.244.1.1/24"), Global: true},
				{Prefix: netip.MustParsePrefix("fd00:244:1::1/64"), Global: true},
				{Prefix: netip.MustParsePrefix("fe80::1/64")},
			}},
			{Index: 3, Name: "docker0", Type: "bridge", Addresses: []routing.Address{
				{Prefix: netip.MustParsePrefix("172.17.0.1/16"), Global: true},
			}},
			{Index: 4, Name: "veth1", Type: "veth", Master: "cni0"},
		}},
	}
}

func TestBridgedFlowsPassNetfilter(t *testing.T) {
	cfg := defaultConfig()
	cfg.Families = ip.Families
	part := plan.ForNode(&cfg, bridgeNode(plan.BridgeAvailable))
	for _, key := range []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"} {
		if part.Sysctls[key] != "1" {
			t.Errorf("%s is %q, want 1", key, part.Sysctls[key])
		}
	}
	if rules := bridgeRules(part, ip.IPv4); len(rules) != 0 {
		t.Errorf("masquerades anyway: %q", rules)
	}
	if s := plan.ForNode(&cfg, &plan.Node{BridgeNetfilter: plan.BridgeAvailable}).Sysctls; s["net/bridge/bridge-nf-call-iptables"] != "" {
		t.Error("a node without bridges gets the sysctl")
	}
}

func TestBridgedFlowsAreMasqueraded(t *testing.T) {
	cfg := defaultConfig()
	cfg.Families = ip.Families
	part := plan.ForNode(&cfg, bridgeNode(plan.BridgeUnavailable))
	if part.Sysctls["net/bridge/bridge-nf-call-iptables"] != "" {
		t.Error("a sysctl that the kernel does not have is planned")
	}
	for family, want := range map[ip.Family]string{
		ip.IPv4: "-s 10.244.1.0/24 -o cni0 -m addrtype ! --src-type LOCAL ", ip.IPv6: "-s fd00:244:1::/64 -o cni0 -m addrtype ! --src-type LOCAL ",
	} {
		rules := bridgeRules(part, family)
		if len(rules) != 1 || !strings.HasPrefix(string(rules[0]), want) || !strings.Contains(string(rules[0]), "-j MASQUERADE") {
			t.Errorf("%s: %q, want one that begins with %q", family, rules, want)
		}
	}
}

func bridgeRules(part plan.NodePlan, family ip.Family) []nat.Rule {
	rules := slices.Clone(part.NAT.Chains[nat.Chain{Family: family, Table: nat.NAT, Name: "KUBE-POSTROUTING"}])
	return slices.DeleteFunc(rules, func(r nat.Rule) bool { return !strings.Contains(string(r), "same bridge") })
}

// Not every bridge has pods. A setting that affects all bridges is left unchanged if
// one of them is foreign.
func TestForeignBridges(t *testing.T) {
	const call = "net/bridge/bridge-nf-call-iptables"
	address := func(prefix string) []routing.Address {
		return []routing.Address{{Prefix: netip.MustParsePrefix(prefix), Global: true}}
	}
	for _, c := range []struct {
		name    string
		link    routing.Link
		port    string // type of its port
		uplink  bool
		pods    bool // it is a pod bridge
		without bool // there is no pod bridge
		// doubtful: it may be a pod bridge. Its traffic is masqueraded too.
		doubtful bool
	}{
		{name: "of virtual machines", link: routing.Link{Addresses: address("192.168.122.1/24")}, port: "tun"},
		{name: "without an address", link: routing.Link{}, port: "veth"},
		{name: "the uplink", link: routing.Link{Addresses: address("192.168.1.5/24")}, port: "device", uplink: true},
		{name: "the uplink, with containers", link: routing.Link{Addresses: address("192.168.1.5/24")}, port: "veth", uplink: true},
		{name: "the uplink, within the pods' range", link: routing.Link{Addresses: address("10.244.9.5/24")}, port: "device", uplink: true},
		{name: "the uplink, with pods", link: routing.Link{Addresses: address("10.244.9.5/24")}, port: "veth", uplink: true, pods: true},
		{name: "of Docker, or of pods of another range", link: routing.Link{Addresses: address("172.20.0.1/24")}, port: "veth", doubtful: true},
		{name: "of pods in machines of their own", link: routing.Link{Addresses: address("10.244.3.1/24")}, port: "tun", pods: true},
		{name: "of virtual machines, and no pods'", link: routing.Link{Addresses: address("192.168.122.1/24")}, port: "tun", without: true},
	} {
		n := bridgeNode(plan.BridgeAvailable)
		if c.without {
			n.Inventory.Links = nil
		}
		c.link.Index, c.link.Name, c.link.Type = 8, "br1", "bridge"
		n.Inventory.Links = append(n.Inventory.Links, c.link, routing.Link{Index: 9, Name: "port", Type: c.port, Master: "br1"})
		if c.uplink {
			n.Inventory.Defaults = []routing.Route{{Family: ip.IPv4, Table: 254, Link: "br1", Dst: netip.MustParsePrefix("0.0.0.0/0")}}
		}
		cfg := defaultConfig()
		cfg.LocalTraffic = plan.LocalTraffic{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
		part := plan.ForNode(&cfg, n)
		if set := part.Sysctls[call] != ""; set != c.pods {
			t.Errorf("%s: the parameter is set: %t", c.name, set)
		}
		// Traffic between pods of cni0 is masqueraded, because it does not pass
		// netfilter.
		rules, want := bridgeRules(part, ip.IPv4), 1
		switch {
		case c.pods || c.without:
			want = 0
		case c.doubtful:
			want = 2
		}
		if len(rules) != want {
			t.Errorf("%s: %d rules masquerade: %q", c.name, len(rules), rules)
		}
		n.BridgeNetfilter = plan.BridgeUnavailable
		if needs := plan.NeedsBridgeNetfilter(&cfg, n); needs != c.pods {
			t.Errorf("%s: the module is loaded: %t", c.name, needs)
		}
	}
}

// Where another program may drop forwarded packets, those between pods of a bridge must not pass its
// rules: they do not under kube-proxy.
func TestBridgeNetfilterWhereForwardingIsRefused(t *testing.T) {
	for _, c := range []struct {
		name      string
		netfilter plan.BridgeNetfilter
		refuses   bool
		value     string // planned
		rules     int    // that masquerade
	}{
		{"not refused", plan.BridgeAvailable, false, "1", 0},
		{"refused", plan.BridgeAvailable, true, "", 1},
		{"refused, enabled", plan.BridgeEnabled, true, "", 0},
		{"refused, missing", plan.BridgeUnavailable, true, "", 1},
	} {
		n, cfg := bridgeNode(c.netfilter), defaultConfig()
		n.Refuses = map[ip.Family]bool{ip.IPv4: c.refuses}
		part := plan.ForNode(&cfg, n)
		if got := part.Sysctls["net/bridge/bridge-nf-call-iptables"]; got != c.value {
			t.Errorf("%s: the parameter is %q, want %q", c.name, got, c.value)
		}
		if rules := bridgeRules(part, ip.IPv4); len(rules) != c.rules {
			t.Errorf("%s: %d rules masquerade, want %d: %q", c.name, len(rules), c.rules, rules)
		}
		if needs := plan.NeedsBridgeNetfilter(&cfg, n); needs == c.refuses {
			t.Errorf("%s: the module is loaded: %t", c.name, needs)
		}
	}
}

func TestRefuses(t *testing.T) {
	open, closed := nat.State{}, nat.State{Refusing: []nat.Chain{{Family: ip.IPv4, Table: nat.Filter, Name: "FORWARD"}}}
	refuses := func(family string) []nft.MarkUse {
		return []nft.MarkUse{{Chain: nft.ID{Family: family, Table: "firewall", Name: "forward"}, Refuses: true}}
	}
	for _, c := range []struct {
		ipv4, ipv6 nat.State
		native     []nft.MarkUse
		want       map[ip.Family]bool
	}{
		{open, open, nil, map[ip.Family]bool{}},
		{closed, open, []nft.MarkUse{{Bits: 4}}, map[ip.Family]bool{ip.IPv4: true}},
		{open, open, refuses("inet"), map[ip.Family]bool{ip.IPv4: true, ip.IPv6: true}},
		{open, open, refuses("ip6"), map[ip.Family]bool{ip.IPv6: true}},
	} {
		if got := plan.Refuses(map[ip.Family]nat.State{ip.IPv4: c.ipv4, ip.IPv6: c.ipv6}, c.native); !maps.Equal(got, c.want) {
			t.Errorf("%v %v %v: %v, want %v", c.ipv4, c.ipv6, c.native, got, c.want)
		}
	}
}
