// Package trace explains a connection: what this node's rules, sets, virtual
// servers and routes do with its first packet and with the answer, step by
// step, and whether the answer finds its way back.
//
// Explain is a pure function of what Observe has read; nothing is sent and
// nothing is changed.
package trace

import (
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// packet is one on its way through the node.
type packet struct {
	protocol ip.Protocol
	src, dst netip.AddrPort
	in, out  string // interfaces; "": from the node, not yet routed
	mark     uint32
	conn     *connection
	answer   bool      // goes against the connection's direction
	first    bool      // conntrack's state is NEW
	virtual  *ipvs.Key // the virtual server that it came by, behind IPVS
}

// connection is what conntrack keeps.
type connection struct {
	mark   uint32
	source netip.AddrPort // the client's own
}

func (p *packet) String() string { return fmt.Sprintf("%s > %s", p.src, p.dst) }

// state is the packet's, as "-m conntrack --ctstate" compares it.
func (p *packet) state() string {
	if p.first {
		return "NEW"
	}
	return "ESTABLISHED"
}

func (p *packet) direction() string {
	if p.answer {
		return "REPLY"
	}
	return "ORIGINAL"
}
