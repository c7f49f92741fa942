package ipvs

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Changes are written here and not through github.com/moby/ipvs, which sends
// one request, waits for its acknowledgement, and builds every attribute as an
// object of its own. Measured with BenchmarkApply and BenchmarkLibrary on an
// emulated machine, a virtual server with two real servers takes a third of the
// time by itself, and a fifth of it as one of many. The library still reads.

// batchSize is how many requests go to the kernel in one write. Larger ones
// gain nothing: by then a request costs what the kernel needs for it.
const batchSize = 64

// Commands and attributes of <linux/ip_vs.h>.
const (
	cmdNewService = 1
	cmdSetService = 2
	cmdDelService = 3
	cmdNewDest    = 5
	cmdSetDest    = 6
	cmdDelDest    = 7

	attrService = 1
	attrDest    = 2

	serviceFamily    = 1
	serviceProtocol  = 2
	serviceAddress   = 3
	servicePort      = 4
	serviceMark      = 5
	serviceScheduler = 6
	serviceFlags     = 7
	serviceTimeout   = 8
	serviceNetmask   = 9

	destAddress        = 1
	destPort           = 2
	destForwarding     = 3
	destWeight         = 4
	destUpperThreshold = 5
	destLowerThreshold = 6

	forwardMasquerade = 0 // IP_VS_CONN_F_MASQ

	interfaceVersion = 1 // IPVS_GENL_VERSION
)

var commands = map[Op]uint8{
	AddVirtualServer: cmdNewService, UpdateVirtualServer: cmdSetService, DeleteVirtualServer: cmdDelService,
	AddRealServer: cmdNewDest, UpdateRealServer: cmdSetDest, DeleteRealServer: cmdDelDest,
}

// writer sends changes to the kernel, many in one write.
type writer struct {
	socket *nl.NetlinkSocket
	family uint16 // of generic netlink, which the kernel numbers as it likes
	last   uint32 // sequence number
	buffer []byte
}

func newWriter(timeout time.Duration) (*writer, error) {
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return nil, fmt.Errorf("look for IPVS in the kernel: %w", err)
	}
	socket, err := nl.Subscribe(unix.NETLINK_GENERIC)
	if err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := socket.SetReceiveTimeout(&limit); err != nil {
		socket.Close()
		return nil, err
	}
	return &writer{socket: socket, family: family.ID}, nil
}

func (w *writer) close() { w.socket.Close() }

// write sends at most batchSize changes and gives one answer for each. The
// kernel goes through a write in order, whatever becomes of a request in it.
// It reports each that fails, and here, besides, the end of the last one. An
// error tells that the answers are not known.
func (w *writer) write(changes []Change) (errs []error, err error) {
	first := w.last + 1
	w.buffer = w.buffer[:0]
	for i, c := range changes {
		w.last++
		flags := uint16(unix.NLM_F_REQUEST)
		if i == len(changes)-1 {
			flags |= unix.NLM_F_ACK
		}
		w.request(c, flags)
	}
	if err := unix.Sendto(w.socket.GetFd(), w.buffer, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	errs = make([]error, len(changes))
	return errs, w.answers(first, errs)
}

// answers reads until the answer to the last request. Those to an earlier
// write, which somebody has not waited for, are passed over.
func (w *writer) answers(first uint32, errs []error) error {
	for {
		messages, _, err := w.socket.Receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			at := m.Header.Seq - first
			if m.Header.Type != unix.NLMSG_ERROR || at >= uint32(len(errs)) || len(m.Data) < 4 {
				continue
			}
			if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
				errs[at] = unix.Errno(-code)
			}
			if m.Header.Seq == w.last {
				return nil
			}
		}
	}
}

