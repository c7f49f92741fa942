// Package trace explains a connection: how this node's rules, sets, virtual servers and
// routes handle its first packet, the reply and the next packet, step by step, and
// whether the reply returns to the client.
//
// Explain is a pure function of a Node, which Read and Kernel.Node read from the kernel and
// tests construct. Nothing is sent or changed.
package trace

import (
	"fmt"
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// State is a packet's conntrack state, as matched by "-m conntrack --ctstate".
type State string

// The states that rules distinguish.
const (
	New         State = "NEW"
	Established State = "ESTABLISHED"
	Related     State = "RELATED" // an ICMP error about a connection
	Invalid     State = "INVALID" // not tracked; bypasses the nat table
)

// Protocols of ping and of ICMP errors.
const (
	ICMP   ip.Protocol = 1
	ICMPv6 ip.Protocol = 58
)

// packet is a packet on its path through the node.
type packet struct {
	protocol    ip.Protocol
	src, dst    netip.AddrPort
	in, out     string // "": from the node, or not yet routed
	mark        uint32
	conn        *connection
	state       State
	sourceFixed bool      // the node's process has chosen src
	notEcho     bool      // of ICMP: neither a ping nor an error
	reply       bool      // in the direction of replies
	phase       Phase     // which packet of the connection it is
	virtual     *ipvs.Key // the virtual server that scheduled it, after IPVS
}

// connection is what conntrack stores.
type connection struct {
	mark   uint32
	source netip.AddrPort // the client's own address
	// destination is the address that the client connects to.
	destination netip.AddrPort
	random      bool // the endpoint sees a random source port
	// dnat and snat report that a rule has translated the destination or the source.
	dnat, snat bool
}

func (p *packet) String() string { return fmt.Sprintf("%s > %s", p.src, p.dst) }

// seesNAT reports whether the packet traverses the nat table, as only the first packet
// of a connection does.
func (p *packet) seesNAT() bool { return p.state == New && !p.reply && p.phase == Request }

func (p *packet) direction() string {
	if p.reply {
		return "REPLY"
	}
	return "ORIGINAL"
}

// isEcho reports whether the packet is a ping.
func (p *packet) isEcho() bool {
	return (p.protocol == ICMP || p.protocol == ICMPv6) && p.state != Related && !p.notEcho
}
