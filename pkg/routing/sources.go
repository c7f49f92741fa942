package routing

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Sources returns, for each address that connected sockets of TCP and UDP on this node have as
// their source, the number of these sockets. It reads the network namespace of the calling thread.
func (n *Netlink) Sources() (map[netip.Addr]int, error) {
	out := map[netip.Addr]int{}
	for _, l := range listings {
		if err := addSources(out, &l); err != nil {
			return nil, fmt.Errorf("read the node's sockets: %w", err)
		}
	}
	return out, nil
}

func addSources(to map[netip.Addr]int, l *listing) error {
	file, err := os.Open("/proc/thread-self/net/" + l.name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel without IPv6
	}
	if err != nil {
		return err
	}
	defer file.Close()
	return readSources(to, file, l.protocol)
}

// unconnected are the states of sockets that have no peer any more, or never had one: TCP_TIME_WAIT,
// TCP_CLOSE and TCP_LISTEN.
var unconnected = map[string]bool{"06": true, "07": true, "0A": true}

// readSources adds the sources of a listing of readListeners' format.
func readSources(to map[netip.Addr]int, listing io.Reader, protocol ip.Protocol) error {
	lines := bufio.NewScanner(listing)
	lines.Scan() // the header
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 4 {
			return fmt.Errorf("%s: line with %d fields, want at least 4", protocol, len(words))
		}
		if unconnected[words[3]] {
			continue
		}
		at, err := parseSocketAddress(words[1])
		if err != nil {
			return err
		}
		to[at.Addr()]++
	}
	return lines.Err()
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
