package routing

import (
	"slices"
	"testing"
)

func TestClientPorts(t *testing.T) {
	for _, c := range []struct {
		all, reserved string
		want          []PortRange
	}{
		{"", "", nil},
		{"32768\t60999\n", "\n", []PortRange{{32768, 60999}}},
		{"1024\t65535\n", "30000-32767,8080\n", []PortRange{{1024, 8079}, {8081, 29999}, {32768, 65535}}},
		{"30000 32767", "1-65535", nil},
		{"30000 32767", "30000,32767", []PortRange{{30001, 32766}}},
		{"30000 32767", "1-30500,30100-30200,32000-65535", []PortRange{{30501, 31999}}},
	} {
		got, err := clientPorts(c.all, c.reserved)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q without %q: %v (%v), want %v", c.all, c.reserved, got, err, c.want)
		}
	}
	for _, c := range [][2]string{{"1024", "x"}, {"1024 70000", ""}, {"1 2 3", ""}, {"1024 65535", "5-"}} {
		if got, err := clientPorts(c[0], c[1]); err == nil {
			t.Errorf("%q without %q: %v, want an error", c[0], c[1], got)
		}
	}
	if ports, err := (&Netlink{}).ClientPorts(); err != nil || len(ports) == 0 {
		t.Errorf("of this machine: %v, %v", ports, err)
	}
}
