package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Question is the connection to explain.
type Question struct {
	Protocol ip.Protocol
	From     netip.Addr
	To       netip.AddrPort
	// In is the interface on which the request enters. If it is "", the route back to
	// From decides. It is ignored if From is an address of the node.
	In string
	// Optional fields.
	FromPort uint16
	// SourceFixed means that the client, a process of the node, has bound From. Without it, the
	// kernel chooses the source of the node's own packets.
	SourceFixed bool
	NotEcho     bool   // of ICMP: neither a ping nor an error
	State       State  // New if not given
	Reply       bool   // the packet is a reply: To opened the connection to From
	Mark        uint32 // that the packet arrives with
	ConnMark    uint32
}

// sourcePort is the client's port if none is given.
const sourcePort = 40000

// Explanation is the path of a connection.
type Explanation struct {
	Request  string   `json:"request"`
	Service  string   `json:"service,omitempty"`  // NAMESPACE/NAME:PORT; "" if unknown or not a Service
	EntersBy string   `json:"entersBy,omitempty"` // "": the client is the node itself
	Steps    []Step   `json:"steps"`
	Doubts   []string `json:"doubts,omitempty"` // what could not be evaluated and was assumed not to match
	// VirtualServer is empty if the request does not reach one.
	VirtualServer string       `json:"virtualServer,omitempty"`
	Scheduler     string       `json:"scheduler,omitempty"`
	RealServers   []ServerPath `json:"realServers,omitempty"`
	// Link is where a request without a virtual server goes: the interface by which it
	// leaves, or "lo" if it is delivered to the node.
	Link string `json:"link,omitempty"`
	// SeenSource is the address with which such a request leaves.
	SeenSource string `json:"seenSource,omitempty"`
	// Verdict is where the request ends, or the worst verdict of the real servers that accept
	// connections.
	Verdict Verdict `json:"verdict"`
}

// ServerPath is the path through one real server.
type ServerPath struct {
	RealServer string `json:"realServer"`
	Pod        string `json:"pod,omitempty"`  // NAMESPACE/NAME
	Host       string `json:"node,omitempty"` // the pod's node
	Weight     int    `json:"weight"`         // 0: no new connections
	// MaxConnections is the limit of Connections, which counts closed ones that IPVS still
	// tracks, too. 0: no limit, and they are not counted.
	MaxConnections uint32 `json:"maxConnections,omitempty"`
	Connections    int    `json:"connections,omitempty"`
	Doubt          string `json:"doubt,omitempty"` // why it may refuse the connection
	LeavesBy       string `json:"leavesBy,omitempty"`
	// ReturnsBy is the interface on which the network returns the request to this node.
	ReturnsBy     string `json:"returnsBy,omitempty"`
	SeenSource    string `json:"seenSource,omitempty"` // what the endpoint sees
	Mark          uint32 `json:"-"`                    // with which the request leaves
	Request       []Step `json:"request"`
	ReplyEntersBy string `json:"replyEntersBy,omitempty"`
	ReplyLeavesBy string `json:"replyLeavesBy,omitempty"` // towards the client
	Reply         []Step `json:"reply"`
	Later         []Step `json:"later,omitempty"` // of the client's next packet, if its path differs
	// Rules is the number of iptables rules that the first packet and its reply were
	// matched against.
	Rules   int     `json:"rulesEvaluated"`
	Verdict Verdict `json:"verdict"`
}

// Verdict is how a path ends.
type Verdict struct {
	Outcome Outcome `json:"outcome"`
	Reason  string  `json:"reason,omitempty"`
}

func (v Verdict) String() string {
	if v.Reason == "" {
		return string(v.Outcome)
	}
	return string(v.Outcome) + ": " + v.Reason
}

// Outcome summarizes how a path ends.
type Outcome string

// The outcomes.
const (
	Answered   Outcome = "answered" // request and reply use the same interfaces
	Asymmetric Outcome = "asymmetric"
	Dropped    Outcome = "dropped"
	Refused    Outcome = "refused"
	Unserved   Outcome = "not a Service"
	Draining   Outcome = "draining" // a real server with weight 0
	Full       Outcome = "full"     // a real server with as many connections as it may have
	Sent       Outcome = "sent"     // to the endpoint; no reply is expected
	Undecided  Outcome = "cannot judge"
)

