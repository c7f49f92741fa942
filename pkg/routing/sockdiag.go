package routing

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Listening sockets are requested by their state, because the kernel then does not go through its
// table of connections, which has up to half a million buckets. For /proc/net/tcp it does, even if
// only the first lines are read: with 24 GB of memory this takes 15 ms for both families, and 0.4 ms
// by netlink (BenchmarkListeners). The library (netlink 1.3.1) cannot select the state.

// listening is the bit of TCP_LISTEN in a set of states.
const listening = 1 << unix.BPF_TCP_LISTEN

// Offsets in struct inet_diag_msg of <linux/inet_diag.h>, and the size of struct inet_diag_req_v2.
const (
	diagSourcePort  = 4
	diagSource      = 8
	diagMessageSize = 72
	diagRequestSize = 56
)

// tcpListeners reads a family's listening sockets of TCP. It fails if the kernel has no module
// tcp_diag.
func tcpListeners(family uint8) ([]Listener, error) {
	messages, err := dump(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		body := make([]byte, diagRequestSize)
		body[0], body[1] = family, unix.IPPROTO_TCP
		binary.NativeEndian.PutUint32(body[4:], listening)
		request.AddRawData(body)
		return request.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
	})
	if err != nil {
		return nil, fmt.Errorf("read listening sockets: %w", err)
	}
	var out []Listener
	for _, m := range messages {
		l, ok := parseSocket(m)
		if !ok {
			return nil, fmt.Errorf("read listening sockets: a message of %d bytes", len(m))
		}
		out = append(out, l)
	}
	return out, nil
}

// parseSocket returns the address of a socket of TCP from a struct inet_diag_msg.
func parseSocket(m []byte) (Listener, bool) {
	if len(m) < diagMessageSize {
		return Listener{}, false
	}
	source := m[diagSource : diagSource+4]
	if m[0] == unix.AF_INET6 {
		source = m[diagSource : diagSource+16]
	}
	a, _ := netip.AddrFromSlice(source)
	return Listener{ip.TCP, a.Unmap(), binary.BigEndian.Uint16(m[diagSourcePort:])}, true
}
