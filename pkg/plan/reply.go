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

// Reply routing binds a flow to an interface by a value in some bits of its connmark. A
// policy rule routes packets that carry this value in their mark through the interface.
// docs/concepts/eni.md shows the path of a flow.

// Binding is an interface that flows can be bound to.
type Binding struct {
	Family ip.Family
	Link   string
	Index  int    // kernel's interface index, which survives a rename
	Table  int    // the table whose default route uses the interface
	Mark   uint32 // the interface's value, within SNAT.Mark
}

// Kernel parameters that only reply routing needs.
const (
	SrcValidMark = "net/ipv4/conf/all/src_valid_mark"
	SNATReroute  = "net/ipv4/vs/snat_reroute"
)

// addReplyRouting adds the state that the chains below need: a policy rule for each
// value, evaluated before a CNI's rules by source, routes of gateways, and the members of the sets
// that these chains match. For IPv4 it also makes the reverse-path check use the mark.
func addReplyRouting(plan *NodePlan, cfg *Config, family ip.Family, paths Paths) {
	if len(paths.Bound) == 0 {
		return
	}
	plan.Sysctls[SNATReroute] = "1" // of both families
	if family == ip.IPv4 {
		plan.Sysctls[SrcValidMark] = "1"
	}
	for _, b := range paths.Bound {
		plan.Rules = append(plan.Rules, routing.Rule{
			Family:   family,
			Priority: cfg.SNAT.Priority,
			Mark:     b.Mark,
			Mask:     cfg.SNAT.Mark,
			Table:    b.Table,
		})
	}
	plan.Bound = append(plan.Bound, paths.Bound...)
	addGatewayRoutes(plan, paths)
	for _, p := range paths.ReplyRouted {
		plan.Members = append(plan.Members, Member{Set: ReplyRoutedSources.In(family), Entry: ipset.Entry{Net: p}})
	}
	for _, p := range paths.Diverted.Sources {
		plan.Members = append(plan.Members, Member{Set: DivertedSources.In(family), Entry: ipset.Entry{Net: p}})
	}
}

// replyRouting writes the chains that bind flows and mark their packets, if there is an
// ENI or a branch. The rules that bind flows by an ENI are in KUBE-SERVICES; see enterRules.
func (r *ruleset) replyRouting() {
	if len(r.paths.Bound) == 0 && len(r.paths.Branches) == 0 {
		return
	}
	if len(r.paths.Bound) > 0 {
		r.restore()
		r.uplinkChains()
	}
	if len(r.paths.Branches) > 0 {
		r.branchRules()
	}
	r.bind()
	r.changeMarks()
	if len(r.paths.Strays) > 0 && r.maySendStrays() {
		r.jumpFirst(nat.Mangle, "POSTROUTING", "-m connmark --mark "+r.primaryMark()+" -m conntrack --ctdir ORIGINAL", "KUBE-IPVS-STRAY", replyComment)
		r.chain(nat.Mangle, "KUBE-IPVS-STRAY", r.strayRules()...)
	}
}

const replyComment = "kubernetes reply routing"

// masked returns a binding's value with the mask, as iptables writes it.
func (r *ruleset) masked(value uint32) string {
	return fmt.Sprintf("%#x/%#x", value, r.cfg.SNAT.Mark)
}

// primaryMark returns the mark of the primary interface.
func (r *ruleset) primaryMark() string { return r.masked(r.paths.Bound[0].Mark) }

// restore writes the PREROUTING rules. Every packet of a flow bound to the primary interface gets
// the mark, in both directions. The mark routes the pod's packets after IPVS has changed their
// destination. The reverse-path check of a reply uses it after masquerading is undone. Later
// packets of a bound flow that enter through an ENI get the mark of that ENI, for the reverse-path
// check. Packets of other flows match no rule but the jump's condition:
//
//	-A PREROUTING -m connmark ! --mark 0x0/0x3060 -j KUBE-IPVS-RESTORE
//	-A KUBE-IPVS-RESTORE -m connmark --mark 0x20/0x3060 -j MARK --set-xmark 0x20/0x3060
//	-A KUBE-IPVS-RESTORE -i eth1 -m conntrack --ctdir ORIGINAL -j MARK --set-xmark 0x40/0x3060     (each ENI)
func (r *ruleset) restore() {
	r.jumpFirst(nat.Mangle, "PREROUTING", r.isBound(), "KUBE-IPVS-RESTORE", replyComment)
	rules := []nat.Rule{nat.Rule(fmt.Sprintf("-m connmark --mark %[1]s -j MARK --set-xmark %[1]s", r.primaryMark()))}
	for _, b := range r.paths.Bound[1:] {
		rules = append(rules, nat.Rule(fmt.Sprintf("-i %s -m conntrack --ctdir ORIGINAL -j MARK --set-xmark %s", b.Link, r.masked(b.Mark))))
	}
	r.chain(nat.Mangle, "KUBE-IPVS-RESTORE", rules...)
}

