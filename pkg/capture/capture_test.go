package capture

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestParse(t *testing.T) {
	at := netip.MustParseAddrPort
	for name, c := range map[string]struct {
		data string
		want Packet
		ok   bool
	}{
		"TCP of IPv4, with an option in the header": {"460000300000400040060000" + "0a0c002c" + "0a600a0a" + "01010101" + "9c400050" + "0000000000000000" + "5012ffff00000000",
			Packet{Protocol: ip.TCP, From: at("10.12.0.44:40000"), To: at("10.96.10.10:80"), Flags: "SYN,ACK"}, true},
		"UDP of IPv6": {"6000000000081140" + "fd000000000000000000000000000001" + "fd000000000000000000000000000002" + "00350036" + "00080000",
			Packet{Protocol: ip.UDP, From: at("[fd00::1]:53"), To: at("[fd00::2]:54")}, true},
		"ICMP":           {"450000300000400040010000" + "0a0c002c" + "0a600a0a" + "08000000", Packet{}, false},
		"half a header":  {"4500003000004000", Packet{}, false},
		"no ports":       {"450000300000400040060000" + "0a0c002c" + "0a600a0a", Packet{}, false},
		"half of IPv6":   {"6000000000081140" + "fd000000000000000000000000000001", Packet{}, false},
		"another header": {"050000300000400040060000" + "0a0c002c" + "0a600a0a" + "9c400050", Packet{}, false},
	} {
		data, err := hex.DecodeString(c.data)
		if err != nil {
			t.Fatal(name, err)
		}
		if got, ok := Parse(data); ok != c.ok || ok && got != c.want {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
	}
}

// FuzzParse checks that an accepted packet has the ports of its transport header: not those
// of an IP header that is too short, and not the payload of a later fragment.
func FuzzParse(f *testing.F) {
	f.Add([]byte{0x4f, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5})
	f.Add([]byte{0x40, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Add([]byte{0x45, 0, 0, 0, 0, 0, 0, 1, 0, 17, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8})
	f.Fuzz(func(t *testing.T, data []byte) {
		p, ok := Parse(data)
		if !ok {
			return
		}
		header := 40
		if p.From.Addr().Is4() {
			header = int(data[0]&15) * 4
			if header < 20 || data[6]&0x1f != 0 || data[7] != 0 {
				t.Fatalf("accepted %+v, header of %d bytes, fragment %x", p, header, data[6:8])
			}
		}
		if len(data) < header+4 || p.From.Port() != binary.BigEndian.Uint16(data[header:]) || p.To.Port() != binary.BigEndian.Uint16(data[header+2:]) {
			t.Fatalf("%+v of %x", p, data)
		}
	})
}
