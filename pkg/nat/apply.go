package nat

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// backend is what the real ruleset and the fake's differ in: the two programs
// iptables-save and iptables-restore --noflush, of one family.
type backend interface {
	save() (string, error)
	// restore carries out its input, table by table. An error leaves the
	// table with the fault, and those after it, as they were.
	restore(input string) error
}

func observe(b backend, family ip.Family, own Own) (State, error) {
	rules, err := read(b)
	if err != nil {
		return State{}, err
	}
	return own.state(family, rules), nil
}

func read(b backend) (ruleset, error) {
	text, err := b.save()
	if err != nil {
		return nil, fmt.Errorf("iptables-save: %w", err)
	}
	return parseSave(text)
}

// apply first tries all changes with one input. If that is refused, each
// table is tried by itself, after a new look at what stands, as another
// program may have changed that in between; this also tells which tables are
// at fault.
func apply(b backend, family ip.Family, changes []Change) []Failure {
	refused, err := attempt(b, family, changes)
	if err == nil {
		return refused
	}
	var failures []Failure
	for _, t := range tables(changes) {
		inTable := ofTable(changes, t)
		refused, err := attempt(b, family, inTable)
		if err != nil {
			refused = failAll(inTable, err)
		}
		failures = append(failures, refused...)
	}
	return failures
}

// attempt makes the changes in one go, except those known to be refused. With
// an error, some tables may be changed and others not.
func attempt(b backend, family ip.Family, changes []Change) ([]Failure, error) {
	rules, err := standing(b, changes)
	if err != nil {
		return nil, err
	}
	sound, refused := check(family, rules, changes)
	if len(sound) == 0 {
		return refused, nil
	}
	return refused, b.restore(RestoreInput(sound, countCopies(rules, sound)))
}

// standing reads the ruleset if the changes depend on it: which copies of a
// jump must go, and whether a chain is still in use. Chains alone can be
// written without.
func standing(b backend, changes []Change) (ruleset, error) {
	for _, c := range changes {
		if c.Op != WriteChain {
			return read(b)
		}
	}
	return nil, nil
}

func countCopies(rules ruleset, changes []Change) Copies {
	copies := Copies{}
	for _, c := range changes {
		if !c.isJump() || rules[c.Chain.Table] == nil {
			continue
		}
		n := 0
		for _, r := range rules[c.Chain.Table].chains[c.Chain.Name] {
			if r == c.Rules[0] {
				n++
			}
		}
		copies[c.jump()] = n
	}
	return copies
}

func failAll(changes []Change, err error) []Failure {
	failures := make([]Failure, len(changes))
	for i, c := range changes {
		failures[i] = Failure{Change: c, Err: err}
	}
	return failures
}

// checkFamily is for the constructors.
func checkFamily(family ip.Family) error {
	if family != ip.IPv4 && family != ip.IPv6 {
		return fmt.Errorf("%s: %w", family, unix.EAFNOSUPPORT)
	}
	return nil
}
