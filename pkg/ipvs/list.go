package ipvs

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// listFile is the text form of IPVS, of the network namespace of the thread that opens it,
// regardless of the thread that reads it:
//
//	TCP  0A600001:01BB rr persistent 10800 FFFFFFFF
//	  -> C000020A:192B      Masq    1      0          0
//
// One read returns the real servers of all virtual servers, where a netlink dump returns
// those of one. If several network namespaces have virtual servers, some kernels omit some.
// A fwmark's line does not contain its family.
const listFile = "/proc/thread-self/net/ip_vs"

// listOf reads the file from its beginning.
func listOf(file *os.File) (map[Key]map[netip.AddrPort]RealServer, error) {
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return parseList(file)
}

// parseList returns the real servers of each virtual server that has an address.
func parseList(r io.Reader) (map[Key]map[netip.AddrPort]RealServer, error) {
	list := map[Key]map[netip.AddrPort]RealServer{}
	var dests map[netip.AddrPort]RealServer // of the last virtual server; nil if it is skipped
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		switch {
		case len(words) < 2:
			return nil, unreadable(lines.Text())
		case words[0] == "->":
			if dests == nil {
				continue // of a fwmark, or the header
			}
			dest, rs, err := parseDest(words)
			if err != nil {
				return nil, unreadable(lines.Text())
			}
			dests[dest] = rs
		case protocols[words[0]] != 0:
			address, err := parseHex(words[1])
			if err != nil {
				return nil, unreadable(lines.Text())
			}
			dests = map[netip.AddrPort]RealServer{}
			list[Key{Protocol: protocols[words[0]], Addr: address.Addr(), Port: address.Port()}] = dests
		default:
			dests = nil // a fwmark, or the header
		}
	}
	return list, lines.Err()
}

var protocols = map[string]ip.Protocol{"TCP": ip.TCP, "UDP": ip.UDP, "SCTP": ip.SCTP}

func unreadable(line string) error {
	return fmt.Errorf("%s: %q: %w", listFile, line, unix.EINVAL)
}

// parseDest parses the line of a real server.
func parseDest(words []string) (netip.AddrPort, RealServer, error) {
	if len(words) < 4 {
		return netip.AddrPort{}, RealServer{}, unix.EINVAL
	}
	address, err := parseHex(words[1])
	if err != nil {
		return netip.AddrPort{}, RealServer{}, err
	}
	weight, err := strconv.Atoi(words[3])
	return address, RealServer{Weight: weight}, err
}

// parseHex parses "0A600001:01BB" and "[fd00:0000:…:0001]:01BB".
func parseHex(text string) (netip.AddrPort, error) {
	at := strings.LastIndexByte(text, ':')
	if at < 0 {
		return netip.AddrPort{}, unix.EINVAL
	}
	port, err := strconv.ParseUint(text[at+1:], 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if host, bracketed := strings.CutPrefix(text[:at], "["); bracketed {
		host, closed := strings.CutSuffix(host, "]")
		addr, err := netip.ParseAddr(host)
		if !closed {
			err = unix.EINVAL
		}
		return netip.AddrPortFrom(addr, uint16(port)), err
	}
	host, err := strconv.ParseUint(text[:at], 16, 32)
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(host)))), uint16(port)), err
}