// Explain follows a connection through a node.
func (e *Evaluator) Explain(n *Node, q Question) Explanation {
	n = e.at(n)
	w := &walk{Node: n, eval: e}
	p := q.packet()
	p.in = n.entry(q)
	out := Explanation{EntersBy: p.in}
	if !e.Quiet {
		out.Request = fmt.Sprintf("%s %s", q.Protocol, p)
	}
	if p.in == "" && n.unroutable(q.From) {
		out.Verdict = Verdict{Dropped, fmt.Sprintf("no route to %s, so the interface by which it enters is unknown, and no reply returns", q.From)}
		return out
	}
	key, verdict := w.request(p)
	out.Verdict = verdict
	switch verdict.Outcome {
	case "":
		out.serve(w, q, key, *p)
	case Unserved:
		out.Link = p.out
		if p.out != "lo" {
			out.SeenSource = p.src.Addr().String()
		}
	}
	out.Steps, out.Doubts = w.steps, w.doubts
	return out
}

// packet returns the connection's first packet.
func (q Question) packet() *packet {
	return &packet{
		protocol: q.Protocol, state: cmp.Or(q.State, New), phase: Request, mark: q.Mark, sourceFixed: q.SourceFixed, notEcho: q.NotEcho, reply: q.Reply,
		src:  netip.AddrPortFrom(q.From, cmp.Or(q.FromPort, sourcePort)),
		dst:  q.To,
		conn: &connection{mark: q.ConnMark, source: netip.AddrPortFrom(q.From, cmp.Or(q.FromPort, sourcePort)), destination: q.To},
	}
}

// entry returns the interface on which a request enters: the given one, or that of the
// return path, or none if the client is the node. A client whose address is a VIP
// counts as the node, unless the question names an interface.
func (n *Node) entry(q Question) string {
	back, ok, _ := n.route(lookup{src: q.To.Addr(), dst: q.From, in: "lo"})
	switch {
	case ok && back.Local && (q.In == "" || n.LinkOf(q.From) != ""):
		return ""
	case q.In != "":
		return q.In
	}
	return cmp.Or(n.attachedTo(q.From), back.Link)
}

// unroutable reports whether a client is neither the node nor has a route.
func (n *Node) unroutable(client netip.Addr) bool {
	_, ok, _ := n.route(lookup{dst: client, in: "lo"})
	return client.IsValid() && !ok && n.LinkOf(client) == ""
}

// attachedTo returns the interface to whose link a host is attached, or "", according to
// the routing tables that policy rules select by input interface. The node's own packets
// may not find the host in these tables.
func (n *Node) attachedTo(host netip.Addr) string {
	for _, rule := range n.Rules {
		if rule.IIf == "" || rule.IIf == "lo" || rule.Action != routing.Lookup {
			continue
		}
		if r, ok := n.inTable(rule.Table, host); ok && r.Link == rule.IIf && !r.Local && !r.Via.IsValid() {
			return r.Link
		}
	}
	return ""
}

// request follows the first packet to IPVS. A verdict means that it does not arrive
// there.
func (w *walk) request(p *packet) (ipvs.Key, Verdict) {
	if p.in == "" {
		return w.sent(p)
	}
	return w.received(p)
}

