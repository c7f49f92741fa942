package plan

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Under externalTrafficPolicy Local an address and port has two sets of endpoints:
// external clients are routed to node-local endpoints and keep their address; internal
// clients may use all endpoints. IPVS has one list of real servers per address and
// port. That list holds the node-local endpoints, as under kube-proxy. Internal clients
// are sent to a second virtual server, selected by a fwmark. IPVS compares the whole
// mark. So a packet of theirs that carries another program's mark, or lost its fwmark, reaches
// the node-local endpoints, as under kube-proxy. docs/concepts/traffic-policies.md shows the path of
// a packet.

// LocalMark describes the fwmarks of the second virtual servers: they have all bits of
// Value and none outside Mask. The bits of Mask that are not in Value hold an index.
// The zero LocalMark disables these virtual servers: internal clients then get the
// node-local endpoints too.
type LocalMark struct{ Value, Mask uint32 }

// Max returns the highest index.
func (m LocalMark) Max() uint32 {
	if m.Value == 0 {
		return 0
	}
	return 1<<bits.OnesCount32(m.Mask&^m.Value) - 1
}

// Mark returns the mark with an index from 1 to Max.
func (m LocalMark) Mark(index uint32) uint32 { return m.Value | deposit(index, m.Mask&^m.Value) }

// Index returns the index of a mark, with or without the masquerade bit, and false if
// the mark is not a LocalMark.
func (m LocalMark) Index(mark, masquerade uint32) (uint32, bool) {
	mark &^= masquerade
	if m.Value == 0 || mark&m.Value != m.Value || mark&^m.Mask != 0 {
		return 0, false
	}
	n := gather(mark, m.Mask&^m.Value)
	return n, n > 0
}

// InternalServer is what a Service needs for the internal clients of one of its addresses and
// ports. It becomes a virtual server once a fwmark is assigned.
type InternalServer struct {
	Key        ipvs.Key // the address and port
	Precedence Precedence
	ipvs.VirtualServer
	Endpoints  []Endpoint // real servers are those of the whole cluster
	Masquerade bool       // internal clients are masqueraded
}

// addInternal adds an InternalServer if there are node-local endpoints. Internal clients of a
// node port are always masqueraded. So is the node itself, at every address; see clearMarks.
func (b *serviceBuilder) addInternal(key ipvs.Key, precedence Precedence, nodePort bool) {
	if !b.service.ExternalLocal || len(b.eps.local) == 0 || b.cfg.LocalMark.Value == 0 {
		return
	}
	b.plan.Internal = append(b.plan.Internal, InternalServer{
		Key: key, Precedence: precedence, VirtualServer: internalServer(b.cfg, b.service),
		Endpoints:  b.endpointsOf(key.Protocol, b.eps.cluster),
		Masquerade: nodePort || !b.keepsClient(),
	})
}

// internalServer implements session affinity by hashing the client's address. A persistent virtual
// server with a fwmark does not map ports: ip_vs_sched_persist compares the virtual server's own
// port, which it does not have. The mh scheduler moves few clients when an endpoint is added or
// removed. Without its fallback (FlagSched1) it would refuse clients of a draining one.
func internalServer(cfg *Config, s *service.Service) ipvs.VirtualServer {
	if s.AffinitySeconds > 0 {
		return ipvs.VirtualServer{Scheduler: "mh", Flags: ipvs.FlagSched1}
	}
	return virtualServer(cfg, s)
}

// AssignMarks returns the plan with a virtual server for each InternalServer whose address and
// port has an index in indexes. Internal clients of the others get the node-local
// endpoints.
func AssignMarks(cfg *Config, plan ServicePlan, indexes map[ipvs.Key]uint32) ServicePlan {
	if len(plan.Internal) == 0 {
		return plan
	}
	plan.VirtualServers, plan.Members = slices.Clone(plan.VirtualServers), slices.Clone(plan.Members)
	for _, in := range plan.Internal {
		if n, ok := indexes[in.Key]; ok {
			plan.addMarked(cfg, in, cfg.LocalMark.Mark(n))
		}
	}
	plan.Internal = nil
	plan.sort()
	return plan
}

