package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Reply routing: a flow is bound to an interface by a value in some bits of
// its conntrack mark, and a policy rule leads packets with that value on their
// own mark out by the interface. docs/concepts/eni.md shows a flow's way through it.

// Binding is an interface that flows can be bound to.
type Binding struct {
	Family ip.Family
	Link   string
	Index  int    // the kernel's number of the interface, which outlives its name
	Table  int    // of which the default route leaves by it
	Mark   uint32 // its value, within SNAT.Mark
}

// The parameters that only reply routing needs.
const (
	SrcValidMark = "net/ipv4/conf/all/src_valid_mark"
	SNATReroute  = "net/ipv4/vs/snat_reroute"
)

// addReplyRouting adds what the chains below need: a policy rule for each
// value, which is looked up before a CNI's rules by source, and the sources
// whose masqueraded flows are bound. The reverse-path check must look at the
// mark too.
func addReplyRouting(part *NodePart, cfg *Config, family ip.Family, paths Paths) {
	if len(paths.Bound) == 0 {
		return
	}
	if family == ip.IPv4 {
		part.Sysctls[SrcValidMark] = "1"
		part.Sysctls[SNATReroute] = "1"
	}
	for _, b := range paths.Bound {
		part.Rules = append(part.Rules, routing.Rule{
			Family:   family,
			Priority: cfg.SNAT.Priority,
			Mark:     b.Mark,
			Mask:     cfg.SNAT.Mark,
			Table:    b.Table,
		})
	}
	part.Bound = append(part.Bound, paths.Bound...)
	for _, p := range paths.ReplyRouted {
		part.Members = append(part.Members, Member{Set: ReplyRoutedSources.In(family), Entry: ipset.Entry{Net: p}})
	}
}

// replyRouting writes the chains that bind flows and mark their packets, where
// there is an ENI or a branch.
func (r *ruleset) replyRouting() {
	if len(r.paths.Bound) == 0 && len(r.paths.Branches) == 0 {
		return
	}
	const comment = "kubernetes reply routing"
	if len(r.paths.Bound) > 0 {
		r.jump(nat.Mangle, "PREROUTING", "KUBE-IPVS-RESTORE", comment)
		r.chain(nat.Mangle, "KUBE-IPVS-RESTORE", r.restoreRules()...)
		r.chain(nat.Mangle, "KUBE-IPVS-ENTER", r.enterRules()...)
		r.chain(nat.Mangle, "KUBE-IPVS-ENTRY", r.entryRules()...)
	}
	if len(r.paths.Branches) > 0 {
		r.branchRules()
	}
	r.jump(nat.Mangle, "INPUT", "KUBE-IPVS-BIND", comment)
	r.jump(nat.Mangle, "FORWARD", "KUBE-IPVS-RETURN", comment)
	r.jump(nat.Mangle, "OUTPUT", "KUBE-IPVS-RETURN", comment)
	r.chain(nat.Mangle, "KUBE-IPVS-BIND", r.bindRules()...)
	r.chain(nat.Mangle, "KUBE-IPVS-RETURN", r.returnRules()...)
	if len(r.paths.Strays) > 0 {
		r.jumpIf(nat.Mangle, "POSTROUTING", "-m connmark --mark "+r.main()+" -m conntrack --ctdir ORIGINAL", "KUBE-IPVS-STRAY", comment)
		r.chain(nat.Mangle, "KUBE-IPVS-STRAY", r.strayRules()...)
	}
}

// masked is a value of a binding under the mask, as iptables writes it.
func (r *ruleset) masked(value uint32) string {
	return fmt.Sprintf("%#x/%#x", value, r.cfg.SNAT.Mark)
}

// main is the value of the main table's interface.
func (r *ruleset) main() string { return r.masked(r.paths.Bound[0].Mark) }

