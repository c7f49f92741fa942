package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// ruleset writes the chains of one family. Each function below shows, in its comment,
// the rules that it writes for IPv4 with the default configuration. Rules match sets,
// so no rule changes with a Service, and a packet is matched against the same few rules
// with ten Services as with forty thousand.
//
// Rules are written for the sets in use (Node.Uses): features that no Service of a node
// uses cost its packets nothing. If a rule decides about new connections, packets of
// established ones skip it by one preceding match.
type ruleset struct {
	state                    *nat.State
	cfg                      *Config
	family                   ip.Family
	sets                     SetsInUse
	paths                    Paths
	outerLinks               []string
	hasLocalhostPlaceholders bool
}

func addRuleset(state *nat.State, cfg *Config, n *Node, facts *Facts, family ip.Family, paths Paths) {
	r := ruleset{
		state: state, cfg: cfg, family: family, sets: n.Uses, paths: paths,
		outerLinks:               outerLinks(cfg, n, family),
		hasLocalhostPlaceholders: hasLocalhostPlaceholders(cfg, n, facts, family),
	}
	r.services(n)
	r.masquerade()
	r.postrouting(n)
	r.firewall()
	r.claims()
	r.sharedVIPs(n)
	r.replyRouting()
	r.externalLocal(n)
	r.clearMarks(n)
	r.virtualAddresses(n)
	r.forward()
	r.accept()
	// Jumps with Moves come first, as nat.Jump requires. In mangle OUTPUT, this leaves the jumps for
	// source ranges and for fwmarks of internal clients at the end, where they must be.
	staying := slices.DeleteFunc(slices.Clone(state.Jumps), func(j nat.Jump) bool { return j.Moves })
	state.Jumps = append(slices.DeleteFunc(state.Jumps, func(j nat.Jump) bool { return !j.Moves }), staying...)
}

// notEstablished matches packets that start a connection or belong to none.
const notEstablished = "-m conntrack ! --ctstate RELATED,ESTABLISHED"

// chain sets the rules of a chain.
func (r *ruleset) chain(t nat.Table, name string, rules ...nat.Rule) {
	r.state.Chains[r.key(t, name)] = rules
}

// key returns a chain of the family.
func (r *ruleset) key(t nat.Table, name string) nat.Chain {
	return nat.Chain{Family: r.family, Table: t, Name: name}
}

// jump adds a jump at the head of a base chain, after the jumps added before. It stays behind rules
// that other programs insert later, as under kube-proxy.
func (r *ruleset) jump(t nat.Table, from, to, comment string) { r.jumpIf(t, from, "", to, comment) }

// jumpFirst is jumpIf for a jump that is moved before foreign rules that can keep packets from it:
// without it, packets would fare worse than under kube-proxy. This does not change the effect of
// the foreign rules, because the chain only changes marks and segment sizes, or drops packets that
// are about to leave the node by mistake.
func (r *ruleset) jumpFirst(t nat.Table, from, match, to, comment string) {
	r.jumpIf(t, from, match, to, comment)
	r.lastJump().Moves = true
}

// jumpIf is jump with a match.
func (r *ruleset) jumpIf(t nat.Table, from, match, to, comment string) {
	r.state.Jumps = append(r.state.Jumps, nat.Jump{
		Chain: r.key(t, from),
		Rule:  rule(comment, match, to),
	})
}

// lastJump returns the jump that was added last, for properties that few jumps have.
func (r *ruleset) lastJump() *nat.Jump { return &r.state.Jumps[len(r.state.Jumps)-1] }

// accepts records that the last jump leads to a chain that only accepts packets.
func (r *ruleset) accepts() { r.lastJump().Accepts = true }

// acceptJump adds a jump, after all other rules of a base chain, to a chain that only accepts
// packets.
func (r *ruleset) acceptJump(t nat.Table, from, to, comment string) {
	r.jump(t, from, to, comment)
	r.lastJump().Append = true
	r.accepts()
}

// uses reports whether a set is in use.
func (r *ruleset) uses(set SetName) bool { return r.sets.Has(set, r.family) }

// used returns the sets that are in use.
func (r *ruleset) used(sets ...SetName) []SetName { return filter(sets, r.uses) }

// match returns "-m set --match-set NAME flags" with the family's set name.
func (r *ruleset) match(set SetName, flags string) string {
	return "-m set --match-set " + set.In(r.family) + " " + flags
}

// notMatch returns the opposite of match.
func (r *ruleset) notMatch(set SetName, flags string) string {
	return "-m set ! --match-set " + set.In(r.family) + " " + flags
}

