//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/fakenode"
)

// Kernel is the kernel of a scenario's node.
type Kernel struct {
	*fakenode.Node
	scenario *Scenario
	writes   []string // all writes, in order
	// written, if set, is called before each write takes effect.
	written func()
	parsed  *rulesets // of this kernel and its clones
}

// rulesets are parsed rules by their text. Most states of a kernel have the same rules.
type rulesets struct {
	mu   sync.Mutex
	have map[string]nat.Ruleset
}

func (r *rulesets) parse(text string) (nat.Ruleset, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rules, ok := r.have[text]; ok {
		return rules, nil
	}
	rules, err := nat.ParseSave(text)
	if err == nil {
		r.have[text] = rules
	}
	return rules, err
}

// NewKernel returns a kernel that has only the scenario's network.
func NewKernel(s *Scenario) *Kernel {
	k := &Kernel{Node: fakenode.New(parameters(s)), scenario: s, parsed: &rulesets{have: map[string]nat.Ruleset{}}}
	k.setNetwork(s)
	return k
}

// Clone returns a kernel with the same state, for a process that starts on it.
func (k *Kernel) Clone() *Kernel {
	return &Kernel{Node: k.Node.Clone(), scenario: k.scenario, parsed: k.parsed}
}

// setNetwork replaces foreign network state by a scenario's. Our policy rules stay.
func (k *Kernel) setNetwork(s *Scenario) {
	ours, _ := k.Routing.Inventory()
	inv := s.Node.Inventory
	inv.Rules = slices.Clone(inv.Rules)
	for _, r := range ours.Rules {
		if r.Own {
			inv.Rules = append(inv.Rules, r)
		}
	}
	for _, f := range ip.Families {
		if !slices.ContainsFunc(inv.Rules, func(r routing.Rule) bool { return r.Family == f && r.Table == routing.TableLocal }) {
			inv.Rules = append(inv.Rules, routing.Rule{Family: f, Table: routing.TableLocal})
		}
		inv.Rules = append(inv.Rules, routing.Rule{Family: f, Priority: routing.PriorityMain, Table: routing.TableMain})
	}
	slices.SortStableFunc(inv.Rules, func(a, b routing.Rule) int { return a.Priority - b.Priority })
	k.Routing.SetInventory(inv)
	k.scenario = s
	for key, value := range parameters(s) {
		if _, there := k.Sysctl.Values()[key]; !there {
			k.Sysctl.Set(key, value)
		}
	}
}

// parameters returns the node's parameters before any proxy has run: strict reverse-path
// checks and no forwarding of IPv4.
func parameters(s *Scenario) sysctl.State {
	values := sysctl.State{
		"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/src_valid_mark": "0",
		"net/ipv4/vs/conntrack": "0", "net/ipv4/vs/snat_reroute": "1", "net/ipv4/vs/expire_nodest_conn": "0",
		"net/ipv4/vs/expire_quiescent_template": "0", "net/ipv4/vs/conn_reuse_mode": "1",
		"net/ipv4/conf/all/arp_ignore": "0", "net/ipv4/conf/all/arp_announce": "0", "net/ipv4/conf/all/rp_filter": "0",
		"net/bridge/bridge-nf-call-iptables": "1", "net/bridge/bridge-nf-call-ip6tables": "1",
	}
	for _, l := range s.Node.Inventory.Links {
		for key, value := range map[string]string{"rp_filter": "1", "src_valid_mark": "0", "accept_local": "0", "route_localnet": "0"} {
			values["net/ipv4/conf/"+l.Name+"/"+key] = value
		}
	}
	return values
}

// one makes changes one by one, as the kernel does, and calls written before each. It
// does not run inside the fakes, whose hooks hold their locks.
func one[C fmt.Stringer, F any](k *Kernel, changes []C, apply func([]C) []F) []F {
	var failures []F
	for _, c := range changes {
		k.writing(c.String())
		failures = append(failures, apply([]C{c})...)
	}
	return failures
}

func (k *Kernel) writing(what string) {
	if k.written != nil {
		k.written()
	}
	k.writes = append(k.writes, what)
}

// The fakes, applying each change by itself.
type (
	slowIPVS struct {
		*ipvs.Fake
		k *Kernel
	}
	slowIPSet struct {
		*ipset.Fake
		k *Kernel
	}
	slowRouting struct {
		*routing.Fake
		k *Kernel
	}
	slowSysctl struct {
		*sysctl.Fake
		k *Kernel
	}
	slowNAT struct {
		*nat.Fake
		k *Kernel
	}
)

