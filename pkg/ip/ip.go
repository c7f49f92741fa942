// Package ip defines the IP families and the transport protocols of Services, with the
// kernel's numbers.
package ip

import (
	"fmt"
	"net/netip"
)

// Family is an IP family. Everything above the kernel packages is written
// once and parameterised by it.
type Family uint8

// The zero Family is neither of them.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Families lists both families in the order in which they are programmed.
var Families = []Family{IPv4, IPv6}

// Of returns the family of an address. An IPv4-mapped IPv6 address counts as IPv6:
// unmap external input before storing it.
func Of(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Bits returns the length of a host prefix: 32 or 128.
func (f Family) Bits() int {
	if f == IPv4 {
		return 32
	}
	return 128
}

// AF returns Linux's number of the address family: AF_INET, AF_INET6, or AF_UNSPEC for the zero
// Family.
func (f Family) AF() uint8 {
	switch f {
	case IPv4:
		return 2
	case IPv6:
		return 10
	}
	return 0
}

// Unspecified returns 0.0.0.0 or ::.
func (f Family) Unspecified() netip.Addr {
	if f == IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Loopback returns 127.0.0.1 or ::1.
func (f Family) Loopback() netip.Addr {
	if f == IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return fmt.Sprintf("Family(%d)", uint8(f))
}

// Protocol is a transport protocol by its IANA number, as in the IP header.
type Protocol uint8

// Protocols of a ServicePort.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// Protocols lists the protocols of a ServicePort.
var Protocols = []Protocol{TCP, UDP, SCTP}

// ParseProtocol parses the API's spelling ("TCP", "UDP", "SCTP").
func ParseProtocol(s string) (Protocol, error) {
	for _, p := range Protocols {
		if p.String() == s {
			return p, nil
		}
	}
	return 0, fmt.Errorf("unknown protocol %q, want TCP, UDP or SCTP", s)
}

// String returns the API's spelling.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("Protocol(%d)", uint8(p))
}
