package plan

import (
	"fmt"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// A shared VIP is local as a whole: its route is in table local (claimShared). But only the ports of
// Services are this node's. The other ports may be served by a device that has the same address, such
// as a load balancer. Pods and the node reach them there, although the VIP is local:
//
//   - A packet to the VIP leaves the node only if the route lookup skips table local.
//   - A packet whose source is the VIP passes the reverse-path check only if the lookup of that check
//     skips table local.
//
// Two marks make a route lookup skip table local, by the policy rules of addClaimRules. With the
// claim mark, here 0x4/0xd, each lookup skips it. With the device mark, 0x5/0xd, only that of the
// reverse-path check does: the rule for it matches the input interface lo, which the kernel uses for
// this lookup. So the packet is still delivered to the node. Chains of table mangle set the marks:
//
//	packet                                       chain              mark
//	pod or node to the device, request           KUBE-IPVS-FOREIGN  claim
//	device to a pod, reply                       KUBE-IPVS-DEVICE   claim
//	device to the node, reply                    KUBE-IPVS-DEVICE   device
//	device to the node or a pod, request         KUBE-IPVS-DEVICE   device
//	node or pod to the device, reply             KUBE-IPVS-PROBED   claim
//
// Connections that the node itself or the device began have the connmark 0x4/0xd, by which the chains
// recognize their later packets.

// sharesVIPs reports the same as claimsPorts for shared VIPs.
func (c *Config) sharesVIPs(u SetsInUse, f ip.Family) bool {
	return (u != nil || c.VIPs.mayShare()) && u.Has(SharedVIPs, f)
}

// routesDevicePorts reports whether packets for ports of other devices leave the node.
func (c *Config) routesDevicePorts(n *Node, f ip.Family) bool {
	return c.sharesVIPs(n.Uses, f) && !n.postpones(DemandedVIPs, f) && !c.claimMarkTaken(n, f)
}

// hasDevicePortPlaceholders reports whether placeholder rules match packets for ports of other
// devices; see Demands.
func (c *Config) hasDevicePortPlaceholders(n *Node, f ip.Family) bool {
	return c.sharesVIPs(n.Uses, f) && n.hasPlaceholders(DemandedVIPs, f) && !c.claimMarkTaken(n, f)
}

// claimMarkTaken reports whether another program uses a mark with which packets would skip table
// local. Its packets would not reach the node any more, so these ports are then refused, as under
// kube-proxy. ruleConflicts and markConflicts warn about it.
func (c *Config) claimMarkTaken(n *Node, f ip.Family) bool {
	return n.foreignMark(f, func(mark uint32) bool {
		bits := mark & c.sharedVIPMask()
		return bits == c.VIPs.Mark || bits == c.deviceMark()
	})
}

// sharedVIPMask returns the mask that identifies a packet for another device's port. It
// includes the bits that every fwmark of a Service has, so that no such fwmark matches.
func (c *Config) sharedVIPMask() uint32 { return c.VIPs.Mark | c.LocalMark.Value }

// deviceMark returns the mark of packets that arrive from the device that shares a VIP
// with this node. A fwmark of a Service has all bits of LocalMark.Value; this mark has
// only one of them, so it is distinct without using another bit. If the value has fewer than two
// bits, packets in both directions have the same mark.
func (c *Config) deviceMark() uint32 {
	v := c.LocalMark.Value
	if v&(v-1) == 0 {
		return c.VIPs.Mark
	}
	return c.VIPs.Mark | v&-v
}

// ciliumMagic are the bits of Cilium's marks that say what such a mark is: 0xf00 for the identity of a
// pod, whose other bits are arbitrary. Cilium's programs in the kernel set these marks; no rule shows
// them.
const ciliumMagic = 0xf00

// skipLocalMask returns the mask with which packets skip table local.
func (c *Config) skipLocalMask() uint32 {
	return c.sharedVIPMask() | ciliumMagic&^(c.MasqueradeMark|c.SNAT.Mark)
}

// addSharedSysctls makes the reverse-path check of outer interfaces use the mark.
// Otherwise it treats packets from a local VIP as martian. If this process cannot set
// parameters, --init-only or the administrator must; otherwise pods and the node get no
// replies from the other device.
func addSharedSysctls(plan *NodePlan, cfg *Config, n *Node) {
	if n.ReadOnly || !slices.Contains(cfg.Families, ip.IPv4) || !cfg.routesDevicePorts(n, ip.IPv4) {
		return
	}
	for _, link := range outerLinks(cfg, n, ip.IPv4) {
		plan.Sysctls[sysctl.LinkKey(ip.IPv4, link, "src_valid_mark")] = "1"
	}
}

// sharedVIPs writes the chains of shared VIPs. All of them are written on demand; see
// sharedVIPPlaceholders.
//
// If another program insists on the head of mangle PREROUTING and accepts packets of
// established connections there, as Calico's Felix does by default, the jumps are not
// written (nat.Jump.Sees). Otherwise requests would leave the node, and replies to them
// would be dropped. Without the jumps, these ports are refused, as under kube-proxy.
func (r *ruleset) sharedVIPs(n *Node) {
	if r.cfg.routesDevicePorts(n, r.family) {
		r.requestsToDevice()
		r.repliesToDevice()
		r.packetsFromDevice()
	}
}

const commentDevice = "kubernetes ports of other devices"

// leavingMark returns the claim mark with the mask of shared VIPs, as VALUE/MASK.
func (r *ruleset) leavingMark() string {
	return fmt.Sprintf("%#x/%#x", r.cfg.VIPs.Mark, r.cfg.sharedVIPMask())
}

// requestsToDevice makes packets from pods and the node leave the node, if no Service has the port.
// Connections of the node itself get the connmark. External clients are refused. ICMP stays local,
// since it has no port. The jump matches no replies: if the node connects to a Service and the
// endpoint is on this node, the source of the request is the VIP, and the reply must stay local:
//
//	-A PREROUTING, OUTPUT -m conntrack --ctdir ORIGINAL -m set --match-set KUBE-IPVS-SHARED-IPS dst -j KUBE-IPVS-FOREIGN
//	-A KUBE-IPVS-FOREIGN -i eth0 -j RETURN     (each outer interface)
//	-A KUBE-IPVS-FOREIGN -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN     (external and cluster IPs alike)
//	-A KUBE-IPVS-FOREIGN -p tcp -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
//	-A KUBE-IPVS-FOREIGN -m addrtype --src-type LOCAL -m conntrack --ctstate NEW -j CONNMARK --set-xmark 0x4/0xd
//	-A KUBE-IPVS-FOREIGN ! -p icmp -j MARK --set-xmark 0x4/0xd
func (r *ruleset) requestsToDevice() {
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		r.jumpForAll(hook, "-m conntrack --ctdir ORIGINAL "+r.match(SharedVIPs, "dst"), chainForeign)
	}
	rules := r.skipExternal()
	// Any Service may name another Service's cluster IP as its external IP.
	for _, set := range r.used(LoadBalancer, ExternalIP, ExternalIPLocal, ClusterIP) {
		rules = append(rules, rule("served by IPVS", r.match(set, "dst,dst"), "RETURN"))
	}
	if r.uses(HealthCheckPort) {
		rules = append(rules, rule("health check node ports", "-p tcp "+r.match(HealthCheckPort, "dst"), "RETURN"))
	}
	r.chain(nat.Mangle, chainForeign, append(rules,
		nat.Rule("-m addrtype --src-type LOCAL -m conntrack --ctstate NEW -j CONNMARK --set-xmark "+r.leavingMark()),
		rule("leaves the node", "! "+r.icmp(), "MARK --set-xmark "+r.leavingMark()))...)
}

