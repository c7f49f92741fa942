package nat

import "slices"

// Among reports whether s is a mixture of variants of a desired state, which are not iptables
// variants. Each rule and jump of s is in a variant, and s has the rules that all variants have.
// The order is not compared.
func Among(s State, variants []State) bool {
	for c, rules := range s.Chains {
		for _, r := range rules {
			if !slices.ContainsFunc(variants, func(v State) bool { return slices.Contains(v.Chains[c], r) }) {
				return false
			}
		}
	}
	for _, j := range slices.Concat(s.Jumps, s.Misplaced) {
		if !slices.ContainsFunc(variants, func(v State) bool { return v.jumps(j) }) {
			return false
		}
	}
	return len(variants) > 0 && !slices.ContainsFunc(sortedChains(variants[0].Chains), func(c Chain) bool { return s.lacks(c, variants) })
}

// jumps reports whether a state has a jump, at the head or the end of its chain.
func (s State) jumps(j Jump) bool {
	return slices.ContainsFunc(s.Jumps, func(k Jump) bool { return j.Chain == k.Chain && j.Rule == k.Rule })
}

// lacks reports whether a state lacks a rule of a chain that all variants have.
func (s State) lacks(c Chain, variants []State) bool {
	return slices.ContainsFunc(variants[0].Chains[c], func(r Rule) bool {
		everywhere := !slices.ContainsFunc(variants, func(v State) bool { return !slices.Contains(v.Chains[c], r) })
		return everywhere && !slices.Contains(s.Chains[c], r)
	})
}
