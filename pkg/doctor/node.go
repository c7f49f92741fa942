package doctor

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
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// parameters without which IPVS cannot serve.
func parameters(n *trace.Node) []Finding {
	var out []Finding
	if !n.Forwards() {
		out = append(out, Finding{Error, n.Family.String(), "the node does not forward", "sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"})
	}
	if n.Sysctls["net/ipv4/vs/conntrack"] == "0" {
		out = append(out, Finding{Error, "IPVS", "conntrack does not track its connections, so nothing is masqueraded", "sysctl -w net.ipv4.vs.conntrack=1"})
	}
	return out
}

func bridges(f *Facts) []Finding {
	var out []Finding
	for _, n := range f.Nodes {
		out = append(out, hiddenBridges(f, n)...)
	}
	return out
}

func hiddenBridges(f *Facts, n *trace.Node) []Finding {
	var out []Finding
	node := plan.Node{Inventory: routing.Inventory{Links: n.Links}}
	for _, r := range n.Routes {
		if r.Dst.Bits() == 0 && !r.Local {
			node.Inventory.Defaults = append(node.Inventory.Defaults, r)
		}
	}
	for _, l := range plan.PodBridges(&f.Config, &node) {
		if !n.BridgeFilters() {
			out = append(out, Finding{Warning, l.Name, "frames between its pods bypass the rules (br_netfilter is not loaded, or bridge-nf-call-iptables or -ip6tables is 0), so their Service traffic must be masqueraded",
				"modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1"})
		}
	}
	return out
}

// interfaces checks ENIs: interfaces with a default route in their own table.
func interfaces(n *trace.Node) []Finding {
	var out []Finding
	for _, r := range n.Routes {
		if r.Local || r.Dst.Bits() != 0 || r.Table == routing.TableMain || isPrimary(n, r.Link) {
			continue
		}
		back := slices.ContainsFunc(n.Rules, func(rule routing.Rule) bool { return rule.Table == r.Table && rule.Mask != 0 })
		if n.Family == ip.IPv4 && n.ReversePathFilter(r.Link) == 1 && !(back && n.Either(r.Link, "src_valid_mark")) {
			out = append(out, Finding{Warning, r.Link, "rp_filter is 1, and the return path of external traffic uses another interface: such traffic is dropped",
				"--snat-mode auto or fwmark, which route replies by a mark, with net.ipv4.conf.all.src_valid_mark=1"})
		}
		source := n.SourceOn(r.Link, r.Via)
		if n.SNATTo(plan.ChainPostrouting, r.Link) == "" && n.LinkOf(source) != r.Link && !replyRouted(n, r.Table) {
			out = append(out, Finding{Warning, r.Link, fmt.Sprintf("has no address: Service traffic of its pods leaves with the source %s, which is %s's", source, n.LinkOf(source)),
				"--snat-mode auto, or name a source with --snat-source or the Node's annotation " + service.AnnotationSNATSources})
		}
	}
	return out
}

// isPrimary reports whether an interface has main's default route.
func isPrimary(n *trace.Node, link string) bool {
	return slices.ContainsFunc(n.Routes, func(r routing.Route) bool {
		return r.Table == routing.TableMain && r.Link == link && r.Dst.Bits() == 0
	})
}

// replyRouted reports whether the masqueraded flows of all sources that policy rules route by an
// ENI's table take reply routing. It returns true if there are no such sources.
func replyRouted(n *trace.Node, table int) bool {
	sources := n.Sets[plan.ReplyRoutedSources.In(n.Family)].Entries
	return !slices.ContainsFunc(n.Rules, func(r routing.Rule) bool {
		if r.Table != table || !r.From.IsValid() || r.IIf != "" {
			return false
		}
		_, listed := sources[ipset.Entry{Net: r.From.Masked()}]
		return !listed
	})
}

// jumps are the desired rules in base chains that jump to our chains.
func jumps(f *Facts, n *trace.Node) []nat.Jump {
	var out []nat.Jump
	node := plan.Node{Inventory: routing.Inventory{Links: n.Links, Rules: n.Rules}}
	for _, j := range plan.ForNode(&f.Config, &node).NAT.Jumps {
		if j.Chain.Family == n.Family {
			out = append(out, j)
		}
	}
	return out
}

