package nat

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// chainName is stricter than iptables, which only rejects blanks and a leading "-" or
// "!". The length is XT_EXTENSION_MAXNAMELEN without the terminating zero.
var chainName = regexp.MustCompile(`^[A-Za-z0-9_.:][A-Za-z0-9_.:-]{0,27}$`)

// check splits the changes into valid ones and those that are known to be refused, so
// that the latter do not fail their whole table.
func check(family ip.Family, rules ruleset, changes []Change) (valid []Change, refused []Failure) {
	for _, c := range changes {
		if err := checkChange(family, c); err != nil {
			refused = append(refused, Failure{Change: c, Err: err})
			continue
		}
		valid = append(valid, c)
	}
	for {
		i, reference := referenced(rules, valid)
		if i < 0 {
			return valid, refused
		}
		err := fmt.Errorf("a rule of another program refers to the chain (%s): %w", reference, unix.EMLINK)
		refused = append(refused, Failure{Change: valid[i], Err: err})
		valid = slices.Delete(valid, i, i+1)
	}
}

func checkChange(family ip.Family, c Change) error {
	switch base := isBase(c.Chain.Name); {
	case c.Chain.Family != family:
		return fmt.Errorf("not a chain of %s: %w", family, unix.EAFNOSUPPORT)
	case baseChains[c.Chain.Table] == nil:
		return fmt.Errorf("table %q is not in use: %w", c.Chain.Table, unix.EINVAL)
	case c.Op < WriteChain || c.Op > DeleteJump:
		return fmt.Errorf("no such operation: %w", unix.EINVAL)
	case c.isJump() && len(c.Rules) != 1:
		return fmt.Errorf("%d rules, want one: %w", len(c.Rules), unix.EINVAL)
	case !c.isJump() && base:
		return fmt.Errorf("base chains cannot be written or deleted: %w", unix.EINVAL)
	case c.isJump() && !slices.Contains(baseChains[c.Chain.Table], c.Chain.Name):
		return fmt.Errorf("not a base chain of the table: %w", unix.ENOENT)
	case !chainName.MatchString(c.Chain.Name):
		return fmt.Errorf("invalid chain name: %w", unix.EINVAL)
	}
	return checkRules(c.Rules)
}

// checkRules rejects text that would be more than one rule.
func checkRules(rules []Rule) error {
	for _, r := range rules {
		if strings.ContainsAny(string(r), "\r\n\x00") {
			return fmt.Errorf("rule %q contains a line break or NUL: %w", r, unix.EINVAL)
		}
		if _, err := Words(string(r)); err != nil {
			return fmt.Errorf("rule %q: %w: %w", r, err, unix.EINVAL)
		}
	}
	return nil
}

// referenced returns the index of a DeleteChain whose chain a rule still refers to
// after all changes, and that rule; or -1. Without a ruleset it finds none.
func referenced(rules ruleset, changes []Change) (int, string) {
	for i, c := range changes {
		if c.Op != DeleteChain || rules[c.Chain.Table] == nil {
			continue
		}
		for name, rs := range rules[c.Chain.Table].chains {
			for _, r := range rs {
				if strings.Contains(string(r), c.Chain.Name) && target(r) == c.Chain.Name &&
					!removes(changes, Jump{Chain: Chain{c.Chain.Family, c.Chain.Table, name}, Rule: r}) {
					return i, fmt.Sprintf("-A %s %s", name, r)
				}
			}
		}
	}
	return -1, ""
}

// removes reports whether the changes remove an existing rule. It ignores the rules that
// they write: no plan refers to a chain that it deletes.
func removes(changes []Change, j Jump) bool {
	return slices.ContainsFunc(changes, func(c Change) bool {
		if c.Chain != j.Chain {
			return false
		}
		return !c.isJump() || c.Op == DeleteJump && c.Rules[0] == j.Rule
	})
}
