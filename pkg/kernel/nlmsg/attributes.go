package nlmsg

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
	for len(data) > 0 {
		kind, value, rest, err := NextAttribute(data)
		if err != nil {
			return nil, err
		}
		if value != nil {
			out = append(out, syscall.NetlinkRouteAttr{
				Attr:  syscall.RtAttr{Len: uint16(unix.SizeofRtAttr + len(value)), Type: kind},
				Value: value,
			})
		}
		data = rest
	}
	return out, nil
}

// NextAttribute reads the first attribute of a list, and returns the rest of the list. It
// does not allocate. At the end of the list, value and rest are nil.
func NextAttribute(data []byte) (kind uint16, value, rest []byte, err error) {
	if len(data) < unix.SizeofRtAttr {
		return 0, nil, nil, nil
	}
	length := int(binary.NativeEndian.Uint16(data))
	if length < unix.SizeofRtAttr || length > len(data) {
		return 0, nil, nil, unix.EBADMSG
	}
	padded := (length + unix.RTA_ALIGNTO - 1) &^ (unix.RTA_ALIGNTO - 1)
	return binary.NativeEndian.Uint16(data[2:]), data[unix.SizeofRtAttr:length], data[min(padded, len(data)):], nil
}
