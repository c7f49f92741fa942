package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// A packet for a VIP reaches IPVS only if the VIP is local. All ports of a local VIP
// belong to the node, even those that another device serves at the same address: for
// example, a load balancer may serve port 443 of an address whose port 80 belongs to a
// Service.
//
// By default (ClaimAuto) load balancer IPs and external IPs are local, as under
// kube-proxy. Packets from pods and the node to ports without a Service are marked and
// skip the table that makes the VIP local. If the mark is lost, such a port is only
// refused, as under kube-proxy.
//
// A VIP that is the address of another node must not be local: everything else on that
// node would become unreachable. It is claimed by port (ClaimPort): packets for a
// port of a Service are marked, and the mark selects a table in which the VIP is local.
// docs/concepts/vips.md shows both.

// VIP is an address that a Service wants, and the mode in which the node claims it.
type VIP struct {
	Addr  netip.Addr
	Claim ClaimMode
}

func (v VIP) String() string { return fmt.Sprintf("%s by %s", v.Addr, v.Claim) }

func compareVIPs(a, b VIP) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Claim, b.Claim))
}

// Route returns the route that makes a VIP local, for marked packets or for all, and
// false for a VIP that is claimed as an address.
func (v *VIPs) Route(vip VIP) (routing.Route, bool) {
	r := routing.LocalRoute(vip.Addr)
	switch vip.Claim {
	case ClaimRoute:
		return r, true
	case ClaimPort:
		r.Table, r.Metric = v.Table, 0
		return r, true
	}
	return routing.Route{}, false
}

// addVIP claims a VIP for a virtual server.
func (b *serviceBuilder) addVIP(claim ClaimMode, vs *VirtualServer) {
	a := vs.Key.Addr
	b.plan.VIPs = append(b.plan.VIPs, VIP{a, claim})
	if claim != ClaimPort {
		b.addMember(VIPAddresses, ipset.Entry{Addr: a})
		return
	}
	b.addMember(PortVIPs, ipset.Entry{Addr: a})
	b.addRefused(vs)
}

// claimShared claims a load balancer IP or external IP, whose other ports may belong to
// another device. It does not claim an address of a node interface, so that SSH and port 6443
// keep working there (kubernetes#114815). The exception is an address on an interface that is not the
// Node's own: another program, such as kube-vip, may move it to another node at any time. A route then
// keeps it local, as the address on kube-ipvs0 does under kube-proxy. Otherwise open connections of
// pods would leave the node and be reset.
//
// If one Service shows by its endpoints that the VIP is another node's address, the claims of others
// by route yield to its claim by port (package reconcile).
func (b *serviceBuilder) claimShared(claim ClaimMode, vs *VirtualServer) {
	a := vs.Key.Addr
	b.plan.Deps |= OnNodeIPs
	if b.facts.NodeIPs.Has(a) {
		b.plan.Deps |= OnPrimary
		if claim != ClaimPort && b.facts.mayBelongToLoadBalancer(a) {
			b.plan.VIPs = append(b.plan.VIPs, VIP{a, ClaimRoute})
		}
		return
	}
	if claim != ClaimAuto {
		b.addVIP(claim, vs)
		return
	}
	b.plan.Deps |= OnPeers | OnAPIServer
	if b.facts.Peers.Has(a) || b.facts.isAPIServer(a) || b.hasEndpointAt(a) {
		b.addVIP(ClaimPort, vs)
		return
	}
	b.addVIP(ClaimRoute, vs)
	b.addMember(SharedVIPs, ipset.Entry{Addr: a})
	b.addRefused(vs)
}

// addRefused adds a port without an endpoint to Refused. Rules need it only if this or another
// Service claims the VIP by port, because packets to such a port are forwarded. Package reconcile does
// not write the member otherwise.
func (b *serviceBuilder) addRefused(vs *VirtualServer) {
	if !active(vs.Endpoints) {
		b.addMember(Refused, EntryOf(vs.Key))
	}
}

