package ip

import (
	"fmt"
	"net/netip"

	netutils "k8s.io/utils/net"
)

// ParseAddr parses an address as all of Kubernetes does: leading zeros, which old objects and files
// may contain, are read as decimal, and IPv4-mapped IPv6 as IPv4. The result may have a zone. It is
// the zero Addr if the text is not an address.
func ParseAddr(s string) netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, _ = netip.AddrFromSlice(netutils.ParseIPSloppy(s))
	}
	return a.Unmap()
}

// ParsePrefix parses a CIDR in the same way, and masks it. It returns an error that quotes the text if
// that is not a CIDR of one family.
func ParsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		p = parseSloppyPrefix(s)
	}
	switch {
	case !p.IsValid():
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR", s)
	case !p.Addr().Is4In6():
		return p.Masked(), nil
	case p.Bits() < 96:
		return netip.Prefix{}, fmt.Errorf("%q mixes IPv4 and IPv6", s)
	}
	return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Masked(), nil
}

// parseSloppyPrefix returns the zero Prefix if the text is not a CIDR.
func parseSloppyPrefix(s string) netip.Prefix {
	_, n, err := netutils.ParseCIDRSloppy(s)
	if err != nil {
		return netip.Prefix{}
	}
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(a, bits)
}