// repliesToDevice makes replies leave the node if the device began the connection:
//
//	-A PREROUTING, OUTPUT -m connmark --mark 0x4/0xd -m conntrack --ctdir REPLY -j KUBE-IPVS-PROBED
//	-A KUBE-IPVS-PROBED -j MARK --set-xmark 0x4/0xd
func (r *ruleset) repliesToDevice() {
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		r.jumpForAll(hook, "-m connmark --mark "+r.leavingMark()+" -m conntrack --ctdir REPLY", "KUBE-IPVS-PROBED")
	}
	r.chain(nat.Mangle, "KUBE-IPVS-PROBED", nat.Rule("-j MARK --set-xmark "+r.leavingMark()))
}

// packetsFromDevice marks packets whose source is the VIP, so that the reverse-path check passes them.
// Connections that the device begins, such as probes (kubernetes#79783), get the connmark. Packets of
// connections with the connmark may be for the node, so they get the device mark. All others are
// replies to pods:
//
//	-A PREROUTING -i eth0 -m set --match-set KUBE-IPVS-SHARED-IPS src -j KUBE-IPVS-DEVICE     (each outer interface)
//	-A KUBE-IPVS-DEVICE -m conntrack --ctstate NEW -j CONNMARK --set-xmark 0x4/0xd
//	-A KUBE-IPVS-DEVICE -m connmark --mark 0x4/0xd -j MARK --set-xmark 0x5/0xd
//	-A KUBE-IPVS-DEVICE -m connmark ! --mark 0x4/0xd -j MARK --set-xmark 0x4/0xd
func (r *ruleset) packetsFromDevice() {
	for _, link := range r.outerLinks {
		r.jumpForAll("PREROUTING", "-i "+link+" "+r.match(SharedVIPs, "src"), "KUBE-IPVS-DEVICE")
	}
	leaving, device := r.leavingMark(), fmt.Sprintf("%#x/%#x", r.cfg.deviceMark(), r.cfg.sharedVIPMask())
	r.chain(nat.Mangle, "KUBE-IPVS-DEVICE",
		nat.Rule("-m conntrack --ctstate NEW -j CONNMARK --set-xmark "+leaving),
		nat.Rule("-m connmark --mark "+leaving+" -j MARK --set-xmark "+device),
		nat.Rule("-m connmark ! --mark "+leaving+" -j MARK --set-xmark "+leaving))
}

