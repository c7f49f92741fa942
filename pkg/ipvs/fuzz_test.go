package ipvs

import (
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzReplies: the kernel's answer about virtual and real servers is rejected, or
// converted to a key that can be changed and formatted. The request that would change it
// is complete.
func FuzzReplies(f *testing.F) {
	f.Add(uint16(unix.AF_INET), uint16(6), uint16(443), uint32(0), "rr", uint32(2), uint32(0), []byte{10, 96, 0, 1}, []byte{10, 244, 1, 5}, uint16(6443), 1)
	f.Add(uint16(unix.AF_INET6), uint16(17), uint16(53), uint32(0), "mh", uint32(3), uint32(10800), []byte(net.ParseIP("fd00::a")), []byte(net.ParseIP("fd00::5")), uint16(53), 0)
	f.Add(uint16(unix.AF_INET), uint16(0), uint16(0), uint32(0x400b), "wrr", uint32(2), uint32(0), []byte{}, []byte{10, 244, 1}, uint16(80), -1)
	f.Fuzz(func(t *testing.T, family, protocol, port uint16, mark uint32, scheduler string, flags, timeout uint32, address, real []byte, realPort uint16, weight int) {
		services, err := readServices([]*ipvs.Service{{
			AddressFamily: family, Protocol: protocol, Port: port, FWMark: mark, Address: address,
			SchedName: scheduler, Flags: flags, Timeout: timeout,
		}})
		if err != nil {
			return
		}
		dests, err := readDestinations([]*ipvs.Destination{{Address: real, Port: realPort, Weight: weight}})
		if err != nil {
			return
		}
		for _, s := range services {
			key, vs := s.Key, s.VirtualServer
			if vs.Flags&flagHashed != 0 {
				t.Errorf("%s has the internal flag IP_VS_SVC_F_HASHED", key)
			}
			if key.FWMark != 0 && key.check() != nil {
				t.Errorf("a mark is read as the invalid key %s", key)
			}
			for _, d := range dests {
				checkRequest(t, Change{Op: UpdateRealServer, Key: key, VirtualServer: vs, Dest: d.Dest})
			}
		}
	})
}

// checkRequest checks that a request is aligned, complete, and one that the package would
// send.
func checkRequest(t *testing.T, c Change) {
	if c.check() != nil {
		return
	}
	_ = c.String()
	b := appendRequest(nil, c)
	if len(b)%4 != 0 {
		t.Errorf("the request for %s has %d bytes", c, len(b))
	}
	if ip.Of(c.Dest.Addr()) != c.Key.Family() || c.Dest == (netip.AddrPort{}) {
		t.Errorf("unexpected request for %s", c)
	}
}

// FuzzList: a list of all real servers is rejected, or parsed so that printing and
// parsing the result again does not change it.
func FuzzList(f *testing.F) {
	f.Add(heading + "TCP  0A600001:01BB rr persistent 10800 FFFFFFFF\n  -> C0000201:192B      Masq    1      3          7         \n")
	f.Add(heading + "FWM  00000007 rr \n  -> C0000209:0050      Masq    1      0          0         \nUDP  0A600002:0035 rr ops \n")
	f.Add(heading + "SCTP  [fd00:0010:0000:0000:0000:0000:0000:0001]:0050 mh \n  -> [fd00:0244:0000:0000:0000:0000:0000:0002]:1F90      Masq    65535  0          0         \n")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := parseList(strings.NewReader(text))
		if err != nil {
			return
		}
		again, err := parseList(strings.NewReader(printList(list)))
		if err != nil {
			t.Fatalf("%v: printed as\n%s", err, printList(list))
		}
		if !reflect.DeepEqual(list, again) {
			t.Errorf("%v, after printing and parsing %v", list, again)
		}
	})
}

// printList returns what the kernel prints for virtual servers.
func printList(list map[Key]map[netip.AddrPort]RealServer) string {
	var b strings.Builder
	b.WriteString(heading)
	for key, dests := range list {
		fmt.Fprintf(&b, "%s  %s rr \n", key.Protocol, printHex(netip.AddrPortFrom(key.Addr, key.Port)))
		for dest, rs := range dests {
			fmt.Fprintf(&b, "  -> %s      Masq    %d      0          0         \n", printHex(dest), rs.Weight)
		}
	}
	return b.String()
}

func printHex(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return fmt.Sprintf("%X:%04X", a.Addr().AsSlice(), a.Port())
	}
	return fmt.Sprintf("[%s]:%04X", a.Addr().StringExpanded(), a.Port())
}