// ClaimByPort returns the plan with a VIP claimed by port, if ClaimAuto has chosen to claim it by
// route.
func (p ServicePlan) ClaimByPort(a netip.Addr) ServicePlan {
	member := func(set SetName) Member { return Member{Set: set.In(ip.Of(a)), Entry: ipset.Entry{Addr: a}} }
	vip, shared := slices.Index(p.VIPs, VIP{a, ClaimRoute}), slices.Index(p.Members, member(SharedVIPs))
	if vip < 0 || shared < 0 {
		return p
	}
	p.VIPs, p.Members = slices.Clone(p.VIPs), slices.Clone(p.Members)
	p.VIPs[vip].Claim = ClaimPort
	p.Members[shared] = member(PortVIPs)
	p.Members = slices.DeleteFunc(p.Members, func(m Member) bool { return m == member(VIPAddresses) })
	p.sort()
	return p
}

// hasEndpointAt reports whether an endpoint of the Service has the address, on any
// port: an endpoint on another node's host network.
func (b *serviceBuilder) hasEndpointAt(a netip.Addr) bool {
	return slices.ContainsFunc(b.service.Ports, func(p service.Port) bool {
		return slices.ContainsFunc(p.Endpoints, func(e service.Endpoint) bool { return e.Addr.Addr() == a })
	})
}

// addClaimRules adds the policy rules for packets to claimed ports, and for packets to
// ports of another device. A rule is written only once a Service needs it, because the
// first policy rule on a node makes every route lookup slower (fib_has_custom_rules).
func addClaimRules(plan *NodePlan, cfg *Config, n *Node, family ip.Family) {
	if cfg.claimsPorts(n.Uses, family) {
		plan.Rules = append(plan.Rules, routing.Rule{
			Family:   family,
			Priority: cfg.VIPs.Priority,
			Mark:     cfg.VIPs.Mark,
			Mask:     cfg.VIPs.Mark,
			Table:    cfg.VIPs.Table,
		})
	}
	if cfg.routesDevicePorts(n, family) {
		mask := cfg.skipLocalMask()
		plan.Rules = append(plan.Rules,
			routing.Rule{Family: family, Action: routing.SkipLocal, Mark: cfg.VIPs.Mark, Mask: mask},
			routing.Rule{Family: family, Action: routing.SkipLocal, IIf: "lo", Mark: cfg.deviceMark(), Mask: mask})
	}
}

// claimsPorts reports whether any VIP is claimed by port, including claims of an earlier configuration
// that still exist. If u is nil (all sets), it reports whether the configuration allows such claims.
func (c *Config) claimsPorts(u SetsInUse, f ip.Family) bool {
	return (u != nil || c.VIPs.mayClaimPorts()) && u.Has(PortVIPs, f)
}

// foreignMark reports whether a rule of iptables or nftables, or a policy rule, of another program
// uses a matching mark.
func (n *Node) foreignMark(f ip.Family, matches func(mark uint32) bool) bool {
	return slices.ContainsFunc(n.ForeignMarks[f], matches) || slices.ContainsFunc(n.Inventory.Rules, func(r routing.Rule) bool {
		return r.Family == f && !r.Own && r.Mask != 0 && matches(r.Mark&r.Mask)
	})
}

// HasForeignMark reports whether another program is known to use exactly this mark, with or without
// the masquerade mark. A virtual server with such a fwmark would get that program's packets, whatever
// their destination.
func (n *Node) HasForeignMark(cfg *Config, f ip.Family, mark uint32) bool {
	return n.foreignMark(f, func(m uint32) bool { return m&^cfg.MasqueradeMark == mark&^cfg.MasqueradeMark })
}

func (r *ruleset) usesPortClaims() bool { return r.cfg.claimsPorts(r.sets, r.family) }

// claims writes the chains for VIPs claimed by port.
func (r *ruleset) claims() {
	if !r.usesPortClaims() {
		return
	}
	const comment = "kubernetes claimed ports"
	r.jumpFirst(nat.Mangle, "PREROUTING", r.match(PortVIPs, "dst"), chainClaim, comment)
	r.jumpFirst(nat.Mangle, "OUTPUT", "-m ipvs ! --ipvs "+r.match(PortVIPs, "dst"), chainClaim, comment)
	r.chain(nat.Mangle, chainClaim, r.claimRules()...)
	r.claimsInRaw()
	r.segmentSize()
	r.unroutedClaims()
}

