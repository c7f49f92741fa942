package nat

import (
	"net/netip"
	"slices"
	"strings"
)

// SourceTranslation is a foreign rule of table nat that translates the sources of packets without
// a mark, wherever they enter.
type SourceTranslation struct {
	Chain Chain
	Rule  Rule
	From  netip.Prefix // the sources that its condition selects; invalid: any, or all but some
}

var translating = []string{"MASQUERADE", "SNAT", "NETMAP"}

// sourceTranslations returns the rules of a chain of table nat that translate sources. It omits
// those that require a mark, a source in a set, or an input interface: these are about packets that
// another rule or program has selected.
func sourceTranslations(c Chain, rules []Rule) []SourceTranslation {
	if c.Table != NAT {
		return nil
	}
	var out []SourceTranslation
	for _, r := range rules {
		names := func(name string) bool { return strings.Contains(string(r), name) }
		if !slices.ContainsFunc(translating, names) || !slices.Contains(translating, target(r)) {
			continue // mostly not parsed: other programs may have thousands of rules
		}
		args, err := Words(string(r))
		if err != nil {
			continue
		}
		t, selected := SourceTranslation{Chain: c, Rule: r}, false
		for i := 0; i+1 < len(args); i++ {
			if i > 0 && args[i-1] == "!" {
				continue
			}
			switch args[i] {
			case "-s":
				t.From = parseNetwork(args[i+1])
			case "-i", "--mark":
				selected = true
			case "--match-set":
				selected = selected || i+2 < len(args) && args[i+2] == "src"
			}
		}
		if !selected {
			out = append(out, t)
		}
	}
	return out
}

// parseNetwork parses a network or an address as printed by iptables-save. It returns an invalid
// prefix if it is neither.
func parseNetwork(text string) netip.Prefix {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	return netip.Prefix{}
}
