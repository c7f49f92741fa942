package nat

import (
	"strconv"
	"strings"
)

// MarkUse is a rule of somebody else's that sets, copies or matches bits of a
// packet's or a connection's mark.
type MarkUse struct {
	Chain Chain
	Rule  Rule
	Bits  uint32
}

// markUses picks such rules of a chain.
func markUses(c Chain, rules []Rule) []MarkUse {
	var out []MarkUse
	for _, r := range rules {
		if bits := markBits(r); bits != 0 {
			out = append(out, MarkUse{Chain: c, Rule: r, Bits: bits})
		}
	}
	return out
}

// markBits are the bits that a rule names: those under its masks, and, as the
// xmark operations set them, those of its values. A value alone stands for
// the whole mark.
func markBits(r Rule) uint32 {
	if !strings.Contains(string(r), "mark ") && !strings.Contains(string(r), "mask ") {
		return 0 // others have rules by the thousand
	}
	var bits uint32
	for _, arg := range Arguments(r, "--mark", "--set-xmark", "--set-mark") {
		value, mask, masked := strings.Cut(arg, "/")
		if !masked {
			return ^uint32(0)
		}
		bits |= parseBits(value) | parseBits(mask)
	}
	for _, arg := range Arguments(r, "--nfmask", "--ctmask") {
		bits |= parseBits(arg)
	}
	return bits
}

// parseBits reads a number as iptables-save prints it; 0 if it is none.
func parseBits(text string) uint32 {
	n, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}
