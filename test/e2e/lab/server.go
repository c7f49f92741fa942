package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Server answers every request with its name and the source address that it sees. On a
// connection it answers any number of requests.
type Server struct {
	Name     string
	Protocol Protocol
	// Address is its listening address; the unspecified address means all, of both
	// families.
	Address netip.AddrPort

	socket *socket
	served atomic.Int64
}

// Serve starts a server on a port of all the namespace's addresses. It runs until the lab
// ends or Stop is called.
func (n *Namespace) Serve(name string, protocol Protocol, port uint16) *Server {
	n.lab.t.Helper()
	return n.ServeOn(name, protocol, netip.AddrPortFrom(netip.IPv6Unspecified(), port))
}

// ServeOn starts a server on one address.
func (n *Namespace) ServeOn(name string, protocol Protocol, address netip.AddrPort) *Server {
	n.lab.t.Helper()
	listener, err := n.openSocket(protocol, family(address.Addr()))
	n.lab.must(err, "server %s", name)
	err = listener.control(func(fd int) error { return listen(fd, protocol, address) })
	n.lab.must(err, "server %s: listen on %s %s in %s", name, protocol, address, n.Name)
	s := &Server{Name: name, Protocol: protocol, Address: address, socket: listener}
	n.closers = append(n.closers, s.Stop)
	if protocol == UDP {
		go s.answerDatagrams()
	} else {
		go s.accept()
	}
	return s
}

func listen(fd int, protocol Protocol, address netip.AddrPort) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if err := unix.Bind(fd, sockaddr(address)); err != nil {
		return err
	}
	if protocol == UDP {
		if !address.Addr().Is6() {
			return nil
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}
	return unix.Listen(fd, 1024)
}

// Served returns the number of requests answered.
func (s *Server) Served() int { return int(s.served.Load()) }

// Stop closes the listening socket; connections stay open.
func (s *Server) Stop() { s.socket.close() }

func (s *Server) answerTo(source netip.AddrPort) []byte {
	s.served.Add(1)
	return fmt.Appendf(nil, "%s %s\n", s.Name, source)
}

// answerDatagrams replies from the address that the client used, as a server with several
// addresses must: the kernel would use that of the interface by which the reply leaves.
func (s *Server) answerDatagrams() {
	buffer, control := make([]byte, 2048), make([]byte, 128)
	for {
		from, asked, err := s.socket.receiveWithControl(buffer, control)
		if !from.IsValid() {
			if err != nil {
				return
			}
			continue
		}
		// A client that no longer exists needs no reply.
		_ = s.socket.control(func(fd int) error {
			return unix.Sendmsg(fd, s.answerTo(from), asked, sockaddr(s.inOwnFamily(from)), 0)
		})
	}
}

// inOwnFamily maps an IPv4 address to IPv6 for a socket that serves both families.
func (s *Server) inOwnFamily(peer netip.AddrPort) netip.AddrPort {
	if s.Address.Addr().Is6() {
		return netip.AddrPortFrom(netip.AddrFrom16(peer.Addr().As16()), peer.Port())
	}
	return peer
}

func (s *Server) accept() {
	for {
		var fd int
		var from unix.Sockaddr
		err := s.socket.whenReadable(func(listener int) (err error) {
			fd, from, err = unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			return err
		})
		if errors.Is(err, unix.ECONNABORTED) {
			continue
		}
		if err != nil {
			return
		}
		connection, err := wrapSocket(fd)
		if err != nil {
			return
		}
		go s.answerConnection(connection, addrPort(from))
	}
}

func (s *Server) answerConnection(connection *socket, from netip.AddrPort) {
	defer connection.close()
	buffer := make([]byte, 2048)
	for {
		length, _, err := connection.receive(buffer)
		if err != nil || length == 0 {
			return
		}
		if connection.send(s.answerTo(from)) != nil {
			return
		}
	}
}
