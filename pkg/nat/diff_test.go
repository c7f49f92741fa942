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
	insert := func(r Rule) Change { return Change{Op: InsertJump, Chain: pre, Rules: []Rule{r}} }
	beside := func(r Rule, after, before []Rule) Change {
		return Change{Op: InsertJump, Chain: pre, Rules: []Rule{r}, After: after, Before: before}
	}
	add := func(r Rule) Change { return Change{Op: AppendJump, Chain: pre, Rules: []Rule{r}} }
	remove := func(r Rule) Change { return Change{Op: DeleteJump, Chain: pre, Rules: []Rule{r}} }
	for _, test := range []struct {
		name                           string
		unread                         bool
		head, stray, moves, want, last []Rule
		changes                        []Change
	}{
		{name: "none"},
		{name: "as wanted", head: []Rule{a, b}, want: []Rule{a, b}},
		{name: "all missing", want: []Rule{a, b, c}, changes: []Change{insert(c), insert(b), insert(a)}},
		{name: "first missing", head: []Rule{b, c}, want: []Rule{a, b, c}, changes: []Change{beside(a, []Rule{}, []Rule{b, c})}},
		{name: "first missing, which moves", head: []Rule{b, c}, moves: []Rule{a}, want: []Rule{b, c}, changes: []Change{insert(a)}},
		{name: "last missing", head: []Rule{a, b}, want: []Rule{a, b, c}, changes: []Change{beside(c, []Rule{a, b}, []Rule{a, b})}},
		{name: "last missing of those that move", head: []Rule{a, c}, moves: []Rule{a, b}, want: []Rule{c}, changes: []Change{beside(b, []Rule{a}, []Rule{a, c})}},
		{name: "swapped", head: []Rule{b, a}, want: []Rule{a, b}, changes: []Change{beside(a, []Rule{}, []Rule{b, a})}},
		{name: "behind a foreign rule", head: []Rule{c}, stray: []Rule{a, b}, moves: []Rule{a, b}, want: []Rule{c}, changes: []Change{insert(b), insert(a)}},
		{name: "doubled", head: []Rule{a}, stray: []Rule{a, a}, want: []Rule{a}, changes: []Change{beside(a, nil, []Rule{a})}},
		{name: "old one at the head", head: []Rule{old, a}, want: []Rule{a}, changes: []Change{remove(old)}},
		{name: "others replace old ones", head: []Rule{old}, want: []Rule{a, b}, changes: []Change{beside(a, []Rule{}, []Rule{old}), beside(b, []Rule{a}, []Rule{old}), remove(old)}},
		{name: "last missing in a chain that cannot be listed", unread: true, head: []Rule{a, b}, want: []Rule{a, b, c}, changes: []Change{insert(c), insert(b), insert(a)}},
		{name: "as wanted in a chain that cannot be listed", unread: true, head: []Rule{a, b}, want: []Rule{a, b}},
		{name: "old ones behind", head: []Rule{a}, stray: []Rule{old, old}, want: []Rule{a}, changes: []Change{remove(old)}},
		{name: "nothing wanted", head: []Rule{a}, stray: []Rule{b, a}, changes: []Change{remove(a), remove(b)}},
		{name: "last one missing", head: []Rule{a}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one with none before it", head: []Rule{a, c}, want: []Rule{a}, last: []Rule{c}},
		{name: "last one behind a foreign rule", head: []Rule{a}, stray: []Rule{c}, want: []Rule{a}, last: []Rule{c}},
		{name: "last one before others of ours", head: []Rule{c, a}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one doubled", head: []Rule{a, c}, stray: []Rule{c}, want: []Rule{a}, last: []Rule{c}, changes: []Change{add(c)}},
		{name: "last one not wanted", head: []Rule{a, c}, want: []Rule{a}, changes: []Change{remove(c)}},
		{name: "only the last one is left", head: []Rule{c}, want: []Rule{a}, last: []Rule{c}, changes: []Change{insert(a)}},
		{name: "only the last one is left, and a foreign rule", stray: []Rule{c}, want: []Rule{a}, last: []Rule{c}, changes: []Change{insert(a)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			have := State{Jumps: jumpsOf("PREROUTING", test.head...), Misplaced: jumpsOf("PREROUTING", test.stray...)}
			if test.unread {
				have.Unread = []Unread{{Table: NAT}}
			}
			var want State
			for _, j := range jumpsOf("PREROUTING", test.moves...) {
				j.Moves = true
				want.Jumps = append(want.Jumps, j)
			}
			want.Jumps = append(want.Jumps, jumpsOf("PREROUTING", test.want...)...)
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
		{Op: WriteChain, Chain: Chain{ip.IPv4, Filter, "NEW"}, Rules: nil},
		{Op: WriteChain, Chain: natChain("CHANGED"), Rules: []Rule{"-j RETURN"}},
		{Op: WriteChain, Chain: v6, Rules: nil},
		{Op: InsertJump, Chain: natChain("INPUT"), Rules: []Rule{"-j CHANGED"}},
		{Op: DeleteJump, Chain: natChain("OUTPUT"), Rules: []Rule{"-j OLD"}},
		{Op: DeleteChain, Chain: natChain("OLD"), Rules: nil},
	}, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}