// isBound returns the match for packets of bound flows.
func (r *ruleset) isBound() string { return "-m connmark ! --mark " + r.masked(0) }

// enterRules returns the rules at the head of KUBE-SERVICES that bind new flows to the
// interface through which they enter, if they are for a Service. Only the first packet of a
// connection passes table nat, and KUBE-SERVICES ends that table for packets to VIPs. Binding makes
// each packet of a flow more expensive. So a flow that enters by the primary interface is bound only
// if its packets or replies may be routed by another one (Diverted), and one that enters by an
// interface of ByMain is not bound:
//
//	-A KUBE-SERVICES -i eth0 -m set --match-set KUBE-IPVS-DIVERTED src -j KUBE-IPVS-UPLINK
//	-A KUBE-SERVICES -i eth0 -m set --match-set KUBE-IPVS-DIVERTED dst -j KUBE-IPVS-UPLINK
//	-A KUBE-SERVICES -i eth1 -j KUBE-IPVS-UPLINK     (each ENI)
func (r *ruleset) enterRules() []nat.Rule {
	var rules []nat.Rule
	for i, b := range r.paths.Bound {
		switch {
		case slices.Contains(r.paths.ByMain, b.Link):
		case i > 0 || r.paths.Diverted.All:
			rules = append(rules, rule(replyComment, "-i "+b.Link, "KUBE-IPVS-UPLINK"))
		case len(r.paths.Diverted.Sources) > 0:
			for _, side := range []string{"src", "dst"} {
				rules = append(rules, rule("leaves by another interface", "-i "+b.Link+" "+r.match(DivertedSources, side), "KUBE-IPVS-UPLINK"))
			}
		}
	}
	return rules
}

// uplinkChains writes the chains that enterRules jump to. The packet is marked with the interface
// before it is routed. Without the mark, the strict reverse-path check of an ENI would drop
// it, because the route back to the client would be looked up in the main table. A flow is not bound
// if that table has a route to the client over the same interface (Direct): the table of the ENI may
// have only a default route, and its gateway would see one direction of the connection:
//
//	nat -A KUBE-IPVS-UPLINK -s 10.13.0.0/24 -i eth1 -j RETURN     (each such route)
//	nat -A KUBE-IPVS-UPLINK -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-IPVS-ENTRY     (external IPs, node ports, cluster IPs)
//	nat -A KUBE-IPVS-ENTRY -i eth0 -j MARK --set-xmark 0x20/0x3060
//	nat -A KUBE-IPVS-ENTRY -i eth1 -j MARK --set-xmark 0x40/0x3060
//	nat -A KUBE-IPVS-ENTRY -j CONNMARK --save-mark --nfmask 0x3060 --ctmask 0x3060
func (r *ruleset) uplinkChains() {
	var uplink, entry []nat.Rule
	for _, b := range r.paths.Bound {
		for _, p := range r.paths.Direct[b.Link] {
			uplink = append(uplink, rule("route of the main table", fmt.Sprintf("-s %s -i %s", p, b.Link), "RETURN"))
		}
		entry = append(entry, nat.Rule(fmt.Sprintf("-i %s -j MARK --set-xmark %s", b.Link, r.masked(b.Mark))))
	}
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts, ClusterIP) {
		uplink = append(uplink, rule("traffic for Services", r.match(set, "dst,dst"), "KUBE-IPVS-ENTRY"))
	}
	r.chain(nat.NAT, "KUBE-IPVS-UPLINK", uplink...)
	r.chain(nat.NAT, "KUBE-IPVS-ENTRY", append(entry,
		nat.Rule(fmt.Sprintf("-j CONNMARK --save-mark --nfmask %#[1]x --ctmask %#[1]x", r.cfg.SNAT.Mark)))...)
}

