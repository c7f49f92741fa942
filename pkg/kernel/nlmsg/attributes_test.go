package nlmsg

import (
	"bytes"
	"testing"
)

func TestAttributes(t *testing.T) {
	b := AppendAttr(AppendUint32(nil, 7, 0x01020304), 9, []byte("abc"))
	list, err := Attributes(b)
	if err != nil || len(list) != 2 || list[0].Attr.Type != 7 || len(list[0].Value) != 4 || list[1].Attr.Type != 9 || !bytes.Equal(list[1].Value, []byte("abc")) {
		t.Errorf("%+v, %v", list, err)
	}
	// The last one without its padding.
	if list, err := Attributes(b[:len(b)-1]); err != nil || len(list) != 2 || string(list[1].Value) != "abc" {
		t.Errorf("unpadded: %+v, %v", list, err)
	}
	for name, data := range map[string][]byte{"too long": {9, 0, 1, 0, 1, 2, 3, 4}, "too short": {3, 0, 1, 0}} {
		if list, err := Attributes(data); err == nil {
			t.Errorf("%s: %+v", name, list)
		}
	}
}
