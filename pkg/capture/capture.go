// Package capture captures packets on the interfaces of a network namespace: received
// packets before any rule, sent packets after all rules.
package capture

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Packet is a packet on an interface.
type Packet struct {
	Link     int  // index of the interface
	Out      bool // leaves by it
	Protocol ip.Protocol
	From, To netip.AddrPort
	Flags    string // of TCP, such as "SYN,ACK"
}

// Socket receives all IP packets of TCP, UDP and SCTP on all interfaces.
type Socket struct {
	file   *os.File
	raw    syscall.RawConn
	buffer [256]byte
}

// Open starts capturing in the network namespace of the calling thread. buffer is the
// size in bytes of the receive buffer. It needs CAP_NET_RAW, and CAP_NET_ADMIN for the
// buffer.
func Open(buffer int) (*Socket, error) {
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return nil, os.NewSyscallError("packet socket", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("packet socket's buffer", err)
	}
	s := &Socket{file: os.NewFile(uintptr(fd), "packet socket")}
	s.raw, err = s.file.SyscallConn()
	return s, err
}

// Close makes Next fail.
func (s *Socket) Close() error { return s.file.Close() }

// Next returns the next packet. It fails after Close.
func (s *Socket) Next() (Packet, error) {
	for {
		length, link, err := s.receive()
		if err != nil {
			return Packet{}, err
		}
		if p, ok := Parse(s.buffer[:length]); ok && link != nil {
			p.Link, p.Out = link.Ifindex, link.Pkttype == unix.PACKET_OUTGOING
			return p, nil
		}
	}
}

// receive reads the first bytes of a packet.
func (s *Socket) receive() (length int, link *unix.SockaddrLinklayer, err error) {
	closed := s.raw.Read(func(fd uintptr) bool {
		var from unix.Sockaddr
		length, from, err = unix.Recvfrom(int(fd), s.buffer[:], 0)
		link, _ = from.(*unix.SockaddrLinklayer)
		return err != unix.EAGAIN && err != unix.EINTR
	})
	if closed != nil {
		return 0, nil, closed
	}
	return length, link, err
}

// Parse parses an IP packet up to the ports. It returns false for a fragment other than the
// first, which has no ports, and for a packet with IPv6 extension headers.
func Parse(data []byte) (p Packet, ok bool) {
	if len(data) < 20 {
		return p, false
	}
	var from, to netip.Addr
	switch data[0] >> 4 {
	case 4:
		from, to = netip.AddrFrom4([4]byte(data[12:16])), netip.AddrFrom4([4]byte(data[16:20]))
		header, laterFragment := int(data[0]&15)*4, data[6]&0x1f != 0 || data[7] != 0
		if header < 20 || header > len(data) || laterFragment {
			return p, false
		}
		p.Protocol, data = ip.Protocol(data[9]), data[header:]
	case 6:
		if len(data) < 40 {
			return p, false
		}
		from, to = netip.AddrFrom16([16]byte(data[8:24])), netip.AddrFrom16([16]byte(data[24:40]))
		p.Protocol, data = ip.Protocol(data[6]), data[40:]
	}
	if len(data) < 4 || !from.IsValid() {
		return p, false
	}
	p.From = netip.AddrPortFrom(from, binary.BigEndian.Uint16(data))
	p.To = netip.AddrPortFrom(to, binary.BigEndian.Uint16(data[2:]))
	if p.Protocol == ip.TCP && len(data) > 13 {
		p.Flags = tcpFlags(data[13])
	}
	return p, p.Protocol == ip.TCP || p.Protocol == ip.UDP || p.Protocol == ip.SCTP
}

func tcpFlags(bits byte) string {
	var flags []string
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK"} {
		if bits&(1<<i) != 0 {
			flags = append(flags, name)
		}
	}
	return strings.Join(flags, ",")
}
