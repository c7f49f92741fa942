package routing

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Sources returns, for each address that connected sockets of TCP and UDP on this node have as
// their source, the number of these sockets. It reads the network namespace of the calling thread.
func (n *Netlink) Sources() (map[netip.Addr]int, error) {
	out := map[netip.Addr]int{}
	for _, l := range listings {
		if err := l.read(func(file io.Reader) error { return readSources(out, file) }); err != nil {
			return nil, fmt.Errorf("read the node's sockets: %w", err)
		}
	}
	return out, nil
}

// unconnected are the states of sockets that have no peer any more, or never had one: TCP_TIME_WAIT,
// TCP_CLOSE and TCP_LISTEN.
var unconnected = map[string]bool{"06": true, "07": true, "0A": true}

// readSources adds the sources of a listing.
func readSources(to map[netip.Addr]int, listing io.Reader) error {
	return eachSocket(listing, func(state, address string) (more bool, err error) {
		if unconnected[state] {
			return true, nil
		}
		at, err := parseSocketAddress(address)
		to[at.Addr()]++
		return true, err
	})
}

// farAway are addresses reserved for documentation, to which packets take the default route.
var farAway = map[ip.Family]net.IP{ip.IPv4: net.ParseIP("192.0.2.1"), ip.IPv6: net.ParseIP("2001:db8::1")}

// DefaultSource returns the address that the kernel chooses as the source of connections by the
// default route. It is invalid if there is no such route.
func (n *Netlink) DefaultSource(f ip.Family) (netip.Addr, error) {
	routes, err := n.handle.RouteGet(farAway[f])
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return netip.Addr{}, nil
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look up the default route: %w", err)
	}
	for _, r := range routes {
		if a, ok := netip.AddrFromSlice(r.Src); ok {
			return a.Unmap(), nil
		}
	}
	return netip.Addr{}, nil
}