// request appends the message for a change.
func (w *writer) request(c Change, flags uint16) {
	begin := len(w.buffer)
	b := binary.NativeEndian.AppendUint32(w.buffer, 0) // the length, below
	b = binary.NativeEndian.AppendUint16(b, w.family)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, w.last)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, commands[c.Op], interfaceVersion, 0, 0)
	b = appendService(b, c)
	switch c.Op {
	case AddRealServer, UpdateRealServer, DeleteRealServer:
		b = appendDest(b, c)
	}
	binary.NativeEndian.PutUint32(b[begin:], uint32(len(b)-begin))
	w.buffer = b
}

// appendService appends the virtual server: which it is, and if it is to be
// made or changed, how.
func appendService(b []byte, c Change) []byte {
	b, begin := openAttr(b, attrService)
	family, netmask := uint16(unix.AF_INET), uint32(0xffffffff)
	if c.Key.Family() == ip.IPv6 {
		family, netmask = unix.AF_INET6, 128
	}
	b = appendUint16(b, serviceFamily, family)
	if c.Key.FWMark != 0 {
		b = appendUint32(b, serviceMark, c.Key.FWMark)
	} else {
		b = appendUint16(b, serviceProtocol, uint16(c.Key.Protocol))
		b = appendBytes(b, serviceAddress, c.Key.Addr.AsSlice())
		b = appendPort(b, servicePort, c.Key.Port)
	}
	switch c.Op {
	case AddVirtualServer, UpdateVirtualServer:
		vs := c.VirtualServer
		b = appendBytes(b, serviceScheduler, append([]byte(vs.Scheduler), 0))
		// The second word says which of the flags are meant: all.
		flags := binary.NativeEndian.AppendUint32(nil, uint32(vs.Flags))
		b = appendBytes(b, serviceFlags, append(flags, 0xff, 0xff, 0xff, 0xff))
		b = appendUint32(b, serviceTimeout, vs.Timeout)
		// Persistence is by one client address: a mask in IPv4, a prefix's
		// length in IPv6.
		b = appendUint32(b, serviceNetmask, netmask)
	}
	return closeAttr(b, begin)
}

// appendDest appends the real server. Thresholds of connections are not used,
// but the kernel wants them.
func appendDest(b []byte, c Change) []byte {
	b, begin := openAttr(b, attrDest)
	b = appendBytes(b, destAddress, c.Dest.Addr().AsSlice())
	b = appendPort(b, destPort, c.Dest.Port())
	if c.Op != DeleteRealServer {
		b = appendUint32(b, destForwarding, forwardMasquerade)
		b = appendUint32(b, destWeight, uint32(c.RealServer.Weight))
		b = appendUint32(b, destUpperThreshold, 0)
		b = appendUint32(b, destLowerThreshold, 0)
	}
	return closeAttr(b, begin)
}

// openAttr begins a nested attribute, closeAttr ends it.
func openAttr(b []byte, kind uint16) (_ []byte, begin int) {
	begin = len(b)
	b = binary.NativeEndian.AppendUint16(b, 0)
	return binary.NativeEndian.AppendUint16(b, kind|unix.NLA_F_NESTED), begin
}

func closeAttr(b []byte, begin int) []byte {
	binary.NativeEndian.PutUint16(b[begin:], uint16(len(b)-begin))
	return b
}

// appendBytes appends an attribute, and what is missing to the next multiple
// of four.
func appendBytes(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, padding[:-len(value)&(unix.NLA_ALIGNTO-1)]...)
}

var padding [unix.NLA_ALIGNTO]byte

func appendUint16(b []byte, kind, value uint16) []byte {
	return appendBytes(b, kind, binary.NativeEndian.AppendUint16(nil, value))
}

func appendUint32(b []byte, kind uint16, value uint32) []byte {
	return appendBytes(b, kind, binary.NativeEndian.AppendUint32(nil, value))
}

// appendPort appends a port, which is in network byte order.
func appendPort(b []byte, kind, port uint16) []byte {
	return appendBytes(b, kind, binary.BigEndian.AppendUint16(nil, port))
}
