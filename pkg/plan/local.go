package plan

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Under externalTrafficPolicy Local one address and port means two things: who
// comes from outside gets the endpoints of this node, with his address kept;
// pods and the node itself get all endpoints. IPVS has one list of real servers
// for an address and port, so those from outside are led to a second virtual
// server, by a mark. docs/eni.md shows a packet's way.

// LocalMark says which marks lead to the second virtual servers: those that
// have all bits of Value and none outside of Mask. The bits of Mask that are
// not in Value count. The zero LocalMark is none: then a node with endpoints
// serves everybody by its own.
//
// IPVS compares a packet's whole mark. Value is what keeps somebody else's
// mark, or one of ours for another purpose, from being taken for a number.
type LocalMark struct{ Value, Mask uint32 }

// Most is the greatest number.
func (m LocalMark) Most() uint32 {
	if m.Value == 0 {
		return 0
	}
	return 1<<bits.OnesCount32(m.Mask&^m.Value) - 1
}

// Of is the mark with a number from 1 to Most.
func (m LocalMark) Of(number uint32) uint32 { return m.Value | deposit(number, m.Mask&^m.Value) }

// Number is the number of a mark, masqueraded or not; false if it has none.
func (m LocalMark) Number(mark, masquerade uint32) (uint32, bool) {
	mark &^= masquerade
	if m.Value == 0 || mark&m.Value != m.Value || mark&^m.Mask != 0 {
		return 0, false
	}
	n := gather(mark, m.Mask&^m.Value)
	return n, n > 0
}

// Outside is what a Service needs for who comes from outside to one of its
// addresses and ports. It becomes a virtual server once it has a number.
type Outside struct {
	Key   ipvs.Key // the address and port
	Right Right
	ipvs.VirtualServer
	RealServers []RealServer     // those on this node
	Endpoints   []netip.AddrPort // see VirtualServer
	Masquerade  bool             // the client's address is not kept
}

// addOutside adds one if there is an endpoint on this node in whatever state:
// its connections go on while it is not ready, and end with the virtual server.
func (b *partBuilder) addOutside(key ipvs.Key, right Right, eps chosen) {
	if !b.service.ExternalLocal || !eps.here || b.cfg.LocalMark.Value == 0 {
		return
	}
	o := Outside{
		Key: key, Right: right, VirtualServer: outsideServer(b.cfg, b.service),
		RealServers: b.realServers(key, eps.local), Endpoints: b.endpoints, Masquerade: !b.keepsClient(),
	}
	b.part.Outside = append(b.part.Outside, o)
}

// outsideServer has another way to session affinity: a persistent virtual
// server with a mark does not map ports (ip_vs_sched_persist compares with the
// virtual server's own port, which it does not have). Hashing the client's
// address leads him to the same endpoint, and mh moves few when one comes or
// goes. Without its fallback it would refuse those of an endpoint that drains.
func outsideServer(cfg *Config, s *service.Service) ipvs.VirtualServer {
	if s.AffinitySeconds > 0 {
		return ipvs.VirtualServer{Scheduler: "mh", Flags: ipvs.FlagSched1}
	}
	return virtualServer(cfg, s)
}

// Numbered gives each of a part's Outside its virtual server, by the number
// that its address and port has. What has none is served to everybody by the
// endpoints of this node, if there are any.
func Numbered(cfg *Config, part Part, numbers map[ipvs.Key]uint32) Part {
	if len(part.Outside) == 0 {
		return part
	}
	part.VirtualServers, part.Members = slices.Clone(part.VirtualServers), slices.Clone(part.Members)
	for _, o := range part.Outside {
		if n, ok := numbers[o.Key]; ok {
			part.addNumbered(cfg, o, cfg.LocalMark.Of(n))
		} else if active(o.RealServers) {
			at := slices.IndexFunc(part.VirtualServers, func(vs VirtualServer) bool { return vs.Key == o.Key })
			part.VirtualServers[at].RealServers = o.RealServers
		}
	}
	part.Outside = nil
	part.sort()
	return part
}

// addNumbered writes the mark that postrouting acts on as well, where it is
// asked for: the packet's whole mark is replaced.
func (p *Part) addNumbered(cfg *Config, o Outside, mark uint32) {
	if o.Masquerade {
		mark |= cfg.MasqueradeMark
	}
	family := o.Key.Family()
	p.Members = append(p.Members, Member{Set: Local.In(family), Entry: entryOf(o.Key), Mark: mark})
	p.VirtualServers = append(p.VirtualServers, VirtualServer{
		Key:           ipvs.Key{Addr: family.Unspecified(), FWMark: mark},
		Right:         o.Right,
		VirtualServer: o.VirtualServer, RealServers: o.RealServers, Endpoints: o.Endpoints,
	})
}

// outside matches who comes from outside of the cluster: neither from a pod
// nor from the node. Where pods cannot be told from others, it is who enters
// by an interface that leads out: the main table's, or an ENI. To a node port
// another node's pod is from outside, too: "clients sending to a NodePort from
// within the cluster may need to take traffic policy into account when picking a
// node", and upstream's tests ask for it. By the cluster's CIDR it cannot be told
// from this node's pods, so for node ports the interface decides as well.
func (r *ruleset) outside(n *Node) []string {
	const notFromNode = "-m addrtype ! --src-type LOCAL"
	var byLink []string
	for _, link := range uplinks(r.cfg, n, r.family) {
		byLink = append(byLink, "-i "+link+" "+notFromNode)
	}
	notLocal, ok := r.notLocal(n)
	switch {
	case ok && r.cfg.LocalTraffic.Mode == DetectClusterCIDR:
		matches := []string{notLocal(notFromNode)}
		for _, m := range byLink {
			matches = append(matches, m+" "+r.match(NodePorts, "dst,dst"))
		}
		return matches
	case ok:
		return []string{notLocal(notFromNode)}
	case len(byLink) == 0:
		return []string{notFromNode}
	}
	return byLink
}

