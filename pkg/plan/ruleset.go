package plan

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// ruleset writes the chains of one family. Each function below shows, in its
// comment, the rules that it writes in IPv4 with the default configuration.
// None depends on which Services there are: what changes with them is the
// members of the sets. A packet so meets the same few rules with ten Services
// and with forty thousand, and no program runs when a Service changes.
type ruleset struct {
	state  *nat.State
	cfg    *Config
	family ip.Family
	paths  Paths
}

func addRuleset(state *nat.State, cfg *Config, n *Node, family ip.Family, paths Paths) {
	r := ruleset{state: state, cfg: cfg, family: family, paths: paths}
	r.jumps()
	r.services(n)
	r.loadBalancer()
	r.nodePort()
	r.markMasquerade()
	r.postrouting(n)
	r.firewall()
	r.forward()
	r.virtualAddresses()
	r.accept()
	r.externalLocal(n)
	r.invalid()
	r.replyRouting()
	r.claims(n)
}

// chain sets a chain's rules.
func (r *ruleset) chain(t nat.Table, name string, rules ...nat.Rule) {
	r.state.Chains[nat.Chain{Family: r.family, Table: t, Name: name}] = rules
}

// jump puts a rule at the head of a chain of the kernel's own, behind the
// jumps that were put there before.
func (r *ruleset) jump(t nat.Table, from, to, comment string) {
	r.state.Jumps = append(r.state.Jumps, nat.Jump{
		Chain: nat.Chain{Family: r.family, Table: t, Name: from},
		Rule:  rule(comment, "", to),
	})
}

// lastJump puts one behind everybody's rules.
func (r *ruleset) lastJump(t nat.Table, from, to, comment string) {
	r.jump(t, from, to, comment)
	r.state.Jumps[len(r.state.Jumps)-1].Last = true
}

// match is "-m set --match-set NAME flags" with the family's name.
func (r *ruleset) match(set SetName, flags string) string {
	return fmt.Sprintf("-m set --match-set %s %s", set.In(r.family), flags)
}

// rule joins a match, a comment of several words (one alone would be printed
// without quotes) and a target. iptables-save prints addresses and interfaces
// first, so a match begins with those.
func rule(comment, match, target string) nat.Rule {
	if match != "" {
		match += " "
	}
	return nat.Rule(fmt.Sprintf("%s-m comment --comment %q -j %s", match, comment, target))
}

