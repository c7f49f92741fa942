package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// network returns an interface with addresses; those with a "-" are secondary.
func network(name string, addresses ...string) routing.Link {
	l := routing.Link{Name: name, Up: true}
	for _, a := range addresses {
		text, secondary := strings.CutSuffix(a, "-")
		p := netip.MustParsePrefix(text)
		l.Addresses = append(l.Addresses, routing.Address{Prefix: p, Global: !p.Addr().IsLinkLocalUnicast(), Secondary: secondary})
	}
	return l
}

func TestHasOtherNetwork(t *testing.T) {
	for name, c := range map[string]struct {
		addresses []string
		source    string
		want      bool
	}{
		"one address":                      {[]string{"10.13.0.5/24"}, "10.13.0.5", false},
		"two networks":                     {[]string{"10.13.0.5/24", "172.31.0.99/24"}, "10.13.0.5", true},
		"one network":                      {[]string{"10.13.0.5/24", "10.13.0.6/24-", "10.13.0.7/32"}, "10.13.0.5", false},
		"a local and a global prefix":      {[]string{"fd13::5/64", "2001:db8:31::99/64", "fe80::1/64"}, "fd13::5", true},
		"by DHCP and by autoconfiguration": {[]string{"2001:db8:31::99/128", "2001:db8:31::a:b/64"}, "2001:db8:31::99", false},
		"both families":                    {[]string{"10.13.0.5/24", "fd13::5/64"}, "10.13.0.5", false},
		"not of the interface":             {[]string{"10.13.0.5/24", "172.31.0.99/24"}, "10.99.0.1", false},
	} {
		inv := routing.Inventory{Links: []routing.Link{network("eth0", "10.12.97.49/24"), network("eth1", c.addresses...)}}
		if got := hasOtherNetwork(&inv, "eth1", netip.MustParseAddr(c.source)); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestDirectOnly(t *testing.T) {
	over := func(link string, networks ...string) (out []routing.Route) {
		for _, n := range networks {
			out = append(out, routing.Route{Family: ip.IPv4, Table: routing.TableMain, Dst: netip.MustParsePrefix(n), Link: link})
		}
		return out
	}
	var many []string
	for i := range maxDirect + 1 {
		many = append(many, fmt.Sprintf("172.16.%d.0/24", i))
	}
	for name, c := range map[string]struct {
		direct []routing.Route
		want   string
	}{
		"none":                      {nil, "map[eth1:[]] []"},
		"its own":                   {over("eth1", "10.50.0.0/16", "10.13.0.0/24"), "map[eth1:[10.13.0.0/24 10.50.0.0/16]] []"},
		"also of another interface": {over("eth1", "10.12.97.0/24", "10.13.0.0/24"), "map[eth1:[10.13.0.0/24]] []"},
		"contains another's":        {over("eth1", "10.12.0.0/16"), "map[eth1:[]] []"},
		"also routed over another":  {append(over("eth1", "10.50.0.0/16"), over("eth2", "10.50.1.0/24")...), "map[eth1:[]] []"},
		"the routes of a router":    {over("eth1", many...), "map[] [eth1]"},
		"of the other family":       {[]routing.Route{{Family: ip.IPv6, Dst: netip.MustParsePrefix("fd50::/64"), Link: "eth1"}}, "map[eth1:[]] []"},
	} {
		inv := routing.Inventory{
			Links:  []routing.Link{network("eth0", "10.12.97.49/24", "10.99.0.1/32"), network("eth1", "10.13.0.5/24"), network("eth2")},
			Direct: c.direct,
		}
		networks, byMain := directOnly(&inv, ip.IPv4, []Binding{{Link: "eth0"}, {Link: "eth1"}})
		if got := fmt.Sprint(networks, byMain); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestMarksOfCilium checks that packets with the mark of a pod's identity, whose low bits are the
// number of the cluster, do not skip table local.
func TestMarksOfCilium(t *testing.T) {
	cfg := Config{MasqueradeMark: 0x4000, LocalMark: LocalMark{Value: 0x9, Mask: 0x3fff}, VIPs: VIPs{Mark: 0x4}, SNAT: SNAT{Mark: 0x3060}}
	mask := cfg.skipLocalMask()
	for id := range uint32(256) {
		if mark := 0x1234<<16 | 0xf00 | id; mark&mask == cfg.VIPs.Mark || mark&mask == cfg.deviceMark() {
			t.Errorf("packets of cluster %d skip table local", id)
		}
	}
	for _, mark := range []uint32{cfg.VIPs.Mark, cfg.deviceMark(), cfg.VIPs.Mark | cfg.MasqueradeMark, cfg.VIPs.Mark | 0x100000} {
		if mark&mask != cfg.VIPs.Mark && mark&mask != cfg.deviceMark() {
			t.Errorf("mark %#x does not skip table local", mark)
		}
	}
	cfg.MasqueradeMark = 0x100
	if cfg.skipLocalMask()&0x100 != 0 {
		t.Error("packets to be masqueraded do not skip table local")
	}
}