// bind writes the OUTPUT rule that binds a new flow to the primary interface if it is masqueraded and
// its source is in ReplyRouted. Requests pass OUTPUT after IPVS has selected an endpoint, and before
// they are routed again by their mark:
//
//	-A OUTPUT -m mark --mark 0x4000/0x4000 -m set --match-set KUBE-IPVS-REPLY-SRC src -j KUBE-IPVS-BIND     (if there are such sources)
//	-A KUBE-IPVS-BIND -j CONNMARK --set-xmark 0x20/0x3060
func (r *ruleset) bind() {
	if r.bindsMasqueraded() {
		r.jumpFirst(nat.Mangle, "OUTPUT", r.masqueradedSource(), "KUBE-IPVS-BIND", replyComment)
		r.chain(nat.Mangle, "KUBE-IPVS-BIND", nat.Rule("-j CONNMARK --set-xmark "+r.primaryMark()))
	}
}

// bindsMasqueraded reports whether masqueraded flows of some sources are bound to the primary
// interface.
func (r *ruleset) bindsMasqueraded() bool {
	return len(r.paths.Bound) > 0 && len(r.paths.ReplyRouted) > 0
}

// masqueradedSource returns the match for the first packets of these flows.
func (r *ruleset) masqueradedSource() string {
	return fmt.Sprintf("-m mark --mark %#[1]x/%#[1]x %s", r.cfg.MasqueradeMark, r.match(ReplyRoutedSources, "src"))
}

// changeMarks writes the rules for packets whose mark must change after the reverse-path check. Replies
// pass FORWARD. OUTPUT sees requests after IPVS, and replies of endpoints in the node's own
// network. Packets of flows bound to the primary interface already have its mark, except the
// first one.
//
// A reply gets its flow's mark just before IPVS sets the VIP as its source and reroutes it
// (snat_reroute). In PREROUTING it would be too early: the reverse-path check would look for
// the endpoint on the client's interface. A request that entered through an ENI loses the
// mark: otherwise it would be sent out of the ENI again instead of to its endpoint. A request from a
// pod behind a branch loses it too, because the pod's source address routes it:
//
//	-A FORWARD -m connmark ! --mark 0x0/0x3060 -m mark ! --mark 0x20/0x3060 -m conntrack --ctdir REPLY -j KUBE-IPVS-RETURN
//	-A OUTPUT -m connmark ! --mark 0x0/0x3060 -m mark ! --mark 0x20/0x3060 -j KUBE-IPVS-BOUND
//	-A KUBE-IPVS-RETURN -j CONNMARK --restore-mark --nfmask 0x3060 --ctmask 0x3060
//	-A KUBE-IPVS-BOUND -j CONNMARK --restore-mark --nfmask 0x3060 --ctmask 0x3060
//	-A KUBE-IPVS-BOUND -m connmark ! --mark 0x20/0x3060 -m conntrack --ctdir ORIGINAL -j MARK --set-xmark 0x0/0x3060
func (r *ruleset) changeMarks() {
	restore := nat.Rule(fmt.Sprintf("-j CONNMARK --restore-mark --nfmask %#[1]x --ctmask %#[1]x", r.cfg.SNAT.Mark))
	changes, notMain := r.isBound(), ""
	if len(r.paths.Bound) > 0 {
		changes += " -m mark ! --mark " + r.primaryMark()
		notMain = "-m connmark ! --mark " + r.primaryMark() + " "
	}
	r.jumpFirst(nat.Mangle, "FORWARD", changes+" -m conntrack --ctdir REPLY", "KUBE-IPVS-RETURN", replyComment)
	r.chain(nat.Mangle, "KUBE-IPVS-RETURN", restore)
	r.jumpFirst(nat.Mangle, "OUTPUT", changes, "KUBE-IPVS-BOUND", replyComment)
	r.chain(nat.Mangle, "KUBE-IPVS-BOUND", restore,
		nat.Rule(notMain+"-m conntrack --ctdir ORIGINAL -j MARK --set-xmark "+r.masked(0)))
}

// Stray is an ENI through which no packet bound to the primary interface is routed
// while our policy rule is in place.
type Stray struct {
	Link   string
	Direct []netip.Prefix // destinations that the main table routes through the ENI
}