// externalLocal tells inside and outside apart. What is from outside gets its
// number behind the routing and the reverse-path check, so that no policy rule
// acts on it, and behind KUBE-IPVS-BIND:
//
//	mangle -A KUBE-IPVS-OUTSIDE ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
//	mangle -A KUBE-IPVS-OUTSIDE -i eth0 -m addrtype ! --src-type LOCAL -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j SET --map-set …
//
// From outside, a node without endpoints takes only what belongs to a connection
// that it has:
//
//	filter -A KUBE-IPVS-INSIDE ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP
func (r *ruleset) externalLocal(n *Node) {
	var number, drop []nat.Rule
	for _, outside := range r.outside(n) {
		number = append(number, rule("only endpoints of this node", outside, "SET --map-set "+Local.In(r.family)+" dst,dst --map-mark"))
		drop = append(drop, rule("only pods and nodes", outside+" -m conntrack ! --ctstate RELATED,ESTABLISHED", "DROP"))
	}
	if r.cfg.LocalMark.Value == 0 {
		number = nil
	}
	r.chain(nat.Mangle, "KUBE-IPVS-OUTSIDE", number...)
	r.chain(nat.NAT, "KUBE-IPVS-INSIDE", r.insideRules(n)...)
	r.chain(nat.Filter, "KUBE-IPVS-INSIDE", drop...)
	r.chain(nat.Mangle, "KUBE-IPVS-SENT", r.sentRules()...)
}

// insideRules masquerade what is from inside where the endpoint would answer past
// this node: what the node sends itself, and what a pod sends that is elsewhere, or
// to a node port, which it may have come to by a tunnel. This node's own pods keep
// their address, as with a cluster IP. Where it is not known who is a pod, or which
// interfaces lead out of the node, nobody can be told from a client that does not
// answer by this node:
//
//	-A KUBE-IPVS-INSIDE ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j RETURN
//	-A KUBE-IPVS-INSIDE -i eth0 -j KUBE-MARK-MASQ     (each interface that leads out)
//	-A KUBE-IPVS-INSIDE -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
//	-A KUBE-IPVS-INSIDE -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j KUBE-MARK-MASQ
func (r *ruleset) insideRules(n *Node) []nat.Rule {
	const masqueraded, target = "source is masqueraded", "KUBE-MARK-MASQ"
	var rules []nat.Rule
	for _, outside := range r.outside(n) {
		rules = append(rules, rule("client address kept", outside, "RETURN"))
	}
	links := uplinks(r.cfg, n, r.family)
	if _, known := r.notLocal(n); !known || len(links) == 0 {
		return append(rules, rule(masqueraded, "", target))
	}
	for _, link := range links {
		rules = append(rules, rule(masqueraded, "-i "+link, target))
	}
	return append(rules,
		rule(masqueraded, "-m addrtype --src-type LOCAL", target),
		rule(masqueraded, r.match(NodePorts, "dst,dst"), target))
}

// sentRules take the number off behind IPVS, before the route is looked up
// again. Should the packet go to an endpoint elsewhere, then IPVS did not find
// the number, as a policy engine has changed the mark: masqueraded, it is
// answered at least.
//
//	-A KUBE-IPVS-SENT -m mark ! --mark 0x9/0x9 -j RETURN
//	-A KUBE-IPVS-SENT -m addrtype --src-type LOCAL -j RETURN
//	-A KUBE-IPVS-SENT -m set ! --match-set KUBE-LOOP-BACK dst,dst,dst -j MARK --set-xmark 0x4000/0x4000
//	-A KUBE-IPVS-SENT -j MARK --set-xmark 0x0/0x3fff
func (r *ruleset) sentRules() []nat.Rule {
	m := r.cfg.LocalMark
	if m.Value == 0 {
		return nil
	}
	return []nat.Rule{
		nat.Rule(fmt.Sprintf("-m mark ! --mark %#[1]x/%#[1]x -j RETURN", m.Value)),
		rule("the mark of a program on this node", "-m addrtype --src-type LOCAL", "RETURN"),
		rule("the number was not found", r.notMatch(LoopBack, "dst,dst,dst"), fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", r.cfg.MasqueradeMark)),
		nat.Rule(fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", m.Mask)),
	}
}

// invalidRules go before those of KUBE-IPVS-INVALID, where a number tells who
// comes from outside:
//
//	-A KUBE-IPVS-INVALID -m mark --mark 0x9/0x4009 -m set --match-set KUBE-IPVS-LOCAL dst,dst -j RETURN
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-IPVS-LOCAL dst,dst -j DROP
//	-A KUBE-IPVS-INVALID -m set --match-set KUBE-IPVS-NO-LOCAL dst,dst -j DROP
func (r *ruleset) invalidRules() []nat.Rule {
	m := r.cfg.LocalMark
	if m.Value == 0 {
		return nil
	}
	kept := fmt.Sprintf("-m mark --mark %#x/%#x %s", m.Value, m.Value|r.cfg.MasqueradeMark, r.match(Local, "dst,dst"))
	return []nat.Rule{
		rule("client address kept", kept, "RETURN"),
		rule("cannot be masqueraded", r.match(Local, "dst,dst"), "DROP"),
		rule("cannot be masqueraded", r.match(NoLocalEndpoint, "dst,dst"), "DROP"),
	}
}

func (r *ruleset) notMatch(set SetName, flags string) string {
	return fmt.Sprintf("-m set ! --match-set %s %s", set.In(r.family), flags)
}