// jumps leads the kernel's chains to ours:
//
//	nat    PREROUTING, OUTPUT → KUBE-SERVICES; POSTROUTING → KUBE-POSTROUTING
//	mangle PREROUTING → KUBE-IPVS-CLAIM, KUBE-IPVS-RESTORE; INPUT → KUBE-IPVS-BIND, KUBE-IPVS-OUTSIDE
//	mangle FORWARD → KUBE-IPVS-RETURN; OUTPUT → KUBE-PROXY-FIREWALL, KUBE-IPVS-CLAIM, KUBE-IPVS-RETURN, KUBE-IPVS-SENT
//	filter INPUT → KUBE-NODE-PORT, KUBE-PROXY-FIREWALL, KUBE-IPVS-FILTER; last of all, KUBE-IPVS-ACCEPT
//	filter FORWARD → KUBE-PROXY-FIREWALL, KUBE-IPVS-UNCLAIMED, KUBE-FORWARD
//
// IPVS takes a node's own connections before filter OUTPUT sees them, with
// their destination changed, so the source ranges stand in mangle for them.
func (r *ruleset) jumps() {
	const portals = "kubernetes service portals"
	r.jump(nat.NAT, "PREROUTING", "KUBE-SERVICES", portals)
	r.jump(nat.NAT, "OUTPUT", "KUBE-SERVICES", portals)
	r.jump(nat.NAT, "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules")

	r.jump(nat.Mangle, "PREROUTING", "KUBE-IPVS-CLAIM", "kubernetes claimed ports")
	r.jump(nat.Mangle, "PREROUTING", "KUBE-IPVS-RESTORE", "kubernetes reply routing")
	r.jump(nat.Mangle, "INPUT", "KUBE-IPVS-BIND", "kubernetes reply routing")
	r.jump(nat.Mangle, "INPUT", "KUBE-IPVS-OUTSIDE", "kubernetes external traffic policy")
	r.jump(nat.Mangle, "FORWARD", "KUBE-IPVS-RETURN", "kubernetes reply routing")
	r.jump(nat.Mangle, "OUTPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer source ranges")
	r.jump(nat.Mangle, "OUTPUT", "KUBE-IPVS-CLAIM", "kubernetes claimed ports")
	r.jump(nat.Mangle, "OUTPUT", "KUBE-IPVS-RETURN", "kubernetes reply routing")
	r.jump(nat.Mangle, "OUTPUT", "KUBE-IPVS-SENT", "kubernetes external traffic policy")

	r.jump(nat.Filter, "INPUT", "KUBE-NODE-PORT", "kubernetes health check service ports")
	r.jump(nat.Filter, "INPUT", "KUBE-PROXY-FIREWALL", "kubernetes load balancer source ranges")
	r.jump(nat.Filter, "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter")
	r.lastJump(nat.Filter, "INPUT", "KUBE-IPVS-ACCEPT", "kubernetes service traffic")
	r.jump(nat.Filter, "FORWARD", "KUBE-PROXY-FIREWALL", "kubernetes load balancer source ranges")
	r.jump(nat.Filter, "FORWARD", "KUBE-IPVS-UNCLAIMED", "kubernetes unclaimed ports")
	r.jump(nat.Filter, "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules")
}

// services decides what is masqueraded:
//
//	-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
//	-A KUBE-SERVICES -i eth0 -p icmp -m icmp --icmp-type 8 -m set --match-set KUBE-IPVS-PORT-IPS dst -j REDIRECT
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-INSIDE
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-NO-LOCAL dst,dst -j KUBE-IPVS-INSIDE
//	-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
//	-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP … -j KUBE-MARK-MASQ
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ
//	-A KUBE-SERVICES -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j KUBE-NODE-PORT
//	-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
//	-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP dst,dst -j ACCEPT
//	-A KUBE-SERVICES -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j ACCEPT
//
// ACCEPT ends the nat table for a VIP, so that nobody's DNAT (a hostPort's,
// say, kubernetes#66103) takes the packet before IPVS. Node ports are matched
// by address and port, so that a VIP's port of the same number is not taken
// for one (kubernetes#132068).
func (r *ruleset) services(n *Node) {
	loopback := "-s 127.0.0.0/8"
	if r.family == ip.IPv6 {
		loopback = "-s ::1/128"
	}
	rules := []nat.Rule{
		nat.Rule(loopback + " -j RETURN"),
	}
	rules = append(rules, r.pingRules(n)...)
	rules = append(rules,
		rule("external traffic policy Local", r.match(Local, "dst,dst"), "KUBE-IPVS-INSIDE"),
		rule("no endpoint on this node", r.match(NoLocalEndpoint, "dst,dst"), "KUBE-IPVS-INSIDE"),
		rule("load balancer IPs", r.match(LoadBalancer, "dst,dst"), "KUBE-LOAD-BALANCER"))
	for _, m := range r.clusterIPSources(n) {
		rules = append(rules, rule("cluster IPs from outside the cluster", m, "KUBE-MARK-MASQ"))
	}
	rules = append(rules,
		rule("external IPs", r.match(ExternalIP, "dst,dst"), "KUBE-MARK-MASQ"),
		rule("node ports", r.match(NodePorts, "dst,dst"), "KUBE-NODE-PORT"))
	for _, set := range []SetName{ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal} {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "ACCEPT"))
	}
	r.chain(nat.NAT, "KUBE-SERVICES", rules...)
}

