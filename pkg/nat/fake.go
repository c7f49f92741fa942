package nat

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Fake holds the ruleset of one family in memory. It accepts the input of
// iptables-restore, and refuses what the program and the kernel refuse. Everything above
// the two programs is the same code as in IPTables. It may be used concurrently; set the
// hooks before.
type Fake struct {
	// Refuse refuses the change's whole table. FailObserve is called before each read of the
	// ruleset, including those by Apply, which fails with its error.
	kernel.Faults[Change, Op]
	// Commit, if set, is called before each table of an input takes effect.
	Commit func(Table)
	// HasSet, if set, reports whether an IP set exists. Without it all exist.
	HasSet func(name string) bool
	// Lacks, if set, returns what the kernel lacks for a rule, which it then refuses.
	Lacks func(Rule) error
	// Unlisted are tables that iptables-save cannot list.
	Unlisted map[Table]bool

	engine   engine
	mu       sync.Mutex
	rules    ruleset
	saves    int
	restores int
	watchers []func(Chain)
}

// NewFake returns a Fake with the kernel's chains and no rules.
func NewFake(family ip.Family) *Fake {
	rules := ruleset{}
	for name, chains := range baseChains {
		rules[name] = newTable()
		for _, c := range chains {
			rules[name].chains[c] = nil
			rules[name].policies[c] = "ACCEPT"
		}
	}
	return &Fake{engine: engine{family: family, watched: true}, rules: rules}
}

// Clone returns a Fake with the same rules, and without hooks. It has no memory of former calls of
// Apply and Observe, like a new process.
func (f *Fake) Clone() *Fake {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &Fake{engine: engine{family: f.engine.family, watched: true}, rules: maps.Clone(f.rules)} // a table is replaced, not changed
}

// Omits is like IPTables.Omits.
func (f *Fake) Omits() bool { return f.engine.omits.Load() }

// Observe is like IPTables.Observe.
func (f *Fake) Observe(own Owned) (State, error) { return f.engine.observe(fakeBackend{f, nil}, own) }

// Apply is like IPTables.Apply.
func (f *Fake) Apply(changes []Change) []Failure {
	refused := map[Table]error{}
	for _, c := range changes {
		if err := f.OnChange(c, c.Op); err != nil {
			refused[c.Chain.Table] = fmt.Errorf("%s: %w", c, err)
		}
	}
	return f.engine.apply(fakeBackend{f, refused}, changes)
}

// Save returns the ruleset as iptables-save prints it.
func (f *Fake) Save() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rules.render()
}

// Restore executes an input of iptables-restore --noflush, as another program would.
func (f *Fake) Restore(input string) error {
	f.mu.Lock()
	before := maps.Clone(f.rules)
	f.mu.Unlock()
	err := f.restore(input, nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notify(before)
	return err
}

// Saves returns the number of reads of the ruleset by Observe and Apply.
func (f *Fake) Saves() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.saves
}

// Restores returns the number of inputs of Apply and Restore, including refused ones.
func (f *Fake) Restores() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.restores
}

// fakeBackend is the backend of a Fake during one call.
type fakeBackend struct {
	*Fake
	refused map[Table]error // by Refuse
}

func (b fakeBackend) save() (string, error) {
	b.mu.Lock()
	b.saves++
	b.mu.Unlock()
	if err := b.OnRead(); err != nil {
		return "", err
	}
	text := b.Save()
	for t := range b.Unlisted {
		before, rest, _ := strings.Cut(text, "*"+string(t)+"\n")
		_, after, _ := strings.Cut(rest, "COMMIT\n")
		text = before + "# Table `" + string(t) + "' is incompatible, use 'nft' tool.\n" + after
	}
	return text, nil
}

func (b fakeBackend) listOwned(t Table, own Owned) (*table, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	have, out := b.rules[t], newTable()
	for name, rules := range have.chains {
		switch {
		case isBase(name):
			out.chains[name] = slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool {
				return !slices.Contains(own.Jumps, Jump{Chain: Chain{b.engine.family, t, name}, Rule: r})
			})
		case slices.Contains(own.Chains, Chain{b.engine.family, t, name}):
			out.chains[name] = rules
		}
	}
	return out, nil
}