// received follows a packet that enters on an interface.
func (w *walk) received(p *packet) (ipvs.Key, Verdict) {
	if v := verdict(w.arrives(p), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	w.interfere("arrival", p)
	if v := verdict(w.hooks("PREROUTING", p, nat.Raw, nat.Mangle, nat.NAT), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	if why := w.reversePath(p); why != "" {
		w.note("reverse path", p, "", "dropped: %s", why)
		return ipvs.Key{}, Verdict{Dropped, why}
	}
	way, ok := w.routed(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: p.in, mark: p.mark}, p)
	if !ok {
		return ipvs.Key{}, Verdict{Dropped, "no route to " + p.dst.Addr().String()}
	}
	if !way.Local {
		return ipvs.Key{}, w.forwarded(p, way)
	}
	return w.delivered(p)
}

// routed looks up the route and records it.
func (w *walk) routed(q lookup, p *packet) (found, bool) {
	way, ok := w.lookUp(q)
	if !ok {
		w.note("route", p, "", "no route to %s", q.dst)
		return way, false
	}
	if !w.eval.Quiet {
		w.note("route", p, "", "%s", way)
	}
	return way, true
}

func (w *walk) lookUp(q lookup) (found, bool) {
	q.assume = w.eval.assume
	way, ok, doubts := w.route(q)
	w.doubts = append(w.doubts, doubts...)
	return way, ok
}

// routedAgain looks up the route again and records it if it differs.
func (w *walk) routedAgain(q lookup, p *packet, before found) (found, bool) {
	way, ok := w.lookUp(q)
	if ok && way == before {
		return way, true
	}
	if !ok {
		w.note("route", p, "", "no route to %s", q.dst)
		return way, false
	}
	w.note("route", p, "", "%s", way)
	return way, true
}

// delivered follows a packet to the node through INPUT, where IPVS is.
func (w *walk) delivered(p *packet) (ipvs.Key, Verdict) {
	if v := verdict(w.hooks("INPUT", p, nat.Mangle, nat.Filter, security), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	if p.phase == Later {
		return ipvs.Key{}, Verdict{}
	}
	if key, ok := w.scheduled(p); ok {
		return key, Verdict{}
	}
	if v := verdict(w.rest("INPUT", p), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	p.out = "lo"
	return ipvs.Key{}, Verdict{Unserved, "it is delivered to the node: a process that listens on the port gets it"}
}

const notForwarding = "forwarding is disabled on the node (net.ipv4.ip_forward, for IPv6 net.ipv6.conf.all.forwarding)"

// forwarded follows a packet that is not for the node.
func (w *walk) forwarded(p *packet, way found) Verdict {
	if !w.Forwards() {
		return Verdict{Dropped, notForwarding}
	}
	p.out = way.Link
	if v := verdict(w.hooks("FORWARD", p, nat.Mangle, nat.Filter, security), w); v.Outcome != "" {
		return v
	}
	if v := verdict(w.rest("FORWARD", p), w); v.Outcome != "" {
		return v
	}
	return w.departs(p)
}

// departs follows a packet that is for no Service through POSTROUTING.
func (w *walk) departs(p *packet) Verdict {
	if v := verdict(w.hooks("POSTROUTING", p, nat.Mangle, nat.NAT), w); v.Outcome != "" {
		return v
	}
	if v := verdict(w.leavesBy(p), w); v.Outcome != "" {
		return v
	}
	return Verdict{Unserved, "it leaves the node by " + p.out}
}

// sent follows a packet of the node itself. IPVS precedes filter OUTPUT and uses the
// route that was looked up last.
func (w *walk) sent(p *packet) (ipvs.Key, Verdict) {
	source, way, ok := w.sourceTowards(p.dst.Addr())
	if p.sourceFixed {
		source = p.src.Addr()
		way, ok = w.lookUp(lookup{src: source, dst: p.dst.Addr(), in: "lo"})
	}
	if !ok {
		return ipvs.Key{}, Verdict{Dropped, "the node has no route to " + p.dst.Addr().String()}
	}
	if p.phase == Request {
		p.src = netip.AddrPortFrom(source, p.src.Port())
		p.conn.source = p.src
	}
	p.out = way.out()
	w.note("route", p, "", "%s", way)
	w.interfere("sent by the node", p)
	w.routedBy = p.mark
	if v := verdict(w.hooks("OUTPUT", p, nat.Raw, nat.Mangle), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	if p.mark != w.routedBy {
		if way, ok = w.routedAgain(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: "lo", mark: p.mark}, p, way); !ok {
			return ipvs.Key{}, Verdict{Dropped, "the node has no route to " + p.dst.Addr().String()}
		}
		p.out = way.out()
	}
	if v := verdict(w.hooks("OUTPUT", p, nat.NAT), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	if p.phase == Later {
		return ipvs.Key{}, Verdict{}
	}
	if key, ok := w.scheduled(p); ok {
		return key, Verdict{}
	}
	if v := verdict(w.hooks("OUTPUT", p, nat.Filter, security), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	if !way.Local {
		return ipvs.Key{}, w.departs(p)
	}
	return w.reenter(p)
}

// reenter follows a packet of the node itself that enters again on lo. The nat table has
// already processed it.
func (w *walk) reenter(p *packet) (ipvs.Key, Verdict) {
	if v := verdict(w.loops(p), w); v.Outcome != "" {
		return ipvs.Key{}, v
	}
	way, ok := w.lookUp(lookup{src: p.src.Addr(), dst: p.dst.Addr(), in: p.in, mark: p.mark})
	if !ok || !way.Local {
		return ipvs.Key{}, Verdict{Dropped, "it enters again by lo and is not local there"}
	}
	return w.delivered(p)
}

// scheduled finds the virtual server. One that matches the packet's mark takes
// precedence.
func (w *walk) scheduled(p *packet) (ipvs.Key, bool) {
	key := ipvs.Key{FWMark: p.mark, Addr: w.Family.Unspecified()}
	if _, ok := w.server(key); !ok || p.mark == 0 {
		key = ipvs.Key{Protocol: p.protocol, Addr: p.dst.Addr(), Port: p.dst.Port()}
	}
	server, ok := w.server(key)
	if !ok {
		w.note("IPVS", p, "", "no virtual server for %s %s", p.protocol, p.dst)
		return key, false
	}
	w.note("IPVS", p, "", "virtual server %s, %s, %s", key, server.Scheduler, countServers(len(server.RealServers)))
	return key, true
}

// server returns a virtual server.
func (n *Node) server(key ipvs.Key) (ipvs.Service, bool) {
	read(n, key)
	s, ok := n.IPVS[key]
	return s, ok
}

// countServers returns a number of real servers in words.
func countServers(n int) string {
	if n == 1 {
		return "1 real server"
	}
	return fmt.Sprintf("%d real servers", n)
}

// verdict explains how rules have ended a packet's path, in the words of the last step.
func verdict(e end, w *walk) Verdict {
	last := func() string {
		s := w.steps[len(w.steps)-1]
		if s.Rule == "" {
			return "in " + s.Where + ": " + s.What
		}
		return "in " + s.Where + " by " + s.Rule
	}
	switch e {
	case dropped:
		return Verdict{Dropped, last()}
	case refused:
		return Verdict{Refused, last()}
	}
	return Verdict{}
}

// serve follows the request to each real server, and the reply back.
func (x *Explanation) serve(w *walk, q Question, key ipvs.Key, p packet) {
	server := w.IPVS[key]
	x.VirtualServer, x.Scheduler = key.String(), server.Scheduler
	if p.state == Related {
		x.Verdict, x.Link = Verdict{Unserved, "it is an ICMP error, which IPVS assigns to its connection"}, "lo"
		return
	}
	var addresses []netip.AddrPort
	for a := range server.RealServers {
		addresses = append(addresses, a)
	}
	slices.SortFunc(addresses, netip.AddrPort.Compare)
	for _, a := range addresses {
		b := &serverPath{walk: &walk{Node: w.Node, eval: w.eval, rules: w.rules}, question: q, client: p, entry: x.EntersBy, key: key, to: a}
		x.RealServers = append(x.RealServers, b.follow(server.RealServers[a]))
		w.doubts = append(w.doubts, b.walk.doubts...)
	}
	if len(w.doubts) > 1 {
		slices.Sort(w.doubts)
		w.doubts = slices.Compact(w.doubts)
	}
	x.Verdict = worst(x.RealServers)
}

// worst returns the verdict over all real servers that accept connections: the common
// one, or the worst.
func worst(paths []ServerPath) Verdict {
	var out Verdict
	full := false
	for _, b := range paths {
		if b.Verdict.Outcome == Draining || b.Verdict.Outcome == Full {
			full = full || b.Verdict.Outcome == Full
			continue
		}
		if out.Outcome == "" || out.Outcome == Answered || out.Outcome == Sent {
			out = b.Verdict
			if out.Outcome != Answered && out.Outcome != Sent {
				out.Reason = "by " + b.RealServer + ": " + out.Reason
			}
		}
	}
	switch {
	case out.Outcome == "" && full:
		return Verdict{Refused, "all real servers that accept connections are full"}
	case out.Outcome == "":
		return Verdict{Refused, "the virtual server has no real server that accepts connections"}
	}
	return out
}
