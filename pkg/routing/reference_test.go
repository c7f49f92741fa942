package routing

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Diff returns the changes that turn have into want, in a deterministic order. What another
// change needs comes before it: the link, then addresses, then routes (those on link before
// those through gateways), then rules, which refer to the routes' tables. Deletions follow
// in the reverse order. If the link is deleted, its addresses are deleted with it and are
// not listed.
func Diff(have, want State) []Change {
	var changes []Change
	if want.DummyLink && !have.DummyLink {
		changes = append(changes, Change{Op: AddLink})
	}
	for _, a := range sorted(minus(want.Addresses, have.Addresses), netip.Addr.Compare) {
		changes = append(changes, Change{Op: AddAddress, Address: a})
	}
	newRoutes := sorted(minus(want.Routes, have.Routes), compareRoutes)
	for _, r := range newRoutes {
		changes = append(changes, Change{Op: AddRoute, Route: r})
	}
	for _, r := range sorted(minus(want.Rules, have.Rules), compareRules) {
		changes = append(changes, Change{Op: AddRule, Rule: r})
	}
	return append(changes, deletions(have, want, newRoutes)...)
}

func deletions(have, want State, newRoutes []Route) []Change {
	var changes []Change
	for _, r := range sorted(minus(have.Rules, want.Rules), compareRules) {
		changes = append(changes, Change{Op: DeleteRule, Rule: r})
	}
	for _, r := range slices.Backward(sorted(minus(have.Routes, want.Routes), compareRoutes)) {
		// The kernel would delete the new route if r has no gateway to match.
		replaced := func(n Route) bool { return n.Key() == r.Key() }
		if !slices.ContainsFunc(newRoutes, replaced) {
			changes = append(changes, Change{Op: DeleteRoute, Route: r})
		}
	}
	if have.DummyLink && !want.DummyLink {
		return append(changes, Change{Op: DeleteLink})
	}
	bound := maps.Clone(have.Addresses)
	if bound == nil {
		bound = map[netip.Addr]struct{}{}
	}
	maps.Copy(bound, have.WrongScope)
	for _, a := range sorted(minus(bound, want.Addresses), netip.Addr.Compare) {
		changes = append(changes, Change{Op: DeleteAddress, Address: a})
	}
	return changes
}

func minus[K comparable](a, b map[K]struct{}) []K {
	var out []K
	for k := range a {
		if _, ok := b[k]; !ok {
			out = append(out, k)
		}
	}
	return out
}

func sorted[K any](keys []K, compare func(K, K) int) []K {
	slices.SortFunc(keys, compare)
	return keys
}

func compareRules(a, b Rule) int {
	return cmp.Or(
		cmp.Compare(a.Family, b.Family),
		cmp.Compare(a.Priority, b.Priority),
		strings.Compare(a.String(), b.String()),
	)
}
