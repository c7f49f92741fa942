package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Connections are counted for each virtual server with something that drains, so
// with many changes this is what is asked most. The library's way, a dump of
// netlink, takes three system calls and builds an object of each attribute; the
// older interface of <linux/ip_vs.h>, a socket option, takes one. With 400 changes
// a second on an emulated machine the dumps were a quarter of all the processor's
// work. The option knows IPv4 alone: for IPv6 the library asks.

const (
	optGetInfo  = 64 + 1024 + 64 + 1 // IP_VS_SO_GET_INFO
	optGetDests = 64 + 1024 + 64 + 4 // IP_VS_SO_GET_DESTS

	// struct ip_vs_getinfo.
	infoSize     = 12
	infoServices = 8

	// struct ip_vs_get_dests of 64-bit machines, up to its entries, and where what is
	// in it.
	destsHead     = 24
	destsProtocol = 0
	destsAddress  = 4
	destsPort     = 8
	destsMark     = 12
	destsNumber   = 16

	// struct ip_vs_dest_entry.
	entrySize     = 96
	entryAddress  = 0
	entryPort     = 4
	entryWeight   = 12
	entryActive   = 24
	entryInactive = 28
)

// control is a socket for the options.
type control struct{ fd int }

// newControl is for the network namespace of the calling thread.
func newControl() (*control, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket to ask IPVS: %w", err)
	}
	return &control{fd}, nil
}

func (c *control) close() { unix.Close(c.fd) }

// destinations reads the real servers of a virtual server of IPv4. The kernel fills
// as many entries as there is room for, and does not say how many that were: the
// others stay zero, and after a full answer there may be more.
func (c *control) destinations(key Key) (map[netip.AddrPort]destination, error) {
	for room := 16; ; room *= 4 {
		request := destsRequest(key, room)
		length := uint32(len(request))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.fd), unix.IPPROTO_IP, optGetDests,
			uintptr(unsafe.Pointer(&request[0])), uintptr(unsafe.Pointer(&length)), 0)
		if errno == unix.ESRCH {
			return nil, nil // there is no such virtual server, of which a dump is empty
		}
		if errno != 0 {
			return nil, errno
		}
		if dests := readEntries(request[destsHead:]); len(dests) < room {
			return dests, nil
		}
	}
}

// count is num_services, which counts IPv4 alone (net/netfilter/ipvs/ip_vs_ctl.c).
func (c *control) count() (int, error) {
	var info [infoSize]byte
	length := uint32(len(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.fd), unix.IPPROTO_IP, optGetInfo,
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return 0, errno
	}
	return int(binary.NativeEndian.Uint32(info[infoServices:])), nil
}

func destsRequest(key Key, room int) []byte {
	b := make([]byte, destsHead+room*entrySize)
	binary.NativeEndian.PutUint32(b[destsNumber:], uint32(room))
	if key.FWMark != 0 {
		binary.NativeEndian.PutUint32(b[destsMark:], key.FWMark)
		return b
	}
	binary.NativeEndian.PutUint16(b[destsProtocol:], uint16(key.Protocol))
	copy(b[destsAddress:], key.Addr.AsSlice())
	binary.BigEndian.PutUint16(b[destsPort:], key.Port)
	return b
}

// readEntries reads entries until one that the kernel has not filled.
func readEntries(b []byte) map[netip.AddrPort]destination {
	dests := map[netip.AddrPort]destination{}
	for ; len(b) >= entrySize; b = b[entrySize:] {
		dest := netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[entryAddress:])), binary.BigEndian.Uint16(b[entryPort:]))
		if dest.Addr().IsUnspecified() {
			break
		}
		dests[dest] = destination{
			RealServer:  RealServer{Weight: int(int32(binary.NativeEndian.Uint32(b[entryWeight:])))},
			Connections: Connections{Active: int(binary.NativeEndian.Uint32(b[entryActive:])), Inactive: int(binary.NativeEndian.Uint32(b[entryInactive:]))},
		}
	}
	return dests
}