// clusterIPSources matches traffic to cluster IPs that must be masqueraded:
// all of it (masqueradeAll), or what does not come from a pod, which answers
// could otherwise miss. Where pods cannot be told from others, only what a
// node itself sends with a VIP as its source.
func (r *ruleset) clusterIPSources(n *Node) []string {
	to := r.match(ClusterIP, "dst,dst")
	if r.cfg.MasqueradeAll {
		return []string{to}
	}
	if notLocal, ok := r.notLocal(n); ok {
		return []string{notLocal(to)}
	}
	return []string{r.match(ClusterIP, "src,dst")}
}

// notLocal adds to a match that the packet does not come from a pod. It is
// false where pods cannot be recognised.
func (r *ruleset) notLocal(n *Node) (func(match string) string, bool) {
	switch lt := r.cfg.LocalTraffic; lt.Mode {
	case DetectBridgeInterface:
		return func(m string) string { return "! -i " + lt.Interface + " " + m }, lt.Interface != ""
	case DetectInterfaceNamePrefix:
		return func(m string) string { return "! -i " + lt.Interface + "+ " + m }, lt.Interface != ""
	case DetectClusterCIDR:
		return r.notFrom(lt.CIDRs)
	case DetectNodeCIDR:
		return r.notFrom(n.PodCIDRs)
	}
	return nil, false
}

// notFrom excludes the family's CIDR; there is at most one.
func (r *ruleset) notFrom(cidrs []netip.Prefix) (func(match string) string, bool) {
	for _, c := range cidrs {
		if ip.Of(c.Addr()) == r.family {
			return func(m string) string { return "! -s " + c.String() + " " + m }, true
		}
	}
	return nil, false
}

// loadBalancer masquerades what comes for a load balancer IP, unless the
// client's address must be kept:
//
//	-A KUBE-LOAD-BALANCER -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
//	-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
func (r *ruleset) loadBalancer() {
	r.chain(nat.NAT, "KUBE-LOAD-BALANCER",
		rule("externalTrafficPolicy Local", r.match(LoadBalancerLocal, "dst,dst"), "RETURN"),
		rule("source is masqueraded", "", "KUBE-MARK-MASQ"))
}

// nodePort is the same for node ports, protocol by protocol:
//
//	-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
//	-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
func (r *ruleset) nodePort() {
	var rules []nat.Rule
	for _, p := range ip.Protocols {
		all, local := nodePortSets(p)
		flags := "dst"
		if p == ip.SCTP {
			flags = "dst,dst"
		}
		proto := "-p " + strings.ToLower(p.String()) + " "
		rules = append(rules,
			rule("externalTrafficPolicy Local", proto+r.match(local, flags), "RETURN"),
			rule("source is masqueraded", proto+r.match(all, flags), "KUBE-MARK-MASQ"))
	}
	r.chain(nat.NAT, "KUBE-NODE-PORT", rules...)
}

// markMasquerade sets the mark that postrouting acts on:
//
//	-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
func (r *ruleset) markMasquerade() {
	m := r.cfg.MasqueradeMark
	r.chain(nat.NAT, "KUBE-MARK-MASQ", nat.Rule(fmt.Sprintf("-j MARK --set-xmark %#x/%#x", m, m)))
}

