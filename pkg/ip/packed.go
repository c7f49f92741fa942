package ip

import (
	"bytes"
	"net/netip"
)

// Packed is an address without its zone, for long lists: unlike netip.Addr, it takes 17 bytes instead
// of 24, and has no pointer that the garbage collector follows. The zero value is the zero netip.Addr.
type Packed struct {
	bytes [16]byte // IPv4 as IPv4-mapped
	is6   bool
}

// Pack returns an address in this form. It drops the zone.
func Pack(a netip.Addr) Packed { return Packed{a.As16(), a.Is6()} }

// Addr returns the address.
func (p Packed) Addr() netip.Addr {
	switch {
	case p == Packed{}:
		return netip.Addr{}
	case p.is6:
		return netip.AddrFrom16(p.bytes)
	}
	return netip.AddrFrom4([4]byte(p.bytes[12:]))
}

func (p Packed) String() string { return p.Addr().String() }

// Compare orders addresses as netip.Addr does: IPv4 before IPv6.
func (p Packed) Compare(q Packed) int {
	switch {
	case p.is6 == q.is6:
		return bytes.Compare(p.bytes[:], q.bytes[:])
	case q.is6:
		return -1
	}
	return 1
}
