package nlmsg

import (
	"encoding/binary"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzAttributes: the parsed values are parts of the message, in order, and do not exceed
// it.
func FuzzAttributes(f *testing.F) {
	f.Add(AppendAttr(AppendUint32(nil, 7, 0x01020304), 9, []byte("abc")))
	f.Add([]byte{4, 0, 1, 0, 3, 0, 2, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := Attributes(data)
		if err != nil {
			return
		}
		size := 0
		for _, a := range list {
			if int(a.Attr.Len) != unix.SizeofRtAttr+len(a.Value) {
				t.Errorf("an attribute of length %d has a value of %d", a.Attr.Len, len(a.Value))
			}
			size += int(a.Attr.Len)
		}
		if size > len(data) {
			t.Errorf("%d bytes of attributes in %d", size, len(data))
		}
	})
}

// FuzzAnswers: whatever messages arrive after three requests, only answers to these
// requests count.
func FuzzAnswers(f *testing.F) {
	f.Add(answer(5, -int32(unix.EEXIST)))
	f.Add(append(answer(6, 0), answer(7, -int32(unix.ENOENT))...))
	f.Add(answer(4, -int32(unix.EPERM)))
	f.Add(answer(5, 1)[:18])
	f.Fuzz(func(t *testing.T, data []byte) {
		messages, err := syscall.ParseNetlinkMessage(data)
		if err != nil {
			return
		}
		w := Writer{first: 5, last: 7}
		errs := make([]error, 3)
		done := w.noteAnswers(messages, errs)
		var answered [3]bool
		for _, m := range messages {
			if at := m.Header.Seq - 5; at < 3 && m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4 {
				answered[at] = true
			}
		}
		for i, err := range errs {
			if err != nil && !answered[i] {
				t.Errorf("request %d has failed without an answer: %v", i, err)
			}
		}
		if done && !answered[2] {
			t.Error("complete without an answer to the last request")
		}
	})
}

// answer returns a message by which the kernel answers a request.
func answer(sequence uint32, code int32) []byte {
	b := binary.NativeEndian.AppendUint32(nil, unix.SizeofNlMsghdr+4)
	b = binary.NativeEndian.AppendUint16(b, unix.NLMSG_ERROR)
	b = binary.NativeEndian.AppendUint16(b, 0)
	b = binary.NativeEndian.AppendUint32(b, sequence)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return binary.NativeEndian.AppendUint32(b, uint32(code))
}
