package ipvs

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// This file writes changes, instead of github.com/moby/ipvs, which waits for each request's
// acknowledgement and allocates every attribute separately. Adding a virtual server with two
// real servers takes a third of the library's time alone, and a fifth in a batch
// (BenchmarkApply and BenchmarkLibrary, on an emulated machine). The library still reads.

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
	*nlmsg.Writer
	family uint16 // generic netlink family, numbered by the kernel at run time
}

func newWriter(timeout time.Duration) (*writer, error) {
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return nil, fmt.Errorf("look for IPVS in the kernel: %w", err)
	}
	w, err := nlmsg.NewWriter(unix.NETLINK_GENERIC, timeout)
	if err != nil {
		return nil, err
	}
	return &writer{w, family.ID}, nil
}

// write sends at most nlmsg.BatchSize changes and returns one answer for each. If it
// returns an error, the answers are unknown.
func (w *writer) write(changes []Change) ([]error, error) {
	for _, c := range changes {
		w.Add(w.family, 0, func(b []byte) []byte { return appendRequest(b, c) })
	}
	return w.Send()
}

// appendRequest appends the message for a change, without the netlink header.
func appendRequest(b []byte, c Change) []byte {
	b = append(b, commands[c.Op], interfaceVersion, 0, 0)
	b = appendService(b, c)
	switch c.Op {
	case AddRealServer, UpdateRealServer, DeleteRealServer:
		b = appendDest(b, c)
	}
	return b
}

// appendService appends the attributes of the virtual server: its key and, for an add or
// update, its settings.
func appendService(b []byte, c Change) []byte {
	b, begin := nlmsg.OpenAttr(b, attrService)
	family, netmask := uint16(unix.AF_INET), uint32(0xffffffff)
	if c.Key.Family() == ip.IPv6 {
		family, netmask = unix.AF_INET6, 128
	}
	b = nlmsg.AppendUint16(b, serviceFamily, family)
	if c.Key.FWMark != 0 {
		b = nlmsg.AppendUint32(b, serviceMark, c.Key.FWMark)
	} else {
		b = nlmsg.AppendUint16(b, serviceProtocol, uint16(c.Key.Protocol))
		b = nlmsg.AppendAttr(b, serviceAddress, c.Key.Addr.AsSlice())
		b = appendPort(b, servicePort, c.Key.Port)
	}
	switch c.Op {
	case AddVirtualServer, UpdateVirtualServer:
		vs := c.VirtualServer
		b = nlmsg.AppendAttr(b, serviceScheduler, append([]byte(vs.Scheduler), 0))
		// The second word is the mask of the flags to set: all.
		flags := binary.NativeEndian.AppendUint32(nil, uint32(vs.Flags))
		b = nlmsg.AppendAttr(b, serviceFlags, append(flags, 0xff, 0xff, 0xff, 0xff))
		b = nlmsg.AppendUint32(b, serviceTimeout, vs.Timeout)
		// Persistence is by full client address: a mask in IPv4, a prefix
		// length in IPv6.
		b = nlmsg.AppendUint32(b, serviceNetmask, netmask)
	}
	return nlmsg.CloseAttr(b, begin)
}

// appendDest appends the attributes of the real server. The kernel requires both connection
// thresholds.
func appendDest(b []byte, c Change) []byte {
	b, begin := nlmsg.OpenAttr(b, attrDest)
	b = nlmsg.AppendAttr(b, destAddress, c.Dest.Addr().AsSlice())
	b = appendPort(b, destPort, c.Dest.Port())
	if c.Op != DeleteRealServer {
		b = nlmsg.AppendUint32(b, destForwarding, forwardMasquerade)
		b = nlmsg.AppendUint32(b, destWeight, uint32(c.RealServer.Weight))
		b = nlmsg.AppendUint32(b, destUpperThreshold, c.RealServer.MaxConnections)
		b = nlmsg.AppendUint32(b, destLowerThreshold, 0) // 0: the kernel uses three quarters of the upper one
	}
	return nlmsg.CloseAttr(b, begin)
}

// appendPort appends a port, which is in network byte order.
func appendPort(b []byte, kind, port uint16) []byte {
	return nlmsg.AppendAttr(b, kind, binary.BigEndian.AppendUint16(nil, port))
}