// addMarked adds the virtual server with a fwmark, and the set member that gives packets the fwmark.
// The fwmark includes the masquerade mark if needed, because it replaces the packet's whole mark.
func (p *ServicePlan) addMarked(cfg *Config, in InternalServer, mark uint32) {
	if in.Masquerade {
		mark |= cfg.MasqueradeMark
	}
	family := in.Key.Family()
	p.Members = append(p.Members, Member{Set: Local.In(family), Entry: EntryOf(in.Key), Mark: mark})
	p.VirtualServers = append(p.VirtualServers, VirtualServer{
		Key:           ipvs.Key{Addr: family.Unspecified(), FWMark: mark},
		Precedence:    in.Precedence,
		VirtualServer: in.VirtualServer, Endpoints: in.Endpoints,
	})
}

// externalClients returns matches for external clients in filter INPUT. Packets that enter through an
// outer interface are external. The exception is a bridge with pods: only packets from outside the
// pods' range are, or none if the range is not known. Pods of other nodes are external: they reach a
// VIP through their own node, and this node only if they address its node port. On other interfaces
// there may be pods outside the configured ranges, or containers of other programs, whose replies
// return through this node. So packets that enter there are external only on a node without outer
// interfaces, and only if they are not known to be from a pod.
func (r *ruleset) externalClients(n *Node) []string {
	var out []string
	pods, byAddress := r.podMatch(n)
	byAddress = byAddress && strings.HasPrefix(pods, "-s ")
	bridges := PodBridges(r.cfg, n)
	for _, link := range r.outerLinks {
		match := "-i " + link
		switch hasPods := slices.ContainsFunc(bridges, func(l routing.Link) bool { return l.Name == link }); {
		case !hasPods:
			out = append(out, match)
		case byAddress:
			out = append(out, "! "+pods+" "+match)
		}
	}
	if len(r.outerLinks) > 0 {
		return out
	}
	const notFromNode = "-m addrtype ! --src-type LOCAL"
	if notPod, ok := r.notFromPod(n); ok {
		return []string{notPod(notFromNode)}
	}
	return []string{notFromNode}
}

// marksInternal reports whether rules give packets of internal clients the fwmarks of Local.
func (c *Config) marksInternal(n *Node, f ip.Family) bool {
	return n.Uses.Has(Local, f) && !n.postpones(DemandedInternal, f) && !c.localMarkTaken(n, f)
}

// localMarkTaken reports whether another program uses a mark with all bits of LocalMark.Value. Its
// packets to virtual servers would be masqueraded, and lose bits of their mark. So internal clients
// then get the node-local endpoints, as under kube-proxy. ruleConflicts and markConflicts warn about it.
func (c *Config) localMarkTaken(n *Node, f ip.Family) bool {
	v := c.LocalMark.Value
	return v != 0 && n.foreignMark(f, func(mark uint32) bool { return mark&v == v })
}

// hasInternalPlaceholders reports whether placeholder rules match packets of internal clients of
// Local; see Demands.
func (c *Config) hasInternalPlaceholders(n *Node, f ip.Family) bool {
	return n.Uses.Has(Local, f) && n.hasPlaceholders(DemandedInternal, f) && !c.localMarkTaken(n, f)
}

// internalPlaceholders returns the placeholder rule for internalRules. The jumps and base chains of
// internalRules and clearMarks cost each connection through IPVS 6,700 instructions, while clients
// of Local are usually external. Until the rules on demand are written, internal clients get the
// node-local endpoints, as under kube-proxy:
//
//	nat -A KUBE-SERVICES -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-DEMAND
//	nat -A KUBE-IPVS-DEMAND -i eth0 -j RETURN     (each outer interface)
//	nat -A KUBE-IPVS-DEMAND -m addrtype --src-type LOCAL -j SET --add-set KUBE-IPVS-DEMAND-INTERNAL dst
//	nat -A KUBE-IPVS-DEMAND -s 10.244.0.0/16 -j SET --add-set KUBE-IPVS-DEMAND-INTERNAL dst
func (r *ruleset) internalPlaceholders(n *Node) []nat.Rule {
	if !r.cfg.hasInternalPlaceholders(n, r.family) {
		return nil
	}
	rules := r.skipExternal()
	for _, internal := range r.internalClients(n) {
		rules = append(rules, rule("rules are written on demand", internal.match, r.addTo(DemandedInternal, "dst")))
	}
	r.chain(nat.NAT, chainDemand, rules...)
	return []nat.Rule{rule("external traffic policy", r.match(Local, "dst,dst"), chainDemand)}
}