// rule joins a match, a comment and a target as iptables-save prints them. So the comment has several
// words, because a single one is printed without quotes, and contains no quote. The match begins with
// addresses and interfaces.
func rule(comment, match, target string) nat.Rule {
	if match != "" {
		match += " "
	}
	return nat.Rule(match + `-m comment --comment "` + comment + `" -j ` + target)
}

// services writes the chains that decide, by its first packet, whether a connection is masqueraded:
//
//	-A PREROUTING, OUTPUT -j KUBE-SERVICES
//	-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
//	-A KUBE-SERVICES -i eth1 -j KUBE-IPVS-UPLINK     (reply routing; see enterRules)
//	-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-IPVS-CLUSTER
//	-A KUBE-SERVICES -i eth0 -p icmp -m icmp --icmp-type 8 -m set --match-set KUBE-IPVS-PORT-IPS dst -j REDIRECT
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-DEMAND     (until demanded; see internalPlaceholders)
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-NO-LOCAL dst,dst -j KUBE-IPVS-INSIDE
//	-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j KUBE-NODE-PORT
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j ACCEPT
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j ACCEPT
//	-A KUBE-IPVS-CLUSTER ! -s 10.244.0.0/16 -j KUBE-MARK-MASQ
//	-A KUBE-IPVS-CLUSTER -j ACCEPT
//
// ACCEPT ends the nat table for a VIP, so that no other program's DNAT, such as that of
// a hostPort (kubernetes#66103), takes the packet before IPVS. Node ports are matched
// by address and port, so that a VIP's port with the same number is not mistaken for
// one (kubernetes#132068).
func (r *ruleset) services(n *Node) {
	const portals = "kubernetes service portals"
	r.jump(nat.NAT, "PREROUTING", ChainServices, portals)
	r.jump(nat.NAT, "OUTPUT", ChainServices, portals)

	rules := append(r.localhostPlaceholders(), nat.Rule("-s "+r.loopback()+" -j RETURN"))
	rules = append(rules, r.enterRules()...)
	rules = append(rules, r.probePlaceholders(n)...)
	if r.uses(ClusterIP) {
		rules = append(rules, rule("cluster IPs", r.match(ClusterIP, "dst,dst"), "KUBE-IPVS-CLUSTER"))
		r.clusterIPs(n)
	}
	rules = append(rules, r.pingRules()...)
	rules = append(rules, r.internalPlaceholders(n)...)
	for _, to := range []struct {
		set             SetName
		comment, target string
	}{
		{NoLocalEndpoint, "no endpoint on this node", chainInside},
		{LoadBalancer, "load balancer IPs", ChainLoadBalancer},
		{ExternalIP, "external IPs", ChainMarkMasq},
		{NodePorts, "node ports", ChainNodePort},
	} {
		if r.uses(to.set) {
			rules = append(rules, rule(to.comment, r.match(to.set, "dst,dst"), to.target))
		}
	}
	for _, set := range r.used(ExternalIP, ExternalIPLocal) {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "ACCEPT"))
	}
	r.chain(nat.NAT, ChainServices, rules...)
}

// clusterIPs writes the chain for cluster IPs. They need no other rule of KUBE-SERVICES.
func (r *ruleset) clusterIPs(n *Node) {
	var rules []nat.Rule
	for _, m := range r.clusterIPSources(n) {
		rules = append(rules, rule("not from a pod", m, ChainMarkMasq))
	}
	r.chain(nat.NAT, "KUBE-IPVS-CLUSTER", append(rules, rule("served by IPVS", "", "ACCEPT"))...)
}

// clusterIPSources returns matches for traffic to cluster IPs that must be masqueraded. That is all
// of it (masqueradeAll), or traffic that is not from a pod, because its replies might bypass this
// node. If pods are not recognized, it matches only the node's own packets with a VIP as their
// source.
func (r *ruleset) clusterIPSources(n *Node) []string {
	if r.cfg.MasqueradeAll {
		return []string{""}
	}
	if notPod, ok := r.notFromPod(n); ok {
		return []string{notPod("")}
	}
	return []string{r.match(ClusterIP, "src,dst")}
}

// notFromPod returns a function that restricts a match to packets not sent by a pod of this
// node, and false if the configuration does not identify pods.
func (r *ruleset) notFromPod(n *Node) (func(match string) string, bool) {
	match, ok := r.podMatch(n)
	return func(m string) string { return strings.TrimSpace("! " + match + " " + m) }, ok
}

