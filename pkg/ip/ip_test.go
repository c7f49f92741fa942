package ip

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOf(t *testing.T) {
	for addr, want := range map[string]Family{
		"10.0.0.1":        IPv4,
		"2001:db8::1":     IPv6,
		"::ffff:10.0.0.1": IPv6, // callers unmap
	} {
		if got := Of(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Of(%s) = %s, want %s", addr, got, want)
		}
	}
}

func TestFamily(t *testing.T) {
	for _, tc := range []struct {
		family      Family
		number      uint8
		bits        int
		unspecified string
		text        string
	}{
		{IPv4, unix.AF_INET, 32, "0.0.0.0", "IPv4"},
		{IPv6, unix.AF_INET6, 128, "::", "IPv6"},
	} {
		if got := tc.family.AF(); got != tc.number {
			t.Errorf("%s: AF number %d, want %d", tc.text, got, tc.number)
		}
		if got := tc.family.Bits(); got != tc.bits {
			t.Errorf("%s: %d bits, want %d", tc.text, got, tc.bits)
		}
		if got := tc.family.Unspecified().String(); got != tc.unspecified {
			t.Errorf("%s: unspecified is %s, want %s", tc.text, got, tc.unspecified)
		}
		if got := tc.family.String(); got != tc.text {
			t.Errorf("String() = %s, want %s", got, tc.text)
		}
		if got := Of(tc.family.Unspecified()); got != tc.family {
			t.Errorf("the unspecified address of %s is of %s", tc.family, got)
		}
	}
	if got := Family(0).String(); got != "Family(0)" {
		t.Errorf("the zero Family is %q", got)
	}
}

// IP headers and netlink messages contain these numbers.
func TestProtocolNumbers(t *testing.T) {
	if TCP != 6 || UDP != 17 || SCTP != 132 {
		t.Errorf("TCP %d, UDP %d, SCTP %d", uint8(TCP), uint8(UDP), uint8(SCTP))
	}
}

func TestParseProtocol(t *testing.T) {
	for _, p := range Protocols {
		if got, err := ParseProtocol(p.String()); err != nil || got != p {
			t.Errorf("ParseProtocol(%q) = %v, %v", p, got, err)
		}
	}
	for _, s := range []string{"", "tcp", "ICMP", "TCP ", "Protocol(1)"} {
		got, err := ParseProtocol(s)
		if err == nil || got != 0 {
			t.Errorf("ParseProtocol(%q) = %v, %v, want an error", s, got, err)
		}
	}
	if got := Protocol(1).String(); got != "Protocol(1)" {
		t.Errorf("protocol 1 is %q", got)
	}
}