// skipExternal returns rules that end a chain for packets of external clients that enter
// through an outer interface.
func (r *ruleset) skipExternal() []nat.Rule {
	var rules []nat.Rule
	for _, link := range r.outerLinks {
		rules = append(rules, rule("external clients", "-i "+link, "RETURN"))
	}
	return rules
}

// clients is a match for some internal clients.
type clients struct{ match, comment string }

// internalClients returns matches for internal clients whose packets did not enter through an outer
// interface. If pods are not known, all clients behind interfaces other than outer ones are
// internal. If neither is known, only the node is internal.
func (r *ruleset) internalClients(n *Node) []clients {
	fromPod, ok := r.fromPod(n)
	if !ok && len(r.outerLinks) > 0 {
		return []clients{{"", "all others get all endpoints"}}
	}
	out := []clients{{"-m addrtype --src-type LOCAL", "the node gets all endpoints"}}
	if ok {
		out = append(out, clients{fromPod(""), "pods get all endpoints"})
	}
	return out
}

// internalRules sets the fwmark of internal clients' packets: in mangle INPUT for pods,
// in mangle OUTPUT for the node. INPUT comes after the last routing decision. In OUTPUT the
// kernel routes a packet with a new mark again; table local normally precedes other lookups, so
// the packet stays local. A packet with another program's bits keeps its mark:
//
//	-A INPUT -m conntrack ! --ctstate RELATED,ESTABLISHED -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-INTERNAL
//	-A OUTPUT -m ipvs ! --ipvs -m conntrack ! --ctstate RELATED,ESTABLISHED -m set --match-set KUBE-IPVS-LOCAL dst,dst -j KUBE-IPVS-INTERNAL
//	-A KUBE-IPVS-INTERNAL -i eth0 -j RETURN     (each outer interface)
//	-A KUBE-IPVS-INTERNAL -m mark ! --mark 0x0/0xffff8f9b -j RETURN
//	-A KUBE-IPVS-INTERNAL -m addrtype --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
//	-A KUBE-IPVS-INTERNAL -s 10.244.0.0/16 -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
//
// See internalClients for nodes on which pods are not known.
func (r *ruleset) internalRules(n *Node) []nat.Rule {
	rules := r.skipExternal()
	own := r.cfg.MasqueradeMark | r.cfg.SNAT.Mark | r.cfg.VIPs.Mark
	toMark := "SET --map-set " + Local.In(r.family) + " dst,dst --map-mark"
	rules = append(rules, rule("marked by another program", fmt.Sprintf("-m mark ! --mark 0x0/%#x", ^own), "RETURN"))
	for _, internal := range r.internalClients(n) {
		rules = append(rules, rule(internal.comment, internal.match, toMark))
	}
	return rules
}

// externalLocal writes the chains of externalTrafficPolicy Local. On a node without
// endpoints, external clients may only continue established connections:
//
//	filter -A KUBE-IPVS-INSIDE -i eth0 -j DROP     (each outer interface)
//	filter -A KUBE-IPVS-INSIDE ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j DROP     (if there are none)
//
// If another program may masquerade them, they reach endpoints of other nodes, as under kube-proxy;
// see masqueradesExternal. Our rules do not masquerade them then.
//
// The node's own packets to these addresses are masqueraded, because their source may
// be the VIP. On a node with endpoints, KUBE-IPVS-SENT does so:
//
//	nat    -A KUBE-IPVS-INSIDE -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
//	nat    -A KUBE-IPVS-INSIDE -i eth0 -j RETURN     (each outer interface, if they are not dropped)
//	nat    -A KUBE-IPVS-INSIDE -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j KUBE-MARK-MASQ
func (r *ruleset) externalLocal(n *Node) {
	if r.cfg.marksInternal(n, r.family) {
		const comment = "kubernetes external traffic policy"
		match := notEstablished + " " + r.match(Local, "dst,dst")
		r.jumpIf(nat.Mangle, "INPUT", match, chainInternal, comment)
		if r.usesPortClaims() {
			// These packets must keep the mark that makes the VIP local.
			match += " " + r.notMatch(PortVIPs, "dst")
		}
		r.jumpIf(nat.Mangle, "OUTPUT", "-m ipvs ! --ipvs "+match, chainInternal, comment)
		r.chain(nat.Mangle, chainInternal, r.internalRules(n)...)
	}
	if !r.uses(NoLocalEndpoint) {
		return
	}
	masquerade := []nat.Rule{rule("source is masqueraded", "-m addrtype --src-type LOCAL", ChainMarkMasq)}
	if r.dropsExternal(n) {
		var drop []nat.Rule
		for _, external := range r.externalClients(n) {
			drop = append(drop, rule("internal clients only", external, "DROP"))
		}
		r.chain(nat.Filter, chainInside, drop...)
	} else if r.uses(NodePorts) {
		for _, external := range r.externalClients(n) {
			masquerade = append(masquerade, rule("internal clients only", external, "RETURN"))
		}
	}
	if r.uses(NodePorts) {
		masquerade = append(masquerade, rule("source is masqueraded", r.match(NodePorts, "dst,dst"), ChainMarkMasq))
	}
	r.chain(nat.NAT, chainInside, masquerade...)
}

