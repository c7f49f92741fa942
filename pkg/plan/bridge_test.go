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
)

// bridgeNode has a bridge with pods, and one without.
func bridgeNode(netfilter bool) *plan.Node {
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

func TestBridgedFlowsAreShownToNetfilter(t *testing.T) {
	cfg := defaultConfig()
	cfg.Families = ip.Families
	part := plan.NodeWide(&cfg, bridgeNode(true))
	for _, key := range []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"} {
		if part.Sysctls[key] != "1" {
			t.Errorf("%s is %q, want 1", key, part.Sysctls[key])
		}
	}
	if rules := bridgeRules(part, ip.IPv4); len(rules) != 0 {
		t.Errorf("masquerades all the same: %q", rules)
	}
	if s := plan.NodeWide(&cfg, &plan.Node{BridgeNetfilter: true}).Sysctls; s["net/bridge/bridge-nf-call-iptables"] != "" {
		t.Error("a node without bridges gets the sysctl")
	}
}

func TestBridgedFlowsAreMasqueradedOtherwise(t *testing.T) {
	cfg := defaultConfig()
	cfg.Families = ip.Families
	part := plan.NodeWide(&cfg, bridgeNode(false))
	if part.Sysctls["net/bridge/bridge-nf-call-iptables"] != "" {
		t.Error("a sysctl that the kernel does not have is wanted")
	}
	for family, want := range map[ip.Family]string{
		ip.IPv4: "-s 10.244.1.0/24 -o cni0 ", ip.IPv6: "-s fd00:244:1::/64 -o cni0 ",
	} {
		rules := bridgeRules(part, family)
		if len(rules) != 1 || !strings.HasPrefix(string(rules[0]), want) || !strings.Contains(string(rules[0]), "-j MASQUERADE") {
			t.Errorf("%s: %q, want one that begins with %q", family, rules, want)
		}
	}
}

func bridgeRules(part plan.NodePart, family ip.Family) []nat.Rule {
	rules := slices.Clone(part.NAT.Chains[nat.Chain{Family: family, Table: nat.NAT, Name: "KUBE-POSTROUTING"}])
	return slices.DeleteFunc(rules, func(r nat.Rule) bool { return !strings.Contains(string(r), "same bridge") })
}
