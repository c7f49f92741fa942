package nlmsg

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// linkRequest is the payload of a request about a link.
func linkRequest(index uint32) func([]byte) []byte {
	return func(b []byte) []byte {
		b = append(b, unix.AF_UNSPEC, 0, 0, 0)
		b = binary.NativeEndian.AppendUint32(b, index)
		return append(b, make([]byte, 8)...)
	}
}

// TestWriterAnswers checks that each request has its own answer, whatever the results of
// those before it, and that writes can follow each other.
func TestWriterAnswers(t *testing.T) {
	w, err := NewWriter(unix.NETLINK_ROUTE, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	const unknown = 0xfff
	for _, failing := range []int{0, 1, 2} {
		for i := range 3 {
			kind := uint16(unix.RTM_GETLINK)
			if i == failing {
				kind = unknown
			}
			w.Add(kind, 0, linkRequest(1))
		}
		errs, err := w.Send()
		if err != nil || len(errs) != 3 {
			t.Fatalf("%d answers: %v", len(errs), err)
		}
		for i, err := range errs {
			if (err != nil) != (i == failing) {
				t.Errorf("request %d of those of which %d must fail: %v", i, failing, err)
			}
		}
	}
	if errs, err := w.Send(); len(errs) != 0 || err != nil {
		t.Errorf("an empty batch was answered with %v, %v", errs, err)
	}
}

// TestUnansweredWrite waits for an answer that never arrives.
func TestUnansweredWrite(t *testing.T) {
	w, err := NewWriter(unix.NETLINK_ROUTE, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.answers(make([]error, 1)); !IsTimeout(err) {
		t.Errorf("%v, want a timeout", err)
	}
}
