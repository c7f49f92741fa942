package plan_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// eniNode is a node whose ENIs are added and removed.
type eniNode struct {
	t *testing.T
	scenario
}

func newENINode(t *testing.T) *eniNode {
	n := &eniNode{t: t, scenario: *withNetwork("link eth0 10.0.0.1/24", "default dev eth0 via 10.0.0.254")}
	n.Node.Inventory.Links[0].Index = 1
	return n
}

// plug adds an interface, with the index as its table.
func (n *eniNode) plug(name string, index int) {
	inv := &n.Node.Inventory
	more := withNetwork("link "+name, fmt.Sprintf("default dev %s via 10.0.%d.254 table %d", name, index, 1000+index),
		fmt.Sprintf("rule 2000 from 10.0.%d.8 lookup %d", index, 1000+index)).Node.Inventory
	more.Links[0].Index = index
	inv.Links = append(inv.Links, more.Links...)
	inv.Defaults = append(inv.Defaults, more.Defaults...)
	inv.Rules = append(inv.Rules, more.Rules...)
}

func (n *eniNode) unplug(name string) {
	inv := &n.Node.Inventory
	inv.Links = slices.DeleteFunc(inv.Links, func(l routing.Link) bool { return l.Name == name })
	inv.Defaults = slices.DeleteFunc(inv.Defaults, func(r routing.Route) bool { return r.Link == name })
}

func (n *eniNode) rename(from, to string) {
	inv := &n.Node.Inventory
	for i := range inv.Links {
		if inv.Links[i].Name == from {
			inv.Links[i].Name = to
		}
	}
	for i := range inv.Defaults {
		if inv.Defaults[i].Link == from {
			inv.Defaults[i].Link = to
		}
	}
}

// renew plans the node and installs the planned policy rules.
func (n *eniNode) renew(want string) {
	n.t.Helper()
	part := plan.ForNode(&n.Config, &n.Node)
	n.Node.Bound = plan.MergeBindings(n.Node.Bound, part.Bound)
	inv := &n.Node.Inventory
	inv.Rules = slices.DeleteFunc(inv.Rules, func(r routing.Rule) bool { return r.Own })
	for _, r := range part.Rules {
		r.Own = true
		inv.Rules = append(inv.Rules, r)
	}
	var got []string
	for _, b := range part.Bound {
		if b.Family == ip.IPv4 {
			got = append(got, fmt.Sprintf("%s %#x", b.Link, b.Mark))
		}
	}
	if text := strings.Join(got, ", "); text != want {
		n.t.Errorf("bound: %s, want %s", text, want)
	}
}

// restart discards the state that only the process had.
func (n *eniNode) restart() { n.Node.Bound = nil }

func TestValuesStay(t *testing.T) {
	n := newENINode(t)
	n.plug("eth1", 2)
	n.plug("eth2", 3)
	n.plug("eth3", 4)
	n.renew("eth0 0x20, eth1 0x40, eth2 0x60, eth3 0x1000")
	n.unplug("eth2")
	n.renew("eth0 0x20, eth1 0x40, eth3 0x1000")
	n.restart()
	n.renew("eth0 0x20, eth1 0x40, eth3 0x1000")
	n.unplug("eth1")
	n.rename("eth3", "ens7")
	n.renew("eth0 0x20, ens7 0x1000")
	n.unplug("ens7")
	n.renew("eth0 0x20") // flows bound to it continue
	n.restart()
	n.renew("")
}

func TestValuesAreNotReusedAtOnce(t *testing.T) {
	n := newENINode(t)
	n.Config.SNAT.Mark = 0x60 // three values
	n.plug("eth1", 2)
	n.renew("eth0 0x20, eth1 0x40")
	n.unplug("eth1")
	n.plug("eth2", 3)
	n.renew("eth0 0x20, eth2 0x60")
	n.plug("eth1", 2)
	n.renew("eth0 0x20, eth1 0x40, eth2 0x60") // each interface has its previous value
	n.unplug("eth2")
	n.plug("eth3", 4)
	n.renew("eth0 0x20, eth1 0x40, eth3 0x60") // no other value is left
	n.plug("eth4", 5)
	n.renew("eth0 0x20, eth1 0x40, eth3 0x60") // no value is free
}

// TestValuesOfOtherSockets checks that no interface gets the value that WireGuard's own
// packets carry, even if no other is left.
func TestValuesOfOtherSockets(t *testing.T) {
	for mask, want := range map[uint32]string{
		0x3060: "eth0 0x20, eth1 0x40, eth2 0x1000",
		0x60:   "eth0 0x20, eth1 0x40",
	} {
		n := newENINode(t)
		n.Config.SNAT.Mark = mask
		n.plug("eth1", 2)
		n.plug("eth2", 3)
		n.Node.Inventory.Rules = append(n.Node.Inventory.Rules, routing.Rule{
			Family: ip.IPv4, Priority: 32764, Invert: true, Mark: 0xca6c, Mask: 0xffffffff, Table: 51820,
		})
		n.renew(want)
	}
}

