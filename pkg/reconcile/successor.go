package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// successor is a mode of kube-proxy that has the same names of chains or sets as we do. Cleanup
// must not remove the state of a kube-proxy that took over in this mode.
type successor struct {
	chains map[nat.Table][]string // names, or prefixes of names, that every sync of kube-proxy writes
	ipvs   bool                   // the mode also has virtual servers, sets, and addresses on the link
}

var (
	noSuccessor successor
	ipvsMode    = successor{ipvs: true, chains: map[nat.Table][]string{
		nat.NAT: {plan.ChainServices, plan.ChainPostrouting, plan.ChainNodePort, plan.ChainLoadBalancer, plan.ChainMarkMasq},
		nat.Filter: {
			plan.ChainForward, plan.ChainNodePort, plan.ChainFirewall, plan.ChainSourceRanges,
			plan.ChainIPVSFilter, plan.ChainIPVSOutFilter,
		},
	}}
	iptablesMode = successor{chains: map[nat.Table][]string{
		nat.NAT:    append([]string{plan.ChainPostrouting, plan.ChainMarkMasq}, plan.IPTablesModePrefixes...),
		nat.Filter: append([]string{plan.ChainForward, plan.ChainFirewall}, plan.IPTablesModePrefixes...),
		nat.Mangle: {plan.ChainProxyCanary},
	}}
)

func (s *successor) has(c nat.Chain) bool {
	return slices.ContainsFunc(s.chains[c.Table], func(name string) bool { return strings.HasPrefix(c.Name, name) })
}

// successor returns the kube-proxy mode that serves a family now, in either iptables back
// end.
func (c *cachedState) successor(family ip.Family) *successor {
	for _, s := range []nat.State{c.nat[family], c.leftovers.nat[family]} {
		if found := successorIn(family, s); found != &noSuccessor {
			return found
		}
	}
	return &noSuccessor
}

// successorIn returns the kube-proxy mode that serves a family with the rules of one back end. In
// both modes KUBE-SERVICES leads to node ports, whatever Services exist. In iptables mode it does
// so through a chain that we do not have. In IPVS mode it matches ports alone, while our rule
// matches addresses too.
func successorIn(family ip.Family, s nat.State) *successor {
	services := servicesChain(family)
	for _, r := range s.Chains[services] {
		switch to := (nat.Jump{Chain: services, Rule: r}).To().Name; {
		case to == plan.ChainNodePorts:
			return &iptablesMode
		case to == plan.ChainNodePort && strings.HasPrefix(string(r), "-m addrtype --dst-type LOCAL "):
			return &ipvsMode
		}
	}
	return &noSuccessor
}

// kubeProxyActive reports whether kube-proxy serves any family, in any mode.
func (cl *cleaner) kubeProxyActive() bool {
	return len(cl.tablesToRemove()) < len(cl.cached.kubeProxy) ||
		slices.ContainsFunc(ip.Families, func(f ip.Family) bool { return cl.cached.successor(f) != &noSuccessor })
}

// kubeProxyUsesIPVS reports whether kube-proxy serves any family in IPVS mode.
func (cl *cleaner) kubeProxyUsesIPVS() bool {
	return slices.ContainsFunc(ip.Families, func(f ip.Family) bool { return cl.cached.successor(f).ipvs })
}

// rulesToRemove returns the rules of a family in one back end that Cleanup removes.
func (cl *cleaner) rulesToRemove(family ip.Family, have nat.State) nat.State {
	next := successorIn(family, have)
	jumps := slices.Concat(have.Jumps, have.Misplaced)
	out := nat.State{Chains: maps.Clone(have.Chains), Jumps: slices.Clone(jumps)}
	maps.DeleteFunc(out.Chains, func(c nat.Chain, _ []nat.Rule) bool { return next.has(c) })
	out.Jumps = slices.DeleteFunc(out.Jumps, func(j nat.Jump) bool { return next.has(j.To()) && !cl.duplicates(j, jumps) })
	return out
}

// duplicates reports whether j is a jump of ours and kube-proxy has one from and to the same
// chains.
func (cl *cleaner) duplicates(j nat.Jump, all []nat.Jump) bool {
	ours := func(j nat.Jump) bool {
		return slices.ContainsFunc(cl.node.NAT.Jumps, func(o nat.Jump) bool { return o.Chain == j.Chain && o.Rule == j.Rule })
	}
	return ours(j) && slices.ContainsFunc(all, func(o nat.Jump) bool { return o.Chain == j.Chain && o.To() == j.To() && !ours(o) })
}

// tablesToRemove returns kube-proxy's nftables tables that Cleanup deletes: those beside
// rules of ours. Without such rules kube-proxy serves the family.
func (cl *cleaner) tablesToRemove() []nft.KubeProxyChange {
	return slices.DeleteFunc(cl.cached.kubeProxy.Removals(), func(c nft.KubeProxyChange) bool {
		_, ours := cl.cached.nat[c.Family].Chains[servicesChain(c.Family)]
		return !ours
	})
}

