package lab

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Outcome is the result of a request.
type Outcome string

// The outcomes that tests distinguish. The outcome of any other error is its text.
const (
	OK          Outcome = "ok"
	Refused     Outcome = "refused"
	TimedOut    Outcome = "timeout"
	Reset       Outcome = "reset"
	Unreachable Outcome = "unreachable"
)

// Answer is the reply to a request, or the reason why there was none.
type Answer struct {
	// Server is the name of the server that answered.
	Server string
	// SeenSource is the source address that the server saw.
	SeenSource netip.AddrPort
	// Local is the client's own address.
	Local   netip.AddrPort
	Err     error
	Elapsed time.Duration
	Ended   time.Time // only for failures of a Load
}

// Outcome classifies the answer.
func (a Answer) Outcome() Outcome {
	switch {
	case a.Err == nil:
		return OK
	case errors.Is(a.Err, unix.ECONNREFUSED):
		return Refused
	case errors.Is(a.Err, os.ErrDeadlineExceeded), errors.Is(a.Err, unix.ETIMEDOUT):
		return TimedOut
	case errors.Is(a.Err, unix.ECONNRESET), errors.Is(a.Err, unix.EPIPE), errors.Is(a.Err, io.EOF):
		return Reset
	case errors.Is(a.Err, unix.EHOSTUNREACH), errors.Is(a.Err, unix.ENETUNREACH):
		return Unreachable
	}
	return Outcome(a.Err.Error())
}

func (a Answer) String() string {
	if a.Err != nil {
		return fmt.Sprintf("%s from %s after %s", a.Outcome(), a.Local, a.Elapsed.Round(time.Millisecond))
	}
	return fmt.Sprintf("%s from %s, seen as %s, after %s", a.Server, a.Local, a.SeenSource, a.Elapsed.Round(time.Millisecond))
}

// DialTimeout suffices for one retransmission of a lost SYN.
const DialTimeout = 3 * time.Second

// sctpDialTimeout does the same for an INIT, which is retransmitted after three seconds
// (RTO.Initial of RFC 4960, net.sctp.rto_initial).
const sctpDialTimeout = 3*time.Second + DialTimeout

// Dial sends one request to "address:port" and waits for the reply.
func (n *Namespace) Dial(protocol Protocol, address string) Answer {
	if protocol == SCTP {
		return n.DialWithin(sctpDialTimeout, protocol, address)
	}
	return n.DialWithin(DialTimeout, protocol, address)
}

// DialWithin is Dial with a time limit.
func (n *Namespace) DialWithin(limit time.Duration, protocol Protocol, address string) Answer {
	return n.DialFrom(0, limit, protocol, address)
}

// DialFrom is DialWithin from a given source port; 0 lets the kernel choose.
func (n *Namespace) DialFrom(port uint16, limit time.Duration, protocol Protocol, address string) Answer {
	begin := time.Now()
	c, err := n.ConnectFrom(port, limit, protocol, address)
	if err != nil {
		return Answer{Err: err, Elapsed: time.Since(begin)}
	}
	defer c.socket.reset()
	answer := c.Ask(max(0, limit-time.Since(begin)))
	answer.Elapsed = time.Since(begin)
	return answer
}

// Connection is a client's connection or, for UDP, a client's socket. It stays open for
// further requests.
type Connection struct {
	protocol Protocol
	socket   *socket
}

// Connect opens a connection to "address:port". Close it after use.
func (n *Namespace) Connect(limit time.Duration, protocol Protocol, address string) (*Connection, error) {
	return n.ConnectFrom(0, limit, protocol, address)
}

// ConnectFrom is Connect from a given source port; 0 lets the kernel choose.
func (n *Namespace) ConnectFrom(port uint16, limit time.Duration, protocol Protocol, address string) (*Connection, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	s, err := n.clientSocket(port, protocol, family(to.Addr()))
	if err != nil {
		return nil, err
	}
	if err := s.deadline(limit); err != nil {
		s.close()
		return nil, err
	}
	if err := s.connect(to); err != nil {
		s.close()
		return nil, err
	}
	return &Connection{protocol: protocol, socket: s}, nil
}

func (n *Namespace) clientSocket(port uint16, protocol Protocol, family int) (*socket, error) {
	s, err := n.openSocket(protocol, family)
	if err != nil {
		return nil, err
	}
	if protocol == SCTP {
		err = s.heedErrors(family)
	}
	if port != 0 && err == nil {
		err = s.bind(family, port)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// Ask sends one request on the connection and waits for the reply. It sends a datagram
// once: a lost datagram or reply is a timeout.
func (c *Connection) Ask(limit time.Duration) (answer Answer) {
	begin := time.Now()
	answer.Local = c.socket.local()
	defer func() { answer.Elapsed = time.Since(begin) }()
	if answer.Err = c.socket.deadline(limit); answer.Err != nil {
		return answer
	}
	if answer.Err = c.socket.send([]byte("who are you?\n")); answer.Err != nil {
		return answer
	}
	buffer := make([]byte, 2048)
	length, _, err := c.socket.receive(buffer)
	if err == nil && length == 0 {
		err = io.EOF
	}
	if answer.Err = err; err == nil {
		answer.Server, answer.SeenSource, answer.Err = parseAnswer(string(buffer[:length]))
	}
	return answer
}

// Send sends one request without waiting for the reply.
func (c *Connection) Send() error { return c.socket.send([]byte("who are you?\n")) }

// Close closes the connection in order.
func (c *Connection) Close() { c.socket.close() }

// Reset resets the connection, so that its port can be used again immediately.
func (c *Connection) Reset() { c.socket.reset() }

// Finish closes a TCP connection and waits until the server has closed it too.
func (c *Connection) Finish(limit time.Duration) error {
	defer c.socket.close()
	if err := c.socket.deadline(limit); err != nil {
		return err
	}
	if err := c.socket.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) }); err != nil {
		return err
	}
	length, _, err := c.socket.receive(make([]byte, 1))
	if err == nil && length > 0 {
		err = errors.New("the server went on sending")
	}
	return err
}