func (f slowIPVS) Apply(c []ipvs.Change) []ipvs.Failure          { return one(f.k, c, f.Fake.Apply) }
func (f slowIPSet) Apply(c []ipset.Change) []ipset.Failure       { return one(f.k, c, f.Fake.Apply) }
func (f slowRouting) Apply(c []routing.Change) []routing.Failure { return one(f.k, c, f.Fake.Apply) }
func (f slowSysctl) Apply(c []sysctl.Change) []sysctl.Failure    { return one(f.k, c, f.Fake.Apply) }

// Apply applies the changes of each table together, table by table.
func (f slowNAT) Apply(changes []nat.Change) []nat.Failure {
	var failures []nat.Failure
	for _, table := range []nat.Table{nat.Filter, nat.Mangle, nat.NAT, nat.Raw} {
		var together []nat.Change
		for _, c := range changes {
			if c.Chain.Table == table {
				together = append(together, c)
			}
		}
		if len(together) > 0 {
			f.k.writing(fmt.Sprintf("%d changes of table %s", len(together), table))
			failures = append(failures, f.Fake.Apply(together)...)
		}
	}
	return failures
}

// apply returns the fakes as the kernel interfaces of package reconcile.
func (k *Kernel) apply() reconcile.Kernel {
	return reconcile.Kernel{
		IPVS: slowIPVS{k.IPVS, k}, IPSet: slowIPSet{k.IPSet, k}, Routing: slowRouting{k.Routing, k}, Sysctl: slowSysctl{k.Sysctl, k},
		Conntrack: k.Conntrack, Loopback: k.Loopback,
		NAT: map[ip.Family]reconcile.NAT{ip.IPv4: slowNAT{k.NAT[ip.IPv4], k}, ip.IPv6: slowNAT{k.NAT[ip.IPv6], k}},
	}
}

// Observed returns the kernel's state of one family for the evaluator.
func (k *Kernel) Observed(family ip.Family) (*trace.Node, error) {
	n := &trace.Node{Family: family, Links: k.scenario.Node.Inventory.Links, Sysctls: k.Sysctl.Values()}
	var err error
	if n.Ruleset, err = k.parsed.parse(k.NAT[family].Save()); err != nil {
		return nil, err
	}
	if n.Sets, err = k.IPSet.Observe(func(string) bool { return true }); err != nil {
		return nil, err
	}
	servers, err := k.IPVS.Observe()
	if err != nil {
		return nil, err
	}
	n.IPVS = servers.WithoutPlaces()
	inv, err := k.Routing.Inventory()
	if err != nil {
		return nil, err
	}
	for _, r := range inv.Rules {
		if r.Family == family {
			n.Rules = append(n.Rules, r)
		}
	}
	if n.Routes, err = k.routes(family); err != nil {
		return nil, err
	}
	n.Delivers = k.scenario.fabric(family)
	return n, nil
}

// routes returns the routes of the kernel itself, foreign routes, and ours.
func (k *Kernel) routes(family ip.Family) ([]routing.Route, error) {
	out := k.scenario.foreignRoutes(family)
	ours, err := k.Routing.Observe()
	if err != nil {
		return nil, err
	}
	for a := range ours.Addresses {
		if ip.Of(a) == family {
			out = append(out, routing.Route{Family: family, Table: routing.TableLocal, Dst: netip.PrefixFrom(a, a.BitLen()), Link: routing.DummyLink, Local: true, Src: a})
		}
	}
	for r := range ours.Routes {
		if r.Family == family {
			out = append(out, r)
		}
	}
	return out, nil
}

// foreignRoutes returns the routes that exist without any proxy.
func (s *Scenario) foreignRoutes(family ip.Family) []routing.Route {
	var out []routing.Route
	for _, l := range s.Node.Inventory.Links {
		for _, a := range l.Addresses {
			addr := a.Prefix.Addr()
			if ip.Of(addr) != family {
				continue
			}
			local := netip.PrefixFrom(addr, addr.BitLen())
			if l.Loopback {
				local = a.Prefix.Masked()
			}
			out = append(out, routing.Route{Family: family, Table: routing.TableLocal, Dst: local, Link: l.Name, Local: true, Src: addr})
			if !l.Loopback && a.Prefix.Bits() < addr.BitLen() {
				out = append(out, routing.Route{Family: family, Table: routing.TableMain, Dst: a.Prefix.Masked(), Link: l.Name, Src: addr})
			}
		}
	}
	for _, r := range slices.Concat(s.Routes, s.Node.Inventory.Defaults) {
		if r.Family == family {
			out = append(out, r)
		}
	}
	return out
}

