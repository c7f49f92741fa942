package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// RuleWarnings returns a sentence for each rule or chain of a family that is not in
// place as planned, with the consequence.
func RuleWarnings(family ip.Family, s nat.State) []string {
	var out []string
	single, groups := byCause(s.Omitted)
	for _, l := range single {
		out = append(out, omittedWarning(l))
	}
	for _, lacks := range slices.Sorted(maps.Keys(groups)) {
		out = append(out, lackWarning(family, lacks, groups[lacks]))
	}
	for _, c := range s.Contested {
		out = append(out, fmt.Sprintf("another program keeps inserting its rules before ours in %s; ours now stay behind them and do not see packets that those rules accept or drop", c))
	}
	for _, c := range s.Yielded {
		out = append(out, fmt.Sprintf("another program keeps appending its rules behind ours in %s; ours are omitted there, and Service traffic is left to that program and to the policy of the chain", c))
	}
	for _, u := range s.Unread {
		out = append(out, fmt.Sprintf("table %s of %s has a rule, written by nft, that iptables cannot read: our rules are in place, but it is unknown which rules precede them; move such rules to a table with another name (%s)", u.Table, family, u.Why))
	}
	return out
}

// byCause groups omitted rules by the extension or set that they lack. Each group gets one
// warning: without xt_set, a hundred rules are omitted. A rule gets a warning of its own if no other
// lacks the same, if the whole rule is refused, or if another rule is written in its place.
func byCause(omitted []nat.OmittedRule) (single []nat.OmittedRule, groups map[string][]nat.OmittedRule) {
	groups = map[string][]nat.OmittedRule{}
	lacking := map[string]int{}
	for _, l := range omitted {
		lacking[l.Lacks]++
	}
	for _, l := range omitted {
		if lacking[l.Lacks] == 1 || l.Lacks == string(l.Rule) || l.Instead != "" && l.Lacks != lacksComment {
			single = append(single, l)
		} else {
			groups[l.Lacks] = append(groups[l.Lacks], l)
		}
	}
	return single, groups
}

// lacksComment is what rules lack that are written without their comments.
const lacksComment = "-m comment"

// lackWarning returns the warning for rules that lack the same extension or set. It lists
// their comments, first those of rules that should drop or reject packets.
func lackWarning(family ip.Family, lacks string, omitted []nat.OmittedRule) string {
	if lacks == lacksComment {
		return fmt.Sprintf("the kernel, or iptables, has no %s: %d rules of %s are written without comments, which changes no packet (%v).", module(lacks), len(omitted), family, omitted[0].Err)
	}
	var opens, lost []string
	for _, l := range omitted {
		about := l.Chain.Name
		if comments := nat.Arguments(l.Rule, "--comment"); len(comments) > 0 {
			about = comments[0]
		}
		into := &lost
		if l.Opens {
			into = &opens
		}
		if !slices.Contains(*into, about) {
			*into = append(*into, about)
		}
	}
	out := fmt.Sprintf("the kernel, or iptables, has no %s: %d rules of %s are omitted; the others are in place. Install it (%v).", module(lacks), len(omitted), family, omitted[0].Err)
	if len(opens) > 0 {
		out += fmt.Sprintf(" Omitted rules that would drop or reject packets: %s.", strings.Join(opens, ", "))
	}
	if len(lost) > 0 {
		out += fmt.Sprintf(" Without effect: %s.", strings.Join(lost, ", "))
	}
	return out
}

// module returns the name of what a rule lacks: "xt_set" for "-m set".
func module(lacks string) string {
	for _, option := range []string{"-m ", "-j "} {
		if name, ok := strings.CutPrefix(lacks, option); ok {
			return "xt_" + name
		}
	}
	return lacks
}

func omittedWarning(l nat.OmittedRule) string {
	why := fmt.Sprintf("the kernel, or iptables, refuses the rule %q of %s", l.Rule, l.Chain)
	lost := "its feature does not work"
	if about := nat.Arguments(l.Rule, "--comment"); len(about) > 0 {
		lost = fmt.Sprintf("%q does not work", about[0])
	}
	switch {
	case l.Instead != "":
		lost = fmt.Sprintf("%q is used instead", l.Instead)
	case l.Opens:
		lost += ", and packets that it should drop or reject are allowed"
	case l.Guard:
		lost += ", and packets that should leave the chain at this rule meet the rules behind it"
	}
	return fmt.Sprintf("%s: %s. The rule is omitted; the others are in place. It needs: %s (%v)", why, lost, strings.Join(extensions(l.Rule), ", "), l.Err)
}

// extensions returns the names of the kernel modules and sets that a rule may need.
func extensions(r nat.Rule) []string {
	var out []string
	for _, m := range nat.Arguments(r, "-m") {
		if m != "tcp" && m != "udp" && m != "icmp" && m != "icmp6" {
			out = append(out, "xt_"+m)
		}
	}
	for _, set := range nat.Arguments(r, "--match-set", "--map-set", "--add-set") {
		out = append(out, "the set "+set)
	}
	for _, to := range nat.Arguments(r, "-j") {
		if !strings.Contains(to, "-") && to != "RETURN" && to != "ACCEPT" && to != "DROP" {
			out = append(out, "xt_"+to)
		}
	}
	return out
}