// fromPod is the opposite of notFromPod.
func (r *ruleset) fromPod(n *Node) (func(match string) string, bool) {
	match, ok := r.podMatch(n)
	return func(m string) string { return strings.TrimSpace(match + " " + m) }, ok
}

// podMatch returns the match for packets from pods of this node, and false if the configuration
// does not identify pods (--detect-local-mode).
func (r *ruleset) podMatch(n *Node) (string, bool) {
	switch lt := r.cfg.LocalTraffic; lt.Mode {
	case DetectBridgeInterface:
		return "-i " + lt.Interface, lt.Interface != ""
	case DetectInterfaceNamePrefix:
		return "-i " + lt.Interface + "+", lt.Interface != ""
	case DetectClusterCIDR:
		return r.from(lt.CIDRs)
	case DetectNodeCIDR:
		return r.from(n.PodCIDRs)
	}
	return "", false
}

// from returns the match for the family's CIDR, or false if there is none. There is at most one. A
// CIDR with all addresses counts as none: it does not distinguish pods from other clients, and iptables
// does not store such a match.
func (r *ruleset) from(cidrs []netip.Prefix) (string, bool) {
	for _, c := range cidrs {
		if ip.Of(c.Addr()) == r.family {
			return "-s " + c.String(), c.Bits() > 0
		}
	}
	return "", false
}

// masquerade writes the chains that decide, by kind of address, whether the client's
// address is kept:
//
//	-A KUBE-LOAD-BALANCER -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j ACCEPT
//	-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
//	-A KUBE-LOAD-BALANCER -j ACCEPT
//	-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN     (udp, sctp alike)
//	-A KUBE-NODE-PORT -j KUBE-MARK-MASQ
//	-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
func (r *ruleset) masquerade() {
	if r.uses(LoadBalancer) {
		var rules []nat.Rule
		if r.uses(LoadBalancerLocal) {
			rules = append(rules, rule("externalTrafficPolicy Local", r.match(LoadBalancerLocal, "dst,dst"), "ACCEPT"))
		}
		r.chain(nat.NAT, ChainLoadBalancer, append(rules, rule("source is masqueraded", "", ChainMarkMasq), rule("served by IPVS", "", "ACCEPT"))...)
	}
	if r.uses(NodePorts) {
		var rules []nat.Rule
		for _, p := range ip.Protocols {
			if _, local := NodePortSets(p); r.uses(local) {
				rules = append(rules, rule("externalTrafficPolicy Local", r.ofProtocol(p, local), "RETURN"))
			}
		}
		// The jump already matched address and port, so the set of all node ports is not needed.
		r.chain(nat.NAT, ChainNodePort, append(rules, rule("source is masqueraded", "", ChainMarkMasq))...)
	}
	m := r.cfg.MasqueradeMark
	r.chain(nat.NAT, ChainMarkMasq, nat.Rule(fmt.Sprintf("-j MARK --set-xmark %#x/%#x", m, m)))
}

// ofProtocol returns the match for a protocol's node port set: a bitmap of ports,
// except for SCTP.
func (r *ruleset) ofProtocol(p ip.Protocol, set SetName) string {
	flags := "dst"
	if p == ip.SCTP {
		flags = "dst,dst"
	}
	return "-p " + strings.ToLower(p.String()) + " " + r.match(set, flags)
}

// postrouting gives marked packets a source to which replies return. IPVS has already changed the
// destination, and the packet was routed again by its original source, so the interface is the one
// it leaves through:
//
//	-A POSTROUTING -j KUBE-POSTROUTING
//	-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE --random-fully
//	-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
//	-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
//	-A KUBE-POSTROUTING -o eth1 -j SNAT --to-source 10.12.192.10 --random-fully     (each ENI with a known source)
//	-A KUBE-POSTROUTING -j MASQUERADE --random-fully
//
// MASQUERADE alone would use another interface's address if eth1 has none, and the
// reply would arrive there.
func (r *ruleset) postrouting(n *Node) {
	r.jump(nat.NAT, "POSTROUTING", ChainPostrouting, "kubernetes postrouting rules")
	m := r.cfg.MasqueradeMark
	var rules []nat.Rule
	if r.uses(LoopBack) {
		rules = append(rules, rule("pod connects to itself", r.match(LoopBack, "dst,dst,src"), "MASQUERADE --random-fully"))
	}
	rules = append(rules, r.bridgeRules(n)...)
	rules = append(rules, r.sharedVIPSource(n)...)
	rules = append(rules, r.ownSource(n)...)
	rules = append(rules,
		nat.Rule(fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m, m)),
		nat.Rule(fmt.Sprintf("-j MARK --set-xmark %#x/0x0", m)))
	rules = append(rules, r.keepBranchSource()...)
	for _, e := range r.paths.SNAT {
		rules = append(rules, rule("SNAT source of this interface", "-o "+e.Link,
			"SNAT --to-source "+e.SNAT.String()+" --random-fully"))
	}
	rules = append(rules, rule("kubernetes service traffic requiring SNAT", "", "MASQUERADE --random-fully"))
	r.chain(nat.NAT, ChainPostrouting, rules...)
}

