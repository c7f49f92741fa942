package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// The older interface of <linux/ip_vs.h>, socket options, supports only IPv4. It needs
// one system call where a netlink dump needs three and an object for each attribute. The
// connections of draining real servers are therefore counted with it: with 400 changes a
// second on an emulated machine, dumps took a quarter of all CPU time.
//
// It also lists all virtual servers in one call, in time that grows with their number.
// Netlink dumps and /proc/net/ip_vs restart at the first bucket of the table for each page
// of the answer: with 44,125 virtual servers they take 45 million steps.

const (
	optGetInfo  = 64 + 1024 + 64 + 1 // IP_VS_SO_GET_INFO
	optServices = 64 + 1024 + 64 + 2 // IP_VS_SO_GET_SERVICES
	optGetDests = 64 + 1024 + 64 + 4 // IP_VS_SO_GET_DESTS

	// struct ip_vs_getinfo.
	infoSize     = 12
	infoServices = 8

	// struct ip_vs_get_services on 64-bit machines, up to its entries, and
	// struct ip_vs_service_entry.
	listedHead      = 8
	listedNumber    = 0
	listedSize      = 104
	listedProtocol  = 0
	listedAddress   = 4
	listedPort      = 8
	listedMark      = 12
	listedScheduler = 16
	listedFlags     = 32
	listedTimeout   = 36

	// struct ip_vs_get_dests on 64-bit machines, up to its entries, and the offsets of
	// its fields.
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
	entryLimit    = 16
	entryActive   = 24
	entryInactive = 28
	entryIn       = 44
	entryOut      = 48
)

// control is a socket for the options. Only count may be called concurrently.
type control struct {
	fd      int
	request []byte // buffer of destinations, reused by the next call
}

// newControl opens a socket in the network namespace of the calling thread.
func newControl() (*control, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket for IPVS: %w", err)
	}
	return &control{fd: fd}, nil
}

func (c *control) close() { unix.Close(c.fd) }

// get reads an option. The kernel overwrites the request with its answer.
func (c *control) get(option uintptr, request []byte) error {
	length := uint32(len(request))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(c.fd), unix.IPPROTO_IP, option,
		uintptr(unsafe.Pointer(&request[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// count returns num_services, which counts only IPv4 (net/netfilter/ipvs/ip_vs_ctl.c).
func (c *control) count() (int, error) {
	var info [infoSize]byte
	if err := c.get(optGetInfo, info[:]); err != nil {
		return 0, err
	}
	return int(binary.NativeEndian.Uint32(info[infoServices:])), nil
}

// spareServices is how many virtual servers may be added between counting and listing before
// the list must be read again.
const spareServices = 64

// services lists the IPv4 virtual servers. As in destinations, a full answer may be
// incomplete.
func (c *control) services() ([]listed, error) {
	n, err := c.count()
	if err != nil {
		return nil, err
	}
	return c.servicesIn(n + spareServices)
}

func (c *control) servicesIn(room int) ([]listed, error) {
	for ; ; room *= 2 {
		request := make([]byte, listedHead+room*listedSize)
		binary.NativeEndian.PutUint32(request[listedNumber:], uint32(room))
		if err := c.get(optServices, request); err != nil {
			return nil, err
		}
		if services := readServiceEntries(request[listedHead:]); len(services) < room {
			return services, nil
		}
	}
}

// readServiceEntries parses entries up to the first one that the kernel did not fill.
func readServiceEntries(b []byte) []listed {
	services := make([]listed, 0, len(b)/listedSize)
	for ; len(b) >= listedSize; b = b[listedSize:] {
		key := Key{
			Protocol: ip.Protocol(binary.NativeEndian.Uint16(b[listedProtocol:])),
			Addr:     netip.AddrFrom4([4]byte(b[listedAddress:])),
			Port:     binary.BigEndian.Uint16(b[listedPort:]),
		}
		if mark := binary.NativeEndian.Uint32(b[listedMark:]); mark != 0 {
			key = Key{Addr: ip.IPv4.Unspecified(), FWMark: mark}
		} else if key.Protocol == 0 {
			break
		}
		services = append(services, listed{key, VirtualServer{
			Scheduler: schedulerName(b[listedScheduler:listedFlags]),
			Flags:     Flags(binary.NativeEndian.Uint32(b[listedFlags:])) &^ flagHashed,
			Timeout:   binary.NativeEndian.Uint32(b[listedTimeout:]),
		}})
	}
	return services
}

// schedulerName returns the name of a scheduler. Common names share one string for all
// virtual servers.
func schedulerName(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	switch string(b) {
	case "rr":
		return "rr"
	case "wrr":
		return "wrr"
	}
	return string(b)
}

// destinations lists the real servers of an IPv4 virtual server. The kernel fills as many
// entries as fit and does not return their number. Unused entries stay zero, and a full
// answer may be incomplete.
func (c *control) destinations(key Key) ([]destination, error) {
	for room := 16; ; room *= 4 {
		request := c.destsRequest(key, room)
		err := c.get(optGetDests, request)
		if errors.Is(err, unix.ESRCH) {
			return nil, nil // no such virtual server: an empty list, as from a dump
		}
		if err != nil {
			return nil, err
		}
		if dests := readEntries(request[destsHead:]); len(dests) < room {
			return dests, nil
		}
	}
}

func (c *control) destsRequest(key Key, room int) []byte {
	size := destsHead + room*entrySize
	if cap(c.request) < size {
		c.request = make([]byte, size)
	}
	b := c.request[:size]
	clear(b)
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

// readEntries parses entries up to the first one that the kernel did not fill.
func readEntries(b []byte) []destination {
	n := 0
	for n < len(b)/entrySize && binary.NativeEndian.Uint32(b[n*entrySize+entryAddress:]) != 0 {
		n++
	}
	dests := make([]destination, n)
	for i := range dests {
		entry := b[i*entrySize:]
		dests[i] = destination{
			Dest:       netip.AddrPortFrom(netip.AddrFrom4([4]byte(entry[entryAddress:])), binary.BigEndian.Uint16(entry[entryPort:])),
			RealServer: RealServer{Weight: int(int32(binary.NativeEndian.Uint32(entry[entryWeight:]))), MaxConnections: binary.NativeEndian.Uint32(entry[entryLimit:])},
			Connections: Connections{
				Active: int(binary.NativeEndian.Uint32(entry[entryActive:])), Inactive: int(binary.NativeEndian.Uint32(entry[entryInactive:])),
				In: binary.NativeEndian.Uint32(entry[entryIn:]), Out: binary.NativeEndian.Uint32(entry[entryOut:]),
			},
		}
	}
	return dests
}
