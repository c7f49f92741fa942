package routing

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Listener is a port on which a process of this node listens, at one of its addresses or,
// with the unspecified address, at all. :: includes IPv4.
type Listener struct {
	Protocol ip.Protocol
	Addr     netip.Addr
	Port     uint16
}

// listing is one of the kernel's lists of sockets.
type listing struct {
	name     string
	family   uint8
	protocol ip.Protocol
	waits    string // the state of listening sockets
}

// listings have the states TCP_LISTEN and, for UDP, TCP_CLOSE, that of a socket without a peer.
var listings = []listing{
	{"tcp", unix.AF_INET, ip.TCP, "0A"}, {"tcp6", unix.AF_INET6, ip.TCP, "0A"},
	{"udp", unix.AF_INET, ip.UDP, "07"}, {"udp6", unix.AF_INET6, ip.UDP, "07"},
}

// Listeners reads the node's listening ports of TCP and UDP, sorted. It returns no partial
// result with an error. It reads the network namespace of the calling thread.
func (n *Netlink) Listeners() ([]Listener, error) {
	var out []Listener
	for _, l := range listings {
		list, err := n.readListing(&l)
		if err != nil {
			return nil, fmt.Errorf("read the node's ports: %w", err)
		}
		out = append(out, list...)
	}
	return sortListeners(out), nil
}

// readListing reads a list by netlink where that takes less, if the kernel can. If it cannot, it
// is not asked again: each time it would start modprobe.
func (n *Netlink) readListing(l *listing) ([]Listener, error) {
	if l.protocol == ip.TCP && !n.noTCPDiag.Load() {
		list, err := tcpListeners(l.family)
		if err == nil {
			return list, nil
		}
		n.noTCPDiag.Store(lacksTCPDiag(err))
	}
	return l.readFile()
}

// lacksTCPDiag reports whether an error means that the kernel has no module tcp_diag or
// inet_diag.
func lacksTCPDiag(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT)
}

func (l *listing) readFile() (list []Listener, err error) {
	err = l.read(func(file io.Reader) error {
		list, err = readListeners(file, l.protocol, l.waits)
		return err
	})
	return list, err
}

// read calls do with the list. A kernel without IPv6 has none of it.
func (l *listing) read(do func(io.Reader) error) error {
	file, err := os.Open("/proc/thread-self/net/" + l.name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if err := do(file); err != nil {
		return fmt.Errorf("%s: %w", l.name, err)
	}
	return nil
}

func sortListeners(list []Listener) []Listener {
	slices.SortFunc(list, func(a, b Listener) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
	})
	return slices.Compact(list)
}

// readListeners parses a listing. TCP's begins with the listening sockets. readListeners does not
// read the others, because there may be very many.
func readListeners(listing io.Reader, protocol ip.Protocol, waits string) ([]Listener, error) {
	var out []Listener
	err := eachSocket(listing, func(state, address string) (more bool, err error) {
		if state != waits {
			return protocol != ip.TCP, nil
		}
		at, err := parseSocketAddress(address)
		out = append(out, Listener{protocol, at.Addr(), at.Port()})
		return true, err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// eachSocket calls do with the state and the local address of each socket in a listing, until do
// returns false or an error:
//
//	sl  local_address rem_address   st …
//	 0: 0100007F:1F90 00000000:0000 0A …
func eachSocket(listing io.Reader, do func(state, address string) (more bool, err error)) error {
	lines := bufio.NewScanner(listing)
	lines.Scan() // the header
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 4 {
			return fmt.Errorf("line with %d fields, want at least 4", len(words))
		}
		if more, err := do(words[3], words[1]); err != nil || !more {
			return err
		}
	}
	return lines.Err()
}

// parseSocketAddress parses ADDRESS:PORT in hexadecimal digits. The address is a sequence of
// 32-bit words in native byte order.
func parseSocketAddress(text string) (netip.AddrPort, error) {
	address, number, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(number, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("invalid port in %q: %w", text, err)
	}
	digits, err := hex.DecodeString(address)
	if err != nil || len(digits)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("invalid address in %q", text)
	}
	for word := range slices.Chunk(digits, 4) {
		binary.NativeEndian.PutUint32(word, binary.BigEndian.Uint32(word))
	}
	addr, ok := netip.AddrFromSlice(digits)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("invalid address in %q", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(port)), nil
}