// rules reports missing or shadowed rules of ours. Without those in table nat nothing
// is masqueraded; those in other tables may not be needed on this node.
func rules(f *Facts) []Finding {
	var out []Finding
	for _, n := range f.Nodes {
		first := map[nat.Chain]int{} // index of our first rule
		moves := map[nat.Chain]bool{}
		for _, j := range jumps(f, n) {
			at := slices.Index(n.Ruleset[j.Chain.Table].Chains[j.Chain.Name], j.Rule)
			if at < 0 && j.Chain.Table == nat.NAT && !j.Append {
				return []Finding{{Error, n.Family.String(), "no rule in nat " + j.Chain.Name + " leads to " + j.To().Name + ": the node is not programmed, or another program has flushed the chain",
					"start kube-ipvs; if it runs, it repairs this within --ipvs-sync-period"}}
			}
			if was, ok := first[j.Chain]; at >= 0 && !j.Append && (!ok || at < was) {
				first[j.Chain] = at
			}
			moves[j.Chain] = moves[j.Chain] || at >= 0 && j.Moves
		}
		for _, chain := range slices.SortedFunc(maps.Keys(first), func(a, b nat.Chain) int { return strings.Compare(a.String(), b.String()) }) {
			out = append(out, shadows(n, chain, first[chain], moves[chain])...)
		}
	}
	return out
}

// shadows reports terminating rules of other programs that precede ours in a base
// chain. moves is nat.Jump.Moves of ours.
func shadows(n *trace.Node, chain nat.Chain, ours int, moves bool) []Finding {
	hint := "kube-ipvs leaves its rule there, as kube-proxy does; if the other rule matches packets for Services by mistake, put it behind"
	if moves {
		hint = "kube-ipvs moves its rule to the front within --ipvs-sync-period; find the program that inserts rules at the head"
	}
	var out []Finding
	for _, r := range n.Ruleset[chain.Table].Chains[chain.Name][:ours] {
		if target := strings.Join(nat.Arguments(r, "-j"), ""); slices.Contains([]string{"ACCEPT", "DROP", "REJECT", "RETURN"}, target) {
			out = append(out, Finding{Warning, string(chain.Table) + " " + chain.Name, "a rule of another program precedes ours: -A " + chain.Name + " " + string(r), hint})
		}
	}
	return out
}

// leftovers reports chains of kube-proxy's iptables mode, which affect packets before
// IPVS.
func leftovers(n *trace.Node) []Finding {
	for chain := range n.Ruleset[nat.NAT].Chains {
		if slices.ContainsFunc(plan.ServiceChainPrefixes, func(prefix string) bool { return strings.HasPrefix(chain, prefix) }) {
			return []Finding{{Error, "kube-proxy", "its iptables mode has left chains such as nat " + chain,
				"restart kube-ipvs, or kube-proxy --proxy-mode iptables --cleanup"}}
		}
	}
	return nil
}

// programmed checks that set member, virtual server and VIP of each cluster IP exist
// together. If another interface has a cluster IP, a process of the node serves it; on
// a dummy interface that is intended (NodeLocal DNSCache), and needs no virtual server.
func programmed(n *trace.Node) []Finding {
	var out []Finding
	set := n.Sets[plan.ClusterIP.In(n.Family)]
	for _, e := range slices.SortedFunc(maps.Keys(set.Entries), ipset.Entry.Compare) {
		at := netip.AddrPortFrom(e.Addr, e.Port)
		name := n.LinkOf(e.Addr)
		link, _ := n.Link(name)
		isDummy := link.Type == "dummy"
		if _, ok := n.IPVS[plan.KeyOf(e)]; !ok && !isDummy {
			out = append(out, drift(fmt.Sprintf("%s %s has no virtual server, although %s lists it", e.Protocol, at, set.Name)))
		}
		if !n.Local(e.Addr) {
			out = append(out, drift(fmt.Sprintf("%s is not local to the node, although %s lists it", e.Addr, set.Name)))
		}
		if isDummy {
			out = append(out, Finding{Note, name, fmt.Sprintf("has the cluster IP %s, as NodeLocal DNSCache does", e.Addr), ""})
		} else if name != "" {
			out = append(out, Finding{Error, name, fmt.Sprintf("has the address %s, which is a Service's cluster IP", e.Addr), "give the interface another address, outside the Service range"})
		}
	}
	return out
}

func drift(what string) Finding {
	return Finding{Error, "drift", what, "kube-ipvs repairs this at its next comparison with the kernel; if it remains, see the log of kube-ipvs"}
}

// foreign reports virtual servers of other programs.
func foreign(n *trace.Node) []Finding {
	var out []Finding
	listed := map[ipvs.Key]bool{}
	for _, name := range plan.Owning {
		for e := range n.Sets[name.In(n.Family)].Entries {
			listed[plan.KeyOf(e)] = true
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(n.IPVS), ipvs.Key.Compare) {
		if key.FWMark == 0 && key.Family() == n.Family && !listed[key] {
			out = append(out, Finding{Note, "IPVS", fmt.Sprintf("virtual server %s belongs to no Service and is not changed", key), ""})
		}
	}
	return out
}