// firewall enforces loadBalancerSourceRanges on every path to the VIP and for every
// packet, so that a client that is no longer allowed loses its connections. IPVS
// rewrites the destination of a node's own connections before they reach filter OUTPUT,
// so their source ranges are checked in mangle. The jumps match the ranges, so packets of allowed
// clients enter no chain:
//
//	-A INPUT -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -m set ! --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j KUBE-PROXY-FIREWALL
//	mangle -A OUTPUT -m ipvs ! --ipvs -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -m set ! … dst,dst,src -j KUBE-PROXY-FIREWALL
//	-A KUBE-PROXY-FIREWALL -j KUBE-SOURCE-RANGES-FIREWALL
//	-A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN
//	-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
//
// Packets to a VIP that is claimed by port may be forwarded, so KUBE-FORWARD has the jump too.
func (r *ruleset) firewall() {
	if !r.uses(LoadBalancerFW) {
		return
	}
	const comment = "kubernetes load balancer source ranges"
	r.jumpIf(nat.Filter, "INPUT", r.notAllowed(), ChainFirewall, comment)
	r.jumpIf(nat.Mangle, "OUTPUT", "-m ipvs ! --ipvs "+r.notAllowed(), ChainFirewall, comment)
	for _, table := range []nat.Table{nat.Filter, nat.Mangle} {
		r.chain(table, ChainFirewall, rule("load balancer source ranges", "", ChainSourceRanges))
		r.chain(table, ChainSourceRanges,
			rule("allowed source: this node", r.match(SourceIP, "dst,dst,src"), "RETURN"),
			nat.Rule("-j DROP"))
	}
}

// notAllowed returns the match for packets from outside the source ranges of their destination.
func (r *ruleset) notAllowed() string {
	return r.match(LoadBalancerFW, "dst,dst") + " " + r.notMatch(SourceCIDR, "dst,dst,src")
}

// forward accepts service traffic under a FORWARD policy of DROP. Requests that IPVS
// forwards never pass FORWARD, but replies do. The jump exists even while FORWARD accepts every
// packet, as under kube-proxy. If it were added only after a policy of DROP is reported (dockerd
// sets one), replies would be dropped until then. The jump costs a connection 2,700 instructions and
// a round trip 1,000. Replies are accepted first, because they are nearly all packets of Services
// that pass FORWARD:
//
//	-A FORWARD -j KUBE-FORWARD
//	-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED --ctdir REPLY -j ACCEPT
//	-A KUBE-FORWARD -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -m set ! --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j KUBE-PROXY-FIREWALL     (firewall; only with claimed ports)
//	-A KUBE-FORWARD -m set --match-set KUBE-IPVS-PORT-IPS dst -j KUBE-IPVS-UNCLAIMED     (unclaimedRules)
//	-A KUBE-FORWARD -i eth0 -m conntrack --ctstate ESTABLISHED -j KUBE-IPVS-ABSENT     (absentAddress)
//	-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED --ctdir ORIGINAL -j ACCEPT
//	-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
func (r *ruleset) forward() {
	const known, connection = "kubernetes forwarding conntrack rule", "-m conntrack --ctstate RELATED,ESTABLISHED"
	m := r.cfg.MasqueradeMark
	rules := []nat.Rule{rule(known, connection, "ACCEPT")}
	if requests := slices.Concat(r.claimedForward(), r.absentAddress()); requests != nil {
		rules = slices.Concat([]nat.Rule{rule(known, connection+" --ctdir REPLY", "ACCEPT")}, requests,
			[]nat.Rule{rule(known, connection+" --ctdir ORIGINAL", "ACCEPT")})
	}
	r.jump(nat.Filter, "FORWARD", ChainForward, "kubernetes forwarding rules")
	r.chain(nat.Filter, ChainForward, append(rules,
		rule("kubernetes forwarding rules", fmt.Sprintf("-m mark --mark %#x/%#x", m, m), "ACCEPT"))...)
}

