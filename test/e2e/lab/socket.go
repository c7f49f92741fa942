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

// Protocols are all of them.
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

// socket is a socket of any of the protocols. Package net has no SCTP, and one
// way for all three keeps their behaviour comparable; the runtime's poller does
// the waiting.
type socket struct {
	file *os.File
	raw  syscall.RawConn
}

// openSocket makes a socket in the namespace.
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

// beStill keeps an SCTP socket from sending heartbeats. An end tells its own
// addresses in the handshake, past all NAT, and a heartbeat after a second or two
// goes straight there: to somebody who knows the connection by another port, and
// aborts it.
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

// whenReadable runs f, waiting for input as long as f says EAGAIN. SCTP's accept
// says EINTR instead if the thread is about to get a signal, as the runtime's are.
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

// bind chooses the socket's own port, even if a connection that is closed
// lingers there.
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

// heedErrors has an SCTP client give up when an ICMP error refuses it, as TCP's
// do. Otherwise the error is only advice, and it tries on in vain.
func (s *socket) heedErrors(family int) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return s.control(func(fd int) error { return unix.SetsockoptInt(fd, level, option, 1) })
}

// connect connects, and waits until that has worked or failed.
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

// receive reads one message or segment, and tells the sender's address if the
// protocol has no connections.
func (s *socket) receive(buffer []byte) (length int, from netip.AddrPort, err error) {
	err = s.whenReadable(func(fd int) error {
		n, address, err := unix.Recvfrom(fd, buffer, 0)
		length, from = n, addrPort(address)
		return err
	})
	return length, from, err
}

// receiveWithControl returns, with a datagram's source, the control message that has an
// answer sent from its destination, if the socket was told to receive it.
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

// answerFrom turns the control messages of a datagram into that of an answer, which
// names no interface: where answers go is for routing to say.
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
	// Without an address it is the zero value, which is no address.
	_ = s.control(func(fd int) (err error) {
		address, err = unix.Getsockname(fd)
		return err
	})
	return addrPort(address)
}

func (s *socket) deadline(d time.Duration) error { return s.file.SetDeadline(time.Now().Add(d)) }

func (s *socket) close() { s.file.Close() }

// reset closes a connection at once, without the states that a closed TCP
// connection lingers in.
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
