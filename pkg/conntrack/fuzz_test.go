package conntrack

import "testing"

// FuzzMessage: what the kernel says of a connection is read, or refused.
func FuzzMessage(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0x80, 4, 0, 1, 0x80})
	f.Add([]byte{2, 0, 0})
	f.Fuzz(func(_ *testing.T, message []byte) {
		list, err := parseMessage(message)
		if err != nil {
			return
		}
		if _, err := parseEntry(list); err == nil {
			identity(list)
		}
	})
}
