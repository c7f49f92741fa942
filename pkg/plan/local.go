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

// Under externalTrafficPolicy Local an address and port has two sets of
// endpoints: external clients get those of this node and keep their address;
// this node's pods and the node itself get all of them. IPVS has one list of
// real servers for an address and port. It holds the node's endpoints, as
// under kube-proxy, and internal clients are led to a second virtual server,
// found by a fwmark. IPVS compares the whole mark of a packet, so a packet that
// another program has marked, and one whose fwmark was lost, gets what
// kube-proxy gives it. docs/concepts/eni.md shows a packet's way.

// LocalMark describes the fwmarks of the second virtual servers: those that
// have all bits of Value and none outside Mask. The bits of Mask that are not
// in Value hold an index. The zero LocalMark turns them off: then internal
// clients get the node's endpoints too.
type LocalMark struct{ Value, Mask uint32 }

// Most is the greatest index.
func (m LocalMark) Most() uint32 {
	if m.Value == 0 {
		return 0
	}
	return 1<<bits.OnesCount32(m.Mask&^m.Value) - 1
}

// Of is the mark with an index from 1 to Most.
func (m LocalMark) Of(number uint32) uint32 { return m.Value | deposit(number, m.Mask&^m.Value) }

// Number is the index of a mark, with or without the masquerade bit; false if
// it is no such mark.
func (m LocalMark) Number(mark, masquerade uint32) (uint32, bool) {
	mark &^= masquerade
	if m.Value == 0 || mark&m.Value != m.Value || mark&^m.Mask != 0 {
		return 0, false
	}
	n := gather(mark, m.Mask&^m.Value)
	return n, n > 0
}

// Internal is what a Service needs for internal clients of one of its addresses
// and ports. It becomes a virtual server once it has a fwmark.
type Internal struct {
	Key   ipvs.Key // the address and port
	Right Right
	ipvs.VirtualServer
	RealServers    []RealServer     // of the whole cluster
	MaxConnections uint32           // see VirtualServer
	Endpoints      []netip.AddrPort // see VirtualServer
	Lost           []netip.AddrPort // see VirtualServer
	Masquerade     bool             // the client's address is not kept
}

// addInternal adds one where the node has endpoints. By a node port internal
// clients are masqueraded; so is the node itself at every address, see sent.
func (b *partBuilder) addInternal(key ipvs.Key, right Right, eps chosen, nodePort bool) {
	if !b.service.ExternalLocal || len(eps.local) == 0 || b.cfg.LocalMark.Value == 0 {
		return
	}
	b.part.Internal = append(b.part.Internal, Internal{
		Key: key, Right: right, VirtualServer: internalServer(b.cfg, b.service),
		RealServers: b.realServers(key, eps.cluster), MaxConnections: b.service.MaxConnections, Endpoints: b.endpoints, Lost: b.lost,
		Masquerade: nodePort || !b.keepsClient(),
	})
}

// internalServer implements session affinity by hashing the client's address: a
// persistent virtual server with a fwmark does not map ports
// (ip_vs_sched_persist compares with the virtual server's own port, which it
// does not have). The mh scheduler moves few clients when an endpoint is added
// or removed; without its fallback it would refuse clients of a draining one.
func internalServer(cfg *Config, s *service.Service) ipvs.VirtualServer {
	if s.AffinitySeconds > 0 {
		return ipvs.VirtualServer{Scheduler: "mh", Flags: ipvs.FlagSched1}
	}
	return virtualServer(cfg, s)
}

// Numbered returns the part with a virtual server for each Internal whose
// address and port has an index in numbers. Internal clients of the others get
// the node's endpoints.
func Numbered(cfg *Config, part Part, numbers map[ipvs.Key]uint32) Part {
	if len(part.Internal) == 0 {
		return part
	}
	part.VirtualServers, part.Members = slices.Clone(part.VirtualServers), slices.Clone(part.Members)
	for _, in := range part.Internal {
		if n, ok := numbers[in.Key]; ok {
			part.addNumbered(cfg, in, cfg.LocalMark.Of(n))
		}
	}
	part.Internal = nil
	part.sort()
	return part
}

// addNumbered includes the bit that masquerades where that is asked for: the set
// replaces the packet's whole mark.
func (p *Part) addNumbered(cfg *Config, in Internal, mark uint32) {
	if in.Masquerade {
		mark |= cfg.MasqueradeMark
	}
	family := in.Key.Family()
	p.Members = append(p.Members, Member{Set: Local.In(family), Entry: entryOf(in.Key), Mark: mark})
	p.VirtualServers = append(p.VirtualServers, VirtualServer{
		Key:           ipvs.Key{Addr: family.Unspecified(), FWMark: mark},
		Right:         in.Right,
		VirtualServer: in.VirtualServer, RealServers: in.RealServers, MaxConnections: in.MaxConnections, Endpoints: in.Endpoints, Lost: in.Lost,
	})
}

