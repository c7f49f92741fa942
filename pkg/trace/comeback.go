package trace

import (
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// Policy rules may route a request out of the node although the endpoint is a pod of this
// node: AWS security groups for pods give each pod a table of its own, which only packets of
// its interfaces use. The network returns the request on the interface by which the
// endpoint's own packets leave. There conntrack sees a second connection from the same
// client port to the same endpoint. It has another source port (get_unique_tuple), and none of
// the marks of the first one. IPVS does not know it: by its addresses, a reply to the client's
// own address is one of the first connection (ip_vs_out).

// home returns the interface on which the network delivers packets for a pod of this node, or
// "" for other addresses. A pod has a route of its own, in any table, or is on a bridge.
func (n *Node) home(pod netip.Addr) string {
	read(n, homeKey(pod))
	bits, link := 0, ""
	for i := range n.Routes {
		r := &n.Routes[i]
		if r.Local || r.Via.IsValid() || !r.Dst.Contains(pod) || r.Dst.Bits() <= bits || n.leadsOut(r.Link) {
			continue
		}
		if l, _ := n.Link(r.Link); r.Dst.IsSingleIP() || l.Type == "bridge" {
			bits, link = r.Dst.Bits(), r.Link
		}
	}
	if link == "" {
		return ""
	}
	if uplink := n.deliveredBy(pod); uplink != "" {
		return uplink
	}
	out, _ := n.RouteOf(pod, n.Family.Unspecified(), link)
	return out.Link
}

// comeBack follows a request that has left the node, if the network returns it, to where the
// endpoint gets it. It returns the request itself if it does not return.
func (b *serverPath) comeBack(request *packet) (*packet, Verdict) {
	in := b.home(b.to.Addr())
	if in == "" || b.local || !b.leadsOut(request.out) {
		return request, Verdict{}
	}
	if b.entry != "" && b.leadsOut(b.entry) && request.src == b.client.src {
		return request, Verdict{Asymmetric, fmt.Sprintf("the request leaves by %s with the client's address %s: a network that checks sources drops it", request.out, request.src.Addr())}
	}
	p := &packet{
		protocol: request.protocol, src: request.src, dst: b.to, in: in,
		conn: &connection{source: request.src, destination: request.dst, random: request.conn.random}, state: New, phase: Request,
	}
	b.note("network", p, "", "returns the request by %s", in)
	if v := b.forwardedPlainly(p, "the request"); v.Outcome != "" {
		return p, v
	}
	if b.leadsOut(p.out) || p.out == "lo" {
		return p, Verdict{Dropped, fmt.Sprintf("the network returns the request by %s, from where it does not reach the endpoint", in)}
	}
	if v := verdict(b.hooks("POSTROUTING", p, nat.Mangle, nat.NAT), b.walk); v.Outcome != "" {
		return p, v
	}
	return p, verdict(b.leavesBy(p), b.walk)
}

// answer follows the endpoint's reply. end is the request as the endpoint gets it, which
// differs from the first packet if the network has returned that.
func (b *serverPath) answer(first, end *packet) (*packet, Verdict) {
	if end != first {
		reply := b.reply(end)
		if v := b.replyOfSecond(reply); v.Outcome != "" {
			return reply, v
		}
	}
	reply := b.reply(first)
	return reply, b.followReply(reply)
}

// forwardedPlainly follows a packet of the second connection to the end of FORWARD or, with the
// output interface lo, of INPUT.
func (b *serverPath) forwardedPlainly(p *packet, what string) Verdict {
	if v := verdict(b.arrives(p), b.walk); v.Outcome != "" {
		return v
	}
	b.interfere("arrival", p)
	if v := verdict(b.hooks("PREROUTING", p, nat.Raw, nat.Mangle, nat.NAT), b.walk); v.Outcome != "" {
		return v
	}
	if p.reply {
		b.restoreClient(p)
	}
	if why := b.reversePath(p); why != "" {
		b.note("reverse path", p, "", "dropped: %s", why)
		return Verdict{Dropped, what + " of the second connection: " + why}
	}
	way, ok := b.routed(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: p.in, mark: p.mark}, p)
	switch {
	case !ok:
		return Verdict{Dropped, what + " of the second connection: no route to " + p.dst.Addr().String()}
	case way.Local:
		p.out = "lo"
		return verdict(b.hooks("INPUT", p, nat.Mangle, nat.Filter, security), b.walk)
	case !b.Forwards():
		return Verdict{Dropped, notForwarding}
	}
	p.out = way.Link
	if v := verdict(b.hooks("FORWARD", p, nat.Mangle, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	return verdict(b.rest("FORWARD", p), b.walk)
}

// replyOfSecond follows the endpoint's reply in the second connection. It returns a Verdict
// without an Outcome if the reply leaves the node for the source of the request: the network
// returns it too, as a reply of the first connection.
func (b *serverPath) replyOfSecond(p *packet) Verdict {
	if v := b.forwardedPlainly(p, "the reply"); v.Outcome != "" {
		return v
	}
	const second = "the network returns the request as a second connection"
	first := p.dst == b.client.src && !p.conn.random
	switch {
	case p.out == "lo" && !first:
		return Verdict{Dropped, second + ": the node takes the reply for its own"}
	case !first && b.leadsOut(p.out):
		return verdict(b.hooks("POSTROUTING", p, nat.Mangle), b.walk)
	case !first:
		return Verdict{Dropped, second + ": the client gets the reply from an address that it did not connect to"}
	}
	b.restoreSource(p)
	if p.out == "lo" {
		return Verdict{Outcome: Answered}
	}
	if b.set("net/ipv4/vs/snat_reroute") {
		way, ok := b.routed(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: "lo", mark: p.mark}, p)
		if !ok {
			return Verdict{Dropped, "the reply: no route to " + p.dst.Addr().String()}
		}
		p.out = way.Link
	}
	v := b.out(p)
	if v.Outcome == Asymmetric {
		v.Reason = second + ", without the mark of the first: " + v.Reason
	}
	return v
}
