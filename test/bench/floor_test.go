//go:build e2e

package bench

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// floor sends netlink messages as fast as the kernel accepts them, many in one write. It
// shares no code with kube-ipvs and is the minimum that kube-ipvs is compared with.
type floor struct {
	socket   *nl.NetlinkSocket
	sequence uint32
	buffer   []byte
	newest   int // offset of the last message
	pending  int
}

// perWrite is the number of messages in one write.
const perWrite = 64

func newFloor(protocol int) (*floor, error) {
	socket, err := nl.Subscribe(protocol)
	return &floor{socket: socket}, err
}

// add appends a message, and sends the batch if it is full.
func (f *floor) add(kind, flags uint16, payload []byte) error {
	f.sequence++
	f.pending++
	f.newest = len(f.buffer)
	b := binary.NativeEndian.AppendUint32(f.buffer, uint32(unix.NLMSG_HDRLEN+len(payload)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, f.sequence)
	b = binary.NativeEndian.AppendUint32(b, 0)
	f.buffer = append(b, payload...)
	if f.pending < perWrite {
		return nil
	}
	return f.flush()
}

// flush sends the batch and waits until the kernel has acknowledged the last message.
func (f *floor) flush() error {
	if f.pending == 0 {
		return nil
	}
	flags := f.buffer[f.newest+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	if err := unix.Sendto(f.socket.GetFd(), f.buffer, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	f.buffer, f.pending = f.buffer[:0], 0
	for {
		messages, _, err := f.socket.Receive()
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m.Header.Type != unix.NLMSG_ERROR {
				continue
			}
			if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
				return fmt.Errorf("the kernel refused a message: %w", unix.Errno(-code))
			}
			if m.Header.Seq == f.sequence {
				return nil
			}
		}
	}
}

func attr(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func nested(kind uint16, attrs ...[]byte) []byte {
	var all []byte
	for _, a := range attrs {
		all = append(all, a...)
	}
	return attr(kind|unix.NLA_F_NESTED, all)
}

func native16(v uint16) []byte  { return binary.NativeEndian.AppendUint16(nil, v) }
func native32(v uint32) []byte  { return binary.NativeEndian.AppendUint32(nil, v) }
func network16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

// floorIPVS creates n TCP virtual servers with their real servers.
func floorIPVS(n int) error {
	family, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		return err
	}
	f, err := newFloor(unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer f.socket.Close()
	for i := range n {
		id := [][]byte{attr(1, native16(unix.AF_INET)), attr(2, native16(unix.IPPROTO_TCP)), attr(3, vip(i).AsSlice()), attr(4, network16(80))}
		service := append(id[:4:4], attr(6, []byte("rr\x00")), attr(7, append(native32(0), 0xff, 0xff, 0xff, 0xff)), attr(8, native32(0)), attr(9, native32(0xffffffff)))
		if err := f.add(family.ID, 0, append([]byte{1, 1, 0, 0}, nested(1, service...)...)); err != nil {
			return err
		}
		for e := range endpointsOfEach {
			dest := nested(2, attr(1, endpoint(i, e, 0).AsSlice()), attr(2, network16(8000)), attr(3, native32(0)), attr(4, native32(1)), attr(5, native32(0)), attr(6, native32(0)))
			if err := f.add(family.ID, 0, append(append([]byte{5, 1, 0, 0}, nested(1, id...)...), dest...)); err != nil {
				return err
			}
		}
	}
	return f.flush()
}

// floorRoutes makes each VIP local through a route.
func floorRoutes(n int) error {
	return floorNetwork(n, func(f *floor, link uint32, a netip.Addr) error {
		header := []byte{unix.AF_INET, 32, 0, 0, unix.RT_TABLE_LOCAL, 81, unix.RT_SCOPE_HOST, unix.RTN_LOCAL, 0, 0, 0, 0}
		payload := append(header, attr(unix.RTA_DST, a.AsSlice())...)
		return f.add(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, append(payload, attr(unix.RTA_OIF, native32(link))...))
	})
}

// floorAddresses adds each VIP as an address of the interface.
func floorAddresses(n int) error {
	return floorNetwork(n, func(f *floor, link uint32, a netip.Addr) error {
		payload := append([]byte{unix.AF_INET, 32, 0, unix.RT_SCOPE_LINK}, native32(link)...)
		return f.add(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, append(payload, attr(unix.IFA_LOCAL, a.AsSlice())...))
	})
}

func floorNetwork(n int, add func(*floor, uint32, netip.Addr) error) error {
	link, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	f, err := newFloor(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer f.socket.Close()
	for i := range n {
		if err := add(f, uint32(link.Attrs().Index), vip(i)); err != nil {
			return err
		}
	}
	return f.flush()
}

// Of <linux/netfilter/ipset/ip_set.h>.
const (
	ipsetAdd     = 6<<8 | 9 // NFNL_SUBSYS_IPSET, IPSET_CMD_ADD
	ipsetCreate  = 6<<8 | 2
	perRequest   = 64
	attrProtocol = 1
	attrSetName  = 2
	attrTypeName = 3
	attrRevision = 4
	attrFamily   = 5
	attrData     = 7
	attrADT      = 8
)

// floorSets creates two sets, one of addresses and ports and one of addresses, with a
// member for each Service.
func floorSets(n int) error {
	f, err := newFloor(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer f.socket.Close()
	address := func(i int) []byte { return nested(1, attr(1|unix.NLA_F_NET_BYTEORDER, vip(i).AsSlice())) }
	members := map[string]func(int) []byte{
		"hash:ip,port": func(i int) []byte {
			return nested(attrData, address(i), attr(4|unix.NLA_F_NET_BYTEORDER, network16(80)), attr(7, []byte{unix.IPPROTO_TCP}))
		},
		"hash:ip": func(i int) []byte { return nested(attrData, address(i)) },
	}
	for kind, member := range members {
		name := attr(attrSetName, []byte("floor-"+kind+"\x00"))
		head := append([]byte{unix.AF_INET, 0, 0, 0}, attr(attrProtocol, []byte{6})...)
		create := append(append([]byte{}, head...), name...)
		create = append(create, attr(attrTypeName, []byte(kind+"\x00"))...)
		create = append(create, attr(attrRevision, []byte{4})...)
		create = append(create, attr(attrFamily, []byte{unix.AF_INET})...)
		create = append(create, nested(attrData, attr(19|unix.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, 1<<20)))...)
		if err := f.add(ipsetCreate, unix.NLM_F_CREATE, create); err != nil {
			return err
		}
		for i := 0; i < n; i += perRequest {
			var data [][]byte
			for j := i; j < min(n, i+perRequest); j++ {
				data = append(data, member(j))
			}
			request := append(append([]byte{}, head...), name...)
			request = append(request, attr(9, native32(0))...) // IPSET_ATTR_LINENO
			if err := f.add(ipsetAdd, unix.NLM_F_EXCL, append(request, nested(attrADT, data...)...)); err != nil {
				return err
			}
		}
	}
	return f.flush()
}
