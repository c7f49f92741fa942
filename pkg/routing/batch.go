package routing

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Changes to VIPs are written here and not through the netlink library, which waits for the
// answer to each. Measured with BenchmarkVIPs on an emulated machine, a thousand take a
// quarter of the time or less.

// applyBatch writes many changes at once. It returns those that the kernel refused: applied
// one by one, they turn out to be harmless or get an error with a reason.
func (s *session) applyBatch(changes []Change) []Change {
	writer, err := nlmsg.NewWriter(unix.NETLINK_ROUTE, requestLimit)
	if err != nil {
		return changes
	}
	defer writer.Close()
	var rest []Change
	for batch := range slices.Chunk(changes, nlmsg.BatchSize) {
		rest = append(rest, s.batch(writer, batch)...)
	}
	return rest
}

func (s *session) batch(w *nlmsg.Writer, changes []Change) []Change {
	var sent, rest []Change
	for _, c := range changes {
		link := DummyLink
		if c.Route.Link != "" {
			link = c.Route.Link
		}
		index, err := s.index(link)
		if err != nil {
			rest = append(rest, c)
			continue
		}
		s.request(w, c, uint32(index))
		sent = append(sent, c)
	}
	answers, err := w.Send()
	if err != nil {
		return changes
	}
	for i, err := range answers {
		if err != nil {
			rest = append(rest, sent[i])
		}
	}
	return rest
}

// request queues the message of a change.
func (s *session) request(w *nlmsg.Writer, c Change, link uint32) {
	switch c.Op {
	case AddAddress:
		w.Add(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(b []byte) []byte { return s.appendAddress(b, c, link) })
	case DeleteAddress:
		w.Add(unix.RTM_DELADDR, 0, func(b []byte) []byte { return s.appendAddress(b, c, link) })
	case AddRoute:
		protocol := uint8(s.protocol)
		w.Add(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, func(b []byte) []byte {
			return appendRoute(b, c.Route, protocol, unix.RT_SCOPE_HOST, link)
		})
	case DeleteRoute:
		w.Add(unix.RTM_DELROUTE, 0, func(b []byte) []byte {
			return appendRoute(b, c.Route, unix.RTPROT_UNSPEC, unix.RT_SCOPE_NOWHERE, link)
		})
	}
}

// appendAddress appends a struct ifaddrmsg and its attributes; see onDummyLink.
func (s *session) appendAddress(b []byte, c Change, link uint32) []byte {
	family, flags, scope := uint8(unix.AF_INET), uint8(0), uint8(s.scope)
	if c.Address.Is6() {
		family, flags, scope = unix.AF_INET6, unix.IFA_F_NODAD, 0
	}
	b = append(b, family, uint8(c.Address.BitLen()), flags, scope)
	b = binary.NativeEndian.AppendUint32(b, link)
	b = nlmsg.AppendAttr(b, unix.IFA_LOCAL, c.Address.AsSlice())
	return nlmsg.AppendAttr(b, unix.IFA_ADDRESS, c.Address.AsSlice())
}

// appendRoute appends a struct rtmsg and its attributes; see newRoute. Table numbers that do
// not fit into a byte are in the attribute only.
func appendRoute(b []byte, r Route, protocol, scope uint8, link uint32) []byte {
	table := uint8(unix.RT_TABLE_UNSPEC)
	if r.Table < 256 {
		table = uint8(r.Table)
	}
	b = append(b, r.Family.AF(), uint8(r.Dst.Bits()), 0, 0, table, protocol, scope, unix.RTN_LOCAL, 0, 0, 0, 0)
	b = nlmsg.AppendAttr(b, unix.RTA_DST, r.Dst.Addr().AsSlice())
	b = nlmsg.AppendUint32(b, unix.RTA_OIF, link)
	b = nlmsg.AppendUint32(b, unix.RTA_TABLE, uint32(r.Table))
	if r.Metric != 0 {
		b = nlmsg.AppendUint32(b, unix.RTA_PRIORITY, uint32(r.Metric))
	}
	return b
}