// postrouting gives marked packets a source that answers come back to. IPVS
// has changed the destination by then, and the packet is routed anew with its
// own source, so that the interface here is the one it really leaves by:
//
//	-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE --random-fully
//	-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
//	-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
//	-A KUBE-POSTROUTING -o eth1 -j SNAT --to-source 10.12.192.10 --random-fully     (each ENI with a known source)
//	-A KUBE-POSTROUTING -j MASQUERADE --random-fully
//
// MASQUERADE alone would take an address of any other interface where eth1
// has none, and the answer would come in there.
func (r *ruleset) postrouting(n *Node) {
	m := r.cfg.MasqueradeMark
	rules := []nat.Rule{
		rule("a pod that reaches itself", r.match(LoopBack, "dst,dst,src"), "MASQUERADE --random-fully"),
	}
	rules = append(rules, r.bridgeRules(n)...)
	rules = append(rules,
		nat.Rule(fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m, m)),
		nat.Rule(fmt.Sprintf("-j MARK --set-xmark %#x/0x0", m)))
	for _, e := range r.paths.SNAT {
		rules = append(rules, rule("SNAT source of this interface", "-o "+e.Link,
			"SNAT --to-source "+e.SNAT.String()+" --random-fully"))
	}
	rules = append(rules, rule("kubernetes service traffic requiring SNAT", "", "MASQUERADE --random-fully"))
	r.chain(nat.NAT, "KUBE-POSTROUTING", rules...)
}

// firewall keeps to loadBalancerSourceRanges, on every path to the VIP:
//
//	-A KUBE-PROXY-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
//	-A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
//	-A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN
//	-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
func (r *ruleset) firewall() {
	for _, table := range []nat.Table{nat.Filter, nat.Mangle} {
		r.chain(table, "KUBE-PROXY-FIREWALL",
			rule("load balancer source ranges", r.match(LoadBalancerFW, "dst,dst"), "KUBE-SOURCE-RANGES-FIREWALL"))
		r.chain(table, "KUBE-SOURCE-RANGES-FIREWALL",
			rule("may come", r.match(SourceCIDR, "dst,dst,src"), "RETURN"),
			rule("this node may come", r.match(SourceIP, "dst,dst,src"), "RETURN"),
			nat.Rule("-j DROP"))
	}
}

// forward lets service traffic pass a FORWARD policy of DROP. What IPVS sends
// on never comes here, but the answers do:
//
//	-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
//	-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
func (r *ruleset) forward() {
	m := r.cfg.MasqueradeMark
	r.chain(nat.Filter, "KUBE-FORWARD",
		rule("kubernetes forwarding rules", fmt.Sprintf("-m mark --mark %#x/%#x", m, m), "ACCEPT"),
		rule("kubernetes forwarding conntrack rule", "-m conntrack --ctstate RELATED,ESTABLISHED", "ACCEPT"))
}

// accept lets service traffic pass an INPUT policy of DROP: on its way to IPVS
// it meets INPUT, as if it were for the node. It stands last there, as another
// program's rules are to be met before: a firewall's own, and a policy engine's,
// which marks in INPUT what it decides on behind IPVS. So it answers nothing but
// the policy. What has to be turned away is by then (virtualAddresses). What
// answers the node's own requests passes too, and errors about connections:
//
//	-A KUBE-IPVS-ACCEPT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT     (load balancers, external IPs, node ports)
//	-A KUBE-IPVS-ACCEPT -m conntrack --ctstate ESTABLISHED --ctdir REPLY -j ACCEPT
//	-A KUBE-IPVS-ACCEPT -p icmp -m conntrack --ctstate RELATED -j ACCEPT
func (r *ruleset) accept() {
	var rules []nat.Rule
	for _, set := range []SetName{ClusterIP, LoadBalancer, ExternalIP, ExternalIPLocal, NodePorts} {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "ACCEPT"))
	}
	rules = append(rules,
		rule("the node was the one to ask", "-m conntrack --ctstate ESTABLISHED --ctdir REPLY", "ACCEPT"),
		rule("errors about connections", r.icmp()+" -m conntrack --ctstate RELATED", "ACCEPT"))
	r.chain(nat.Filter, "KUBE-IPVS-ACCEPT", rules...)
}

