package kernel

import (
	"encoding/binary"
	"syscall"

	"golang.org/x/sys/unix"
)

// Attributes parses a list of netlink attributes; the values are parts of data. It
// returns EBADMSG for an attribute that exceeds data. It replaces ParseRouteAttr of
// package nl, which panics on a last attribute without padding (netlink 1.3.1, found by
// FuzzListings).
func Attributes(data []byte) ([]syscall.NetlinkRouteAttr, error) {
	var out []syscall.NetlinkRouteAttr
	for len(data) >= unix.SizeofRtAttr {
		length := int(binary.NativeEndian.Uint16(data))
		if length < unix.SizeofRtAttr || length > len(data) {
			return nil, unix.EBADMSG
		}
		kind := binary.NativeEndian.Uint16(data[2:])
		out = append(out, syscall.NetlinkRouteAttr{
			Attr:  syscall.RtAttr{Len: uint16(length), Type: kind},
			Value: data[unix.SizeofRtAttr:length],
		})
		padded := (length + unix.RTA_ALIGNTO - 1) &^ (unix.RTA_ALIGNTO - 1)
		data = data[min(padded, len(data)):]
	}
	return out, nil
}
