package config

import (
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Each method here reads one value. For an invalid value it records an error and
// returns the zero value.

func (b *builder) addr(path *field.Path, s string) netip.Addr {
	a := ip.ParseAddr(s)
	if !a.IsValid() || a.Zone() != "" {
		b.invalid(path, s, "must be an IP address such as 10.0.0.1 or fd00::1")
		return netip.Addr{}
	}
	return a
}

// addrPort reads an address with a port; "" disables it.
func (b *builder) addrPort(path *field.Path, s string) netip.AddrPort {
	if s == "" {
		return netip.AddrPort{}
	}
	host, port, err := net.SplitHostPort(s)
	number, errPort := strconv.ParseUint(port, 10, 16)
	a := netip.AddrPortFrom(ip.ParseAddr(host), uint16(number))
	if err != nil || errPort != nil || !a.IsValid() || a.Port() == 0 {
		b.invalid(path, s, "must be an IP address and a port from 1 to 65535, such as 0.0.0.0:10256 or [::]:10256")
		return netip.AddrPort{}
	}
	return a
}

// addrPortIn reads an address with a port, or a CIDR with a port, such as
// 10.0.0.0/8:10249 or [fd00::/8]:10249, which selects the node address in the CIDR.
func (b *builder) addrPortIn(path *field.Path, s string) (netip.AddrPort, netip.Prefix) {
	if !strings.Contains(s, "/") {
		return b.addrPort(path, s), netip.Prefix{}
	}
	host, port, err := net.SplitHostPort(s)
	number, errPort := strconv.ParseUint(port, 10, 16)
	in, errPrefix := netip.ParsePrefix(host)
	if err != nil || errPort != nil || number == 0 || errPrefix != nil || in.Addr().Is4In6() {
		b.invalid(path, s, "must be a CIDR and a port, such as 10.0.0.0/8:10249 or [fd00::/8]:10249")
		return netip.AddrPort{}, netip.Prefix{}
	}
	return netip.AddrPortFrom(in.Masked().Addr(), uint16(number)), in.Masked()
}

func (b *builder) prefix(path *field.Path, s string) (netip.Prefix, bool) {
	p, err := ip.ParsePrefix(strings.TrimSpace(s))
	if err != nil {
		b.invalid(path, s, "must be a CIDR such as 10.0.0.0/8 or fd00::/8")
		return netip.Prefix{}, false
	}
	return p, true
}

func (b *builder) prefixes(path *field.Path, values []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for i, s := range values {
		if p, ok := b.prefix(path.Index(i), s); ok {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// inRange reports whether a number is between two bounds.
func (b *builder) inRange(path *field.Path, v, low, high int) bool {
	if v < low || v > high {
		b.invalid(path, v, fmt.Sprintf("must be from %d to %d", low, high))
		return false
	}
	return true
}

// maxTimeout is the longest timeout that any kernel accepts. The kernel stores timeouts of IPVS and
// conntrack as ticks, in 31 bits, and has 100 to 1,000 ticks per second (HZ). With a higher HZ, its
// limit is lower, and it refuses the setting.
const maxTimeout = math.MaxInt32 / 100 * time.Second

// seconds reads a timeout in whole seconds, the kernel's unit. Like kube-proxy, it ignores a
// fraction of a second, but not one that would leave 0.
func (b *builder) seconds(path *field.Path, d time.Duration) time.Duration {
	whole := d.Truncate(time.Second)
	if d < 0 || d > maxTimeout || d > 0 && whole == 0 {
		b.invalid(path, d.String(), fmt.Sprintf("must be from 1s to %s; 0 keeps the kernel's value", maxTimeout))
		return 0
	}
	if whole != d {
		b.notices = append(b.notices, fmt.Sprintf("%s: %s is rounded down to %s: the kernel takes whole seconds", path, d, whole))
	}
	return whole
}

// interfaceName reads the name of an interface, or a prefix of names.
func (b *builder) interfaceName(path *field.Path, s string, most int) string {
	bad := func(r rune) bool { return r == '/' || r == '+' || unicode.IsSpace(r) || unicode.IsControl(r) }
	if s == "" || s == "." || s == ".." || len(s) > most || strings.ContainsFunc(s, bad) {
		b.invalid(path, s, fmt.Sprintf("must be 1 to %d characters that are valid in an interface name", most))
		return ""
	}
	return s
}

// absolute reads an absolute path.
func (b *builder) absolute(path *field.Path, s string) string {
	if !filepath.IsAbs(s) {
		b.invalid(path, s, "must be an absolute path such as "+DefaultStateDir)
	}
	return s
}

// byInterface reads the addresses of each interface, at most one per family, by routing.LinkKey.
func (b *builder) byInterface(path *field.Path, values map[string][]string, linkLocal bool) map[string][]netip.Addr {
	if len(values) == 0 {
		return nil
	}
	out := map[string][]netip.Addr{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		at := path.Key(name)
		key, isMAC := routing.LinkKey(name)
		if !isMAC {
			b.interfaceName(at, name, maxInterfaceName)
		}
		for _, s := range values[name] {
			if a := b.interfaceAddr(at, s, out[key], linkLocal); a.IsValid() {
				out[key] = append(out[key], a)
			}
		}
	}
	return out
}

// interfaceAddr reads one more address of an interface.
func (b *builder) interfaceAddr(path *field.Path, s string, have []netip.Addr, linkLocal bool) netip.Addr {
	a := b.addr(path, s)
	if !a.IsValid() {
		return a
	}
	if a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() && !linkLocal {
		b.invalid(path, s, "must be a routable unicast address")
		return netip.Addr{}
	}
	for _, h := range have {
		if ip.Of(h) == ip.Of(a) {
			b.invalid(path, s, fmt.Sprintf("must be the only address of its family for this interface, but %s is set", h))
			return netip.Addr{}
		}
	}
	return a
}
