package trace

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/capture"
)

// flow recognizes the packets of a connection on both sides of IPVS.
type flow struct {
	Question
	servers map[netip.AddrPort]bool
	sources map[netip.Addr]bool // sources of the requests that reach the endpoints
}

// Flow returns a function that reports whether a packet belongs to an explained
// connection. After IPVS, it cannot distinguish other clients with the same source address.
func Flow(q Question, x Explanation) func(capture.Packet) bool {
	f := flow{q, map[netip.AddrPort]bool{}, map[netip.Addr]bool{q.From: true}}
	for _, b := range x.RealServers {
		if a, err := netip.ParseAddrPort(b.RealServer); err == nil {
			f.servers[a] = true
		}
		if a, err := netip.ParseAddr(b.SeenSource); err == nil {
			f.sources[a] = true
		}
	}
	return f.contains
}

func (f *flow) contains(p capture.Packet) bool {
	if p.Protocol != f.Protocol {
		return false
	}
	return f.between(p.From.Addr(), p.To) || f.between(p.To.Addr(), p.From)
}

// between reports whether client and server are those of the connection.
func (f *flow) between(client netip.Addr, server netip.AddrPort) bool {
	return server == f.To && client == f.From || f.servers[server] && f.sources[client]
}

// Line formats a packet as text.
func Line(at time.Time, p capture.Packet) string {
	direction := "in"
	if p.Out {
		direction = "out"
	}
	name := fmt.Sprintf("#%d", p.Link)
	if link, err := net.InterfaceByIndex(p.Link); err == nil {
		name = link.Name
	}
	return fmt.Sprintf("%s %-3s %-15s %s %s > %s %s", at.Format("15:04:05.000000"), direction, name, p.Protocol, p.From, p.To, p.Flags)
}
