package nat

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// backend is what differs between the real ruleset and the Fake: the programs
// iptables-save and iptables-restore --noflush of one family.
type backend interface {
	save() (string, error)
	// restore executes its input table by table. If it returns an error, the table with
	// the fault and those after it are unchanged.
	restore(input string) error
	// listOwned reads our chains and jumps of a table that save cannot list.
	listOwned(t Table, own Owned) (*table, error)
}

// engine is what IPTables and Fake share: it applies changes to a backend, and
// remembers what it has learned about the kernel and other programs.
type engine struct {
	family  ip.Family
	now     func() time.Time // nil: time.Now
	watched bool             // Watcher reports changes of the backend

	mu        sync.Mutex // one restore at a time: concurrent ones would wait for each other
	omissions omissions
	omits     atomic.Bool // whether omissions has missing parts, for Omits, which does not wait for mu
	heads     contests    // for the heads of chains; see State.Contested
	ends      contests    // for the ends of chains; see State.Overtaken
}

func (e *engine) time() time.Time {
	if e.now == nil {
		return time.Now()
	}
	return e.now()
}

func (e *engine) observe(b backend, own Owned) (State, error) {
	rules, unread, err := read(b, own)
	if err != nil {
		return State{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.time()
	e.omissions.retry(b, now)
	e.omits.Store(len(e.omissions.missing) > 0)
	e.omissions.restoreJumps(rules, own.jumpsOf(e.family))
	s, displaced := own.state(e.family, rules, func(c Chain) bool { return e.heads.stays(c, now) })
	e.heads.seen(displaced)
	yielded, overtaken := own.ends(rules, func(c Chain) bool { return e.ends.stays(c, now) })
	s.Yielded, s.Overtaken = sortedChains(yielded), sortedChains(overtaken)
	e.ends.seen(overtaken)
	e.omissions.complete(&s, own.Jumps)
	s.Unread, s.Refusing = unread, own.refusing(e.family, rules, unread)
	if e.watched && !slices.ContainsFunc(unread, func(u Unread) bool { return u.Table == Filter }) {
		s.Open = own.open(e.family, rules)
	}
	return s, nil
}

// read reads the ruleset. For a table that cannot be listed it returns only what is
// ours.
func read(b backend, own Owned) (ruleset, []Unread, error) {
	text, err := b.save()
	if err != nil {
		return nil, nil, fmt.Errorf("iptables-save: %w", err)
	}
	rules, unread, err := parsePartly(text)
	if err != nil {
		return nil, nil, err
	}
	for _, u := range unread {
		if rules[u.Table], err = b.listOwned(u.Table, own); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", u.err(), err)
		}
	}
	return rules, unread, nil
}

// apply first tries all changes in one input. If that is refused, it reads the rules
// again, in case another program has changed them, and tries each table by itself,
// which also finds the tables at fault. From these it omits the rules that are refused
// individually.
func (e *engine) apply(b backend, changes []Change) []Failure {
	e.mu.Lock()
	defer e.mu.Unlock()
	refused, err := e.attempt(b, changes)
	if err == nil {
		return refused
	}
	var failures []Failure
	for _, t := range tables(changes) {
		inTable := ofTable(changes, t)
		refused, err := e.attempt(b, inTable)
		if err != nil && e.omissions.find(b, t, inTable, err) {
			e.omissions.probed = e.time()
			e.omits.Store(true)
			refused, err = e.attempt(b, inTable)
		}
		if err != nil {
			refused = failAll(inTable, err)
		}
		failures = append(failures, refused...)
	}
	return failures
}

// attempt makes the changes in one input, except those known to be refused. With an
// error, some tables may have been changed.
func (e *engine) attempt(b backend, changes []Change) ([]Failure, error) {
	rules, err := rulesFor(b, changes)
	if err != nil {
		return nil, err
	}
	valid, refused := check(e.family, rules, e.omissions.adapt(changes))
	if len(valid) == 0 {
		e.omissions.note(changes)
		return refused, nil
	}
	existing := baseRules(rules, valid)
	if err := b.restore(RestoreInput(valid, existing)); err != nil {
		return refused, err
	}
	e.omissions.note(changes)
	for _, c := range valid {
		switch moved := c.isJump() && slices.Contains(existing[c.Chain], c.Rules[0]); {
		case moved && c.Op == InsertJump:
			e.heads.move(c.Chain, e.time(), maxMoves)
		case moved && c.Op == AppendJump:
			e.ends.move(c.Chain, e.time(), maxAppends)
		}
	}
	return refused, nil
}

// rulesFor reads the ruleset if applying the changes depends on it: which copies of a
// jump to delete, and whether a chain is still in use. Writing chains does not depend on
// it.
func rulesFor(b backend, changes []Change) (ruleset, error) {
	for _, c := range changes {
		if c.Op != WriteChain {
			rules, _, err := read(b, ownOf(changes))
			return rules, err
		}
	}
	return nil, nil
}

// ownOf returns the chains and jumps that the changes write or delete.
func ownOf(changes []Change) Owned {
	var own Owned
	for _, c := range changes {
		if c.isJump() && len(c.Rules) == 1 {
			own.Jumps = append(own.Jumps, c.jump())
		} else {
			own.Chains = append(own.Chains, c.Chain)
		}
	}
	return own
}

// baseRules returns the rules of the base chains whose jumps the changes insert or delete.
func baseRules(rules ruleset, changes []Change) map[Chain][]Rule {
	out := map[Chain][]Rule{}
	for _, c := range changes {
		if t := rules[c.Chain.Table]; c.isJump() && t != nil {
			out[c.Chain] = t.chains[c.Chain.Name]
		}
	}
	return out
}

func failAll(changes []Change, err error) []Failure {
	failures := make([]Failure, len(changes))
	for i, c := range changes {
		failures[i] = Failure{Change: c, Err: err}
	}
	return failures
}

// checkFamily validates the family for the constructors.
func checkFamily(family ip.Family) error {
	if family != ip.IPv4 && family != ip.IPv6 {
		return fmt.Errorf("%s: %w", family, unix.EAFNOSUPPORT)
	}
	return nil
}