// absentAddress returns rules that drop packets of established node port connections while
// the node's address is removed for a moment, as by a DHCP renewal. With a default route, the kernel
// would forward such packets. Once one left through another interface than the one that the
// connection was masqueraded for, the kernel would delete the conntrack entry
// (nf_nat_oif_changed), and the endpoint would reset the connection. The client sends dropped
// packets again:
//
//	-A KUBE-FORWARD -i eth0 -m conntrack --ctstate ESTABLISHED -j KUBE-IPVS-ABSENT     (each outer interface)
//	-A KUBE-IPVS-ABSENT -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j DROP
func (r *ruleset) absentAddress() []nat.Rule {
	if !r.uses(NodePorts) || len(r.outerLinks) == 0 {
		return nil
	}
	r.chain(nat.Filter, "KUBE-IPVS-ABSENT", rule("address is absent", r.match(NodePorts, "dst,dst"), "DROP"))
	var rules []nat.Rule
	for _, link := range r.outerLinks {
		rules = append(rules, rule("kubernetes node ports", "-i "+link+" -m conntrack --ctstate ESTABLISHED", "KUBE-IPVS-ABSENT"))
	}
	return rules
}

// accept accepts service traffic under an INPUT policy of DROP: packets for IPVS pass INPUT, as if
// they were for the node. The jump is last, because the rules of firewalls and policy engines must
// be evaluated first. Some policy engines mark packets in INPUT for decisions after IPVS. Packets
// to be rejected have been rejected by then (virtualAddresses). Replies to the node's own requests
// and errors about connections are accepted too. The jump is omitted as long as INPUT accepts every
// packet anyway (nat.State.Open), because every packet of every connection would pay for it. With
// --accept-service-traffic=false, all of this is left to the policy:
//
//	-A INPUT -j KUBE-IPVS-ACCEPT     (last)
//	-A KUBE-IPVS-ACCEPT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT     (load balancers, external IPs, node ports)
//	-A KUBE-IPVS-ACCEPT -m conntrack --ctstate ESTABLISHED --ctdir REPLY -j ACCEPT
//	-A KUBE-IPVS-ACCEPT -p icmp -m conntrack --ctstate RELATED -j ACCEPT
func (r *ruleset) accept() {
	if r.cfg.LeaveToInputPolicy {
		return
	}
	r.acceptJump(nat.Filter, "INPUT", "KUBE-IPVS-ACCEPT", "kubernetes service traffic")
	var rules []nat.Rule
	for _, set := range r.used(ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts) {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "ACCEPT"))
	}
	rules = append(rules,
		rule("replies to the node", "-m conntrack --ctstate ESTABLISHED --ctdir REPLY", "ACCEPT"),
		rule("errors about connections", r.icmp()+" -m conntrack --ctstate RELATED", "ACCEPT"))
	r.chain(nat.Filter, "KUBE-IPVS-ACCEPT", rules...)
}