// claimRules marks packets for a port of a Service: in PREROUTING, and in OUTPUT for
// the node's own packets, which already carry the node's address. IPVS would accept the
// latter without a mark too, but those scheduled to an endpoint in the node's network
// would still leave through the interface towards the VIP. RELATED matches ICMP errors
// of a connection, such as "fragmentation needed", which have no port to match:
//
//	-A KUBE-IPVS-CLAIM -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-REFUSED dst,dst -j RETURN
//	-A KUBE-IPVS-CLAIM -m set --match-set KUBE-LOAD-BALANCER dst,dst -j MARK --set-xmark 0x4/0x4     (external IPs alike)
//	-A KUBE-IPVS-CLAIM -p icmp -m conntrack --ctstate RELATED -j MARK --set-xmark 0x4/0x4
func (r *ruleset) claimRules() []nat.Rule {
	var rules []nat.Rule
	if r.uses(Refused) {
		rules = append(rules, rule("no endpoint for this port", "-m conntrack --ctstate NEW "+r.match(Refused, "dst,dst"), "RETURN"))
	}
	rules = append(rules, r.claimMarks()...)
	return append(rules, rule("errors about connections", r.icmp()+" -m conntrack --ctstate RELATED", r.claimMark()))
}

// claimMarks returns the rules that mark packets for the ports of VIPs.
func (r *ruleset) claimMarks() []nat.Rule {
	var rules []nat.Rule
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal) {
		rules = append(rules, rule("claimed port", r.match(set, "dst,dst"), r.claimMark()))
	}
	return rules
}

func (r *ruleset) claimMark() string {
	return fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", r.cfg.VIPs.Mark)
}

// claimsInRaw marks packets for claimed ports in table raw if another program's rules in
// mangle PREROUTING may precede ours. Calico's Felix insists on the head of that chain, and by
// default accepts packets of established connections there: unmarked, they would leave the
// node. Table raw does not know connections. So at a port without an endpoint only established TCP
// connections continue, and ICMP errors are not marked:
//
//	raw -A KUBE-IPVS-CLAIM -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m set --match-set KUBE-IPVS-REFUSED dst,dst -j RETURN
//	raw -A KUBE-IPVS-CLAIM ! -p tcp -m set --match-set KUBE-IPVS-REFUSED dst,dst -j RETURN
//	raw -A KUBE-IPVS-CLAIM -m set --match-set KUBE-LOAD-BALANCER dst,dst -j MARK --set-xmark 0x4/0x4     (external IPs alike)
func (r *ruleset) claimsInRaw() {
	r.jumpFirst(nat.Raw, "PREROUTING", r.match(PortVIPs, "dst"), chainClaim, "kubernetes claimed ports")
	r.lastJump().Behind = r.key(nat.Mangle, "PREROUTING")
	var rules []nat.Rule
	if r.uses(Refused) {
		const comment = "no endpoint for this port"
		rules = append(rules,
			rule(comment, "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN "+r.match(Refused, "dst,dst"), "RETURN"),
			rule(comment, "! -p tcp "+r.match(Refused, "dst,dst"), "RETURN"))
	}
	r.chain(nat.Raw, chainClaim, append(rules, r.claimMarks()...)...)
}

// segmentSize limits the size of TCP segments to VIPs claimed by port to the MTU of the path to the
// endpoint. Otherwise uploads would hang: to tell the client, IPVS would send an ICMP error with the
// VIP as its source, and the kernel drops it, because the VIP is no local IPv4 address. The endpoint
// announces the size in its SYN-ACK, which passes FORWARD before IPVS changes its source. The
// rule also matches the SYN-ACKs of other forwarded connections. The MTU limits those as well:
//
//	-A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -m conntrack --ctdir REPLY -j KUBE-IPVS-MSS
//	-A KUBE-IPVS-MSS -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
//
// The kernel accepts the target only in a rule that matches SYN itself.
func (r *ruleset) segmentSize() {
	if r.family != ip.IPv4 {
		return
	}
	const syn = "-p tcp -m tcp --tcp-flags SYN,RST SYN"
	r.jumpFirst(nat.Mangle, "FORWARD", syn+" -m conntrack --ctdir REPLY", "KUBE-IPVS-MSS", "kubernetes claimed ports")
	r.chain(nat.Mangle, "KUBE-IPVS-MSS", nat.Rule(syn+" -j TCPMSS --clamp-mss-to-pmtu"))
}

