//go:build prove

package prove

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// edit is a rule with one condition, or its target, changed.
type edit struct {
	what      string // including the original condition
	condition int    // its index, as the evaluator counts; -1 for the target
	rule      nat.Rule
}

// part is an option of a rule with its arguments.
type part struct {
	module string // of the "-m" in front of it
	not    bool
	option string
	args   []string
}

func (p part) words() []string {
	var out []string
	if p.module != "" {
		out = append(out, "-m", p.module)
	}
	if p.not {
		out = append(out, "!")
	}
	return append(append(out, p.option), p.args...)
}

func (p part) String() string { return strings.Join(p.words(), " ") }

// parts splits a rule, without its comment.
func parts(rule nat.Rule) (conditions, target []part) {
	words, _ := nat.Words(string(rule))
	module, not := "", false
	for len(words) > 0 {
		if words[0] == "!" {
			not, words = true, words[1:]
			continue
		}
		p := part{not: not, option: words[0]}
		if strings.HasPrefix(p.option, "--") {
			p.module = module
		}
		words = words[1:]
		n := slices.IndexFunc(words, func(w string) bool { return w == "!" || strings.HasPrefix(w, "-") })
		if n < 0 {
			n = len(words)
		}
		if p.option == "--comment" {
			n = 1
		}
		p.args, words, not = words[:n], words[n:], false
		switch {
		case p.option == "-m":
			module = p.args[0]
			continue
		case p.option == "--comment":
		case p.option == "-j" || p.option == "-g" || len(target) > 0:
			p.module = ""
			target = append(target, p)
		default:
			conditions = append(conditions, p)
		}
	}
	return conditions, target
}

func join(conditions, target []part) nat.Rule {
	var words []string
	for _, p := range slices.Concat(conditions, target) {
		words = append(words, p.words()...)
	}
	return nat.Rule(strings.Join(words, " "))
}

// edits returns variants of a rule: without each condition, with each one negated,
// narrowed and widened, and without each bit of a mark that the rule sets. It omits those that
// are not accepted.
func edits(rule nat.Rule) []edit {
	conditions, target := parts(rule)
	var out []edit
	for i, c := range conditions {
		change := func(what string, to ...part) {
			if list := slices.Concat(conditions[:i:i], to, conditions[i+1:]); accepted(list, target) {
				out = append(out, edit{what, i, join(list, target)})
			}
		}
		change(fmt.Sprintf("without %q", c))
		negated := c
		negated.not = !c.not
		change(fmt.Sprintf("with %q negated", c), negated)
		for _, v := range variants(c) {
			changed := c
			changed.args = v.args
			change(fmt.Sprintf("with %q %s", c, v.what), changed)
		}
	}
	for i, p := range target {
		for _, v := range markVariants(p) {
			list := slices.Clone(target)
			list[i].args = v.args
			out = append(out, edit{fmt.Sprintf("with %q %s", p, v.what), -1, join(conditions, list)})
		}
	}
	return out
}

// accepted reports whether iptables accepts a rule, and some packet may match it. TCPMSS needs a
// match of SYN (find_syn_match).
func accepted(conditions, target []part) bool {
	has := func(is func(part) bool) bool { return slices.ContainsFunc(conditions, is) }
	if has(func(c part) bool { return lacksProtocol(c, has) || contradictory(c, has) }) {
		return false
	}
	mss := slices.ContainsFunc(target, func(p part) bool { return p.option == "-j" && p.args[0] == "TCPMSS" })
	return !mss || has(func(c part) bool { return c.option == "--tcp-flags" && !c.not })
}

// lacksProtocol reports whether a condition is about fields of a protocol that the rule does not
// require (xt_check_match).
func lacksProtocol(c part, has func(func(part) bool) bool) bool {
	protocol := c.module
	if protocol == "icmp6" {
		protocol = "ipv6-icmp"
	}
	return slices.Contains([]string{"tcp", "udp", "sctp", "icmp", "ipv6-icmp"}, protocol) &&
		!has(func(o part) bool { return o.option == "-p" && !o.not && o.args[0] == protocol })
}