// strays returns the ENIs that strayRules can guard. It skips an ENI over which the main table has
// another default route, because a packet bound to the primary interface may be correct there, or
// more than maxDirect other routes. It returns none if another program's rule that may route such a
// packet precedes ours, or if the primary interface is down or has lost its default route, because
// the ENI is then the only path.
func strays(cfg *Config, n *Node, family ip.Family, bound []Binding, found []ENI) []Stray {
	inv := &n.Inventory
	precedes := func(r routing.Rule) bool {
		otherTable := r.Other || r.Action == routing.Lookup && r.Table != routing.TableMain && r.Table != routing.TableLocal
		return r.Family == family && !r.Own && r.Priority <= cfg.SNAT.Priority && (r.IIf == "" || r.IIf == "lo") && otherTable
	}
	if len(bound) == 0 || n.MainGone[family] || !isUp(inv, bound[0].Link) || slices.ContainsFunc(inv.Rules, precedes) {
		return nil
	}
	var out []Stray
	for _, b := range bound[1:] {
		byMain := func(r routing.Route) bool { return r.Link == b.Link }
		isENI := slices.ContainsFunc(found, func(e ENI) bool { return e.Link == b.Link })
		if !isENI || slices.ContainsFunc(MainDefaults(inv, family), byMain) {
			continue
		}
		if s := (Stray{b.Link, direct(inv, family, b.Link)}); len(s.Direct) <= maxDirect {
			out = append(out, s)
		}
	}
	return out
}

// maxDirect limits the rules for networks that the main table routes over an interface. A node
// that learns routes from a routing protocol may have hundreds of thousands.
const maxDirect = 100

// direct returns the networks that the main table routes over an interface, apart from its default
// route; sorted.
func direct(inv *routing.Inventory, family ip.Family, link string) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range inv.Direct {
		if r.Family == family && r.Link == link {
			out = append(out, r.Dst)
		}
	}
	slices.SortFunc(out, comparePrefixes)
	return slices.Compact(out)
}

// directOnly returns Paths.Direct and Paths.ByMain. It omits networks that overlap with those of
// other interfaces: the main table may route replies to them by another interface than that of the
// request.
func directOnly(inv *routing.Inventory, family ip.Family, bound []Binding) (directOf map[string][]netip.Prefix, byMain []string) {
	directOf = map[string][]netip.Prefix{}
	for _, b := range bound[min(1, len(bound)):] {
		all := direct(inv, family, b.Link)
		if len(all) > maxDirect {
			byMain = append(byMain, b.Link)
			continue
		}
		directOf[b.Link] = filter(all, func(p netip.Prefix) bool { return !overlapsOtherLink(inv, b.Link, p) })
	}
	return directOf, byMain
}

// overlapsOtherLink reports whether a network overlaps with one of another interface: that of an
// address, or one that the main table routes over it.
func overlapsOtherLink(inv *routing.Inventory, link string, p netip.Prefix) bool {
	return slices.ContainsFunc(inv.Direct, func(r routing.Route) bool { return r.Link != link && r.Dst.Overlaps(p) }) ||
		slices.ContainsFunc(inv.Links, func(l routing.Link) bool {
			return l.Name != link && l.Up && slices.ContainsFunc(l.Addresses, func(a routing.Address) bool {
				return !a.Prefix.IsSingleIP() && a.Prefix.Overlaps(p)
			})
		})
}

// maySendStrays reports whether a request bound to the primary interface could be routed through
// an ENI. Such requests come from pods that are bound because they are masqueraded, or from clients
// behind the primary interface that policy rules divert. A rule for a single address is for a pod
// or for an address of the node, not for such clients.
func (r *ruleset) maySendStrays() bool {
	d := r.paths.Diverted
	return r.bindsMasqueraded() || d.All || slices.ContainsFunc(d.Sources, func(p netip.Prefix) bool { return !p.IsSingleIP() })
}

func isUp(inv *routing.Inventory, name string) bool {
	return slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name == name && l.Up })
}

// strayRules writes the rules of mangle POSTROUTING, which precede SNAT. They drop a
// packet of a flow that is bound to the primary interface but routed through an
// ENI. This happens if another program, such as systemd-networkd at its start, deleted
// our policy rule; package routing's Guard adds the rule again within milliseconds. The sender
// retransmits a dropped packet. If it left instead, the kernel would drop the conntrack
// entry of a masqueraded flow (nf_nat_oif_changed), and the endpoint would reset the
// connection:
//
//	-A POSTROUTING -m connmark --mark 0x20/0x3060 -m conntrack --ctdir ORIGINAL -j KUBE-IPVS-STRAY
//	-A KUBE-IPVS-STRAY -d 10.12.192.0/24 -o eth1 -j RETURN     (each route of the main table by an ENI)
//	-A KUBE-IPVS-STRAY -o eth1 -j DROP     (each ENI)
func (r *ruleset) strayRules() []nat.Rule {
	var rules []nat.Rule
	for _, s := range r.paths.Strays {
		for _, d := range s.Direct {
			rules = append(rules, rule("route of the main table", "-d "+d.String()+" -o "+s.Link, "RETURN"))
		}
		rules = append(rules, rule("a policy rule is missing", "-o "+s.Link, "DROP"))
	}
	return rules
}