func (b fakeBackend) restore(input string) error { return b.Fake.restore(input, b.refused) }

func (f *Fake) restore(input string, refused map[Table]error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.restores++
	return fakeRestore(f.rules, input, f.validate(refused))
}

// notify calls the watchers of changed chains.
func (f *Fake) notify(before ruleset) {
	for name, t := range f.rules {
		for chain := range before[name].chains {
			now, ok := t.chains[chain]
			if !ok || !slices.Equal(now, before[name].chains[chain]) || t.policies[chain] != before[name].policies[chain] {
				for _, w := range f.watchers {
					w(Chain{f.engine.family, name, chain})
				}
			}
		}
	}
}

// Watch is like Watcher.Watch, for its family.
func (f *Fake) Watch(ctx context.Context, concerns func(Chain) bool, changed func()) error {
	f.mu.Lock()
	f.watchers = append(f.watchers, func(c Chain) {
		if ctx.Err() == nil && concerns(c) {
			changed()
		}
	})
	f.mu.Unlock()
	changed()
	<-ctx.Done()
	return ctx.Err()
}

// validate checks a table as the kernel does at its COMMIT.
func (f *Fake) validate(refused map[Table]error) func(Table, *table) error {
	return func(name Table, t *table) error {
		if f.Commit != nil {
			f.Commit(name)
		}
		if err := refused[name]; err != nil {
			return err
		}
		for _, chain := range t.names() {
			for _, r := range t.chains[chain] {
				if err := f.validateRule(name, t, r); err != nil {
					return fmt.Errorf("-A %s %s: %w", chain, r, err)
				}
			}
		}
		return noLoop(t)
	}
}

// extensions are targets that are not chains, with the only table that supports each,
// if it is limited to one.
var extensions = map[string]Table{
	"ACCEPT": "", "DROP": "", "RETURN": "", "MARK": "", "CONNMARK": "", "LOG": "", "NFLOG": "",
	"MASQUERADE": NAT, "SNAT": NAT, "DNAT": NAT, "REDIRECT": NAT, "REJECT": Filter, "TCPMSS": "",
	"SET": "", // with --map-set, only table mangle
}

func (f *Fake) validateRule(name Table, t *table, r Rule) error {
	for _, set := range Arguments(r, "--match-set", "--map-set", "--add-set") {
		if f.HasSet != nil && !f.HasSet(set) {
			return fmt.Errorf("set %s does not exist: %w", set, unix.ENOENT)
		}
	}
	if f.Lacks != nil {
		if err := f.Lacks(r); err != nil {
			return err
		}
	}
	to := target(r)
	if only, ok := extensions[to]; ok {
		if len(Arguments(r, "--map-set")) > 0 {
			only = Mangle
		}
		if only != "" && only != name {
			return fmt.Errorf("%s is only valid in table %s: %w", to, only, unix.EINVAL)
		}
		return nil
	}
	if _, ok := t.chains[to]; !ok && to != "" || isBase(to) {
		return fmt.Errorf("no chain or target %s: %w", to, unix.ENOENT)
	}
	return nil
}

// noLoop rejects chains that lead back to themselves.
func noLoop(t *table) error {
	done := map[string]bool{} // false: on the path
	var visit func(string) error
	visit = func(chain string) error {
		if finished, seen := done[chain]; seen {
			if !finished {
				return fmt.Errorf("chain %s leads to itself: %w", chain, unix.ELOOP)
			}
			return nil
		}
		done[chain] = false
		for _, r := range t.chains[chain] {
			if to := target(r); t.chains[to] != nil {
				if err := visit(to); err != nil {
					return err
				}
			}
		}
		done[chain] = true
		return nil
	}
	for _, chain := range t.names() {
		if err := visit(chain); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) clone() *table {
	c := &table{chains: map[string][]Rule{}, policies: maps.Clone(t.policies)}
	for name, rules := range t.chains {
		c.chains[name] = slices.Clone(rules)
	}
	return c
}