// virtualAddresses lets a VIP answer on its Services' ports and to ping, and
// on nothing else: it is a local address, so whatever listens on 0.0.0.0
// would answer for it (kubernetes#72236). And it turns away who comes from
// outside to a node without an endpoint, under externalTrafficPolicy Local
// (externalLocal):
//
//	-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -m set ! --match-set KUBE-IPVS-IPS dst -j ACCEPT
//	-A KUBE-IPVS-FILTER -m conntrack --ctstate INVALID -j KUBE-IPVS-INVALID
//	-A KUBE-IPVS-FILTER -m set --match-set KUBE-IPVS-NO-LOCAL dst,dst -j KUBE-IPVS-INSIDE
//	-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN     (and the other three)
//	-A KUBE-IPVS-FILTER -p icmp -m icmp --icmp-type 8 -j RETURN     (not with --vip-ping=false)
//	-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
func (r *ruleset) virtualAddresses() {
	r.chain(nat.Filter, "KUBE-NODE-PORT",
		rule("health check node ports", "-p tcp "+r.match(HealthCheckPort, "dst")+" "+r.notMatch(VIPAddresses, "dst"), "ACCEPT"))

	rules := []nat.Rule{
		rule("no connection of ours", "-m conntrack --ctstate INVALID", "KUBE-IPVS-INVALID"),
		rule("no endpoint on this node", r.match(NoLocalEndpoint, "dst,dst"), "KUBE-IPVS-INSIDE"),
	}
	for _, set := range []SetName{LoadBalancer, ClusterIP, ExternalIP, ExternalIPLocal} {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "RETURN"))
	}
	if r.cfg.VIPs.Ping {
		rules = append(rules, rule("ping is answered", r.echoRequest(), "RETURN"))
	}
	rules = append(rules, rule("no such port on this VIP", "-m conntrack --ctstate NEW "+r.match(VIPAddresses, "dst"), r.reject()))
	r.chain(nat.Filter, "KUBE-IPVS-FILTER", rules...)
}

// icmp is the family's.
func (r *ruleset) icmp() string {
	if r.family == ip.IPv6 {
		return "-p ipv6-icmp"
	}
	return "-p icmp"
}

// echoRequest matches a ping.
func (r *ruleset) echoRequest() string {
	if r.family == ip.IPv6 {
		return r.icmp() + " -m icmp6 --icmpv6-type 128"
	}
	return r.icmp() + " -m icmp --icmp-type 8"
}

// reject is the target that refuses a connection.
func (r *ruleset) reject() string {
	if r.family == ip.IPv6 {
		return "REJECT --reject-with icmp6-port-unreachable"
	}
	return "REJECT --reject-with icmp-port-unreachable"
}

// invalid drops what conntrack cannot place, such as a FIN that comes when the
// connection is forgotten, if it would have to be masqueraded: the nat table
// does not see it, while IPVS would still send it on, with the client's own
// address, to an endpoint that knows the connection by another. Where the
// client's address is kept, it passes: there conntrack may see only half of a
// flow, and all of it would look wrong. Behind invalidRules:
//
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
//	-A KUBE-IPVS-INVALID -p tcp -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j RETURN
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-LOAD-BALANCER dst,dst -j DROP     (and external IPs, node ports)
func (r *ruleset) invalid() {
	const kept = "client address kept"
	rules := append(r.invalidRules(), rule(kept, r.match(LoadBalancerLocal, "dst,dst"), "RETURN"))
	for _, p := range ip.Protocols {
		_, local := nodePortSets(p)
		flags := "dst"
		if p == ip.SCTP {
			flags = "dst,dst"
		}
		rules = append(rules, rule(kept, "-p "+strings.ToLower(p.String())+" "+r.match(local, flags)+" "+r.match(NodePorts, "dst,dst"), "RETURN"))
	}
	for _, set := range []SetName{LoadBalancer, ExternalIP, NodePorts} {
		rules = append(rules, rule("cannot be masqueraded", r.match(set, "dst,dst"), "DROP"))
	}
	r.chain(nat.Filter, "KUBE-IPVS-INVALID", rules...)
}
