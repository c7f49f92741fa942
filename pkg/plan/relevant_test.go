package plan_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// ForNode returns the same plan for a node and for what Relevant returns of it. So a node needs no new
// plan while Relevant returns the same.
func TestIrrelevantLinksChangeNothing(t *testing.T) {
	irrelevant := 0
	property(t, func(t *testing.T, g generator) {
		cfg, n := g.config(), g.node()
		n.Started = true // without variants of the rules, which take most of the time
		cfg.SNAT.Mode = []plan.SNATMode{plan.SNATAuto, plan.SNATOff}[g.Intn(2)]
		cfg.SNAT.Gateways = map[string][]netip.Addr{}
		for _, key := range some(g, "eth0", "veth1", "02:00:00:00:00:07") {
			cfg.SNAT.Gateways[key] = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
		}
		n.Inventory.Links = append(n.Inventory.Links, g.podLinks()...)
		for i, link := range some(g, "eth0", "veth1", "veth2") {
			n.Inventory.Defaults = append(n.Inventory.Defaults, routing.Route{Family: ip.IPv4, Table: routing.TableMain + i, Link: link})
			n.Inventory.Rules = append(n.Inventory.Rules, routing.Rule{Family: ip.IPv4, Priority: 100 + i, IIf: link, Table: routing.TableMain - 1})
		}
		relevant := plan.Relevant(&cfg, &n)
		irrelevant += len(n.Inventory.Links) - len(relevant.Inventory.Links)
		if all, some := plan.ForNode(&cfg, &n), plan.ForNode(&cfg, &relevant); !reflect.DeepEqual(all, some) {
			t.Errorf("of %+v,\nonly %+v count (-all +some)\n%s", n.Inventory.Links, relevant.Inventory.Links, cmp.Diff(all, some, planByValue))
		}
	})
	if irrelevant < rounds/4 {
		t.Errorf("only %d interfaces were left out", irrelevant)
	}
}

// podLinks returns interfaces such as those of pods, and sometimes a bridge.
func (g generator) podLinks() []routing.Link {
	var out []routing.Link
	for i, name := range some(g, "veth1", "veth2", "veth3", "veth4") {
		l := routing.Link{Index: 100 + i, Name: name, Type: []string{"veth", "veth", "veth", "device"}[g.Intn(4)], Up: g.coin(), MAC: fmt.Sprintf("02:00:00:00:00:%02x", g.Intn(8))}
		l.Master = []string{"", "", "cni0"}[g.Intn(3)]
		for _, a := range some(g, "fe80::1/64", "169.254.1.1/32", "198.51.100.7/24") {
			if g.Intn(3) == 0 {
				l.Addresses = append(l.Addresses, routing.Address{Prefix: netip.MustParsePrefix(a), Global: g.coin()})
			}
		}
		out = append(out, l)
	}
	if g.coin() {
		out = append(out, routing.Link{Index: 109, Name: "cni0", Type: "bridge", Up: true, Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.244.0.1/24"), Global: true}}})
	}
	return out
}

// Names of interfaces that the kernel allows and rules cannot contain do not appear in any, and every
// rule can be written. Addresses of such interfaces have node ports nevertheless.
func TestLinksThatCannotBeNamed(t *testing.T) {
	for name, want := range map[string]bool{"eth9.100": true, "wan-1@x": true, "é%d$'": true, `up"link`: false, "eth+": false, "!": false} {
		s := load(t, "eni")
		rename := func(link string) string {
			if link == "eth1" {
				return name
			}
			return link
		}
		inv := &s.Node.Inventory
		for i := range inv.Links {
			inv.Links[i].Name = rename(inv.Links[i].Name)
		}
		for i := range inv.Defaults {
			inv.Defaults[i].Link = rename(inv.Defaults[i].Link)
		}
		inv.Rules = append(inv.Rules, routing.Rule{Family: ip.IPv4, Priority: 9000, IIf: name, Table: 7})
		part := plan.ForNode(&s.Config, &s.Node)
		named := false
		for c, rules := range part.NAT.Chains {
			for _, r := range rules {
				if _, err := nat.Words(string(r)); err != nil {
					t.Errorf("%s: %s: %s: %v", name, c, r, err)
				}
				named = named || name != "!" && slices.Contains(nat.Arguments(r, "-i", "-o"), name)
				if strings.Contains(string(r), "+ ") {
					t.Errorf("%s: %s: a wildcard: %s", name, c, r)
				}
			}
		}
		warned := slices.ContainsFunc(plan.Warnings(&s.Config, &s.Node, &part, plan.Foreign{}), func(w string) bool {
			return strings.Contains(w, "the interface "+strconv.Quote(name)+" is not recognized")
		})
		if named != want || warned == want {
			t.Errorf("%s: named in a rule: %t, warned: %t", name, named, warned)
		}
		before, after := load(t, "eni"), plan.NewFacts(&s.Config, &s.Node)
		if facts := plan.NewFacts(&before.Config, &before.Node); !facts.NodeIPs.Equal(after.NodeIPs) {
			t.Errorf("%s: the node's addresses are %v", name, after.NodeIPs)
		}
	}
}