// restoreRules stand in PREROUTING. What is bound to the main table's
// interface has the mark on every packet, both ways: a pod's own packets are
// routed by it after IPVS has changed their destination, and a reply's
// reverse path is looked up by it once the masquerading is undone. New flows
// that enter by any of the interfaces are looked at; later packets of a bound
// flow get the mark of the interface that they enter by:
//
//	-A KUBE-IPVS-RESTORE -m connmark --mark 0x20/0x3060 -j MARK --set-xmark 0x20/0x3060
//	-A KUBE-IPVS-RESTORE -i eth1 -m connmark ! --mark 0x0/0x3060 -m conntrack --ctdir ORIGINAL -j MARK --set-xmark 0x40/0x3060     (each interface)
//	-A KUBE-IPVS-RESTORE -i eth1 -m conntrack --ctstate NEW -j KUBE-IPVS-ENTER
func (r *ruleset) restoreRules() []nat.Rule {
	rules := []nat.Rule{nat.Rule(fmt.Sprintf("-m connmark --mark %s -j MARK --set-xmark %s", r.main(), r.main()))}
	for _, b := range r.paths.Bound {
		rules = append(rules,
			nat.Rule(fmt.Sprintf("-i %s -m connmark ! --mark %s -m conntrack --ctdir ORIGINAL -j MARK --set-xmark %s", b.Link, r.masked(0), r.masked(b.Mark))),
			nat.Rule("-i "+b.Link+" -m conntrack --ctstate NEW -j KUBE-IPVS-ENTER"))
	}
	return rules
}

// enterRules pick what is for a Service:
//
//	-A KUBE-IPVS-ENTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-IPVS-ENTRY     (external IPs, node ports, cluster IPs)
func (r *ruleset) enterRules() []nat.Rule {
	var rules []nat.Rule
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts, ClusterIP) {
		rules = append(rules, rule("from outside", r.match(set, "dst,dst"), "KUBE-IPVS-ENTRY"))
	}
	return rules
}

// entryRules mark such a packet with the interface that it entered by, and
// bind its flow. Without the mark the strict reverse-path check would drop it
// at an ENI, as the way back to the client is looked up in the main table:
//
//	-A KUBE-IPVS-ENTRY -i eth0 -j MARK --set-xmark 0x20/0x3060
//	-A KUBE-IPVS-ENTRY -i eth1 -j MARK --set-xmark 0x40/0x3060
//	-A KUBE-IPVS-ENTRY -j CONNMARK --save-mark --nfmask 0x3060 --ctmask 0x3060
func (r *ruleset) entryRules() []nat.Rule {
	var rules []nat.Rule
	for _, b := range r.paths.Bound {
		rules = append(rules, nat.Rule(fmt.Sprintf("-i %s -j MARK --set-xmark %s", b.Link, r.masked(b.Mark))))
	}
	return append(rules, nat.Rule(fmt.Sprintf("-j CONNMARK --save-mark --nfmask %#[1]x --ctmask %#[1]x", r.cfg.SNAT.Mark)))
}

// bindRules stand in INPUT, behind the reverse-path check and before IPVS. A
// new flow that the nat table has decided to masquerade, from a source that
// cannot be given an address of its interface, is bound to the main table's.
// What entered by an ENI loses the mark, or IPVS would send it out there again
// instead of to its endpoint:
//
//	-A KUBE-IPVS-BIND -m mark --mark 0x4000/0x4000 -m set --match-set KUBE-IPVS-REPLY-SRC src -j CONNMARK --set-xmark 0x20/0x3060
//	-A KUBE-IPVS-BIND -m connmark --mark 0x20/0x3060 -j MARK --set-xmark 0x20/0x3060
//	-A KUBE-IPVS-BIND -i eth1 -j MARK --set-xmark 0x0/0x3060
func (r *ruleset) bindRules() []nat.Rule {
	if len(r.paths.Bound) == 0 {
		return r.branchArrived()
	}
	rules := []nat.Rule{
		r.bindMasqueraded(),
		nat.Rule(fmt.Sprintf("-m connmark --mark %s -j MARK --set-xmark %s", r.main(), r.main())),
	}
	for _, b := range r.paths.Bound[1:] {
		rules = append(rules, nat.Rule(fmt.Sprintf("-i %s -j MARK --set-xmark %s", b.Link, r.masked(0))))
	}
	return append(rules, r.branchArrived()...)
}

