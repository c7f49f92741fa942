package plan_test

import (
	"fmt"
	"maps"
	"math/rand"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// rounds of each property. The round is the seed, so that a failure can be reproduced.
const rounds = 1000

// generator creates Services and nodes from few values, so that they collide: duplicate
// addresses, VIPs on the node, matching zones.
type generator struct{ *rand.Rand }

func (g generator) coin() bool { return g.Intn(2) == 0 }

// some returns some elements of a list, in any order.
func some[T any](g generator, list ...T) []T {
	out := slices.Clone(list)
	g.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:g.Intn(len(out)+1)]
}

func (g generator) addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, a := range some(g, list...) {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func (g generator) config() plan.Config {
	cfg := defaultConfig()
	cfg.Families = [][]ip.Family{{ip.IPv4}, {ip.IPv6}, ip.Families}[g.Intn(3)]
	cfg.NodePortAddresses.Primary = g.coin()
	claims := []plan.ClaimMode{plan.ClaimAddress, plan.ClaimRoute, plan.ClaimPort}
	cfg.VIPs.ClusterIPs, cfg.VIPs.LoadBalancers, cfg.VIPs.ExternalIPs = claims[g.Intn(2)], claims[g.Intn(3)], claims[g.Intn(3)]
	if g.Intn(4) == 0 {
		cfg.ExcludeCIDRs = prefixes([]string{"203.0.113.0/24"})
	}
	return cfg
}

func (g generator) node() plan.Node {
	return plan.Node{
		Zone:             []string{"a", "b", ""}[g.Intn(3)],
		Addresses:        g.addrs("192.0.2.11", "10.9.0.1", "2001:db8::11"),
		Inventory:        routing.Inventory{Links: g.links()},
		UnreachableNodes: some(g, "node-2"),
	}
}

func (g generator) service() service.Service {
	s := service.Service{
		Name:            types.NamespacedName{Namespace: "default", Name: "web"},
		ClusterIPs:      g.addrs("10.96.0.10", "fd00:96::10"),
		ExternalIPs:     g.addrs("10.96.0.10", "192.0.2.11", "198.51.100.7", "203.0.113.5", "2001:db8::11"),
		LoadBalancers:   g.addrs("192.0.2.11", "198.51.100.7", "203.0.113.5", "2001:db8:113::5"),
		SourceRanges:    prefixes(some(g, "192.0.2.0/24", "10.0.0.0/8", "2001:db8::/64", "0.0.0.0/0")),
		ExternalLocal:   g.coin(),
		InternalLocal:   g.coin(),
		AffinitySeconds: uint32(g.Intn(2) * 60),
	}
	if g.coin() {
		s.HealthCheckNodePort = 32000
	}
	for i, protocol := range some(g, ip.Protocols...) {
		s.Ports = append(s.Ports, service.Port{
			Name: fmt.Sprint(i), Protocol: protocol, Port: 80, NodePort: uint16(g.Intn(2) * 30080), Endpoints: g.endpoints(),
		})
	}
	return s
}

// endpoints returns sorted endpoints, as package service does.
func (g generator) endpoints() []service.Endpoint {
	var out []service.Endpoint
	for _, a := range g.addrs("10.244.1.5", "10.244.1.6", "10.244.2.5", "fd00:244:1::5", "fd00:244:2::5") {
		e := service.Endpoint{
			Addr: netip.AddrPortFrom(a, 8080), Node: []string{"node-1", "node-2", ""}[g.Intn(3)],
			Ready: g.Intn(3) > 0, Serving: g.coin(), Terminating: g.coin(),
			Hints: &service.Hints{Zones: some(g, "a", "b"), Nodes: some(g, "node-1", "node-2")},
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b service.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return out
}

// links returns addresses by interface. Every change of them changes the facts.
func (g generator) links() []routing.Link {
	var out []routing.Link
	for i, a := range g.addrs("192.0.2.11", "198.51.100.7", "10.9.0.1", "2001:db8::11", "fe80::1") {
		out = append(out, routing.Link{Index: i + 1, Name: fmt.Sprintf("eth%d", i), Addresses: []routing.Address{
			{Prefix: netip.PrefixFrom(a, a.BitLen()), Global: !a.IsLinkLocalUnicast()},
		}})
	}
	return out
}

var planByValue = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{}, ip.Packed{}), cmpopts.EquateEmpty(),
}

func property(t *testing.T, check func(t *testing.T, g generator)) {
	for seed := range int64(rounds) {
		check(t, generator{rand.New(rand.NewSource(seed))})
		if t.Failed() {
			t.Fatalf("with seed %d", seed)
		}
	}
}

func TestDeterministic(t *testing.T) {
	property(t, func(t *testing.T, g generator) {
		cfg, node, s := g.config(), g.node(), g.service()
		facts := plan.NewFacts(&cfg, &node)
		want := plan.ForService(&cfg, &facts, &s)

		again := s
		again.ClusterIPs, again.ExternalIPs = shuffled(g, s.ClusterIPs), shuffled(g, s.ExternalIPs)
		again.LoadBalancers, again.SourceRanges = shuffled(g, s.LoadBalancers), shuffled(g, s.SourceRanges)
		again.Ports = shuffled(g, s.Ports)
		facts = plan.NewFacts(&cfg, &node)
		if diff := cmp.Diff(want, plan.ForService(&cfg, &facts, &again), planByValue); diff != "" {
			t.Errorf("input in another order (-want +got)\n%s", diff)
		}
		if !reflect.DeepEqual(plan.ForNode(&cfg, &node), plan.ForNode(&cfg, &node)) {
			t.Error("the node's plan differs from itself")
		}
	})
}

func shuffled[T any](g generator, list []T) []T {
	out := slices.Clone(list)
	g.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func TestInvariants(t *testing.T) {
	property(t, func(t *testing.T, g generator) {
		cfg, node, s := g.config(), g.node(), g.service()
		facts := plan.NewFacts(&cfg, &node)
		part := plan.ForService(&cfg, &facts, &s)
		numbers := map[ipvs.Key]uint32{}
		for i, o := range part.Internal {
			if g.Intn(4) > 0 {
				numbers[o.Key] = uint32(i + 1)
			}
		}
		part = plan.AssignMarks(&cfg, part, numbers)
		checkMarks(t, &part, len(numbers))
		checkServers(t, &cfg, &facts, &part)
		checkVIPs(t, &facts, &part)
		checkMembers(t, &part)
	})
}

// checkServers: keys are unique, sorted, of a served family; real
// servers are of the same family and sorted; the address is local.
func checkServers(t *testing.T, cfg *plan.Config, facts *plan.Facts, part *plan.ServicePlan) {
	for i, vs := range part.VirtualServers {
		if i > 0 && part.VirtualServers[i-1].Key.Compare(vs.Key) >= 0 {
			t.Errorf("%s is duplicated or out of order", vs.Key)
		}
		if !slices.Contains(cfg.Families, vs.Key.Family()) {
			t.Errorf("%s is of a family that is not served", vs.Key)
		}
		for j, e := range vs.Endpoints {
			if ip.Of(e.Addr.Addr()) != vs.Key.Family() || j > 0 && vs.Endpoints[j-1].Dest().Compare(e.Dest()) >= 0 {
				t.Errorf("%s: endpoint %s is of another family, duplicated or out of order", vs.Key, e.Dest())
			}
		}
		claimed := slices.ContainsFunc(part.VIPs, func(v plan.VIP) bool { return v.Addr == vs.Key.Addr })
		if vs.Key.FWMark == 0 && !claimed && !facts.NodeIPs.Has(vs.Key.Addr) && !slices.Contains(facts.NodePorts, vs.Key.Addr) {
			t.Errorf("%s is neither claimed nor on an interface", vs.Key)
		}
	}
}

// checkMarks: each number selects a virtual server of its own, and a member maps to it.
func checkMarks(t *testing.T, part *plan.ServicePlan, want int) {
	marks := map[ipvs.Key]int{}
	for _, m := range part.Members {
		local := m.Set == plan.Local.In(ip.IPv4) || m.Set == plan.Local.In(ip.IPv6)
		if local != (m.Mark != 0) {
			t.Errorf("%s is in %s with mark %#x", m.Entry, m.Set, m.Mark)
		}
		if local {
			marks[ipvs.Key{Addr: ip.Of(m.Entry.Addr).Unspecified(), FWMark: m.Mark}]++
		}
	}
	for _, vs := range part.VirtualServers {
		if vs.Key.FWMark != 0 && marks[vs.Key] != 1 {
			t.Errorf("%d members map to %s", marks[vs.Key], vs.Key)
		}
	}
	if len(marks) != want {
		t.Errorf("%d numbers in use, want %d", len(marks), want)
	}
}

// checkVIPs: each VIP is claimed for a virtual server, and is in the set that the rules
// for its claim match, unless it is also on an interface of the node.
func checkVIPs(t *testing.T, facts *plan.Facts, part *plan.ServicePlan) {
	claimed := map[string]bool{}
	for _, v := range part.VIPs {
		if facts.NodeIPs.Has(v.Addr) && v.Claim == plan.ClaimRoute {
			continue
		}
		set := plan.VIPAddresses
		if v.Claim == plan.ClaimPort {
			set = plan.PortVIPs
		}
		claimed[set.In(ip.Of(v.Addr))+" "+v.Addr.String()] = true
	}
	listed := map[string]bool{}
	for _, m := range part.Members {
		for _, set := range []plan.SetName{plan.VIPAddresses, plan.PortVIPs} {
			if m.Set == set.In(ip.Of(m.Entry.Addr)) {
				listed[m.Set+" "+m.Entry.Addr.String()] = true
			}
		}
	}
	if !maps.Equal(claimed, listed) {
		t.Errorf("claimed %v, but the sets hold %v", claimed, listed)
	}
	for _, v := range part.VIPs {
		if !slices.ContainsFunc(part.VirtualServers, func(vs plan.VirtualServer) bool { return vs.Key.Addr == v.Addr }) {
			t.Errorf("%s is claimed for no virtual server", v)
		}
	}
}

// checkMembers: members are unique, and members that name a virtual server name an
// existing one. Otherwise a rule would act on packets that IPVS does not serve.
func checkMembers(t *testing.T, part *plan.ServicePlan) {
	seen := map[plan.Member]bool{}
	keys := map[ipvs.Key]bool{}
	for _, vs := range part.VirtualServers {
		keys[vs.Key] = true
	}
	for _, m := range part.Members {
		if seen[m] {
			t.Errorf("%s is in %s twice", m.Entry, m.Set)
		}
		seen[m] = true
		if m.Entry.Net.IsValid() && m.Entry.Net.Bits() == 0 {
			t.Errorf("%s: the kernel refuses %s", m.Set, m.Entry)
		}
		loopBack := m.Set == plan.LoopBack.In(ip.IPv4) || m.Set == plan.LoopBack.In(ip.IPv6)
		key := plan.KeyOf(m.Entry)
		if m.Entry.Protocol != 0 && !loopBack && !keys[key] {
			t.Errorf("%s is in %s, but no virtual server", m.Entry, m.Set)
		}
	}
}

// A change of the node never changes the plan of a Service that does not depend on it,
// according to Deps.
func TestDependsIsComplete(t *testing.T) {
	told := map[plan.Deps]int{}
	property(t, func(t *testing.T, g generator) {
		cfg, s, before, after := g.config(), g.service(), g.node(), g.node()
		switch g.Intn(5) { // mostly one change at a time
		case 0:
			after.Inventory, after.Addresses, after.UnreachableNodes = before.Inventory, before.Addresses, before.UnreachableNodes
		case 1:
			after.Zone, after.Addresses, after.UnreachableNodes = before.Zone, before.Addresses, before.UnreachableNodes
		case 2:
			after.Zone, after.Inventory, after.UnreachableNodes = before.Zone, before.Inventory, before.UnreachableNodes
		case 3:
			after.Zone, after.Inventory, after.Addresses = before.Zone, before.Inventory, before.Addresses
		}
		a, b := plan.NewFacts(&cfg, &before), plan.NewFacts(&cfg, &after)
		was, is := plan.ForService(&cfg, &a, &s), plan.ForService(&cfg, &b, &s)
		changed := plan.DiffFacts(&a, &b)
		if was.Deps&changed != 0 {
			told[changed]++
			return
		}
		if diff := cmp.Diff(was, is, planByValue); diff != "" {
			t.Errorf("depends on %s, and %s changed (-was +is)\n%s", dependsText(was.Deps), dependsText(changed), diff)
		}
	})
	for _, d := range []plan.Deps{plan.OnZone, plan.OnUnreachableNodes, plan.OnPrimary, plan.OnNodeIPs, plan.OnNodeIPs | plan.OnNodePorts} {
		if told[d] == 0 {
			t.Errorf("no Service depended on %s", dependsText(d))
		}
	}
}

// The source ranges of a load balancer IP apply whatever else the address is: no rule
// lets other clients through.
func TestSourceRangesHold(t *testing.T) {
	property(t, func(t *testing.T, g generator) {
		cfg, node, s := g.config(), g.node(), g.service()
		s.SourceRanges = prefixes([]string{"10.0.0.0/8"})
		facts := plan.NewFacts(&cfg, &node)
		part := plan.ForService(&cfg, &facts, &s)
		for _, vs := range part.VirtualServers {
			k := vs.Key
			entry := plan.EntryOf(k)
			restricted := plan.Member{Set: plan.LoadBalancerFW.In(k.Family()), Entry: entry}
			if slices.Contains(s.LoadBalancers, k.Addr) && k.Port == 80 && !slices.Contains(part.Members, restricted) {
				t.Errorf("%s is open to every client", k)
			}
		}
	})
}

func BenchmarkServiceOf2Endpoints(b *testing.B) {
	cfg := defaultConfig()
	node := *manyLinks(3)
	facts := plan.NewFacts(&cfg, &node)
	s := service.Service{
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports: []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{
			{Addr: netip.MustParseAddrPort("10.244.1.5:8080"), Node: "node-1", Ready: true, Serving: true},
			{Addr: netip.MustParseAddrPort("10.244.2.5:8080"), Node: "node-2", Ready: true, Serving: true},
		}}},
	}
	b.ReportAllocs()
	for b.Loop() {
		plan.ForService(&cfg, &facts, &s)
	}
}
