package plan

import (
	"fmt"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// RuleWarnings returns a sentence for each rule or chain of a family that is not in
// place as planned, with the consequence.
func RuleWarnings(family ip.Family, s nat.State) []string {
	var out []string
	for _, l := range s.LeftOut {
		out = append(out, leftOutWarning(l))
	}
	for _, c := range s.Contested {
		out = append(out, fmt.Sprintf("another program keeps inserting its rules before ours in %s; ours now stay behind them and do not see packets that those rules accept or drop", c))
	}
	for _, u := range s.Unread {
		out = append(out, fmt.Sprintf("table %s of %s has a rule, written by nft, that iptables cannot read: our rules are in place, but it is unknown which rules precede them; move such rules to a table with another name (%s)", u.Table, family, u.Why))
	}
	return out
}

func leftOutWarning(l nat.LeftOut) string {
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
	for _, set := range nat.Arguments(r, "--match-set", "--map-set") {
		out = append(out, "the set "+set)
	}
	for _, to := range nat.Arguments(r, "-j") {
		if !strings.Contains(to, "-") && to != "RETURN" && to != "ACCEPT" && to != "DROP" {
			out = append(out, "xt_"+to)
		}
	}
	return out
}