// virtualAddresses lets a VIP answer only on its Services' ports and to pings. A VIP is
// a local address, so any process listening on 0.0.0.0 would answer for it
// (kubernetes#72236). Under externalTrafficPolicy Local it drops packets of external clients on
// a node without endpoints. Health check node ports come after the ports of Services, because
// they are matched by port only, and a VIP may have the same port with source ranges:
//
//	-A INPUT -m conntrack ! --ctstate RELATED,ESTABLISHED -j KUBE-IPVS-FILTER
//	-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
//	-A KUBE-IPVS-FILTER -m conntrack --ctstate INVALID -j KUBE-IPVS-INVALID
//	-A KUBE-IPVS-FILTER -m set --match-set KUBE-IPVS-NO-LOCAL dst,dst -j KUBE-IPVS-INSIDE
//	-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN     (and external IPs)
//	-A KUBE-IPVS-FILTER -p icmp -m icmp --icmp-type 8 -j RETURN     (not with --vip-ping=false)
//	-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j KUBE-IPVS-NO-PORT
//	-A KUBE-IPVS-NO-PORT -p tcp -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -m set ! --match-set KUBE-IPVS-PORT-IPS dst -j RETURN
//	-A KUBE-IPVS-NO-PORT -j REJECT     (sharedVIPPlaceholders may precede it)
//	-A INPUT -j KUBE-NODE-PORT     (only where INPUT may drop packets; see accept)
//	-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -m set ! --match-set KUBE-IPVS-PORT-IPS dst -j ACCEPT
func (r *ruleset) virtualAddresses(n *Node) {
	r.jumpIf(nat.Filter, "INPUT", notEstablished, ChainIPVSFilter, "kubernetes ipvs access filter")
	rules := r.localEndpointPlaceholders()
	if r.uses(ClusterIP) {
		rules = append(rules, rule("served by IPVS", r.match(ClusterIP, "dst,dst"), "RETURN"))
	}
	if len(r.used(LoadBalancer, ExternalIP, NodePorts)) > 0 {
		rules = append(rules, rule("no known connection", "-m conntrack --ctstate INVALID", "KUBE-IPVS-INVALID"))
		r.invalid()
	}
	if r.dropsExternal(n) {
		rules = append(rules, rule("no endpoint on this node", r.match(NoLocalEndpoint, "dst,dst"), chainInside))
	}
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal) {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "RETURN"))
	}
	if r.cfg.VIPs.Ping {
		rules = append(rules, rule("ping is answered", r.echoRequest(), "RETURN"))
	}
	const noPort = "no such port on this VIP"
	rules = append(rules, rule(noPort, "-m conntrack --ctstate NEW "+r.match(VIPAddresses, "dst"), "KUBE-IPVS-NO-PORT"))
	var others []nat.Rule
	if r.uses(HealthCheckPort) {
		others = append(others, rule("health check node ports", r.healthCheck(), "RETURN"))
	}
	others = append(others, r.sharedVIPPlaceholders(n)...)
	r.chain(nat.Filter, "KUBE-IPVS-NO-PORT", append(others, rule(noPort, "", r.reject()))...)
	if r.uses(HealthCheckPort) {
		r.jump(nat.Filter, "INPUT", ChainNodePort, "kubernetes health check service ports")
		r.accepts()
		r.chain(nat.Filter, ChainNodePort, rule("health check node ports", r.healthCheck(), "ACCEPT"))
	}
	r.chain(nat.Filter, ChainIPVSFilter, rules...)
}

// healthCheck returns the match for health check node ports of addresses that are local as a
// whole. Load balancers may probe them on their own address (kubernetes#117621).
func (r *ruleset) healthCheck() string {
	return "-p tcp " + r.match(HealthCheckPort, "dst") + " " + r.notMatch(PortVIPs, "dst")
}

// icmp returns the match for the family's ICMP.
func (r *ruleset) icmp() string {
	if r.family == ip.IPv6 {
		return "-p ipv6-icmp"
	}
	return "-p icmp"
}

// echoRequest returns the match for a ping.
func (r *ruleset) echoRequest() string {
	if r.family == ip.IPv6 {
		return r.icmp() + " -m icmp6 --icmpv6-type 128"
	}
	return r.icmp() + " -m icmp --icmp-type 8"
}

// reject returns the target that refuses a connection.
func (r *ruleset) reject() string {
	if r.family == ip.IPv6 {
		return "REJECT --reject-with icmp6-port-unreachable"
	}
	return "REJECT --reject-with icmp-port-unreachable"
}

// invalid drops packets that conntrack cannot assign to a connection and that would
// need masquerading, such as a FIN that arrives after conntrack has forgotten its
// connection. The nat table does not see such a packet, while IPVS would forward it
// with the client's own address to an endpoint that knows the connection by another
// address. Packets whose client address is kept pass: conntrack may see only one
// direction of their flows and consider all of it invalid:
//
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
//	-A KUBE-IPVS-INVALID -p tcp -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j RETURN
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-LOAD-BALANCER dst,dst -j DROP     (and external IPs, node ports)
func (r *ruleset) invalid() {
	const kept = "client address kept"
	var rules []nat.Rule
	if r.uses(LoadBalancerLocal) {
		rules = append(rules, rule(kept, r.match(LoadBalancerLocal, "dst,dst"), "RETURN"))
	}
	for _, p := range ip.Protocols {
		if _, local := NodePortSets(p); r.uses(local) {
			rules = append(rules, rule(kept, r.ofProtocol(p, local)+" "+r.match(NodePorts, "dst,dst"), "RETURN"))
		}
	}
	for _, set := range r.used(LoadBalancer, ExternalIP, NodePorts) {
		rules = append(rules, rule("cannot be masqueraded", r.match(set, "dst,dst"), "DROP"))
	}
	r.chain(nat.Filter, "KUBE-IPVS-INVALID", rules...)
}
