package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Only the library's sockets and attributes are used. Its function for deletion reads
// the whole table into memory and does not support SCTP ports.

// answerTimeout limits the wait for each part of a response.
const answerTimeout = 15 * time.Second

// Constants of <linux/netfilter/nfnetlink_conntrack.h> that the library lacks.
const (
	getStats = 5 // IPCTNL_MSG_CT_GET_STATS

	ctaFilter           = 25 // CTA_FILTER; ignored by kernels before 5.8
	ctaFilterOrigFlags  = 1  // CTA_FILTER_ORIG_FLAGS
	ctaFilterReplyFlags = 2  // CTA_FILTER_REPLY_FLAGS
)

// Fields of a tuple that a filter compares: CTA_FILTER_FLAG of
// net/netfilter/nf_internals.h, which is not exported to user space.
const (
	filterDst     = 1 << 1
	filterProto   = 1 << 3
	filterDstPort = 1 << 5
)

const nested = unix.NLA_F_NESTED

// Netlink deletes entries in the network namespace in which it was created.
type Netlink struct{ client }

// ErrMissing is the error of a kernel that has no module nf_conntrack_netlink.
var ErrMissing = errors.New("the kernel has no nf_conntrack_netlink")

// New connects to the kernel in the network namespace of the calling thread. It returns
// ErrMissing if the module of connection tracking for netlink cannot be loaded, and an error
// that names the fix if access is denied.
func New() (*Netlink, error) {
	sockets, err := nlmsg.Netfilter(answerTimeout)
	if err != nil {
		return nil, err
	}
	s := &socket{sockets}
	// The response looks like part of an unterminated dump: the acknowledgement ends it.
	if _, err := s.request(getStats, unix.AF_UNSPEC, unix.NLM_F_ACK).Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		s.close()
		if errors.Is(err, unix.EINVAL) { // nfnetlink_rcv_msg: no such subsystem
			return nil, ErrMissing
		}
		return nil, fmt.Errorf("no access to connection tracking (%w); check that the process has CAP_NET_ADMIN", err)
	}
	return &Netlink{client{raw: s}}, nil
}

// socket accesses the table through a netlink socket. The client's lock guards it.
type socket struct {
	sockets map[int]*nl.SocketHandle
}

func (s *socket) close() {
	for _, handle := range s.sockets {
		handle.Close()
	}
}

func (s *socket) request(command int, family uint8, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|command, flags)
	req.Sockets = s.sockets
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// attributes makes the kernel skip entries that do not pass. IPv6 addresses cannot be
// filtered: up to Linux 6.1 at least, ctnetlink_filter_match_tuple
// (net/netfilter/nf_conntrack_netlink.c) skips the equal ones, as TestFilter found.
func (f filter) attributes() []*nl.RtAttr {
	flags := nl.NewRtAttr(nested|ctaFilter, nil)
	list := []*nl.RtAttr{flags}
	if f.protocol != 0 {
		orig, origFlags := nl.NewRtAttr(nested|nl.CTA_TUPLE_ORIG, nil), uint32(filterProto)
		proto := nl.NewRtAttr(nested|nl.CTA_TUPLE_PROTO, nil)
		proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{byte(f.protocol)})
		if dst := f.originalDst; dst.IsValid() {
			if dst.Addr().Is4() {
				origFlags |= filterDst
				orig.AddChild(dstAttr(dst.Addr()))
			}
			origFlags |= filterDstPort
			proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, dst.Port()))
		}
		orig.AddChild(proto)
		flags.AddRtAttr(ctaFilterOrigFlags, nl.Uint32Attr(origFlags))
		list = append(list, orig)
	}
	if f.replyDst.Is4() {
		reply := nl.NewRtAttr(nested|nl.CTA_TUPLE_REPLY, nil)
		reply.AddChild(dstAttr(f.replyDst))
		flags.AddRtAttr(ctaFilterReplyFlags, nl.Uint32Attr(filterDst))
		list = append(list, reply)
	}
	if len(list) == 1 {
		return nil
	}
	return list
}

// dstAttr returns a tuple's destination, an IPv4 address.
func dstAttr(dst netip.Addr) *nl.RtAttr {
	attr := nl.NewRtAttr(nested|nl.CTA_TUPLE_IP, nil)
	attr.AddRtAttr(nl.CTA_IP_V4_DST, dst.AsSlice())
	return attr
}

