//go:build prove

package prove

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// probe is a packet that shows that a rule is needed, if its result changes: the first one of a
// class, or the next one of an open connection. No oracle judges the results of probes that are no
// classes of the subject.
type probe struct {
	*Class
	open     *trace.Connection // nil: the first packet
	answered bool              // the first packet leaves the node, and another host answers it
}

func (p probe) String() string {
	if p.open != nil {
		return p.Class.String() + ", the next packet to " + p.open.RealServer()
	}
	if p.answered {
		return p.Class.String() + ", and the answer of another host"
	}
	return p.Class.String()
}

// follow returns the result, or "" if it is in doubt.
func (p probe) follow(e *trace.Evaluator, n *trace.Node) string {
	if p.open != nil {
		v := e.Continue(n, p.open)
		if v.Outcome == trace.Undecided {
			return ""
		}
		return string(v.Outcome)
	}
	var connmark uint32
	if p.answered {
		e.Interfere = func(_ trace.Point, _, conn *uint32) { connmark = *conn }
	}
	x := e.Explain(n, p.Question)
	e.Interfere = nil
	if len(x.Doubts) > 0 {
		return ""
	}
	from, err := netip.ParseAddr(x.SeenSource)
	if !p.answered || err != nil || p.In != "" && from != p.From {
		return Summary(&x)
	}
	y := e.Explain(n, trace.Question{
		Protocol: p.Protocol, From: p.To.Addr(), FromPort: p.To.Port(), In: x.Link, To: netip.AddrPortFrom(from, 40000),
		State: trace.Established, Reply: true, ConnMark: connmark,
	})
	if len(y.Doubts) > 0 {
		return ""
	}
	return Summary(&x) + "; the answer: " + Summary(&y)
}

// probes returns the classes of a subject and others that rules may distinguish.
func (s *Subject) probes() []probe {
	var out []probe
	for _, c := range s.Classes {
		out = append(out, probe{Class: c, answered: c.State == "" && c.target.kind == OtherPort})
		for _, q := range slices.Concat(s.boundAddresses(c), s.further(c)) {
			out = append(out, probe{Class: &Class{q, c.target}})
		}
	}
	return out
}

// boundAddresses returns connections of the node whose program has bound an address: the node's own, one of
// another interface, or a loopback address.
func (s *Subject) boundAddresses(c *Class) []trace.Question {
	if c.In != "" || c.target.svc == nil {
		return nil
	}
	var out []trace.Question
	from := func(a netip.Addr) {
		q := c.Question
		q.From, q.SourceFixed = a, true
		out = append(out, q)
	}
	from(c.From)
	others := 0
	for _, l := range s.Node.Links {
		for _, a := range l.Addresses {
			addr := a.Prefix.Addr()
			if ip.Of(addr) != s.Family || addr == c.From || addr.IsLinkLocalUnicast() || others > 0 && !addr.IsLoopback() {
				continue
			}
			if !addr.IsLoopback() {
				others++
			}
			from(addr)
			if addr.IsLoopback() && !a.Prefix.IsSingleIP() {
				from(netip.AddrFrom4([4]byte{127, 200, 0, 1}))
			}
		}
	}
	return out
}

// further returns packets that the oracle does not judge: other ICMP messages, packets of open
// connections that are not for a Service, and clients beside the loopback network.
func (s *Subject) further(c *Class) []trace.Question {
	var out []trace.Question
	add := func(change func(*trace.Question)) {
		q := c.Question
		change(&q)
		out = append(out, q)
	}
	state := func(state trace.State) func(*trace.Question) {
		return func(q *trace.Question) { q.State = state }
	}
	icmp := c.Protocol == trace.ICMP || c.Protocol == trace.ICMPv6
	switch {
	case c.State != "":
	case icmp:
		add(func(q *trace.Question) { q.NotEcho = true })
		add(state(trace.Established))
		if c.In != "" {
			add(state(trace.Invalid))
		}
	case c.target.svc == nil:
		add(state(trace.Established))
		if c.Protocol == ip.TCP && c.In != "" {
			add(state(trace.Related)) // a connection that a helper expects, such as FTP's
		}
	}
	if c.From == faraway[ip.IPv4] && c.In != "" {
		add(func(q *trace.Question) { q.From = netip.AddrFrom4([4]byte{126, 200, 0, 1}) })
	}
	return out
}

// openConnections returns the next packets of the connections that each class opens.
func (s *Subject) openConnections() []probe {
	var out []probe
	for _, c := range s.Classes {
		if c.State != "" || c.target.svc == nil {
			continue
		}
		e := trace.Evaluator{Quiet: true, Opened: func(conn *trace.Connection) { out = append(out, probe{Class: c, open: conn}) }}
		e.Explain(s.Node, c.Question)
	}
	return out
}

// afterEndpointsLeft returns the node after all endpoints have left, while their connections are
// still open.
func (s *Subject) afterEndpointsLeft() (*trace.Node, error) {
	p, err := NewProduct(s.Scenario)
	if err != nil {
		return nil, err
	}
	to := s.Scenario.clone()
	for i := range to.Services {
		for j := range to.Services[i].Ports {
			to.Services[i].Ports[j].Endpoints = nil
		}
	}
	if err := p.Change(to); err != nil {
		return nil, err
	}
	return p.Observed(s.Family)
}

// withoutAddress returns the node while the addresses of its primary interface are absent for a
// moment, or nil if it has none.
func (s *Subject) withoutAddress() *trace.Node {
	main := s.Oracle.mainUplink()
	out := *s.Node
	out.Routes = slices.DeleteFunc(slices.Clone(s.Node.Routes), func(r routing.Route) bool { return r.Local && r.Link == main })
	if len(out.Routes) == len(s.Node.Routes) {
		return nil
	}
	out.Links = slices.Clone(s.Node.Links)
	for i := range out.Links {
		if out.Links[i].Name == main {
			out.Links[i].Addresses = nil
		}
	}
	return &out
}