// bindMasqueraded binds a flow that is going to be masqueraded to the main table's
// interface, if its source cannot be given an address of its own interface.
func (r *ruleset) bindMasqueraded() nat.Rule {
	masq := r.cfg.MasqueradeMark
	return nat.Rule(fmt.Sprintf("-m mark --mark %#[1]x/%#[1]x %s -j CONNMARK --set-xmark %s", masq, r.match(ReplyRoutedSources, "src"), r.main()))
}

// returnRules stand in FORWARD, and in OUTPUT for endpoints in the node's own
// network. An answer gets its flow's mark before IPVS gives it the VIP as its
// source and routes it anew (snat_reroute), and not sooner: in PREROUTING the
// reverse-path check would look for the endpoint beyond the client's
// interface:
//
//	-A KUBE-IPVS-RETURN -m connmark ! --mark 0x0/0x3060 -m conntrack --ctdir REPLY -j CONNMARK --restore-mark --nfmask 0x3060 --ctmask 0x3060
func (r *ruleset) returnRules() []nat.Rule {
	return []nat.Rule{nat.Rule(fmt.Sprintf(
		"-m connmark ! --mark %s -m conntrack --ctdir REPLY -j CONNMARK --restore-mark --nfmask %#[2]x --ctmask %#[2]x",
		r.masked(0), r.cfg.SNAT.Mark))}
}

// Stray is an ENI that no packet bound to the main table's interface is routed
// out by while our policy rule stands.
type Stray struct {
	Link   string
	Direct []netip.Prefix // except packets for these, which the main table routes there
}

// strays returns the ENIs that strayRules can guard. Where another rule precedes
// ours, or the main table has another default route by the ENI, a packet can be
// there rightly. Where the main table's interface is gone, it is the only way.
func strays(cfg *Config, n *Node, family ip.Family, bound []Binding) []Stray {
	inv := &n.Inventory
	precedes := func(r routing.Rule) bool {
		leadsElsewhere := r.Other || r.Action == routing.Lookup && r.Table != tableMain && r.Table != tableLocal
		return r.Family == family && !r.Own && r.Priority <= cfg.SNAT.Priority && (r.IIf == "" || r.IIf == "lo") && leadsElsewhere
	}
	if len(bound) == 0 || n.MainGone[family] || !isUp(inv, bound[0].Link) || slices.ContainsFunc(inv.Rules, precedes) {
		return nil
	}
	var out []Stray
	for _, b := range bound[1:] {
		byMain := func(r routing.Route) bool { return r.Link == b.Link }
		if slices.ContainsFunc(MainDefaults(inv, family), byMain) {
			continue
		}
		s := Stray{Link: b.Link}
		for _, r := range inv.Direct {
			if r.Family == family && byMain(r) {
				s.Direct = append(s.Direct, r.Dst)
			}
		}
		slices.SortFunc(s.Direct, comparePrefixes)
		s.Direct = slices.Compact(s.Direct)
		out = append(out, s)
	}
	return out
}

func isUp(inv *routing.Inventory, name string) bool {
	return slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name == name && l.Up })
}

// strayRules stand in mangle POSTROUTING, before the source is chosen. They
// drop a packet of a flow that is bound to the main table's interface and was
// routed by an ENI: another program, systemd-networkd at its start, has deleted
// our policy rule, which Guard adds again within milliseconds. A dropped packet
// is sent again. One that left would have the kernel forget a masqueraded flow
// (nf_nat_oif_changed), and the endpoint would reset it:
//
//	-A POSTROUTING -m connmark --mark 0x20/0x3060 -m conntrack --ctdir ORIGINAL -j KUBE-IPVS-STRAY
//	-A KUBE-IPVS-STRAY -d 10.12.192.0/24 -o eth1 -j RETURN     (each route of the main table by an ENI)
//	-A KUBE-IPVS-STRAY -o eth1 -j DROP     (each ENI)
func (r *ruleset) strayRules() []nat.Rule {
	var rules []nat.Rule
	for _, s := range r.paths.Strays {
		for _, d := range s.Direct {
			rules = append(rules, rule("by the main table", "-d "+d.String()+" -o "+s.Link, "RETURN"))
		}
		rules = append(rules, rule("a policy rule is missing", "-o "+s.Link, "DROP"))
	}
	return rules
}