// dump processes each message as it arrives, because the table can have millions of
// entries. wanted excludes what kernels before 5.8 do not filter.
func (s *socket) dump(family ip.Family, f filter, wanted func(Entry) bool) ([]tracked, error) {
	var entries []tracked
	var malformed error
	req := s.request(nl.IPCTNL_MSG_CT_GET, family.AF(), unix.NLM_F_DUMP)
	for _, a := range f.attributes() {
		req.AddData(a)
	}
	take := func(message []byte) bool {
		list, err := parseMessage(message)
		var entry Entry
		if err == nil {
			entry, err = parseEntry(list)
		}
		if err == nil && wanted(entry) {
			entries = append(entries, tracked{entry, timeout(list), identity(list)})
		}
		malformed = err
		return err == nil
	}
	err := nlmsg.Execute(s.sockets, unix.NETLINK_NETFILTER, func() error {
		return req.ExecuteIter(unix.NETLINK_NETFILTER, 0, take)
	})
	if err != nil {
		return nil, err
	}
	return entries, malformed
}

func (s *socket) remove(family ip.Family, entry tracked) error {
	req := s.request(nl.IPCTNL_MSG_CT_DELETE, family.AF(), unix.NLM_F_ACK)
	req.AddRawData(entry.identity)
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

func parseMessage(message []byte) ([]syscall.NetlinkRouteAttr, error) {
	if len(message) < nl.SizeofNfgenmsg {
		return nil, errMalformed
	}
	list, err := nlmsg.Attributes(message[nl.SizeofNfgenmsg:])
	if err != nil {
		return nil, errMalformed
	}
	return list, nil
}

func parseEntry(list []syscall.NetlinkRouteAttr) (entry Entry, err error) {
	for _, a := range list {
		switch a.Attr.Type & nl.NLA_TYPE_MASK {
		case nl.CTA_TUPLE_ORIG:
			entry.Protocol, entry.OriginalSrc, entry.OriginalDst, err = parseTuple(a.Value)
		case nl.CTA_TUPLE_REPLY:
			_, entry.ReplySrc, entry.ReplyDst, err = parseTuple(a.Value)
		}
		if err != nil {
			return Entry{}, err
		}
	}
	return entry, nil
}

// timeout returns when an entry expires, 0 if the kernel does not tell.
func timeout(list []syscall.NetlinkRouteAttr) time.Duration {
	for _, a := range list {
		if a.Attr.Type&nl.NLA_TYPE_MASK == nl.CTA_TIMEOUT && len(a.Value) == 4 {
			return time.Duration(binary.BigEndian.Uint32(a.Value)) * time.Second
		}
	}
	return 0
}

// identity is the kernel's identity of an entry: the client's tuple, the zone, and an
// ID, so that a successor is not deleted instead.
func identity(list []syscall.NetlinkRouteAttr) []byte {
	var data []byte
	for _, a := range list {
		switch a.Attr.Type & nl.NLA_TYPE_MASK {
		case nl.CTA_TUPLE_ORIG, nl.CTA_ZONE, nl.CTA_ID:
			data = append(data, nl.NewRtAttr(int(a.Attr.Type), a.Value).Serialize()...)
		}
	}
	return data
}

// parseTuple parses the addresses of one direction. Ports are 0 for a protocol without
// ports.
func parseTuple(data []byte) (protocol ip.Protocol, src, dst netip.AddrPort, err error) {
	tuple, err := parse(data)
	if err != nil {
		return 0, src, dst, err
	}
	addrs, err := parse(tuple[nl.CTA_TUPLE_IP])
	if err != nil {
		return 0, src, dst, err
	}
	proto, err := parse(tuple[nl.CTA_TUPLE_PROTO])
	if err != nil || len(proto[nl.CTA_PROTO_NUM]) != 1 {
		return 0, src, dst, errMalformed
	}
	src = netip.AddrPortFrom(addrs.addr(nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC), proto.port(nl.CTA_PROTO_SRC_PORT))
	dst = netip.AddrPortFrom(addrs.addr(nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST), proto.port(nl.CTA_PROTO_DST_PORT))
	return ip.Protocol(proto[nl.CTA_PROTO_NUM][0]), src, dst, nil
}

var errMalformed = fmt.Errorf("the kernel sent a malformed entry: %w", unix.EBADMSG)

// attributes holds the few values of a nest by type. It is a fixed-size array instead
// of a map because each entry of the table needs six of them.
type attributes [8][]byte

func parse(data []byte) (attributes, error) {
	var values attributes
	list, err := nlmsg.Attributes(data)
	if err != nil {
		return values, errMalformed
	}
	for _, a := range list {
		if kind := a.Attr.Type & nl.NLA_TYPE_MASK; int(kind) < len(values) {
			values[kind] = a.Value
		}
	}
	return values, nil
}

func (a *attributes) addr(v4, v6 int) netip.Addr {
	if addr, ok := netip.AddrFromSlice(a[v4]); ok {
		return addr
	}
	addr, _ := netip.AddrFromSlice(a[v6])
	return addr
}

func (a *attributes) port(kind int) uint16 {
	if len(a[kind]) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(a[kind])
}
