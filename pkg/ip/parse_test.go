package ip

import (
	"net/netip"
	"testing"
)

func TestParseAddr(t *testing.T) {
	for text, want := range map[string]netip.Addr{
		"10.0.0.1":        netip.AddrFrom4([4]byte{10, 0, 0, 1}),
		"010.000.0.1":     netip.AddrFrom4([4]byte{10, 0, 0, 1}),
		"::ffff:10.0.0.1": netip.AddrFrom4([4]byte{10, 0, 0, 1}),
		"fd00::1":         netip.MustParseAddr("fd00::1"),
		"fe80::1%eth0":    netip.MustParseAddr("fe80::1%eth0"),
		"":                {},
		" 10.0.0.1":       {},
		"10.0.0":          {},
		"10.0.0.0/8":      {},
	} {
		if got := ParseAddr(text); got != want {
			t.Errorf("ParseAddr(%q) = %v, want %v", text, got, want)
		}
	}
}

func TestParsePrefix(t *testing.T) {
	for text, want := range map[string]netip.Prefix{
		"10.1.2.3/8":           netip.MustParsePrefix("10.0.0.0/8"),
		"010.0.0.0/08":         netip.MustParsePrefix("10.0.0.0/8"),
		"::ffff:10.1.0.0/104":  netip.MustParsePrefix("10.0.0.0/8"),
		"::ffff:10.1.0.0/90":   {},
		"fd00::1/8":            netip.MustParsePrefix("fd00::/8"),
		"0.0.0.0/0":            netip.MustParsePrefix("0.0.0.0/0"),
		"":                     {},
		"10.0.0.0":             {},
		"10.0.0.0/33":          {},
		"fe80::%eth0/64":       {},
		" 10.0.0.0/8":          {},
		"10.0.0.0/255.0.0.0":   {},
		"::ffff:10.1.0.0/1040": {},
	} {
		if got, err := ParsePrefix(text); got != want || want.IsValid() != (err == nil) {
			t.Errorf("ParsePrefix(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
}
