// Package trace explains a connection: what this node's rules, sets, virtual
// servers and routes do with its first packet, with the answer and with the
// packet after that, step by step, and whether the answer returns.
//
// Explain is a pure function of a Node, which Observe reads from the kernel and
// tests make up; nothing is sent and nothing is changed.
package trace

import (
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// State is conntrack's of a packet, as "-m conntrack --ctstate" compares it.
type State string

// The states that rules distinguish.
const (
	New         State = "NEW"
	Established State = "ESTABLISHED"
	Related     State = "RELATED" // an ICMP error about a connection
	Invalid     State = "INVALID" // conntrack cannot place it; the nat table does not see it
)

// The protocols of pings and of errors about connections.
const (
	ICMP   ip.Protocol = 1
	ICMPv6 ip.Protocol = 58
)

// packet is one on its way through the node.
type packet struct {
	protocol ip.Protocol
	src, dst netip.AddrPort
	in, out  string // interfaces; "": from the node, not yet routed
	mark     uint32
	conn     *connection
	state    State
	answer   bool      // goes against the connection's direction
	phase    Phase     // which of the connection's packets it is
	virtual  *ipvs.Key // the virtual server that it came by, behind IPVS
}

// connection is what conntrack keeps.
type connection struct {
	mark   uint32
	source netip.AddrPort // the client's own
}

func (p *packet) String() string { return fmt.Sprintf("%s > %s", p.src, p.dst) }

// seesNAT reports whether the nat table is traversed: by the first packet of a
// connection only.
func (p *packet) seesNAT() bool { return p.state == New && !p.answer && p.phase == Request }

func (p *packet) direction() string {
	if p.answer {
		return "REPLY"
	}
	return "ORIGINAL"
}

// isEcho reports whether the packet is a ping.
func (p *packet) isEcho() bool {
	return (p.protocol == ICMP || p.protocol == ICMPv6) && p.state != Related
}