// jumpForAll is jumpFirst for a mangle chain that marks all packets of a connection or none.
func (r *ruleset) jumpForAll(from, match, to string) {
	r.jumpFirst(nat.Mangle, from, match, to, commentDevice)
	r.lastJump().Sees = r.key(nat.Mangle, "PREROUTING")
}

// sharedVIPPlaceholders returns the placeholder rules for sharedVIPs, whose rules make each packet of
// the node more expensive: policy rules alone cost 10,800 instructions of a connection and 2,100
// of a round trip. The client's next attempt leaves the node:
//
//	-A KUBE-IPVS-NO-PORT ! -p icmp -m set --match-set KUBE-IPVS-SHARED-IPS dst -j KUBE-IPVS-DEMAND
//	-A KUBE-IPVS-DEMAND -i eth0 -j RETURN     (each outer interface)
//	-A KUBE-IPVS-DEMAND -j SET --add-set KUBE-IPVS-DEMAND-IPS dst
//	-A KUBE-IPVS-DEMAND -j DROP
func (r *ruleset) sharedVIPPlaceholders(n *Node) []nat.Rule {
	if !r.cfg.hasDevicePortPlaceholders(n, r.family) {
		return nil
	}
	rules := r.skipExternal()
	r.chain(nat.Filter, chainDemand, append(rules,
		rule("rules are written on demand", "", r.addTo(DemandedVIPs, "dst")),
		rule("the client sends it again", "", "DROP"))...)
	return []nat.Rule{rule("port of another device", "! "+r.icmp()+" "+r.match(SharedVIPs, "dst"), chainDemand)}
}

// probePlaceholders returns the placeholder rules of KUBE-SERVICES for sharedVIPs. They match when
// the device connects to this node with the VIP as its source (kubernetes#79783). The
// reverse-path check then drops the packet:
//
//	-A KUBE-SERVICES -i eth0 -m set --match-set KUBE-IPVS-SHARED-IPS src -j SET --add-set KUBE-IPVS-DEMAND-IPS src     (each outer interface)
func (r *ruleset) probePlaceholders(n *Node) []nat.Rule {
	if !r.cfg.hasDevicePortPlaceholders(n, r.family) {
		return nil
	}
	var rules []nat.Rule
	for _, link := range r.outerLinks {
		rules = append(rules, rule("rules are written on demand", "-i "+link+" "+r.match(SharedVIPs, "src"), r.addTo(DemandedVIPs, "src")))
	}
	return rules
}

// sharedVIPSource returns the KUBE-POSTROUTING rules for shared VIPs. The node's own packets may have
// the VIP as their source. They get one that replies can return to. Packets to other addresses with
// this mark are another program's, and keep theirs:
//
//	nat -A KUBE-POSTROUTING -m mark --mark 0x4/0xd -m addrtype --src-type LOCAL -m set --match-set KUBE-IPVS-SHARED-IPS dst -j MASQUERADE
//
// If rules are written on demand, it also returns a rule for the node's own first packet. That packet is
// routed to lo with the VIP as its source, which its conntrack entry would keep. If it is
// masqueraded there, the kernel deletes the entry once the connection leaves by another
// interface (nf_nat_oif_changed):
//
//	nat -A KUBE-POSTROUTING -o lo ! -p icmp -m set --match-set KUBE-IPVS-SHARED-IPS dst -j MASQUERADE
//
// Both rules exist before and after the demand, because packets arrive while the tables are
// being written.
func (r *ruleset) sharedVIPSource(n *Node) []nat.Rule {
	if !r.cfg.sharesVIPs(r.sets, r.family) {
		return nil
	}
	var rules []nat.Rule
	if n.OnDemand {
		rules = append(rules, rule("forgotten when it leaves the node", "-o lo ! "+r.icmp()+" "+r.match(SharedVIPs, "dst"), "MASQUERADE --random-fully"))
	}
	match := fmt.Sprintf("-m mark --mark %#x/%#x -m addrtype --src-type LOCAL %s", r.cfg.VIPs.Mark, r.cfg.sharedVIPMask(), r.match(SharedVIPs, "dst"))
	return append(rules, rule("source may be a VIP", match, "MASQUERADE --random-fully"))
}
