package conntrack

import (
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// FuzzMessage checks that the identity by which an entry is deleted has the client's tuple of
// the entry that was parsed. Otherwise another connection would be deleted.
func FuzzMessage(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0x80, 4, 0, 1, 0x80})
	f.Add([]byte{2, 0, 0})
	f.Add([]byte("\x02\x00\x00\x00\x34\x00\x01\x80\x14\x00\x01\x80\x08\x00\x01\x00\x0a\x00\x00\x01\x08\x00\x02\x00\x0a\x00\x00\x02\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x03\xe8\x00\x00\x06\x00\x03\x00\x00\x35\x00\x00\x34\x00\x02\x80\x14\x00\x01\x80\x08\x00\x01\x00\x0a\x00\x00\x03\x08\x00\x02\x00\x0a\x00\x00\x01\x1c\x00\x02\x80\x05\x00\x01\x00\x11\x00\x00\x00\x06\x00\x02\x00\x00\x35\x00\x00\x06\x00\x03\x00\x03\xe8\x00\x00\x08\x00\x0c\x00\x00\x00\x00\x07")) // UDP 10.0.0.1:1000 > 10.0.0.2:53, answered by 10.0.0.3:53
	f.Fuzz(func(t *testing.T, message []byte) {
		list, err := parseMessage(message)
		if err != nil {
			return
		}
		entry, err := parseEntry(list)
		if err != nil {
			return
		}
		again, err := nlmsg.Attributes(identity(list))
		if err != nil {
			t.Fatal(err)
		}
		same, err := parseEntry(again)
		if err != nil || same.Protocol != entry.Protocol || same.OriginalSrc != entry.OriginalSrc || same.OriginalDst != entry.OriginalDst {
			t.Errorf("deletes %s, %v, read %s", same, err, entry)
		}
	})
}