// fabric is the network beyond the node. It delivers an address to the interface by which
// the CNI's routing sends packets from that address, and accepts the address as a source
// only from that interface.
func (s *Scenario) fabric(family ip.Family) func(netip.Addr) string {
	n := s.bare(family)
	known := map[netip.Addr]string{}
	for link, list := range s.Config.SNAT.Sources {
		for _, a := range list {
			known[a] = link
		}
	}
	for link, list := range s.Node.SNATSources {
		for _, a := range list {
			known[a] = link
		}
	}
	var mu sync.Mutex // classes are evaluated concurrently
	return func(a netip.Addr) string {
		mu.Lock()
		defer mu.Unlock()
		if link := n.LinkOf(a); link != "" {
			return link
		}
		link, seen := known[a]
		if !seen {
			link = s.outOf(n, a)
			known[a] = link
		}
		return link
	}
}

// bare returns the node without any proxy and without foreign marks.
func (s *Scenario) bare(family ip.Family) *trace.Node {
	n := &trace.Node{Family: family, Links: s.Node.Inventory.Links, Routes: s.foreignRoutes(family), Sysctls: parameters(s)}
	n.Rules = append(n.Rules, routing.Rule{Family: family, Table: routing.TableLocal})
	for _, r := range s.Node.Inventory.Rules {
		if r.Family == family && r.Mask == 0 {
			if r.Table == routing.TableLocal {
				n.Rules = n.Rules[1:] // it has moved
			}
			n.Rules = append(n.Rules, r)
		}
	}
	n.Rules = append(n.Rules, routing.Rule{Family: family, Priority: routing.PriorityMain, Table: routing.TableMain})
	slices.SortStableFunc(n.Rules, func(a, b routing.Rule) int { return a.Priority - b.Priority })
	return n
}

// outOf returns the interface by which a pod of this node reaches external hosts.
func (s *Scenario) outOf(n *trace.Node, pod netip.Addr) string {
	at := s.podLink(n, pod)
	if at == "" {
		return ""
	}
	out, _ := n.RouteOf(pod, faraway[n.Family], at)
	return out.Link
}

// podLink returns the interface of a pod of this node, from any table that has a route to
// it, or "" for other addresses.
func (s *Scenario) podLink(n *trace.Node, a netip.Addr) string {
	bits, link := 0, ""
	for _, r := range n.Routes {
		if r.Dst.Contains(a) && r.Dst.Bits() > bits && !r.Local && !s.isUplink(n.Family, r.Link) {
			bits, link = r.Dst.Bits(), r.Link
		}
	}
	return link
}

// isBranch reports whether an interface is only the uplink of pods that policy rules by
// input interface route there. No external client connects to a Service through it.
func (s *Scenario) isBranch(family ip.Family, link string) bool {
	for _, d := range s.Node.Inventory.Defaults {
		if d.Family != family || d.Link != link {
			continue
		}
		for _, r := range s.Node.Inventory.Rules {
			if r.Table == d.Table && r.IIf != "" {
				return true
			}
		}
	}
	return false
}

// faraway are addresses that no scenario uses.
var faraway = map[ip.Family]netip.Addr{
	ip.IPv4: netip.MustParseAddr("100.64.9.9"),
	ip.IPv6: netip.MustParseAddr("2001:db8:64:9::9"),
}

// uplinks returns the interfaces of default routes of any table, and those with a configured
// gateway.
func (s *Scenario) uplinks(family ip.Family) []string {
	var out []string
	for _, r := range s.Node.Inventory.Defaults {
		if r.Family == family && !slices.Contains(out, r.Link) {
			out = append(out, r.Link)
		}
	}
	for link, gateways := range s.Config.SNAT.Gateways {
		if slices.ContainsFunc(gateways, func(a netip.Addr) bool { return ip.Of(a) == family }) && !slices.Contains(out, link) {
			out = append(out, link)
		}
	}
	return out
}

func (s *Scenario) isUplink(family ip.Family, link string) bool {
	return slices.Contains(s.uplinks(family), link)
}
