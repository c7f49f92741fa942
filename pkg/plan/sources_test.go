package plan

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// An interface is an ENI only if rules send all traffic of a source to a table with a
// default route through it.
func TestENIsOfRules(t *testing.T) {
	pod, all := netip.MustParsePrefix("10.12.192.44/32"), netip.MustParsePrefix("0.0.0.0/0")
	rule := func(change func(*routing.Rule)) routing.Rule {
		r := routing.Rule{Family: ip.IPv4, Priority: 2000, From: pod, Table: 1003}
		change(&r)
		return r
	}
	for name, test := range map[string]struct {
		rule  routing.Rule
		local bool
		want  string
	}{
		"by source":             {rule: rule(func(*routing.Rule) {}), want: "[eth1]"},
		"to a destination":      {rule: rule(func(r *routing.Rule) { r.To = netip.MustParsePrefix("10.0.0.0/8") }), want: "[]"},
		"from an interface":     {rule: rule(func(r *routing.Rule) { r.IIf = "veth1" }), want: "[]"},
		"by an interface":       {rule: rule(func(r *routing.Rule) { r.OIf = "eth1" }), want: "[]"},
		"with a mark":           {rule: rule(func(r *routing.Rule) { r.Mark, r.Mask = 0x80, 0x80 }), want: "[]"},
		"inverted":              {rule: rule(func(r *routing.Rule) { r.Invert = true }), want: "[]"},
		"with other conditions": {rule: rule(func(r *routing.Rule) { r.Other = true }), want: "[]"},
		"of ours":               {rule: rule(func(r *routing.Rule) { r.Own = true }), want: "[]"},
		"a goto":                {rule: rule(func(r *routing.Rule) { r.Action, r.Target, r.Table = routing.Goto, 3000, 0 }), want: "[]"},
		"a local default":       {rule: rule(func(*routing.Rule) {}), local: true, want: "[]"}, // TPROXY
	} {
		n := Node{Inventory: routing.Inventory{
			Rules: []routing.Rule{test.rule},
			Defaults: []routing.Route{
				{Family: ip.IPv4, Table: routing.TableMain, Dst: all, Link: "eth0"},
				{Family: ip.IPv4, Table: 1003, Dst: all, Link: "eth1", Local: test.local},
			},
		}}
		links := []string{}
		for _, e := range enis(&Config{}, &n, ip.IPv4) {
			links = append(links, e.Link)
		}
		if got := fmt.Sprint(links); got != test.want {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}

// Policy rules behind ours route some packets by another table than main, or may route any.
func TestDiverted(t *testing.T) {
	pod := netip.MustParsePrefix("10.12.192.44/32")
	rule := func(change func(*routing.Rule)) routing.Rule {
		r := routing.Rule{Family: ip.IPv4, Priority: 2000, From: pod, Table: 1003}
		change(&r)
		return r
	}
	byDefault := func(table int, link string) routing.Route {
		return routing.Route{Family: ip.IPv4, Table: table, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: link}
	}
	const some, none, all = "{[10.12.192.44/32] false}", "{[] false}", "{[] true}"
	for name, test := range map[string]struct {
		rule routing.Rule
		want string
	}{
		"by source":                {rule(func(*routing.Rule) {}), some},
		"by source, and more":      {rule(func(r *routing.Rule) { r.To, r.Other = netip.MustParsePrefix("10.0.0.0/8"), true }), some},
		"to the primary interface": {rule(func(r *routing.Rule) { r.Table = 100 }), none},
		"to single networks":       {rule(func(r *routing.Rule) { r.From, r.Table = netip.Prefix{}, 52 }), none},
		"to the main table":        {rule(func(r *routing.Rule) { r.Table = routing.TableMain }), none},
		"by another interface":     {rule(func(r *routing.Rule) { r.IIf = "veth1" }), none},
		"by the primary interface": {rule(func(r *routing.Rule) { r.IIf, r.From = "eth0", netip.Prefix{} }), all},
		"before ours":              {rule(func(r *routing.Rule) { r.Priority = 111 }), none},
		"of ours":                  {rule(func(r *routing.Rule) { r.Own = true }), none},
		"of the other family":      {rule(func(r *routing.Rule) { r.Family = ip.IPv6 }), none},
		"by a mark":                {rule(func(r *routing.Rule) { r.From, r.Mark, r.Mask = netip.Prefix{}, 0x80, 0x80 }), all},
		"to a destination":         {rule(func(r *routing.Rule) { r.From, r.To = netip.Prefix{}, pod }), all},
		"not from a source":        {rule(func(r *routing.Rule) { r.Invert = true }), all},
		"main, suppressed":         {rule(func(r *routing.Rule) { r.From, r.Table, r.Other = netip.Prefix{}, routing.TableMain, true }), all},
		"a goto for all packets":   {rule(func(r *routing.Rule) { r.From, r.Action, r.Target = netip.Prefix{}, routing.Goto, 3000 }), all},
	} {
		n := Node{Inventory: routing.Inventory{
			Rules:    []routing.Rule{test.rule},
			Defaults: []routing.Route{byDefault(routing.TableMain, "eth0"), byDefault(100, "eth0"), byDefault(1003, "eth1")},
		}}
		if got := fmt.Sprint(diverted(&Config{SNAT: SNAT{Priority: 480}}, &n, ip.IPv4)); got != test.want {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}
