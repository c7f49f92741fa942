package nat

import "testing"

func TestMarkBits(t *testing.T) {
	for rule, want := range map[Rule]uint32{
		"-j ACCEPT": 0,
		"-m comment --comment \"no --mark 0x1/0x1 here\" -j ACCEPT":                        0,
		"-m mark --mark 0x80/0x80 -j ACCEPT":                                               0x80,
		"-m mark ! --mark 0x1 -j ACCEPT":                                                   0xffffffff,
		"-i eth0 -j MARK --set-xmark 0x10/0x0":                                             0x10,
		"-j CONNMARK --set-xmark 0x80/0xff":                                                0xff,
		"-i eni+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x40":                   0xc0,
		"-m connmark --mark 0x100/0xf00 -j CONNMARK --save-mark --nfmask 0x1 --ctmask 0x2": 0xf03,
	} {
		if got := markBits(rule); got != want {
			t.Errorf("%s: %#x, want %#x", rule, got, want)
		}
	}
}

func TestOthersMarks(t *testing.T) {
	rules, err := parseSave("*mangle\n:PREROUTING ACCEPT [0:0]\n:OURS - [0:0]\n:THEIRS - [0:0]\n" +
		"-A PREROUTING -j OURS\n-A OURS -j MARK --set-xmark 0x20/0x20\n-A THEIRS -j MARK --set-xmark 0x40/0x40\nCOMMIT\n")
	if err != nil {
		t.Fatal(err)
	}
	s, _ := Owned{Prefixes: []string{"OURS"}}.state(4, rules, never)
	if len(s.Marks) != 1 || s.Marks[0].Chain.Name != "THEIRS" || s.Marks[0].Bits != 0x40 {
		t.Errorf("%+v", s.Marks)
	}
}