// dropsExternal reports whether external clients are dropped where a Service under
// externalTrafficPolicy Local has no endpoint on the node.
func (r *ruleset) dropsExternal(n *Node) bool {
	return r.uses(NoLocalEndpoint) && !r.cfg.RemoteFallback && !r.masqueradesExternal(n)
}

// masqueradesExternal reports whether a rule of another program may masquerade external clients on
// the way to endpoints of other nodes. Network plugins such as flannel have such rules. The reply
// then returns through the node, so kube-proxy serves these clients even without an endpoint on
// the node. Rules for sources in the network of an interface that is not an outer one, or among
// the pods, do not match external clients.
func (r *ruleset) masqueradesExternal(n *Node) bool {
	return slices.ContainsFunc(n.Translations[r.family], func(from netip.Prefix) bool {
		if !from.IsValid() {
			return true
		}
		within := func(p netip.Prefix) bool { return p.Bits() <= from.Bits() && p.Contains(from.Addr()) }
		isInner := func(l routing.Link) bool {
			return !slices.Contains(r.outerLinks, l.Name) && slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return within(a.Prefix.Masked()) })
		}
		return !slices.ContainsFunc(r.cfg.LocalTraffic.CIDRs, within) && !slices.ContainsFunc(n.PodCIDRs, within) && !slices.ContainsFunc(n.Inventory.Links, isInner)
	})
}

