package reconcile

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// TestGatewayRoutes checks that the routes of a gateway exist while a policy rule looks them up,
// come back after the kernel has deleted them with the link's state, and are removed in the end.
func TestGatewayRoutes(t *testing.T) {
	w := newWorld(t)
	w.cfg.SNAT.Gateways = map[string][]netip.Addr{"eth1": {netip.MustParseAddr("10.13.0.1"), netip.MustParseAddr("fd00:13::1")}}
	w.Sysctl.Set(plan.SrcValidMark, "0")
	w.Sysctl.Set(plan.SNATReroute, "0")
	link := func(index int, name, v4, v6 string) routing.Link {
		l := routing.Link{Index: index, Name: name, Type: "device", Up: true}
		for _, a := range []string{v4, v6} {
			l.Addresses = append(l.Addresses, routing.Address{Prefix: netip.MustParsePrefix(a), Global: true})
		}
		return l
	}
	inv := routing.Inventory{Links: []routing.Link{link(2, "eth0", "10.0.0.1/24", "fd00::1/64"), link(3, "eth1", "10.13.0.5/24", "fd00:13::5/64")}}
	for _, f := range ip.Families {
		inv.Defaults = append(inv.Defaults, routing.Route{Family: f, Table: routing.TableMain, Dst: netip.PrefixFrom(f.Unspecified(), 0), Link: "eth0"})
	}
	w.Routing.SetInventory(inv)
	renew := func(when string, writes ...string) {
		t.Helper()
		got, err := w.Routing.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		w.order = nil
		w.reconciler.SetNode(plan.Node{Inventory: got}, 0)
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		var order []string
		for _, change := range w.order {
			if strings.Contains(change, "table 80083") || strings.Contains(change, "lookup 80083") {
				order = append(order, change)
			}
		}
		if !slices.Equal(order, writes) {
			t.Errorf("%s: %q, want %q", when, order, writes)
		}
	}
	routes := []string{
		"add route 10.13.0.0/24 dev eth1 table 80083", "add route 0.0.0.0/0 via 10.13.0.1 dev eth1 table 80083",
		"add route fd00:13::/64 dev eth1 table 80083", "add route ::/0 via fd00:13::1 dev eth1 table 80083",
	}
	rules := []string{"add IPv4 rule 480: fwmark 0x40/0x3060 lookup 80083", "add IPv6 rule 480: fwmark 0x40/0x3060 lookup 80083"}
	renew("a new gateway", append(slices.Clone(routes), rules...)...)
	renew("unchanged")
	state, err := w.Routing.Observe()
	if err != nil {
		t.Fatal(err)
	}
	for r := range state.Routes {
		w.Routing.Do(routing.Change{Op: routing.DeleteRoute, Route: r}) // as the kernel does while the link is down
	}
	renew("up again", routes...)
	for r := range state.Routes {
		if r.Family == ip.IPv4 {
			w.Routing.Do(routing.Change{Op: routing.DeleteRoute, Route: r}) // as the kernel does with the last IPv4 address
		}
	}
	renew("with an IPv4 address again", routes[:2]...)
	w.restart()
	w.order = nil
	got, err := w.Routing.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	w.reconciler.SetNode(plan.Node{Inventory: got}, 0)
	if err := w.start().Err(); err != nil {
		t.Fatal(err)
	}
	if at := slices.IndexFunc(w.order, func(change string) bool { return strings.Contains(change, "80083") }); at >= 0 {
		t.Errorf("a restart writes %q", w.order[at])
	}
	if n := w.reconciler.nodeDifferences(); n > 0 {
		t.Errorf("%d differences after a restart", n)
	}
	inv.Links[1].Up = false
	inv.Rules = nil
	for rule := range state.Rules {
		rule.Own = true
		inv.Rules = append(inv.Rules, rule)
	}
	w.Routing.SetInventory(inv)
	renew("down", deleted(rules, routes)...)
}

// deleted returns the deletions of what was added, in the order of their texts.
func deleted(added ...[]string) []string {
	var out []string
	for _, list := range added {
		sorted := slices.Sorted(slices.Values(list))
		for _, change := range sorted {
			out = append(out, "delete "+strings.TrimPrefix(change, "add "))
		}
	}
	return out
}