// serversToRemove returns the virtual servers that Cleanup deletes. Where kube-proxy has taken over in
// IPVS mode, these are only the fwmark virtual servers, which it does not know. One that still has
// connections stays, and is reported by an error: IPVS finds an established connection without the
// mark, and no new ones begin once the rules that set the mark are deleted.
func (cl *cleaner) serversToRemove() ([]ipvs.Change, []error) {
	var out []ipvs.Change
	var errs []error
	for s := range cl.servers.allExisting() {
		if cl.cached.successor(s.key.Family()).ipvs {
			if s.key.FWMark == 0 {
				continue
			}
			if err := cl.checkUnused(s.key); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		out = append(out, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: s.key})
	}
	slices.SortFunc(out, func(a, b ipvs.Change) int { return a.Key.Compare(b.Key) })
	return out, errs
}

// checkUnused returns an error if a virtual server has connections.
func (cl *cleaner) checkUnused(key ipvs.Key) error {
	dests, err := cl.kernel.IPVS.Connections(key)
	if err != nil {
		return err
	}
	n := 0
	for _, c := range dests {
		n += c.Active + c.Inactive
	}
	if n == 0 {
		return nil
	}
	address, _ := cl.marks.addressOf(key)
	return fmt.Errorf("virtual server %s, which serves internal clients of %s, still has %d connections and stays: clean up again once they have ended", key, address, n)
}

// setsToRemove returns the sets that Cleanup destroys. plan.Local and plan.Draining, which
// map marks to addresses, stay while fwmark virtual servers of their family stay.
func (cl *cleaner) setsToRemove(servers []ipvs.Change) []ipset.Set {
	stay := map[string]bool{}
	for _, family := range cl.cfg.Families {
		if cl.cached.successor(family).ipvs {
			for _, name := range plan.KubeProxySets(family) {
				stay[name] = true
			}
		}
	}
	removed := map[ipvs.Key]bool{}
	for _, c := range servers {
		removed[c.Key] = true
	}
	for s := range cl.servers.allExisting() {
		if s.key.FWMark != 0 && !removed[s.key] {
			stay[plan.Local.In(s.key.Family())], stay[plan.Draining.In(s.key.Family())] = true, true
		}
	}
	var out []ipset.Set
	for _, set := range cl.sets.list {
		if set.exists && !stay[set.name] {
			out = append(out, set.set)
		}
	}
	return out
}

// sources returns how many connections of the node's own processes have an address as their source.
// Without a kube-proxy, which serves them from now on, it returns none.
func (cl *cleaner) sources() (map[netip.Addr]int, error) {
	if !cl.kubeProxyActive() {
		return nil, nil
	}
	return cl.kernel.Routing.Sources()
}

// keptSources returns the VIPs that stay local because connections of the node's own processes
// have them as their source, and an error for each. The kernel chooses a local VIP as the source of
// the node's connections to it. A kube-proxy in iptables or nftables mode serves these connections
// too, but their replies reach the process only while the VIP is local. The changes make such a VIP
// local by a route that gives new connections the node's address as their source, so that a later
// cleanup can remove it.
func (cl *cleaner) keptSources(sources map[netip.Addr]int) (changes []routing.Change, kept map[netip.Addr]bool, errs []error) {
	kept = map[netip.Addr]bool{}
	for v := range cl.vips.allExisting() {
		a, family := v.key.Addr, ip.Of(v.key.Addr)
		if n := sources[a]; n > 0 && v.key.Claim != plan.ClaimPort && !kept[a] && !cl.cached.successor(family).ipvs {
			kept[a] = true
			errs = append(errs, fmt.Errorf("%d connections of this node have the source %s, which stays local: clean up again once they have ended", n, a))
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(kept), netip.Addr.Compare) {
		route := routing.LocalRoute(a)
		source, err := cl.kernel.Routing.DefaultSource(ip.Of(a))
		if err != nil {
			errs = append(errs, err)
		}
		route.Src = source
		changes = append(changes, routing.Change{Op: routing.AddRoute, Route: route})
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return changes, kept, errs
}

// linkRemovals deletes the link or, if kube-proxy uses it or one of its addresses stays, the other
// addresses of a family that kube-proxy does not serve in IPVS mode.
func (cl *cleaner) linkRemovals(staying map[netip.Addr]bool) []routing.Change {
	var changes []routing.Change
	inUse := cl.kubeProxyUsesIPVS()
	for v := range cl.vips.allExisting() {
		inUse = inUse || v.key.Claim == plan.ClaimAddress && staying[v.key.Addr]
	}
	if cl.cached.link && !inUse {
		return append(changes, routing.Change{Op: routing.DeleteLink})
	}
	for v := range cl.vips.allExisting() {
		if v.key.Claim == plan.ClaimAddress && !staying[v.key.Addr] && !cl.cached.successor(ip.Of(v.key.Addr)).ipvs {
			changes = append(changes, routing.Change{Op: routing.DeleteAddress, Address: v.key.Addr})
		}
	}
	return changes
}