// clearMarks writes the chains that clear the claim mark and the fwmark after they have taken effect.
//
// The claim mark would route a packet to lo if its endpoint is itself a VIP. It is cleared in filter
// INPUT if possible: a change in OUTPUT makes the kernel route the packet again. In INPUT, only packets
// to VIPs claimed by port lose it: on other packets the mark is another program's. In OUTPUT, after
// IPVS, the destination is an endpoint, so no rule can distinguish the two. If a rule of another
// program uses the bit, OUTPUT therefore clears it only where it would route the packet to lo. The
// outer packets of a tunnel to a VIP are then lost, as under kube-proxy, where such a VIP is local.
//
// The fwmark is cleared in OUTPUT, after IPVS has selected an endpoint and before the packet is
// rerouted. The node's own packets to a remote endpoint are masqueraded there, because their source
// may be the VIP:
//
//	filter -A INPUT -m mark --mark 0x4/0xd -m set --match-set KUBE-IPVS-PORT-IPS dst -j KUBE-IPVS-CLAIMED
//	filter -A KUBE-IPVS-CLAIMED -j MARK --set-xmark 0x0/0x4
//	-A OUTPUT -m mark ! --mark 0x0/0xd -m ipvs --ipvs -j KUBE-IPVS-SENT
//	-A KUBE-IPVS-SENT -m mark ! --mark 0x9/0x9 -j MARK --set-xmark 0x0/0x4     (-m set --match-set KUBE-IPVS-PORT-IPS dst, if used by others)
//	-A KUBE-IPVS-SENT -m mark ! --mark 0x9/0x9 -j RETURN
//	-A KUBE-IPVS-SENT -m addrtype --src-type LOCAL -j MARK --set-xmark 0x4000/0x4000
//	-A KUBE-IPVS-SENT -j MARK --set-xmark 0x0/0x3fff
//	-A KUBE-IPVS-SENT -m connmark --mark 0x20/0x3060 -j MARK --set-xmark 0x20/0x3060     (with reply routing)
func (r *ruleset) clearMarks(n *Node) {
	local, claim := uint32(0), uint32(0)
	if r.cfg.marksInternal(n, r.family) && r.cfg.LocalMark.Value != 0 {
		local = r.cfg.LocalMark.Value
	}
	if r.usesPortClaims() {
		claim = r.cfg.VIPs.Mark
	}
	if local|claim == 0 {
		return
	}
	r.jumpFirst(nat.Mangle, "OUTPUT", fmt.Sprintf("-m mark ! --mark 0x0/%#x -m ipvs --ipvs", local|claim), "KUBE-IPVS-SENT", "kubernetes virtual servers")
	var rules []nat.Rule
	withoutFwmark := ""
	if local != 0 {
		withoutFwmark = fmt.Sprintf("-m mark ! --mark %#[1]x/%#[1]x ", local)
	}
	if claim != 0 {
		unmark := nat.Rule(fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", claim))
		r.jumpIf(nat.Filter, "INPUT", fmt.Sprintf("-m mark --mark %#x/%#x %s", claim, r.cfg.sharedVIPMask(), r.match(PortVIPs, "dst")), "KUBE-IPVS-CLAIMED", "kubernetes claimed ports")
		r.chain(nat.Filter, "KUBE-IPVS-CLAIMED", unmark)
		misrouted := ""
		if n.foreignMark(r.family, func(mark uint32) bool { return mark&claim != 0 }) {
			misrouted = r.match(PortVIPs, "dst") + " "
		}
		rules = append(rules, nat.Rule(withoutFwmark+misrouted)+unmark)
	}
	if local != 0 {
		masq := r.cfg.MasqueradeMark
		rules = append(rules,
			nat.Rule(withoutFwmark+"-j RETURN"),
			rule("the node itself", "-m addrtype --src-type LOCAL", fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", masq)),
			nat.Rule(fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", r.cfg.LocalMark.Mask)))
		if len(r.paths.Bound) > 0 {
			rules = append(rules, nat.Rule(fmt.Sprintf("-m connmark --mark %s -j MARK --set-xmark %s", r.primaryMark(), r.primaryMark())))
		}
	}
	r.chain(nat.Mangle, "KUBE-IPVS-SENT", rules...)
}

// ownSource masquerades the node's own packets to an endpoint on the host network. Such
// packets do not pass KUBE-IPVS-SENT and keep their fwmark. Packets that IPVS has not sent have
// another program's mark, and keep their source:
//
//	nat -A KUBE-POSTROUTING -m mark --mark 0x9/0x9 -m addrtype --src-type LOCAL -m ipvs --ipvs -j MASQUERADE --random-fully
func (r *ruleset) ownSource(n *Node) []nat.Rule {
	v := r.cfg.LocalMark.Value
	if v == 0 || !r.uses(Local) || r.cfg.localMarkTaken(n, r.family) {
		return nil
	}
	return []nat.Rule{rule("the node itself", fmt.Sprintf("-m mark --mark %#[1]x/%#[1]x -m addrtype --src-type LOCAL -m ipvs --ipvs", v), "MASQUERADE --random-fully")}
}

// outerLinks returns the interfaces through which clients on other hosts reach the
// node: uplinks, tunnels, and other interfaces with a network of their own, except pod
// bridges.
func outerLinks(cfg *Config, n *Node, family ip.Family) []string {
	out := uplinks(cfg, n, family)
	for _, l := range n.Inventory.Links {
		if !slices.Contains(out, l.Name) && isOuter(cfg, n, &l) {
			out = append(out, l.Name)
		}
	}
	return out
}

// switches lists the kinds of interfaces that many pods are attached to.
var switches = []string{"bridge", "openvswitch"}

// adapters lists the kinds of interfaces that lead out of the machine.
var adapters = []string{"device", "bond", "team", "vlan"}

// podKinds lists the kinds of interfaces that lead to a pod, or group interfaces that may.
var podKinds = []string{"veth", "netkit", "ipvlan", "ipvtap", "macvlan", "macvtap", "vrf"}

// silentKinds lists the kinds of interfaces through which the node receives no IP packets. Packets
// that ifb has queued enter again through their own interface.
var silentKinds = []string{"dummy", "ifb", "nlmon", "vsockmon", "can", "vcan", "vxcan"}

// isOuter reports whether a link is an outer interface other than an uplink:
//
//   - An adapter is one if it has an address, or if routes over it lead to a gateway (BGP unnumbered).
//   - A VRF device is one if only adapters are attached to it. An attached adapter is one by the same
//     rule as others: table nat sees its packets, other chains see those of the VRF device.
//   - A bridge is one if only adapters are attached to it, and it has an address that is not a
//     single-host one. Any other bridge is for pods or containers.
//   - A link of podKinds is one if it has such an address. The node's end of a pod's link has no
//     address or a single-host one.
//   - All kinds that are not listed above are taken for tunnels, which receive packets of other hosts
//     and often have no address. There are dozens of them, and the kernel gets new ones more often
//     than kinds for pods.
func isOuter(cfg *Config, n *Node, l *routing.Link) bool {
	isAdapter := slices.Contains(adapters, l.Type)
	switch {
	case l.Loopback || l.Master != "" && !isVRF(n, l.Master) || slices.Contains(silentKinds, l.Type) || isPodLink(cfg, n, l):
		return false
	case isVirtualRouter(l):
		return true
	case l.Type == "vrf":
		return extendsAdapter(n, l.Name)
	case slices.Contains(switches, l.Type):
		if !extendsAdapter(n, l.Name) {
			return false
		}
	case !isAdapter && !slices.Contains(podKinds, l.Type):
		return !isPodTap(cfg, n, l)
	}
	return isAdapter && slices.Contains(n.Inventory.Gateways, l.Name) || slices.ContainsFunc(l.Addresses, func(a routing.Address) bool {
		return a.Global && (isAdapter || !a.Prefix.IsSingleIP())
	})
}

// isPodTap reports whether a link is the node's port of a userspace switch for pods: a tap with an
// address in the pods' range. A tap has a MAC address, unlike the tun of flannel's UDP backend, whose
// address is in that range too. Antrea's antrea-gw0 is a tap if Open vSwitch has the datapath type
// netdev; otherwise it is of the kind openvswitch.
func isPodTap(cfg *Config, n *Node, l *routing.Link) bool {
	return l.Type == "tuntap" && l.MAC != "" && inPodRange(cfg, n, l)
}

// isVirtualRouter reports whether a link receives the packets for a virtual MAC address of VRRP
// (RFC 9568): keepalived adds such a macvlan for use_vmac, with single-host addresses while the node
// is the master.
func isVirtualRouter(l *routing.Link) bool {
	return l.Type == "macvlan" && (strings.HasPrefix(l.MAC, "00:00:5e:00:01:") || strings.HasPrefix(l.MAC, "00:00:5e:00:02:"))
}

func isVRF(n *Node, name string) bool {
	return slices.ContainsFunc(n.Inventory.Links, func(l routing.Link) bool { return l.Name == name && l.Type == "vrf" })
}

// extendsAdapter reports whether adapters, and nothing else, are attached to a bridge or a VRF
// device. A bridge then has their network.
func extendsAdapter(n *Node, bridge string) bool {
	ports := portsOf(&n.Inventory, bridge)
	return len(ports) > 0 && !slices.ContainsFunc(ports, func(l routing.Link) bool { return !slices.Contains(adapters, l.Type) })
}

// isPodLink reports whether the configuration identifies a link as a pod link.
func isPodLink(cfg *Config, n *Node, l *routing.Link) bool {
	var cidrs []netip.Prefix
	switch lt := cfg.LocalTraffic; lt.Mode {
	case DetectBridgeInterface:
		return l.Name == lt.Interface
	case DetectInterfaceNamePrefix:
		return lt.Interface != "" && strings.HasPrefix(l.Name, lt.Interface)
	case DetectNodeCIDR:
		cidrs = n.PodCIDRs
	}
	return slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return containsAny(cidrs, a.Prefix.Addr()) })
}