// Upload sends a number of bytes on a TCP connection, closes it, and waits until the
// server has read them all.
func (c *Connection) Upload(bytes int, limit time.Duration) error {
	defer c.socket.close()
	if err := c.socket.deadline(limit); err != nil {
		return err
	}
	for rest := bytes; rest > 0; rest -= 10_000 {
		if _, err := c.socket.file.Write(make([]byte, min(rest, 10_000))); err != nil {
			return err
		}
	}
	if err := c.socket.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) }); err != nil {
		return err
	}
	for {
		// The server answers each piece, and closes the connection after the last one.
		if length, _, err := c.socket.receive(make([]byte, 4096)); err != nil || length == 0 {
			return err
		}
	}
}

func parseAnswer(text string) (server string, source netip.AddrPort, err error) {
	server, seen, ok := strings.Cut(strings.TrimSpace(text), " ")
	if !ok {
		return "", netip.AddrPort{}, fmt.Errorf("not a reply of the lab's servers: %q", text)
	}
	source, err = netip.ParseAddrPort(seen)
	return server, source, err
}

// Load is a client that keeps sending requests, each on a new connection.
type Load struct {
	stop chan struct{}
	done sync.WaitGroup
	mu   sync.Mutex
	// counts and answers are guarded by mu.
	counts   map[Outcome]int
	servers  map[string]int
	sources  map[netip.Addr]int
	failures []Answer
}

// Tally is the result of a load.
type Tally struct {
	Outcomes map[Outcome]int
	// Servers counts the replies of each server.
	Servers map[string]int
	// Sources counts the addresses that the servers saw.
	Sources map[netip.Addr]int
	// Failures are the first requests that were not answered.
	Failures []Answer
}

// keptFailures is the number of failures that are kept.
const keptFailures = 20

// Load starts clients that keep sending requests to "address:port" until stopped, at
// least one each.
func (n *Namespace) Load(clients int, protocol Protocol, address string) *Load {
	return n.PacedLoad(0, DialTimeout, clients, protocol, address)
}

// PacedLoad is Load with a pause after each request, so that a slow machine can do other
// work, and with a timeout for each.
func (n *Namespace) PacedLoad(pause, limit time.Duration, clients int, protocol Protocol, address string) *Load {
	return n.load(pause, clients, func() Answer { return n.DialWithin(limit, protocol, address) })
}

// PortLoad is PacedLoad with one client that uses increasing source ports, beginning with
// the given one, so that no two loads share one: IPVS mixes up connections from one port
// to two VIPs with the same endpoint.
func (n *Namespace) PortLoad(first uint16, pause, limit time.Duration, protocol Protocol, address string) *Load {
	port := first - 1
	return n.load(pause, 1, func() Answer {
		port++
		return n.DialFrom(port, limit, protocol, address)
	})
}

// load makes each client connect repeatedly.
func (n *Namespace) load(pause time.Duration, clients int, dial func() Answer) *Load {
	l := &Load{stop: make(chan struct{}), counts: map[Outcome]int{}, servers: map[string]int{}, sources: map[netip.Addr]int{}}
	for range clients {
		l.done.Go(func() {
			l.count(dial())
			for !l.stoppedIn(pause) {
				l.count(dial())
			}
		})
	}
	n.closers = append(n.closers, func() { l.Stop() })
	return l
}

// stoppedIn waits for the pause or the end of the load.
func (l *Load) stoppedIn(pause time.Duration) bool {
	if pause == 0 {
		return l.stopped()
	}
	select {
	case <-l.stop:
		return true
	case <-time.After(pause):
		return false
	}
}

func (l *Load) stopped() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

func (l *Load) count(answer Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[answer.Outcome()]++
	if answer.Err == nil {
		l.servers[answer.Server]++
		l.sources[answer.SeenSource.Addr()]++
	} else if len(l.failures) < keptFailures {
		answer.Ended = time.Now()
		l.failures = append(l.failures, answer)
	}
}

// Tally returns the result so far.
func (l *Load) Tally() Tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Tally{
		Outcomes: maps.Clone(l.counts), Servers: maps.Clone(l.servers), Sources: maps.Clone(l.sources),
		Failures: slices.Clone(l.failures),
	}
}

// Stop ends the clients, waits for their last requests, and returns the tally.
func (l *Load) Stop() Tally {
	l.mu.Lock()
	if !l.stopped() {
		close(l.stop)
	}
	l.mu.Unlock()
	l.done.Wait()
	return l.Tally()
}
