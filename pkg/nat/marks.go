package nat

import (
	"strconv"
	"strings"
)

// MarkUse is a foreign rule that sets, copies or matches bits of a packet mark or
// connmark.
type MarkUse struct {
	Chain Chain
	Rule  Rule
	Bits  uint32
}

// Values returns the marks that the rule sets or matches, without their masks.
func (u MarkUse) Values() []uint32 {
	var out []uint32
	for _, arg := range Arguments(u.Rule, "--mark", "--set-xmark", "--set-mark") {
		value, _, _ := strings.Cut(arg, "/")
		out = append(out, parseBits(value))
	}
	return out
}

// markUses returns the rules of a chain that use marks.
func markUses(c Chain, rules []Rule) []MarkUse {
	var out []MarkUse
	for _, r := range rules {
		if bits := markBits(r); bits != 0 {
			out = append(out, MarkUse{Chain: c, Rule: r, Bits: bits})
		}
	}
	return out
}

// markBits returns the bits that a rule names: those of its masks and, as for xmark
// operations, of its values. A value without a mask means the whole mark.
func markBits(r Rule) uint32 {
	if !strings.Contains(string(r), "mark ") && !strings.Contains(string(r), "mask ") {
		return 0 // not parsed: other programs may have thousands of rules
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

// parseBits parses a number as printed by iptables-save. It returns 0 if it is not one.
func parseBits(text string) uint32 {
	n, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}