// external lists matches for external clients in filter INPUT and nat
// PREROUTING. Whatever enters by an interface that leads out of the node is
// external: pods of other nodes reach a VIP through their own node, and a node
// port by choosing this node. Elsewhere, what is not known to be a pod is
// external too.
func (r *ruleset) external(n *Node) []string {
	var out []string
	for _, link := range r.outerLinks {
		out = append(out, "-i "+link)
	}
	const notFromNode = "-m addrtype ! --src-type LOCAL"
	if notPod, ok := r.notLocal(n); ok {
		return append(out, notPod(notFromNode))
	}
	if len(out) == 0 {
		return []string{notFromNode}
	}
	return out
}

// internalRules put the fwmark on packets of internal clients, in mangle INPUT
// for pods and in mangle OUTPUT for the node: behind every routing decision, so
// that no policy rule sees it. A packet with bits of another program keeps its
// mark:
//
//	-A KUBE-IPVS-INTERNAL -i eth0 -j RETURN     (each interface that leads out)
//	-A KUBE-IPVS-INTERNAL -m mark ! --mark 0x0/0xffff8f9b -j RETURN
//	-A KUBE-IPVS-INTERNAL -m addrtype --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
//	-A KUBE-IPVS-INTERNAL -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
//
// Where neither pods nor the interfaces that lead out are known, only the node
// is internal. With reply routing, a mark with the masquerade bit binds the flow as
// KUBE-IPVS-BIND does, which does not see that bit:
//
//	-A KUBE-IPVS-INTERNAL -m mark --mark 0x4000/0x4000 -m set --match-set KUBE-IPVS-REPLY-SRC src -j CONNMARK --set-xmark 0x20/0x3060
func (r *ruleset) internalRules(n *Node) []nat.Rule {
	var rules []nat.Rule
	for _, link := range r.outerLinks {
		rules = append(rules, rule("external clients", "-i "+link, "RETURN"))
	}
	own := r.cfg.MasqueradeMark | r.cfg.SNAT.Mark | r.cfg.VIPs.Mark
	toMark := "SET --map-set " + Local.In(r.family) + " dst,dst --map-mark"
	rules = append(rules,
		rule("marked by another program", fmt.Sprintf("-m mark ! --mark 0x0/%#x", ^own), "RETURN"),
		rule("the node gets all endpoints", "-m addrtype --src-type LOCAL", toMark))
	const pods, notNode = "pods get all endpoints", "-m addrtype ! --src-type LOCAL"
	if fromPod, ok := r.local(n); ok {
		rules = append(rules, rule(pods, fromPod(notNode), toMark))
	} else if len(r.outerLinks) > 0 {
		rules = append(rules, rule(pods, notNode, toMark))
	}
	if len(r.paths.Bound) > 0 {
		rules = append(rules, r.bindMasqueraded())
	}
	return rules
}

// externalLocal writes the chains of externalTrafficPolicy Local. From external
// clients a node without endpoints takes only what belongs to an established
// connection:
//
//	filter -A KUBE-IPVS-INSIDE -i eth0 -j DROP
//	filter -A KUBE-IPVS-INSIDE ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j DROP
//
// What the node itself sends there is masqueraded, as its source may be the VIP.
// Where it has endpoints, KUBE-IPVS-SENT does that:
//
//	nat    -A KUBE-IPVS-INSIDE -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
//	nat    -A KUBE-IPVS-INSIDE -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j KUBE-MARK-MASQ
func (r *ruleset) externalLocal(n *Node) {
	if r.uses(Local) {
		const comment = "kubernetes external traffic policy"
		match := notEstablished + " " + r.match(Local, "dst,dst")
		r.jumpIf(nat.Mangle, "INPUT", match, "KUBE-IPVS-INTERNAL", comment)
		if r.usesClaims() {
			// Its mark must stay the one that makes the VIP local.
			match += " " + r.notMatch(PortVIPs, "dst")
		}
		r.jumpIf(nat.Mangle, "OUTPUT", match, "KUBE-IPVS-INTERNAL", comment)
		r.chain(nat.Mangle, "KUBE-IPVS-INTERNAL", r.internalRules(n)...)
	}
	if !r.uses(NoLocalEndpoint) {
		return
	}
	var drop []nat.Rule
	for _, external := range r.external(n) {
		drop = append(drop, rule("only pods and nodes", external, "DROP"))
	}
	r.chain(nat.Filter, "KUBE-IPVS-INSIDE", drop...)
	masquerade := []nat.Rule{rule("source is masqueraded", "-m addrtype --src-type LOCAL", "KUBE-MARK-MASQ")}
	if r.uses(NodePorts) {
		masquerade = append(masquerade, rule("source is masqueraded", r.match(NodePorts, "dst,dst"), "KUBE-MARK-MASQ"))
	}
	r.chain(nat.NAT, "KUBE-IPVS-INSIDE", masquerade...)
}

