package ipvs

import (
	"net"
	"net/netip"
	"testing"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FuzzReplies: what the kernel says of virtual and real servers is refused, or
// read so that it names something that can be changed, and is told in words; and
// the request that would change it is whole.
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
		for key, vs := range services {
			if vs.Flags&flagHashed != 0 {
				t.Errorf("%s has a flag that is the kernel's own", key)
			}
			if key.FWMark != 0 && key.check() != nil {
				t.Errorf("a mark is read as %s, which names nothing", key)
			}
			for addr := range dests {
				checkRequest(t, Change{Op: UpdateRealServer, Key: key, VirtualServer: vs, Dest: addr})
			}
		}
	})
}

// checkRequest wants a request that is aligned and whole, of what the package
// would send.
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
		t.Errorf("a request for %s", c)
	}
}