// contradictory reports whether a state is added that no packet has in the rule's direction:
// INVALID packets have none, and a NEW one is no reply.
func contradictory(c part, has func(func(part) bool) bool) bool {
	if c.option != "--ctstate" || c.not {
		return false
	}
	states := strings.Split(c.args[0], ",")
	return slices.Contains(states, "INVALID") && has(func(o part) bool { return o.option == "--ctdir" }) ||
		slices.Contains(states, "NEW") && has(func(o part) bool { return o.option == "--ctdir" && !o.not && o.args[0] == "REPLY" })
}

// variant is a condition or a target with other arguments.
type variant struct {
	what string
	args []string
}

var ctStates = []string{"NEW", "ESTABLISHED", "RELATED", "INVALID"}

// variants returns narrower and wider conditions.
func variants(c part) (out []variant) {
	switch c.option {
	case "--ctstate":
		states := strings.Split(c.args[0], ",")
		for _, s := range ctStates {
			i := slices.Index(states, s)
			switch {
			case i < 0:
				out = append(out, variant{"and " + s, []string{c.args[0] + "," + s}})
			case len(states) > 1:
				out = append(out, variant{"but not " + s, []string{strings.Join(slices.Delete(slices.Clone(states), i, i+1), ",")}})
			}
		}
	case "--mark":
		return markVariants(c)
	case "-s", "-d":
		p, err := netip.ParsePrefix(c.args[0])
		if err != nil || p.Bits() == 0 {
			return nil
		}
		out = append(out, variant{"twice as wide", []string{netip.PrefixFrom(p.Addr(), p.Bits()-1).Masked().String()}})
		if !p.IsSingleIP() {
			out = append(out, variant{"half as wide", []string{netip.PrefixFrom(p.Addr(), p.Bits()+1).Masked().String()}})
		}
	case "--match-set":
		if len(c.args) == 2 {
			if fields := turned(c.args[1]); fields != c.args[1] {
				out = append(out, variant{"by " + fields, []string{c.args[0], fields}})
			}
		}
	}
	return out
}

// turned replaces the destination by the source, or the reverse, in the fields of a set match
// that has only one of them.
func turned(fields string) string {
	if strings.Contains(fields, "src") && strings.Contains(fields, "dst") {
		return fields
	}
	return strings.NewReplacer("dst", "src", "src", "dst").Replace(fields)
}

// otherBit is a mark bit of other programs.
const otherBit = 0x100000

// markVariants removes a bit from a mask, or adds one of other programs. Of masks with
// many bits it removes only ours.
func markVariants(p part) (out []variant) {
	switch p.option {
	case "--mark", "--set-xmark":
		left, right, _ := strings.Cut(p.args[0], "/")
		value, err1 := strconv.ParseUint(left, 0, 32)
		mask, err2 := strconv.ParseUint(right, 0, 32)
		if err1 != nil || err2 != nil {
			return nil
		}
		text := func(v, m uint64) []string { return []string{fmt.Sprintf("%#x/%#x", v, m)} }
		for b := uint64(1); b < 1<<16; b <<= 1 {
			if bits.OnesCount64(mask) > 8 || bits.OnesCount64(mask) < 2 {
				break
			}
			if mask&b != 0 {
				out = append(out, variant{fmt.Sprintf("without bit %#x", b), text(value&^b, mask&^b)})
			}
		}
		if mask&otherBit == 0 && p.option == "--mark" {
			out = append(out, variant{fmt.Sprintf("and bit %#x", otherBit), text(value, mask|otherBit)})
		}
	case "--nfmask", "--ctmask":
		mask, err := strconv.ParseUint(p.args[0], 0, 32)
		for b := uint64(1); err == nil && b < 1<<16; b <<= 1 {
			if mask&b != 0 && bits.OnesCount64(mask) <= 8 {
				out = append(out, variant{fmt.Sprintf("without bit %#x", b), []string{fmt.Sprintf("%#x", mask&^b)}})
			}
		}
	}
	return out
}
