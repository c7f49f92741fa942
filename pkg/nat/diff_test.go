package nat

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func natChain(name string) Chain { return Chain{ip.IPv4, NAT, name} }

func jumpsOf(name string, rules ...Rule) []Jump {
	var out []Jump
	for _, r := range rules {
		out = append(out, Jump{Chain: natChain(name), Rule: r})
	}
	return out
}

func TestDiffJumps(t *testing.T) {
	const a, b, c, old = Rule("-j A"), Rule("-j B"), Rule("-j C"), Rule("-j OLD")
	pre := natChain("PREROUTING")
	insert := func(r Rule) Change { return Change{InsertJump, pre, []Rule{r}} }
	add := func(r Rule) Change { return Change{AppendJump, pre, []Rule{r}} }
	remove := func(r Rule) Change { return Change{DeleteJump, pre, []Rule{r}} }
	for _, test := range []struct {
		name                    string
		head, stray, want, last []Rule
		changes                 []Change
	}{
		{name: "none"},
		{name: "as wanted", head: []Rule{a, b}, want: []Rule{a, b}},
		{name: "all missing", want: []Rule{a, b, c}, changes: []Change{insert(c), insert(b), insert(a)}},
		{name: "first missing", head: []Rule{b, c}, want: []Rule{a, b, c}, changes: []Change{insert(a)}},
		{name: "last missing", head: []Rule{a, b}, want: []Rule{a, b, c}, changes: []Change{insert(c), insert(b), insert(a)}},
		{name: "swapped", head: []Rule{b, a}, want: []Rule{a, b}, changes: []Change{insert(b), insert(a)}},
		{name: "behind a foreign rule", stray: []Rule{a, b}, want: []Rule{a, b}, changes: []Change{insert(b), insert(a)}},
		{name: "doubled", head: []Rule{a}, stray: []Rule{a, a}, want: []Rule{a}, changes: []Change{insert(a)}},
		{name: "old one at the head", head: []Rule{old, a}, want: []Rule{a}, changes: []Change{remove(old)}},
		{name: "old ones behind", head: []Rule{a}, stray: []Rule{old, old}, want: []Rule{a}, changes: []Change{remove(old)}},
		{name: "nothing wanted", head: []Rule{a}, stray: []Rule{b, a}, changes: []Change{remove(a), remove(b)}},
		{name: "last one missing", head: []Rule{a}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one with none before it", head: []Rule{a, c}, want: []Rule{a}, last: []Rule{c}},
		{name: "last one behind a foreign rule", head: []Rule{a}, stray: []Rule{c}, want: []Rule{a}, last: []Rule{c}},
		{name: "last one before others of ours", head: []Rule{c, a}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one doubled", head: []Rule{a, c}, stray: []Rule{c}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one not wanted", head: []Rule{a, c}, want: []Rule{a}, changes: []Change{remove(c)}},
		{name: "only the last one is left", head: []Rule{c}, want: []Rule{a}, last: []Rule{c}, changes: []Change{insert(a)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			have := State{Jumps: jumpsOf("PREROUTING", test.head...), Misplaced: jumpsOf("PREROUTING", test.stray...)}
			want := State{Jumps: jumpsOf("PREROUTING", test.want...)}
			for _, j := range jumpsOf("PREROUTING", test.last...) {
				j.Append = true
				want.Jumps = append(want.Jumps, j)
			}
			got := Diff(have, want)
			if diff := cmp.Diff(test.changes, got); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDiffOrder(t *testing.T) {
	have := State{
		Chains: map[Chain][]Rule{natChain("SAME"): {"-j RETURN"}, natChain("CHANGED"): nil, natChain("OLD"): nil, natChain("EMPTY"): {}},
		Jumps:  jumpsOf("OUTPUT", "-j OLD"),
	}
	v6 := Chain{ip.IPv6, Filter, "NEW"}
	want := State{
		Chains: map[Chain][]Rule{natChain("SAME"): {"-j RETURN"}, natChain("CHANGED"): {"-j RETURN"}, natChain("EMPTY"): nil, v6: nil, {ip.IPv4, Filter, "NEW"}: nil},
		Jumps:  jumpsOf("INPUT", "-j CHANGED"),
	}
	got := Diff(have, want)
	if diff := cmp.Diff([]Change{
		{WriteChain, Chain{ip.IPv4, Filter, "NEW"}, nil},
		{WriteChain, natChain("CHANGED"), []Rule{"-j RETURN"}},
		{WriteChain, v6, nil},
		{InsertJump, natChain("INPUT"), []Rule{"-j CHANGED"}},
		{DeleteJump, natChain("OUTPUT"), []Rule{"-j OLD"}},
		{DeleteChain, natChain("OLD"), nil},
	}, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}