// unroutedClaims drops packets for claimed ports that leave the node although they carry the claim
// mark: another program, such as systemd-networkd at its start, has deleted our policy rule, or the
// VIP is not claimed yet. Package routing's Guard adds the rule again within milliseconds, and the
// sender retransmits. If the packet left instead, the kernel would drop the conntrack entry of a
// masqueraded flow (nf_nat_oif_changed), and another host might reset the connection. The rule in
// FORWARD precedes those of table filter that reject. The match on outer interfaces excludes frames
// that a bridge switches between its ports, which may carry the mark too:
//
//	-A FORWARD, POSTROUTING -o eth0 -m mark --mark 0x4/0x4 -m set --match-set KUBE-IPVS-PORT-IPS dst -j KUBE-IPVS-UNROUTED     (each outer interface)
//	-A KUBE-IPVS-UNROUTED -m set --match-set KUBE-LOAD-BALANCER dst,dst -j DROP     (external IPs alike)
func (r *ruleset) unroutedClaims() {
	for _, hook := range []string{"FORWARD", "POSTROUTING"} {
		for _, link := range r.outerLinks {
			match := fmt.Sprintf("-o %s -m mark --mark %#[2]x/%#[2]x %s", link, r.cfg.VIPs.Mark, r.match(PortVIPs, "dst"))
			r.jumpFirst(nat.Mangle, hook, match, "KUBE-IPVS-UNROUTED", "kubernetes claimed ports")
		}
	}
	var rules []nat.Rule
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal) {
		rules = append(rules, rule("not routed to this node", r.match(set, "dst,dst"), "DROP"))
	}
	r.chain(nat.Mangle, "KUBE-IPVS-UNROUTED", rules...)
}

// claimedForward returns the KUBE-FORWARD rules for requests to VIPs claimed by port; see
// forward.
func (r *ruleset) claimedForward() []nat.Rule {
	if !r.usesPortClaims() {
		return nil
	}
	var rules []nat.Rule
	if r.uses(LoadBalancerFW) {
		rules = append(rules, rule("kubernetes load balancer source ranges", r.notAllowed(), ChainFirewall))
	}
	r.chain(nat.Filter, "KUBE-IPVS-UNCLAIMED", r.unclaimedRules()...)
	return append(rules, rule("kubernetes unclaimed ports", r.match(PortVIPs, "dst"), "KUBE-IPVS-UNCLAIMED"))
}

// unclaimedRules returns rules for requests that are forwarded. A port without an endpoint is
// refused here, not by IPVS. IPVS would send an ICMP error with the VIP as its source; the kernel
// drops it, because the VIP is no local IPv4 address. Packets from external clients to ports
// without a Service would be forwarded back to where they came from, and loop:
//
//	-A KUBE-FORWARD -m set --match-set KUBE-IPVS-PORT-IPS dst -j KUBE-IPVS-UNCLAIMED
//	-A KUBE-IPVS-UNCLAIMED -m set --match-set KUBE-IPVS-REFUSED dst,dst -j REJECT
//	-A KUBE-IPVS-UNCLAIMED -i eth0 -j REJECT     (each outer interface)
func (r *ruleset) unclaimedRules() []nat.Rule {
	rules := []nat.Rule{rule("no endpoint for this port", r.match(Refused, "dst,dst"), r.reject())}
	for _, link := range r.outerLinks {
		rules = append(rules, rule("no such port on this VIP", "-i "+link, r.reject()))
	}
	return rules
}

// pingRules makes the node answer external clients' pings of a VIP claimed by port. The
// pings are redirected to an address of the interface, because the kernel's own reply
// would have the VIP as its source and not be sent; see unclaimedRules.
func (r *ruleset) pingRules() []nat.Rule {
	if !r.usesPortClaims() || !r.cfg.VIPs.Ping {
		return nil
	}
	var rules []nat.Rule
	for _, link := range r.outerLinks {
		rules = append(rules, rule("ping is answered", "-i "+link+" "+r.echoRequest()+" "+r.match(PortVIPs, "dst"), "REDIRECT"))
	}
	return rules
}
