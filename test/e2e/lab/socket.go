package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Protocol is a transport protocol.
type Protocol string

// The protocols that Services have.
const (
	TCP  Protocol = "TCP"
	UDP  Protocol = "UDP"
	SCTP Protocol = "SCTP"
)

// Protocols are all protocols.
var Protocols = []Protocol{TCP, UDP, SCTP}

func (p Protocol) socketType() (kind, number int) {
	switch p {
	case UDP:
		return unix.SOCK_DGRAM, unix.IPPROTO_UDP
	case SCTP:
		return unix.SOCK_STREAM, unix.IPPROTO_SCTP
	}
	return unix.SOCK_STREAM, unix.IPPROTO_TCP
}

// socket is a socket of any protocol. Package net does not support SCTP, and the same
// code for all three keeps their behavior comparable. The runtime's poller waits for
// input and output.
type socket struct {
	file *os.File
	raw  syscall.RawConn
}

// openSocket opens a socket in the namespace.
func (n *Namespace) openSocket(protocol Protocol, family int) (*socket, error) {
	kind, number := protocol.socketType()
	var fd int
	err := n.Do(func() (err error) {
		fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, number)
		return err
	})
	if err == nil && protocol == SCTP {
		err = beStill(fd)
	}
	if err != nil {
		return nil, fmt.Errorf("%s socket in %s: %w", protocol, n.Name, err)
	}
	return wrapSocket(fd)
}

// beStill disables the heartbeats of an SCTP socket. An end announces its own addresses
// in the handshake, bypassing all NAT. A heartbeat after a second or two goes directly to
// such an address. The peer there knows the connection by another port, and aborts it.
func beStill(fd int) error {
	const peerAddressParameters, heartbeatDisable = 9, 1 << 1 // SCTP_PEER_ADDR_PARAMS, SPP_HB_DISABLE
	var parameters [156]byte                                  // struct sctp_paddrparams, which is packed
	binary.NativeEndian.PutUint32(parameters[146:], heartbeatDisable)
	return unix.SetsockoptString(fd, unix.IPPROTO_SCTP, peerAddressParameters, string(parameters[:]))
}

func wrapSocket(fd int) (*socket, error) {
	file := os.NewFile(uintptr(fd), "socket")
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &socket{file: file, raw: raw}, nil
}

// control runs f on the descriptor without waiting.
func (s *socket) control(f func(fd int) error) (err error) {
	if e := s.raw.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// whenReadable runs f, and waits for input as long as f returns EAGAIN. SCTP's accept
// returns EINTR instead if the thread is about to get a signal, as the runtime's threads
// are.
func (s *socket) whenReadable(f func(fd int) error) (err error) {
	if e := s.raw.Read(func(fd uintptr) bool {
		for err = f(int(fd)); errors.Is(err, unix.EINTR); err = f(int(fd)) {
		}
		return !errors.Is(err, unix.EAGAIN)
	}); e != nil {
		return e
	}
	return err
}

// bind chooses the socket's own port, even if a closed connection still uses it.
func (s *socket) bind(family int, port uint16) error {
	any := netip.IPv4Unspecified()
	if family == unix.AF_INET6 {
		any = netip.IPv6Unspecified()
	}
	return s.control(func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
		return unix.Bind(fd, sockaddr(netip.AddrPortFrom(any, port)))
	})
}

// heedErrors makes an SCTP client give up after an ICMP error, as a TCP client does.
// Otherwise the error is only a hint, and the client retries until it times out.
func (s *socket) heedErrors(family int) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return s.control(func(fd int) error { return unix.SetsockoptInt(fd, level, option, 1) })
}

// connect connects, and waits for the result.
func (s *socket) connect(address netip.AddrPort) error {
	err := s.control(func(fd int) error { return unix.Connect(fd, sockaddr(address)) })
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	if e := s.raw.Write(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if ready, e := unix.Poll(poll, 0); e != nil || ready == 0 {
			return false
		}
		var code int
		code, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			err = unix.Errno(code)
		}
		return true
	}); e != nil {
		return e
	}
	return err
}

// receive reads one message or segment, and returns the sender's address if the protocol
// is connectionless.
func (s *socket) receive(buffer []byte) (length int, from netip.AddrPort, err error) {
	err = s.whenReadable(func(fd int) error {
		n, address, err := unix.Recvfrom(fd, buffer, 0)
		length, from = n, addrPort(address)
		return err
	})
	return length, from, err
}

// receiveWithControl returns, with a datagram's source, the control message that makes a
// reply use the datagram's destination as its source, if the socket is configured for
// that.
func (s *socket) receiveWithControl(buffer, control []byte) (from netip.AddrPort, answer []byte, err error) {
	err = s.whenReadable(func(fd int) error {
		_, length, _, address, err := unix.Recvmsg(fd, buffer, control, 0)
		if err == nil {
			from, answer = addrPort(address), answerFrom(control[:length])
		}
		return err
	})
	return from, answer, err
}

// answerFrom turns the control messages of a datagram into that of a reply. It names no
// interface: routing decides where replies leave.
func answerFrom(control []byte) []byte {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO {
			info := *(*unix.Inet6Pktinfo)(unsafe.Pointer(&m.Data[0]))
			info.Ifindex = 0
			return unix.PktInfo6(&info)
		}
	}
	return nil
}

func (s *socket) send(data []byte) error {
	return s.control(func(fd int) error { return unix.Send(fd, data, unix.MSG_NOSIGNAL) })
}

func (s *socket) local() netip.AddrPort {
	var address unix.Sockaddr
	// Without an address, it returns the zero value.
	_ = s.control(func(fd int) (err error) {
		address, err = unix.Getsockname(fd)
		return err
	})
	return addrPort(address)
}

func (s *socket) deadline(d time.Duration) error { return s.file.SetDeadline(time.Now().Add(d)) }

func (s *socket) close() { s.file.Close() }

// reset closes a connection immediately, without the states in which a closed TCP
// connection remains.
func (s *socket) reset() {
	_ = s.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	s.close()
}

func family(address netip.Addr) int {
	if address.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func sockaddr(address netip.AddrPort) unix.Sockaddr {
	if address.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}
}

func addrPort(address unix.Sockaddr) netip.AddrPort {
	switch a := address.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
