package trace

import (
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// serverPath is the path of a connection from IPVS to one real server and back.
type serverPath struct {
	*walk
	question Question
	client   packet // as it reached IPVS
	entry    string // interface on which it entered; "": from the node
	key      ipvs.Key
	to       netip.AddrPort
	local    bool           // the real server is on the host network of this node
	seen     netip.AddrPort // source with which the request leaves the node
}

func (b *serverPath) follow(server ipvs.RealServer) ServerPath {
	out := ServerPath{Weight: server.Weight, RealServer: b.to.String(), MaxConnections: server.MaxConnections}
	if server.Weight == 0 {
		out.Verdict = Verdict{Draining, "it accepts no new connections"}
		return out
	}
	if out.limit(b.Connections[b.key][b.to]); out.Verdict.Outcome != "" {
		return out
	}
	p := b.client
	conn := *b.client.conn
	p.conn = &conn
	end := &p
	if out.Verdict = b.dispatch(&p); out.Verdict.Outcome == "" && p.state != Invalid {
		if end, out.Verdict = b.comeBack(&p); end != &p {
			out.ReturnsBy = end.in
		}
	}
	out.Request, b.steps = b.steps, nil
	out.Rules = b.rules
	out.LeavesBy, out.SeenSource, out.Mark = p.out, end.src.Addr().String(), p.mark
	switch {
	case out.Verdict.Outcome != "":
		return out
	case p.state == Invalid:
		out.Verdict = Verdict{Outcome: Sent}
		return out
	}
	b.seen = p.src
	out.ReplyEntersBy = b.reply(end).in
	reply, v := b.answer(&p, end)
	out.Verdict = v
	out.ReplyLeavesBy, out.Reply = reply.out, b.steps
	out.Rules = b.rules
	if out.Verdict.Outcome == Answered {
		b.steps = nil
		if v := b.followNext(&p); v.Outcome != "" {
			out.Verdict, out.Later = v, b.steps
		} else if b.eval.Opened != nil {
			b.eval.Opened(&Connection{b, p})
		}
	}
	return out
}

// limit compares the connections of a real server with its limit. Once
// the limit is reached, the kernel accepts no new ones until fewer than three quarters of it exist
// (ip_vs_unbind_dest in net/netfilter/ipvs/ip_vs_conn.c). Whether this state holds cannot be read.
func (out *ServerPath) limit(c ipvs.Connections) {
	if out.MaxConnections == 0 {
		return
	}
	total, limit := c.Active+c.Inactive, int(out.MaxConnections)
	out.Connections = total
	switch {
	case total >= limit:
		out.Verdict = Verdict{Full, fmt.Sprintf("it has %d connections, and %s is %d", total, service.AnnotationMaxConnections, limit)}
	case 4*total >= 3*limit:
		out.Doubt = fmt.Sprintf("it may refuse new connections: if it has been full, it accepts them again below three quarters of %d", limit)
	}
}

// dispatch follows a request from IPVS to where it leaves the node. IPVS looks up the
// route without source and mark. nat OUTPUT looks it up again with both, because the
// destination differs from conntrack's; mangle OUTPUT does so if it changes the mark.
func (b *serverPath) dispatch(p *packet) Verdict {
	was := p.out
	p.dst, p.virtual, p.in = b.to, &b.key, ""
	way, ok := b.routed(lookup{dst: b.to.Addr(), in: "lo"}, p)
	switch {
	case !ok:
		return Verdict{Dropped, "no route to " + b.to.Addr().String()}
	case way.Local && b.entry == "" && was != "" && was != "lo":
		return Verdict{Dropped, "the endpoint is on this node's host network, but the request is already routed out of " + was}
	case way.Local:
		b.local, p.out = true, "lo"
		if b.entry == "" {
			return b.dispatchHere(p)
		}
		return b.deliverHere(p)
	}
	p.out = way.Link
	b.interfere("sent by IPVS", p)
	b.routedBy = p.mark
	if v := verdict(b.hooks("OUTPUT", p, nat.Raw, nat.Mangle), b.walk); v.Outcome != "" {
		return v
	}
	if p.state != Invalid || p.mark != b.routedBy {
		if way, ok = b.routedAgain(lookup{src: p.src.Addr(), dst: b.to.Addr(), in: "lo", mark: p.mark}, p, way); !ok {
			return Verdict{Dropped, "no route to " + b.to.Addr().String() + " from " + p.src.Addr().String()}
		}
	}
	if way.Local {
		return Verdict{Dropped, "after IPVS it is routed to lo: " + way.String()}
	}
	p.out = way.Link
	if v := b.sendRouted(p); v.Outcome != "" {
		return v
	}
	return b.leaves(p)
}

// sendRouted follows a packet that has its route through the rest of OUTPUT and through
// POSTROUTING, which may masquerade it. It returns a Verdict without an Outcome if the
// packet is sent.
func (b *serverPath) sendRouted(p *packet) Verdict {
	if v := verdict(b.hooks("OUTPUT", p, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	if v := verdict(b.hooks("POSTROUTING", p, nat.Mangle, nat.NAT), b.walk); v.Outcome != "" {
		return v
	}
	if p.phase == Later {
		p.src = b.seen
	}
	return verdict(b.leavesBy(p), b.walk)
}

// dispatchHere follows a request of the node itself to an endpoint on its host network.
// It passes the rest of OUTPUT and POSTROUTING, which may masquerade it, and enters
// again on lo.
func (b *serverPath) dispatchHere(p *packet) Verdict {
	if v := b.sendRouted(p); v.Outcome != "" {
		return v
	}
	return b.throughLoopback(p)
}

// deliverHere follows a request that has entered on an interface to an endpoint on the node's
// host network: it is still in INPUT.
func (b *serverPath) deliverHere(p *packet) Verdict {
	p.in = b.entry
	v := verdict(b.rest("INPUT", p), b.walk)
	p.in = ""
	return v
}

// throughLoopback follows a packet of the node itself that enters again on lo. It keeps
// its route and its connection, so only the hooks act on it.
func (b *serverPath) throughLoopback(p *packet) Verdict {
	if v := verdict(b.loops(p), b.walk); v.Outcome != "" {
		return v
	}
	if v := verdict(b.hooks("INPUT", p, nat.Mangle, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	if v := verdict(b.rest("INPUT", p), b.walk); v.Outcome != "" {
		return v
	}
	p.out = "lo"
	return Verdict{}
}

// followNext follows the client's next packet, which must take the path of the first: if a
// masqueraded connection leaves by another interface, the kernel drops the connection
// (nf_nat_oif_changed).
func (b *serverPath) followNext(first *packet) Verdict {
	p := b.question.packet()
	p.state, p.phase, p.conn, p.in = Established, Later, first.conn, b.entry
	p.src = b.client.conn.source
	if b.entry != "" {
		p.dst = b.client.dst
	}
	if _, v := b.request(p); v.Outcome != "" {
		v.Reason = "the next packet: " + v.Reason
		return v
	}
	local := b.local
	v := b.dispatch(p)
	switch {
	case v.Outcome != "":
		v.Reason = "the next packet: " + v.Reason
		return v
	case p.out != first.out || b.local != local:
		return Verdict{Asymmetric, fmt.Sprintf("the first packet leaves by %s, the next by %s", first.out, p.out)}
	}
	return Verdict{}
}

// leaves checks whether the network outside the node accepts the request.
func (b *serverPath) leaves(p *packet) Verdict {
	if !b.leadsOut(p.out) {
		return Verdict{}
	}
	src := p.src.Addr()
	by := b.deliveredBy(src)
	if b.LinkOf(src) == "" && b.Local(src) {
		return Verdict{Asymmetric, fmt.Sprintf("the request leaves by %s with the VIP %s as its source: the reply goes to the host that has this address", p.out, src)}
	}
	if own := b.directLink(p); by == "" && own != "" && own != p.out {
		return Verdict{Asymmetric, fmt.Sprintf("the request leaves by %s with the source %s, whose own traffic leaves by %s: a network that checks sources drops it", p.out, src, own)}
	}
	if by != "" && by != p.out {
		return Verdict{Asymmetric, fmt.Sprintf("the request leaves by %s with the source %s, which belongs to %s: a network that checks sources drops it; otherwise the reply arrives on %s",
			p.out, src, by, by)}
	}
	return Verdict{}
}

// directLink returns the interface by which a policy rule routes direct traffic of the
// client to the endpoint. It returns "" if there is none, or if the client's address
// is not preserved.
func (b *serverPath) directLink(p *packet) string {
	if b.entry == "" || p.src.Addr() != b.client.src.Addr() {
		return ""
	}
	way, ok, _ := b.route(lookup{src: p.src.Addr(), dst: b.to.Addr(), in: b.entry})
	if !ok || way.Local || way.rule.IIf == "" && way.rule.From.Bits() <= 0 {
		return ""
	}
	return way.Link
}

// reply returns the endpoint's first packet as it enters this node.
func (b *serverPath) reply(request *packet) *packet {
	p := &packet{
		protocol: request.protocol, src: b.to, dst: request.src, in: request.out, conn: request.conn,
		reply: true, state: Established, phase: Reply,
	}
	if b.local {
		p.in = ""
	}
	return p
}

// followReply follows the reply to the client.
func (b *serverPath) followReply(p *packet) Verdict {
	if b.local {
		return b.replyFromNode(p)
	}
	if v := b.bypasses(p); v.Outcome != "" {
		return v
	}
	if v := b.checkHairpin(p); v.Outcome != "" {
		return v
	}
	if v := verdict(b.arrives(p), b.walk); v.Outcome != "" {
		return v
	}
	b.interfere("arrival", p)
	if v := verdict(b.hooks("PREROUTING", p, nat.Raw, nat.Mangle), b.walk); v.Outcome != "" {
		return v
	}
	b.restoreClient(p)
	if why := b.reversePath(p); why != "" {
		b.note("reverse path", p, "", "dropped: %s", why)
		return Verdict{Dropped, "the reply: " + why}
	}
	way, ok := b.routed(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: p.in, mark: p.mark}, p)
	switch {
	case !ok:
		return Verdict{Dropped, "the reply: no route to " + p.dst.Addr().String()}
	case way.Local:
		return b.deliverReply(p)
	case !b.Forwards():
		return Verdict{Dropped, "the reply: " + notForwarding}
	}
	return b.forwardReply(p, way)
}

// bypasses reports replies that bypass this node's IPVS: from an endpoint on the client's
// bridge whose frames bypass the rules, and from a remote endpoint that sees the
// address of an external client.
func (b *serverPath) bypasses(p *packet) Verdict {
	if p.dst != p.conn.source {
		return Verdict{}
	}
	link, _ := b.Link(p.in)
	if p.in == b.entry && link.Type == "bridge" && b.BridgeFilters() {
		if v := verdict(b.switched(p.in, p), b.walk); v.Outcome != "" {
			return v
		}
	}
	if p.in == b.entry && link.Type == "bridge" && !b.BridgeFilters() {
		return Verdict{Dropped, "client and endpoint are on bridge " + p.in + ", whose frames bypass the rules (br_netfilter is not loaded, or bridge-nf-call-iptables or -ip6tables is 0): the client gets a reply from an address that it did not connect to"}
	}
	if b.entry != "" && b.leadsOut(b.entry) && b.leadsOut(p.in) {
		return Verdict{Dropped, "the endpoint, on another node, sees the client's address and replies to it directly, not through this node"}
	}
	return Verdict{}
}

// checkHairpin reports whether the reply of a pod on a bridge to itself is dropped. If
// bridged packets pass the rules, the bridge undoes the masquerading and sends the reply
// back to the port on which it entered (br_nf_pre_routing_finish). This port must be in
// hairpin mode.
func (b *serverPath) checkHairpin(p *packet) Verdict {
	link, _ := b.Link(p.in)
	if b.to.Addr() != p.conn.source.Addr() || p.dst == p.conn.source || link.Type != "bridge" || !b.BridgeFilters() {
		return Verdict{}
	}
	ports := b.ports(p.in)
	hairpin := 0
	for _, port := range ports {
		if b.Hairpin[port] {
			hairpin++
		}
	}
	switch hairpin {
	case len(ports):
		return Verdict{}
	case 0:
		return Verdict{Dropped, "the reply has to leave " + p.in + " by the port on which it entered, and no port is in hairpin mode"}
	}
	if b.assumed("a pod's reply to itself leaves %s by the port on which it entered: %d of %d ports are in hairpin mode, and the pod's port is unknown", p.in, hairpin, len(ports)) {
		return Verdict{Dropped, "the reply has to leave " + p.in + " by the port on which it entered, and that is not in hairpin mode"}
	}
	return Verdict{}
}

// deliverReply follows the reply to a request of the node itself.
func (b *serverPath) deliverReply(p *packet) Verdict {
	if v := verdict(b.hooks("INPUT", p, nat.Mangle, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	b.restoreSource(p)
	if v := verdict(b.rest("INPUT", p), b.walk); v.Outcome != "" {
		return v
	}
	return Verdict{Outcome: Answered}
}

// forwardReply follows a reply through FORWARD, after which IPVS sets the VIP as its source
// and looks up its route again.
func (b *serverPath) forwardReply(p *packet, way found) Verdict {
	p.out = way.Link
	if v := verdict(b.hooks("FORWARD", p, nat.Mangle, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	b.restoreSource(p)
	if v := verdict(b.rest("FORWARD", p), b.walk); v.Outcome != "" {
		return v
	}
	if b.set("net/ipv4/vs/snat_reroute") {
		again, ok := b.routedAgain(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: "lo", mark: p.mark}, p, way)
		if !ok {
			return Verdict{Dropped, "the reply: no route to " + p.dst.Addr().String()}
		}
		p.out = again.Link
	}
	return b.out(p)
}

// replyFromNode follows the reply of an endpoint on the node's host network, which starts
// in OUTPUT.
func (b *serverPath) replyFromNode(p *packet) Verdict {
	b.interfere("sent by the node", p)
	if v := verdict(b.hooks("OUTPUT", p, nat.Raw, nat.Mangle), b.walk); v.Outcome != "" {
		return v
	}
	b.restoreClient(p)
	b.restoreSource(p)
	way, ok := b.routed(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: "lo", mark: p.mark}, p)
	if !ok {
		return Verdict{Dropped, "the reply: no route to " + p.dst.Addr().String()}
	}
	p.out = way.out()
	if v := verdict(b.hooks("OUTPUT", p, nat.Filter, security), b.walk); v.Outcome != "" {
		return v
	}
	if !way.Local {
		return b.out(p)
	}
	if v := verdict(b.hooks("POSTROUTING", p, nat.Mangle), b.walk); v.Outcome != "" {
		return v
	}
	if v := b.throughLoopback(p); v.Outcome != "" {
		return v
	}
	return Verdict{Outcome: Answered}
}

// restoreClient does what conntrack does to the reply of a masqueraded connection.
func (b *serverPath) restoreClient(p *packet) {
	if p.dst != p.conn.source {
		p.dst = p.conn.source
		b.note("conntrack", p, "", "destination becomes the client's again")
	}
}

// restoreSource does what IPVS does to a reply.
func (b *serverPath) restoreSource(p *packet) {
	p.src = b.client.dst
	b.note("IPVS", p, "", "source becomes the VIP")
}

// out follows a reply to where it leaves the node.
func (b *serverPath) out(p *packet) Verdict {
	if v := verdict(b.hooks("POSTROUTING", p, nat.Mangle), b.walk); v.Outcome != "" {
		return v
	}
	if v := verdict(b.leavesBy(p), b.walk); v.Outcome != "" {
		return v
	}
	if p.out != b.entry {
		return Verdict{Asymmetric, fmt.Sprintf("the request entered by %s, the reply leaves by %s", b.entry, p.out)}
	}
	return Verdict{Outcome: Answered}
}