// sent clears the marks that have done their work once IPVS has chosen an
// endpoint, before the route is looked up again. The claim mark would send a
// packet for an endpoint that is itself a VIP to lo. What the node itself sends
// to a remote endpoint is masqueraded, as its source may be the VIP:
//
//	-A OUTPUT -m mark ! --mark 0x0/0xd -m ipvs --ipvs -j KUBE-IPVS-SENT
//	-A KUBE-IPVS-SENT -m mark ! --mark 0x9/0x9 -j MARK --set-xmark 0x0/0x4
//	-A KUBE-IPVS-SENT -m mark ! --mark 0x9/0x9 -j RETURN
//	-A KUBE-IPVS-SENT -m addrtype --src-type LOCAL -j MARK --set-xmark 0x4000/0x4000
//	-A KUBE-IPVS-SENT -j MARK --set-xmark 0x0/0x3fff
//	-A KUBE-IPVS-SENT -m connmark --mark 0x20/0x3060 -j MARK --set-xmark 0x20/0x3060     (with reply routing)
func (r *ruleset) sent() {
	local, claim := uint32(0), uint32(0)
	if r.uses(Local) && r.cfg.LocalMark.Value != 0 {
		local = r.cfg.LocalMark.Value
	}
	if r.usesClaims() {
		claim = r.cfg.VIPs.Mark
	}
	if local|claim == 0 {
		return
	}
	r.jumpIf(nat.Mangle, "OUTPUT", fmt.Sprintf("-m mark ! --mark 0x0/%#x -m ipvs --ipvs", local|claim), "KUBE-IPVS-SENT", "kubernetes virtual servers")
	var rules []nat.Rule
	notLocal := ""
	if local != 0 {
		notLocal = fmt.Sprintf("-m mark ! --mark %#[1]x/%#[1]x ", local)
	}
	if claim != 0 {
		rules = append(rules, nat.Rule(notLocal+fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", claim)))
	}
	if local != 0 {
		masq := r.cfg.MasqueradeMark
		rules = append(rules,
			nat.Rule(notLocal+"-j RETURN"),
			rule("the node itself", "-m addrtype --src-type LOCAL", fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", masq)),
			nat.Rule(fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", r.cfg.LocalMark.Mask)))
		if len(r.paths.Bound) > 0 {
			rules = append(rules, nat.Rule(fmt.Sprintf("-m connmark --mark %s -j MARK --set-xmark %s", r.main(), r.main())))
		}
	}
	r.chain(nat.Mangle, "KUBE-IPVS-SENT", rules...)
}

// ownSource masquerades what the node itself sends to an endpoint in its own
// network: there KUBE-IPVS-SENT does not see it, and it keeps its fwmark:
//
//	nat -A KUBE-POSTROUTING -m mark --mark 0x9/0x9 -m addrtype --src-type LOCAL -j MASQUERADE --random-fully
func (r *ruleset) ownSource() []nat.Rule {
	v := r.cfg.LocalMark.Value
	if v == 0 || !r.uses(Local) {
		return nil
	}
	return []nat.Rule{rule("the node itself", fmt.Sprintf("-m mark --mark %#[1]x/%#[1]x -m addrtype --src-type LOCAL", v), "MASQUERADE --random-fully")}
}

func (r *ruleset) notMatch(set SetName, flags string) string {
	return fmt.Sprintf("-m set ! --match-set %s %s", set.In(r.family), flags)
}

// outerLinks are the interfaces that clients of other hosts enter by: uplinks,
// tunnels, and whatever else has a network of its own and is no bridge of pods.
func outerLinks(cfg *Config, n *Node, family ip.Family) []string {
	out := uplinks(cfg, n, family)
	for _, l := range n.Inventory.Links {
		if !slices.Contains(out, l.Name) && leadsOut(cfg, n, &l) {
			out = append(out, l.Name)
		}
	}
	return out
}

// tunnels are kinds of interfaces by which other nodes' packets come.
var tunnels = []string{"vxlan", "geneve", "ipip", "ip6tnl", "sit", "gre", "ip6gre", "wireguard", "tuntap"}

// switches are kinds of interfaces that many pods are attached to.
var switches = []string{"bridge", "openvswitch"}

// leadsOut reports whether a link is not for pods of this node. The node's end
// of a pod's link has no address, or one of a single host; a bridge of pods has
// an address of the pods' network.
func leadsOut(cfg *Config, n *Node, l *routing.Link) bool {
	if l.Loopback || l.Master != "" || l.Type == "dummy" || isPodLink(cfg, n, l) {
		return false
	}
	if slices.Contains(tunnels, l.Type) {
		return true
	}
	return !slices.Contains(switches, l.Type) && slices.ContainsFunc(l.Addresses, func(a routing.Address) bool {
		return a.Global && !a.Prefix.IsSingleIP()
	})
}

// isPodLink reports whether the configuration names a link as one of pods.
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