// TestValuesOfForeignMarks checks that no interface, the primary one included, gets a value that
// another program's policy rule would route, or with which our policy rule would route that
// program's packets.
func TestValuesOfForeignMarks(t *testing.T) {
	before := func(mark, mask uint32) routing.Rule {
		return routing.Rule{Family: ip.IPv4, Priority: 220, Mark: mark, Mask: mask, Table: 220}
	}
	behind := func(mark, mask uint32) routing.Rule {
		r := before(mark, mask)
		r.Priority = 1000
		return r
	}
	with := func(r routing.Rule, change func(*routing.Rule)) routing.Rule { change(&r); return r }
	const usual = "eth0 0x20, eth1 0x40"
	for name, c := range map[string]struct {
		mask  uint32
		rules []routing.Rule
		marks []uint32
		want  string
	}{
		"none":                          {0x3060, nil, nil, usual},
		"no bit of ours":                {0x3060, []routing.Rule{before(0x80, 0x80), behind(0x100, 0xf00)}, []uint32{0x80, 0x100000, 0x4000}, usual},
		"strongSwan's 42":               {0x3060, []routing.Rule{before(42, 0xffffffff)}, nil, "eth0 0x40, eth1 0x60"},
		"ours, of a mask of 8 bits":     {0x3060, []routing.Rule{before(0x20, 0xff)}, nil, "eth0 0x40, eth1 0x60"},
		"the same, behind our rules":    {0x3060, []routing.Rule{behind(0x20, 0xff)}, nil, "eth0 0x40, eth1 0x60"},
		"ours, of the whole mark":       {0x3060, []routing.Rule{before(0x20, 0xffffffff)}, nil, "eth0 0x40, eth1 0x60"},
		"the ENI's":                     {0x3060, []routing.Rule{before(0x40, 0xff)}, nil, "eth0 0x20, eth1 0x60"},
		"one bit":                       {0x3060, []routing.Rule{before(0x20, 0x20)}, nil, "eth0 0x40, eth1 0x1000"},
		"one bit, behind our rules":     {0x3060, []routing.Rule{behind(0x20, 0x20)}, nil, "eth0 0x40, eth1 0x60"},
		"a mark of our low bits only":   {0x3060, []routing.Rule{before(0x1000, 0xf000)}, nil, usual},
		"unmarked packets":              {0x3060, []routing.Rule{before(0, 0xff)}, nil, usual},
		"another family":                {0x3060, []routing.Rule{with(before(0x20, 0xff), func(r *routing.Rule) { r.Family = ip.IPv6 })}, nil, usual},
		"a rule of ours":                {0x3060, []routing.Rule{with(before(0x20, 0xff), func(r *routing.Rule) { r.Own = true })}, nil, usual},
		"not, before our rules":         {0x3060, []routing.Rule{with(before(0xca6c, 0xffffffff), func(r *routing.Rule) { r.Invert = true })}, nil, usual},
		"not, with the mark of ours":    {0x3060, []routing.Rule{with(before(0xca20, 0xffffffff), func(r *routing.Rule) { r.Invert = true })}, nil, "eth0 0x40, eth1 0x60"},
		"set by iptables":               {0x3060, nil, []uint32{0x20}, "eth0 0x40, eth1 0x60"},
		"set with others, by iptables":  {0x3060, nil, []uint32{0x100040}, "eth0 0x20, eth1 0x60"},
		"portmap's 0x2000":              {0x2020, nil, []uint32{0x2000}, "eth0 0x20, eth1 0x2020"},
		"all, by two rules":             {0x60, []routing.Rule{before(0x20, 0x20), before(0x40, 0x40)}, nil, ""},
		"all but the primary's":         {0x60, []routing.Rule{before(0x40, 0x40)}, nil, "eth0 0x20"},
		"all but one, which is taken":   {0x60, []routing.Rule{before(0x20, 0xff), before(0x60, 0x60)}, nil, "eth0 0x40"},
		"behind our rules, all but two": {0x60, []routing.Rule{behind(0x20, 0x60)}, nil, "eth0 0x40, eth1 0x60"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newENINode(t)
			n.Config.SNAT.Mark = c.mask
			n.plug("eth1", 2)
			n.Node.Inventory.Rules = append(n.Node.Inventory.Rules, c.rules...)
			n.Node.ForeignMarks = map[ip.Family][]uint32{ip.IPv4: c.marks}
			n.renew(c.want)
		})
	}
}

// TestValuesChangeForForeignRules checks that an interface gets another value once another program
// has a rule that matches its value, and keeps that one when the rule is gone, also over a restart.
func TestValuesChangeForForeignRules(t *testing.T) {
	n := newENINode(t)
	n.plug("eth1", 2)
	n.renew("eth0 0x20, eth1 0x40")
	inv := &n.Node.Inventory
	foreign := routing.Rule{Family: ip.IPv4, Priority: 220, Mark: 0x20, Mask: 0xff, Table: 220}
	inv.Rules = append(inv.Rules, foreign)
	n.renew("eth0 0x60, eth1 0x40")
	inv.Rules = slices.DeleteFunc(inv.Rules, func(r routing.Rule) bool { return r == foreign })
	n.renew("eth0 0x60, eth1 0x40")
	n.restart()
	n.renew("eth0 0x60, eth1 0x40")
	n.plug("eth2", 3)
	n.renew("eth0 0x60, eth1 0x40, eth2 0x20")
	n.unplug("eth1")
	n.unplug("eth2")
	n.renew("eth0 0x60")
}

