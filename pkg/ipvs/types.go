// Package ipvs programs the kernel's IP Virtual Server: virtual servers (a
// VIP and port) and, behind each, real servers (endpoints).
package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Key identifies a virtual server as the kernel does: by protocol, address
// and port, or by fwmark and family.
type Key struct {
	Addr     netip.Addr  // with FWMark: the unspecified address of the family
	FWMark   uint32      // the packet's whole mark; 0 for an address key
	Port     uint16      // 0 with FWMark
	Protocol ip.Protocol // 0 with FWMark
}

// Family returns the family of the virtual server.
func (k Key) Family() ip.Family { return ip.Of(k.Addr) }

// String returns "TCP 10.96.0.1:443" or "FWM 0x200001 IPv4".
func (k Key) String() string {
	if k.FWMark != 0 {
		return fmt.Sprintf("FWM %#x %s", k.FWMark, k.Family())
	}
	return k.Protocol.String() + " " + netip.AddrPortFrom(k.Addr, k.Port).String()
}

// Compare orders keys: fwmark keys last, then by address, protocol and port.
func (k Key) Compare(other Key) int {
	return cmp.Or(
		cmp.Compare(k.FWMark, other.FWMark),
		k.Addr.Compare(other.Addr),
		cmp.Compare(k.Protocol, other.Protocol),
		cmp.Compare(k.Port, other.Port),
	)
}

// Flags are IP_VS_SVC_F_* of <linux/ip_vs.h>, except IP_VS_SVC_F_HASHED, which the kernel
// sets itself.
type Flags uint32

// Flags that can be set on a virtual server.
const (
	FlagPersistent Flags = 0x1  // session affinity by client address
	FlagOnePacket  Flags = 0x4  // UDP: schedule each datagram anew
	FlagSched1     Flags = 0x8  // scheduler's own: sh-fallback, mh-fallback
	FlagSched2     Flags = 0x10 // scheduler's own: sh-port, mh-port
	FlagSched3     Flags = 0x20
)

// VirtualServer is the settings of a virtual server.
type VirtualServer struct {
	Scheduler string // rr, wrr, lc, mh, …
	Flags     Flags
	Timeout   uint32 // seconds of persistence; 0 without FlagPersistent
}

// RealServer is the settings of a real server. The forwarding method is always masquerading,
// as a Service maps ports.
type RealServer struct {
	Weight int // 0 drains: established connections continue, no new ones are accepted
	// MaxConnections is the number of connections at which the kernel stops adding new
	// ones, until a quarter of them has ended. It includes closed ones that IPVS still
	// tracks. 0: no limit.
	MaxConnections uint32
}

// Service is a virtual server with its real servers by address and port.
type Service struct {
	VirtualServer
	RealServers map[netip.AddrPort]RealServer
	// Place is the virtual server's place in the kernel's list, from 1. The kernel deletes all
	// virtual servers in this order. It is 0 if unknown.
	Place uint32
}

// State is all of IPVS in one network namespace, or a part of it.
type State map[Key]Service

// WithoutPlaces returns a copy whose places are 0. Two states that differ only in the order of
// the kernel's list are equal without their places.
func (s State) WithoutPlaces() State {
	c := make(State, len(s))
	for key, v := range s {
		v.Place = 0
		c[key] = v
	}
	return c
}

// Connections counts a real server's entries in the connection table.
type Connections struct {
	Active   int // TCP: established
	Inactive int // all others: closing TCP, UDP, SCTP

	// In and Out are the packets that clients have sent and received, modulo 1<<32. The kernel
	// updates them every two seconds, and not with net.ipv4.vs.run_estimation=0.
	In, Out uint32
}

// Timeouts are the timeouts of the connection table in whole seconds. The kernel's defaults
// are 900, 120 and 300.
type Timeouts struct{ TCP, TCPFin, UDP uint32 }

// Op is what a Change does.
type Op uint8

// The operations. Apply makes the outcome true: adding an existing object updates
// it, and deleting a missing one succeeds.
const (
	AddVirtualServer Op = iota + 1
	UpdateVirtualServer
	DeleteVirtualServer // with its real servers
	AddRealServer
	UpdateRealServer
	DeleteRealServer
)

var opNames = map[Op]string{
	AddVirtualServer:    "add virtual server",
	UpdateVirtualServer: "update virtual server",
	DeleteVirtualServer: "delete virtual server",
	AddRealServer:       "add real server",
	UpdateRealServer:    "update real server",
	DeleteRealServer:    "delete real server",
}

// String returns the name of the operation.
func (o Op) String() string { return opNames[o] }

// Change is one operation on one virtual or real server.
type Change struct {
	Op            Op
	Key           Key
	VirtualServer VirtualServer  // Add and UpdateVirtualServer
	Dest          netip.AddrPort // the real server's
	RealServer    RealServer     // Add and UpdateRealServer
}

func (c Change) String() string {
	switch c.Op {
	case AddVirtualServer, UpdateVirtualServer, DeleteVirtualServer:
		return c.Op.String() + " " + c.Key.String()
	case AddRealServer:
		return "add real server " + c.Dest.String() + " to " + c.Key.String()
	case UpdateRealServer:
		return "set " + c.RealServer.String() + " of real server " + c.Dest.String() + " of " + c.Key.String()
	case DeleteRealServer:
		return "delete real server " + c.Dest.String() + " of " + c.Key.String()
	}
	return fmt.Sprintf("unknown operation %d on %s", c.Op, c.Key)
}

// String formats the settings as a Change does.
func (rs RealServer) String() string {
	text := "weight " + strconv.Itoa(rs.Weight)
	if rs.MaxConnections != 0 {
		text += " and limit " + strconv.FormatUint(uint64(rs.MaxConnections), 10)
	}
	return text
}

// Failure is a change that the kernel refused.
type Failure = kernel.Failure[Change]
