package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/capture"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Packet is one packet as an interface saw it: an incoming one before all netfilter
// hooks, an outgoing one after them.
type Packet struct {
	At        time.Time
	Interface string
	Out       bool
	Protocol  Protocol
	From, To  netip.AddrPort
	// Flags are TCP's, such as "SYN" or "SYN,ACK".
	Flags string
}

func (p Packet) String() string {
	direction := "in "
	if p.Out {
		direction = "out"
	}
	return fmt.Sprintf("%s %s %-14s %s %s > %s %s", p.At.Format("05.000"), direction, p.Interface, p.Protocol, p.From, p.To, p.Flags)
}

// flow selects the packets that a capture keeps: those from or to one of the far ends.
type flow struct {
	protocol Protocol
	ends     map[netip.AddrPort]bool
}

func (f flow) isRequest(p Packet) bool { return f.ends[p.To] }
func (f flow) isReply(p Packet) bool   { return f.ends[p.From] }

func (f flow) matches(p Packet) bool {
	return p.Protocol == f.protocol && (f.isRequest(p) || f.isReply(p))
}

// Capture collects the packets of a flow on all interfaces of one namespace.
type Capture struct {
	host   *Namespace
	flow   flow
	socket *capture.Socket
	names  map[int]string

	mu      sync.Mutex
	packets []Packet
	// news is closed and replaced when a packet arrives.
	news chan struct{}
}

// captureBuffer holds packets while the capture waits for a busy processor.
const captureBuffer = 16 << 20

// Watch begins to capture packets from and to the servers at the "address:port" ends, on
// all interfaces of the namespace. The ends are those of the watched part of the path:
// after the proxy, the backends. Packets that pass after Watch has returned are captured.
func (n *Namespace) Watch(protocol Protocol, ends ...string) *Capture {
	n.lab.t.Helper()
	c := &Capture{host: n, flow: flow{protocol, map[netip.AddrPort]bool{}}, names: map[int]string{}, news: make(chan struct{})}
	for _, text := range ends {
		end, err := netip.ParseAddrPort(text)
		n.lab.must(err, "watch %s", text)
		c.flow.ends[end] = true
	}
	err := n.Do(func() (err error) {
		c.socket, err = capture.Open(captureBuffer)
		return err
	})
	n.lab.must(err, "%s", n.Name)
	n.closers = append(n.closers, c.Stop)
	go c.run()
	return c
}

// Stop ends the capture and keeps its packets.
func (c *Capture) Stop() { _ = c.socket.Close() }

func (c *Capture) run() {
	for {
		seen, err := c.socket.Next()
		if err != nil {
			return
		}
		packet := Packet{
			At: time.Now(), Interface: c.name(seen.Link), Out: seen.Out,
			Protocol: protocols[seen.Protocol], From: seen.From, To: seen.To, Flags: seen.Flags,
		}
		if c.flow.matches(packet) {
			c.add(packet)
		}
	}
}

var protocols = map[ip.Protocol]Protocol{ip.TCP: TCP, ip.UDP: UDP, ip.SCTP: SCTP}

// name returns the name of an interface. It caches names, because interfaces may be
// deleted.
func (c *Capture) name(index int) string {
	if name, ok := c.names[index]; ok {
		return name
	}
	name := fmt.Sprintf("#%d", index)
	if link, err := c.host.netlink.LinkByIndex(index); err == nil {
		name = link.Attrs().Name
	}
	c.names[index] = name
	return name
}

func (c *Capture) add(packet Packet) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets = append(c.packets, packet)
	close(c.news)
	c.news = make(chan struct{})
}

// Packets returns the captured packets in order.
func (c *Capture) Packets() []Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.packets)
}

// Await waits for a packet that matches, and returns the first one.
func (c *Capture) Await(limit time.Duration, match func(Packet) bool) (Packet, bool) {
	timeout := time.After(limit)
	for seen := 0; ; {
		c.mu.Lock()
		packets, news := c.packets, c.news
		c.mu.Unlock()
		for ; seen < len(packets); seen++ {
			if match(packets[seen]) {
				return packets[seen], true
			}
		}
		select {
		case <-news:
		case <-timeout:
			return Packet{}, false
		}
	}
}

// Path is the path of a flow through a host, from the first packet of each kind. An empty
// field means that there was none.
type Path struct {
	// RequestIn and RequestOut are the interfaces by which requests entered and
	// left; RequestSource is the source address with which they left.
	RequestIn, RequestOut string
	RequestSource         netip.Addr
	// ReplyIn and ReplyOut are the same for replies. Replies whose NAT is reversed on the
	// host do not leave it as part of the watched flow.
	ReplyIn, ReplyOut string
}

// Path returns the path of the flow so far.
func (c *Capture) Path() (path Path) {
	for _, p := range c.Packets() {
		name := &path.RequestIn
		switch {
		case c.flow.isReply(p) && p.Out:
			name = &path.ReplyOut
		case c.flow.isReply(p):
			name = &path.ReplyIn
		case p.Out:
			name = &path.RequestOut
			if *name == "" {
				path.RequestSource = p.From.Addr()
			}
		}
		if *name == "" {
			*name = p.Interface
		}
	}
	return path
}

func (c *Capture) String() string { return c.Since(time.Time{}) }

// Since formats the packets from a moment on.
func (c *Capture) Since(begin time.Time) string {
	var text strings.Builder
	fmt.Fprintf(&text, "packets at %s:\n", c.host.Name)
	for _, p := range c.Packets() {
		if !p.At.Before(begin) {
			fmt.Fprintln(&text, p)
		}
	}
	return text.String()
}
