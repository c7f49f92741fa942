package plan

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// A VIP that is an address of the node has all its ports there, also those
// that somebody else serves on the same address. So VIPs of load balancers and
// external IPs are claimed port by port: what is for such a port gets a mark,
// and the mark leads to a table in which the VIP is local. Everything else is
// routed as if the node had never heard of the VIP. docs/vips.md shows it all.
//
// The table holds VIPs and nothing else. So the mark need not be taken off
// again: neither the reverse-path check, which looks for the client under the
// same mark, nor the route to the endpoint finds anything there.

// VIP is an address that a Service claims.
type VIP struct {
	Addr  netip.Addr
	Claim Claim
}

func (v VIP) String() string { return fmt.Sprintf("%s by %s", v.Addr, v.Claim) }

func compareVIPs(a, b VIP) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Claim, b.Claim))
}

// Route makes a VIP local: for packets with the mark, or for all. The link
// only has to be one that is up: a route of IPv6 cannot be made on kube-ipvs0,
// which is down. It is false for a VIP that is an address.
func (v *VIPs) Route(vip VIP) (routing.Route, bool) {
	r := routing.Route{
		Family: ip.Of(vip.Addr),
		Dst:    netip.PrefixFrom(vip.Addr, vip.Addr.BitLen()),
		Link:   "lo",
		Local:  true,
	}
	switch {
	case vip.Claim == ClaimPort:
		r.Table = v.Table
	case vip.Claim == ClaimRoute && r.Family == ip.IPv4:
		// Beside the route that the kernel makes for an address, which has the
		// metric 0, as long as one gives way to the other. IPv6 has such a
		// metric anyway.
		r.Table, r.Metric = tableLocal, besideKernels
	case vip.Claim == ClaimRoute:
		r.Table = tableLocal
	default:
		return routing.Route{}, false
	}
	return r, true
}

const besideKernels = 1024

// addVIP claims a VIP for a virtual server.
func (b *partBuilder) addVIP(claim Claim, vs *VirtualServer) {
	a := vs.Key.Addr
	b.part.VIPs = append(b.part.VIPs, VIP{a, claim})
	if claim != ClaimPort {
		b.addMember(VIPAddresses, ipset.Entry{Addr: a})
		return
	}
	b.addMember(PortVIPs, ipset.Entry{Addr: a})
	if !active(vs.RealServers) {
		b.addMember(Refused, entryOf(vs.Key))
	}
}

// addClaimRule looks marked packets up in our table.
func addClaimRule(part *NodePart, cfg *Config, family ip.Family) {
	if !cfg.VIPs.byPort() {
		return
	}
	part.Rules = append(part.Rules, routing.Rule{
		Family:   family,
		Priority: cfg.VIPs.Priority,
		Mark:     cfg.VIPs.Mark,
		Mask:     cfg.VIPs.Mark,
		Table:    cfg.VIPs.Table,
	})
}

// claims writes the chains of VIPs that are claimed by port. They are empty if
// no kind of VIP is.
func (r *ruleset) claims(n *Node) {
	var claim, unclaimed []nat.Rule
	if r.cfg.VIPs.byPort() {
		claim, unclaimed = r.claimRules(), r.unclaimedRules(n)
	}
	r.chain(nat.Mangle, "KUBE-IPVS-CLAIM", claim...)
	r.chain(nat.Filter, "KUBE-IPVS-UNCLAIMED", unclaimed...)
}

// claimRules stand in PREROUTING, and in OUTPUT for the node's own packets,
// which have their source by then. IPVS would take those without a mark, too,
// but leave them on their way out by the interface towards the VIP where it
// gives them an endpoint in the node's own network. What is RELATED is an ICMP
// error about a connection, which has no port to be matched by, such as
// "fragmentation needed":
//
//	-A KUBE-IPVS-CLAIM -m set ! --match-set KUBE-IPVS-PORT-IPS dst -j RETURN
//	-A KUBE-IPVS-CLAIM -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-REFUSED dst,dst -j RETURN
//	-A KUBE-IPVS-CLAIM -m set --match-set KUBE-LOAD-BALANCER dst,dst -j MARK --set-xmark 0x4/0x4
//	-A KUBE-IPVS-CLAIM -m set --match-set KUBE-EXTERNAL-IP dst,dst -j MARK --set-xmark 0x4/0x4     (and KUBE-EXTERNAL-IP-LOCAL)
//	-A KUBE-IPVS-CLAIM -p icmp -m conntrack --ctstate RELATED -j MARK --set-xmark 0x4/0x4
func (r *ruleset) claimRules() []nat.Rule {
	mark := fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", r.cfg.VIPs.Mark)
	rules := []nat.Rule{
		rule("no VIP claimed by port", "-m set ! --match-set "+PortVIPs.In(r.family)+" dst", "RETURN"),
		rule("no endpoint to send it to", "-m conntrack --ctstate NEW "+r.match(Refused, "dst,dst"), "RETURN"),
	}
	var sets []SetName
	if r.cfg.VIPs.LoadBalancers == ClaimPort {
		sets = append(sets, LoadBalancer)
	}
	if r.cfg.VIPs.ExternalIPs == ClaimPort {
		sets = append(sets, ExternalIP, ExternalIPLocal)
	}
	for _, set := range sets {
		rules = append(rules, rule("claimed port", r.match(set, "dst,dst"), mark))
	}
	return append(rules, rule("errors about connections", r.icmp()+" -m conntrack --ctstate RELATED", mark))
}

// unclaimedRules stand in FORWARD. A port without an endpoint is refused here
// and not by IPVS, whose ICMP error the kernel would not send: its source is
// the VIP, which IPv4 does not find among the local addresses. And what comes
// from outside for a port that nobody has claimed would go back to where it
// came from, and come again:
//
//	-A KUBE-IPVS-UNCLAIMED -m set --match-set KUBE-IPVS-REFUSED dst,dst -j REJECT
//	-A KUBE-IPVS-UNCLAIMED -i eth0 -m set --match-set KUBE-IPVS-PORT-IPS dst -j REJECT     (each uplink)
func (r *ruleset) unclaimedRules(n *Node) []nat.Rule {
	rules := []nat.Rule{rule("no endpoint to send it to", r.match(Refused, "dst,dst"), r.reject())}
	for _, link := range uplinks(r.cfg, n, r.family) {
		rules = append(rules, rule("no such port on this VIP", "-i "+link+" "+r.match(PortVIPs, "dst"), r.reject()))
	}
	return rules
}

// pingRules have the node answer what comes from outside, as it does for a VIP
// that is its address. From inside the real load balancer is pinged. It is
// redirected to an address of the interface because the kernel's own answer
// would have the VIP as its source, and not be sent; see unclaimedRules.
func (r *ruleset) pingRules(n *Node) []nat.Rule {
	if !r.cfg.VIPs.byPort() || !r.cfg.VIPs.Ping {
		return nil
	}
	var rules []nat.Rule
	for _, link := range uplinks(r.cfg, n, r.family) {
		rules = append(rules, rule("ping is answered", "-i "+link+" "+r.echoRequest()+" "+r.match(PortVIPs, "dst"), "REDIRECT"))
	}
	return rules
}