// strayRules returns the rules that keep flows of the primary interface off ENIs,
// in the order of the chain.
func strayRules(s *scenario) []nat.Rule {
	cfg := defaultConfig()
	part := plan.ForNode(&cfg, &s.Node)
	return part.NAT.Chains[nat.Chain{Family: ip.IPv4, Table: nat.Mangle, Name: "KUBE-IPVS-STRAY"}]
}

// A packet is dropped only where it cannot be correct, which means that our policy rule
// is missing.
func TestStraysAreDropped(t *testing.T) {
	withLink := func(link string, more ...string) *scenario {
		return withNetwork(append([]string{
			"link eth0 10.0.0.1/24", "default dev eth0 via 10.0.0.254",
			link, "default dev eth1 via 10.1.0.254 table 1003", "rule 2000 from 10.1.0.44/32 lookup 1003",
		}, more...)...)
	}
	eni := func(more ...string) *scenario { return withLink("link eth1", more...) }
	const known = "link eth1 10.1.0.10/32" // the SNAT source
	const drop = "-o eth1 -m comment --comment \"a policy rule is missing\" -j DROP"
	for name, c := range map[string]struct {
		scenario *scenario
		want     []nat.Rule
	}{
		"an ENI":                        {eni(), []nat.Rule{drop}},
		"a rule behind ours":            {eni("rule 512 from 10.1.0.44/32 lookup 1003"), []nat.Rule{drop}},
		"a rule before ours":            {eni("rule 110 from 10.1.0.44/32 lookup 1003"), nil},
		"a rule to main before ours":    {eni("rule 20 from 10.1.0.44/32 lookup 254"), []nat.Rule{drop}},
		"main has a default by the ENI": {eni("default dev eth1 via 10.1.0.254"), nil},
		"no pod needs reply routing":    {withLink(known), nil},
		"a client may be diverted":      {withLink(known, "rule 2000 from 10.1.0.0/24 lookup 1003"), []nat.Rule{drop}},
		"any packet may be diverted":    {withLink(known, "rule 2000 from all lookup 1003"), []nat.Rule{drop}},
		"no ENI":                        {withNetwork("link eth0 10.0.0.1/24", "default dev eth0 via 10.0.0.254"), nil},
	} {
		if got := strayRules(c.scenario); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	for name, change := range map[string]func(*plan.Node){
		"the main table's default route is gone": func(n *plan.Node) { n.MainGone = map[ip.Family]bool{ip.IPv4: true} },
		"its interface is down":                  func(n *plan.Node) { n.Inventory.Links[0].Up = false },
	} {
		s := eni()
		change(&s.Node)
		if got := strayRules(s); len(got) > 0 {
			t.Errorf("%s: %q", name, got)
		}
	}
	routed := eni()
	routed.Node.Inventory.Direct = []routing.Route{
		{Family: ip.IPv4, Table: 254, Dst: netip.MustParsePrefix("10.1.0.0/24"), Link: "eth1"},
		{Family: ip.IPv6, Table: 254, Dst: netip.MustParsePrefix("fd00::/64"), Link: "eth1"},
	}
	want := []nat.Rule{"-d 10.1.0.0/24 -o eth1 -m comment --comment \"route of the main table\" -j RETURN", drop}
	if got := strayRules(routed); !slices.Equal(got, want) {
		t.Errorf("a route of main by the ENI: %q, want %q", got, want)
	}
}

// TestLocalAfterReplyRouting checks that nothing is bound if our policy rules would precede that of
// table local: packets to VIPs would leave the node.
func TestLocalAfterReplyRouting(t *testing.T) {
	for priority, bound := range map[int]bool{0: true, 20: true, 480: true, 481: false, 32765: false} {
		s := load(t, "eni")
		s.Node.Inventory.Rules = slices.DeleteFunc(s.Node.Inventory.Rules, func(r routing.Rule) bool { return r.Table == routing.TableLocal })
		s.Node.Inventory.Rules = append(s.Node.Inventory.Rules, routing.Rule{Family: ip.IPv4, Priority: priority, Table: routing.TableLocal})
		part := plan.ForNode(&s.Config, &s.Node)
		rule := slices.ContainsFunc(part.Rules, func(r routing.Rule) bool { return r.Family == ip.IPv4 && r.Priority == s.Config.SNAT.Priority })
		if rule != bound || len(part.Bound) > 0 != bound {
			t.Errorf("table local at %d: bound %v, rules %v", priority, part.Bound, part.Rules)
		}
		warned := slices.ContainsFunc(plan.Warnings(&s.Config, &s.Node, &part, plan.Foreign{}), func(w string) bool {
			return strings.Contains(w, "IPv4 Service traffic by eth1") && strings.Contains(w, "the policy rule for table local comes after")
		})
		if warned == bound {
			t.Errorf("table local at %d: warned: %t", priority, warned)
		}
	}
}
