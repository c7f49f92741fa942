package routing

import (
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestReadSources(t *testing.T) {
	const header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	for _, c := range []struct {
		protocol ip.Protocol
		lines    string
		want     map[string]int
	}{
		{ip.TCP, "   0: 0100600A:C350 0200F40A:0050 01 0:0\n   1: 0100600A:C351 0200F40A:0050 08 0:0\n   2: 00000000:0050 00000000:0000 0A 0:0\n" +
			"   3: 0B00A8C0:C352 0200F40A:0050 06 0:0\n", map[string]int{"10.96.0.1": 2}},
		{ip.TCP, "   0: 0000000000000000FFFF00000100600A:C350 0000000000000000FFFF00000200F40A:0050 01 0:0\n", map[string]int{"10.96.0.1": 1}},
		{ip.UDP, "   0: 0100600A:C350 0200F40A:0035 01 0:0\n   1: 0100600A:C351 00000000:0000 07 0:0\n", map[string]int{"10.96.0.1": 1}},
	} {
		got := map[netip.Addr]int{}
		if err := readSources(got, strings.NewReader(header+c.lines)); err != nil {
			t.Error(err)
		}
		want := map[netip.Addr]int{}
		for a, n := range c.want {
			want[netip.MustParseAddr(a)] = n
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", c.lines, got, want)
		}
	}
	for _, malformed := range []string{"0: 0100600A:C350\n", "0: x 0200F40A:0050 01\n"} {
		if err := readSources(map[netip.Addr]int{}, strings.NewReader(header+malformed)); err == nil {
			t.Errorf("%q: no error", malformed)
		}
	}
}
