package routing

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Input interfaces that rules of other programs match.
func TestInputsOf(t *testing.T) {
	rules := []rawRule{
		{Rule{Family: ip.IPv4, IIf: "vlan1", Table: 101}, 0},
		{Rule{Family: ip.IPv4, IIf: "lo", Table: 102}, 0},
		{Rule{Family: ip.IPv4, IIf: "vlan2", Action: Goto, Target: 9}, 0},
		{Rule{Family: ip.IPv4, IIf: "vlan3", Table: 101}, Protocol},
		{Rule{Family: ip.IPv6, IIf: "vlan4", Table: 101}, 0},
		{Rule{Family: ip.IPv4, OIf: "vlan5", Table: 101}, 0},
	}
	if got := slices.Sorted(maps.Keys(inputsOf(rules, ip.IPv4))); !slices.Equal(got, []string{"vlan1"}) {
		t.Errorf("inputs %q, want only vlan1", got)
	}
}

// Of the routes over an input interface, only those to single hosts on its link are
// wanted.
func TestWantedRoutes(t *testing.T) {
	tables := tables{family: ip.IPv4, names: map[int]string{2: "eth0", 3: "vlan1"}, inputs: map[string]bool{"vlan1": true}}
	network := func(s string) *net.IPNet { _, n, _ := net.ParseCIDR(s); return n }
	for name, tc := range map[string]struct {
		route netlink.Route
		want  bool
	}{
		"default":               {netlink.Route{LinkIndex: 2, Gw: net.IPv4(10, 0, 0, 1)}, true},
		"a pod":                 {netlink.Route{LinkIndex: 3, Dst: network("10.1.0.5/32")}, true},
		"a pod of another link": {netlink.Route{LinkIndex: 2, Dst: network("10.1.0.5/32")}, false},
		"a network":             {netlink.Route{LinkIndex: 3, Dst: network("10.1.0.0/24")}, false},
		"behind a gateway":      {netlink.Route{LinkIndex: 3, Dst: network("10.1.0.5/32"), Gw: net.IPv4(10, 0, 0, 1)}, false},
	} {
		if got := tables.wants(tc.route); got != tc.want {
			t.Errorf("%s: wanted: %t", name, got)
		}
	}
}

// Links to gateways of the main table are told from those of other tables, and on-link routes have
// none.
func TestLinksToGateways(t *testing.T) {
	tables := tables{family: ip.IPv4, names: map[int]string{2: "eth0", 3: "eth1", 4: "eth2", 5: "cni0"}, peers: map[netip.Addr]struct{}{}, gateways: map[string]bool{}, main: map[string]bool{}}
	for _, r := range []netlink.Route{
		{Table: TableMain, MultiPath: []*netlink.NexthopInfo{{LinkIndex: 2, Gw: net.ParseIP("192.0.2.1")}, {LinkIndex: 3, Via: &netlink.Via{AddrFamily: unix.AF_INET6, Addr: net.ParseIP("fe80::1")}}}},
		{Table: 7, LinkIndex: 4, Gw: net.ParseIP("192.0.2.2")},
		{Table: TableMain, LinkIndex: 5},
	} {
		tables.addGateways(r)
	}
	if want := map[string]bool{"eth0": true, "eth1": true}; !maps.Equal(tables.main, want) {
		t.Errorf("of the main table: %v, want %v", tables.main, want)
	}
	if want := map[string]bool{"eth0": true, "eth1": true, "eth2": true}; !maps.Equal(tables.gateways, want) {
		t.Errorf("of all tables: %v, want %v", tables.gateways, want)
	}
	if len(tables.peers) != 2 {
		t.Errorf("peers: %v", tables.peers)
	}
}
