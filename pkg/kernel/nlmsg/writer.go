// Package nlmsg sends netlink requests in batches, follows notifications and parses
// attributes. The library vishvananda/netlink sends requests one by one, and parses every
// attribute separately or not at all.
package nlmsg

import (
	"encoding/binary"
	"errors"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// BatchSize is the best number of requests per write. More gain nothing, because then
// the kernel's own cost per request dominates.
const BatchSize = 64

// Writer sends batches of requests through a netlink socket, where the libraries send
// one and wait for its response. It must not be used concurrently.
type Writer struct {
	socket      *nl.NetlinkSocket
	first, last uint32 // sequence numbers of the batch
	newest      int    // start of the last request
	buffer      []byte
}

// NewWriter opens a socket of a netlink protocol, such as NETLINK_ROUTE, in the network
// namespace of the calling thread. A response that takes longer than the timeout fails
// with EAGAIN.
func NewWriter(protocol int, timeout time.Duration) (*Writer, error) {
	socket, err := nl.Subscribe(protocol)
	if err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := socket.SetReceiveTimeout(&limit); err != nil {
		socket.Close()
		return nil, err
	}
	return &Writer{socket: socket, first: 1}, nil
}

// Close closes the socket.
func (w *Writer) Close() { w.socket.Close() }

// Add appends a request: its type, its flags in addition to NLM_F_REQUEST, and the data
// after the header, which payload appends.
func (w *Writer) Add(kind, flags uint16, payload func([]byte) []byte) {
	w.last++
	w.newest = len(w.buffer)
	b := binary.NativeEndian.AppendUint32(w.buffer, 0) // the length, set below
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, w.last)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = payload(b)
	binary.NativeEndian.PutUint32(b[w.newest:], uint32(len(b)-w.newest))
	w.buffer = b
}

// flagsAt is the offset of the flags in a message's header.
const flagsAt = 6

// Send writes the batch and returns one result per request. The kernel processes a
// write in order, whether or not requests fail. It acknowledges each failure, and the
// last request. An error means that the results are unknown and the socket is unusable.
func (w *Writer) Send() (errs []error, err error) {
	errs = make([]error, w.last+1-w.first)
	if len(errs) == 0 {
		return nil, nil
	}
	flags := binary.NativeEndian.Uint16(w.buffer[w.newest+flagsAt:])
	binary.NativeEndian.PutUint16(w.buffer[w.newest+flagsAt:], flags|unix.NLM_F_ACK)
	err = unix.Sendto(w.socket.GetFd(), w.buffer, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = w.answers(errs)
	}
	w.first, w.buffer = w.last+1, w.buffer[:0]
	if err != nil {
		return nil, err
	}
	return errs, nil
}

// answers reads until the response to the last request. It skips responses to an
// earlier, abandoned write.
func (w *Writer) answers(errs []error) error {
	for {
		messages, _, err := w.socket.Receive()
		if err != nil {
			return err
		}
		if w.noteAnswers(messages, errs) {
			return nil
		}
	}
}

// noteAnswers stores responses, and reports whether the last one is among them.
func (w *Writer) noteAnswers(messages []syscall.NetlinkMessage, errs []error) (last bool) {
	for _, m := range messages {
		at := m.Header.Seq - w.first
		if m.Header.Type != unix.NLMSG_ERROR || at >= uint32(len(errs)) || len(m.Data) < 4 {
			continue
		}
		if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
			errs[at] = unix.Errno(-code)
		}
		if m.Header.Seq == w.last {
			return true
		}
	}
	return false
}

// IsTimeout reports whether the kernel did not respond to a Writer in time.
func IsTimeout(err error) bool { return errors.Is(err, unix.EAGAIN) }

// OpenAttr begins a nested attribute, CloseAttr ends it.
func OpenAttr(b []byte, kind uint16) (_ []byte, begin int) {
	begin = len(b)
	b = binary.NativeEndian.AppendUint16(b, 0)
	return binary.NativeEndian.AppendUint16(b, kind|unix.NLA_F_NESTED), begin
}

// CloseAttr writes the length of an attribute begun by OpenAttr.
func CloseAttr(b []byte, begin int) []byte {
	binary.NativeEndian.PutUint16(b[begin:], uint16(len(b)-begin))
	return b
}

// AppendAttr appends an attribute, padded to a multiple of four bytes.
func AppendAttr(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, padding[:-len(value)&(unix.NLA_ALIGNTO-1)]...)
}

var padding [unix.NLA_ALIGNTO]byte

// AppendUint16 appends an attribute with a number in the machine's byte order.
func AppendUint16(b []byte, kind, value uint16) []byte {
	return AppendAttr(b, kind, binary.NativeEndian.AppendUint16(nil, value))
}

// AppendUint32 appends an attribute with a number in the machine's byte order.
func AppendUint32(b []byte, kind uint16, value uint32) []byte {
	return AppendAttr(b, kind, binary.NativeEndian.AppendUint32(nil, value))
}
