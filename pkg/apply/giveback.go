package apply

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kubeproxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// successor is what kube-proxy has taken over, in a mode that has names of ours.
type successor struct {
	chains map[nat.Table][]string // those that it writes with every pass, or how their names begin
	ipvs   bool                   // virtual servers, sets, and addresses on the link as well
}

var (
	noSuccessor successor
	ipvsMode    = successor{ipvs: true, chains: map[nat.Table][]string{
		nat.NAT: {"KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-MARK-MASQ"},
		nat.Filter: {
			"KUBE-FORWARD", "KUBE-NODE-PORT", "KUBE-PROXY-FIREWALL", "KUBE-SOURCE-RANGES-FIREWALL",
			"KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
		},
	}}
	iptablesMode = successor{chains: map[nat.Table][]string{
		nat.NAT:    append([]string{"KUBE-POSTROUTING", "KUBE-MARK-MASQ"}, iptablesModes...),
		nat.Filter: append([]string{"KUBE-FORWARD", "KUBE-PROXY-FIREWALL"}, iptablesModes...),
		nat.Mangle: {"KUBE-PROXY-CANARY"},
	}}
)

func (s *successor) has(c nat.Chain) bool {
	return slices.ContainsFunc(s.chains[c.Table], func(name string) bool { return strings.HasPrefix(c.Name, name) })
}

// successor finds who serves a family now, in either back end of iptables.
func (a *Applier) successor(family ip.Family) *successor {
	for _, s := range []nat.State{a.have.nat[family], a.have.leftovers.nat[family]} {
		if found := successorIn(family, s); found != &noSuccessor {
			return found
		}
	}
	return &noSuccessor
}

// successorIn finds who serves a family with the rules of a back end. Whatever
// Services there are, KUBE-SERVICES leads to node ports: in iptables mode to a
// chain that we do not have, and in IPVS mode by their numbers alone, while we
// match addresses too.
func successorIn(family ip.Family, s nat.State) *successor {
	services := servicesChain(family)
	for _, r := range s.Chains[services] {
		switch to := (nat.Jump{Chain: services, Rule: r}).To().Name; {
		case to == "KUBE-NODEPORTS":
			return &iptablesMode
		case to == "KUBE-NODE-PORT" && strings.HasPrefix(string(r), "-m addrtype --dst-type LOCAL "):
			return &ipvsMode
		}
	}
	return &noSuccessor
}

// GivenBack tells whether Cleanup has found kube-proxy serving in our place.
func (a *Applier) GivenBack() bool {
	return len(a.tablesToGo()) < len(a.have.kubeProxy) ||
		slices.ContainsFunc(ip.Families, func(f ip.Family) bool { return a.successor(f) != &noSuccessor })
}

// leavesIPVS tells whether kube-proxy goes on with IPVS in any family.
func (a *Applier) leavesIPVS() bool {
	return slices.ContainsFunc(ip.Families, func(f ip.Family) bool { return a.successor(f).ipvs })
}

// rulesToGo are the rules of a family in one back end that Cleanup removes.
func (a *Applier) rulesToGo(family ip.Family, have nat.State) nat.State {
	next := successorIn(family, have)
	jumps := slices.Concat(have.Jumps, have.Stray)
	out := nat.State{Chains: maps.Clone(have.Chains), Jumps: slices.Clone(jumps)}
	maps.DeleteFunc(out.Chains, func(c nat.Chain, _ []nat.Rule) bool { return next.has(c) })
	out.Jumps = slices.DeleteFunc(out.Jumps, func(j nat.Jump) bool { return next.has(j.To()) && !a.doubles(j, jumps) })
	return out
}

// doubles tells whether a jump is in our words, and there is one in kube-proxy's.
func (a *Applier) doubles(j nat.Jump, all []nat.Jump) bool {
	ours := func(j nat.Jump) bool {
		return slices.ContainsFunc(a.node.NAT.Jumps, func(o nat.Jump) bool { return o.Chain == j.Chain && o.Rule == j.Rule })
	}
	return ours(j) && slices.ContainsFunc(all, func(o nat.Jump) bool { return o.Chain == j.Chain && o.To() == j.To() && !ours(o) })
}

// tablesToGo are kube-proxy's tables of nftables mode that Cleanup takes away: those
// beside rules of ours, as without them it is kube-proxy that serves.
func (a *Applier) tablesToGo() []kubeproxy.Change {
	return slices.DeleteFunc(a.have.kubeProxy.Removals(), func(c kubeproxy.Change) bool {
		_, ours := a.have.nat[c.Family].Chains[servicesChain(c.Family)]
		return !ours
	})
}

// serversToGo are the virtual servers that Cleanup takes away. Where IPVS is left to
// kube-proxy it does not know those with a mark. Such a one stays as long as a
// connection goes through it: IPVS finds the connection without the mark, and new
// ones do not come once the rules are gone that mark.
func (a *Applier) serversToGo() (ipvs.State, []error) {
	out := maps.Clone(a.have.servers)
	var errs []error
	for key := range a.have.servers {
		if !a.successor(key.Family()).ipvs {
			continue
		}
		if key.FWMark == 0 {
			delete(out, key)
		} else if err := a.unused(key); err != nil {
			delete(out, key)
			errs = append(errs, err)
		}
	}
	return out, errs
}

// unused is nil if no connection goes through a virtual server.
func (a *Applier) unused(key ipvs.Key) error {
	dests, err := a.kernel.IPVS.Connections(key)
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
	address, _ := a.serves(key)
	return fmt.Errorf("virtual server %s, to which pods and nodes that ask %s are led, stays for as long as it has connections, now %d: clean up again then", key, address, n)
}

// setsToGo are the sets that Cleanup takes away. The one that says what marks are
// for stays with their virtual servers.
func (a *Applier) setsToGo(servers ipvs.State) ipset.State {
	out := maps.Clone(a.have.sets)
	for _, family := range a.cfg.Families {
		if a.successor(family).ipvs {
			for _, name := range plan.KubeProxysSets(family) {
				delete(out, name)
			}
		}
	}
	for key := range a.have.servers {
		if _, goes := servers[key]; key.FWMark != 0 && !goes {
			delete(out, plan.Local.In(key.Family()))
			delete(out, plan.Draining.In(key.Family()))
		}
	}
	return out
}

// linkToGo takes away the link, or from one that is kube-proxy's the addresses of a
// family that is not.
func (a *Applier) linkToGo() []routing.Change {
	var changes []routing.Change
	if a.have.link && !a.leavesIPVS() {
		return append(changes, routing.Change{Op: routing.DeleteLink})
	}
	for vip := range a.have.vips {
		if vip.Claim == plan.ClaimAddress && !a.successor(ip.Of(vip.Addr)).ipvs {
			changes = append(changes, routing.Change{Op: routing.DeleteAddress, Address: vip.Addr})
		}
	}
	return changes
}
