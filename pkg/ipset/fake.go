package ipset

import (
	"errors"
	"maps"
	"sync"

	"golang.org/x/sys/unix"
)

// Fake holds sets in memory. It keeps state and refuses what the kernel refuses, with
// the same errors: one table of tests runs against both. It shares the code above the
// kernel's own semantics.
//
// Set the fields before use. Methods other than those of Netlink may be called
// concurrently.
type Fake struct {
	client

	// Refuse, if set, is called before each change. If it returns an error, that is the
	// kernel's response and nothing is done.
	Refuse func(Change) error
	// FailObserve, if set, is called before each dump, which returns its error.
	FailObserve func() error

	kernel fakeKernel
}

// NewFake returns a kernel without sets.
func NewFake() *Fake {
	f := &Fake{}
	f.kernel = fakeKernel{fake: f, sets: map[string]listing{}, references: map[string]int{}, counts: map[Op]int{}}
	f.client.raw = &f.kernel
	return f
}

// Dump returns all sets as text; see State.String.
func (f *Fake) Dump() string {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	state := State{}
	for name, set := range k.sets {
		state[name] = set.Contents
	}
	return state.String()
}

// Reference marks a set as referred to, as a rule that matches it does, so that it
// cannot be destroyed. Release undoes one Reference.
func (f *Fake) Reference(name string) { f.kernel.refer(name, 1) }

// Release undoes one Reference.
func (f *Fake) Release(name string) { f.kernel.refer(name, -1) }

// FailNext makes the next changes return errs, one each, without effect. A nil error
// lets one change pass.
func (f *Fake) FailNext(errs ...error) {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	k.failures = append(k.failures, errs...)
}

// Counts returns the number of changes of each kind since the last call, including
// refused ones.
func (f *Fake) Counts() map[Op]int {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	counts := k.counts
	k.counts = map[Op]int{}
	return counts
}

// fakeKernel is the kernel's interface of a Fake.
type fakeKernel struct {
	fake *Fake

	mu         sync.Mutex
	sets       map[string]listing
	references map[string]int
	counts     map[Op]int
	failures   []error
}

func (k *fakeKernel) close() {}

func (k *fakeKernel) refer(name string, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.references[name] += n
}

// refuse counts a change and returns the error that a test asked for.
func (k *fakeKernel) refuse(c Change) error {
	k.mu.Lock()
	k.counts[c.Op]++
	var err error
	if len(k.failures) > 0 {
		err, k.failures = k.failures[0], k.failures[1:]
	}
	k.mu.Unlock()
	if err == nil && k.fake.Refuse != nil {
		err = k.fake.Refuse(c)
	}
	return err
}

func (k *fakeKernel) list(name string, members bool) ([]listing, error) {
	if k.fake.FailObserve != nil {
		if err := k.fake.FailObserve(); err != nil {
			return nil, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, there := k.sets[name]; name != "" && !there {
		return nil, unix.ENOENT
	}
	var sets []listing
	for _, set := range k.sets {
		if name != "" && set.Name != name {
			continue
		}
		set.count = len(set.Entries)
		if members {
			set.Entries = maps.Clone(set.Entries)
		} else {
			set.Entries = map[Entry]uint32{}
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func (k *fakeKernel) create(set Set, maxElem uint32) error {
	if err := k.refuse(Change{Op: CreateSet, Set: set}); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, there := k.sets[set.Name]; there {
		return unix.EEXIST
	}
	if _, err := set.fields(); err != nil {
		return ErrNoType
	}
	k.sets[set.Name] = listing{Contents: Contents{set, map[Entry]uint32{}}, maxElem: maxElem}
	return nil
}

func (k *fakeKernel) destroy(name string) error {
	if err := k.refuse(Change{Op: DestroySet, Set: Set{Name: name}}); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, there := k.sets[name]; !there {
		return unix.ENOENT
	}
	if k.references[name] > 0 {
		return ErrBusy
	}
	delete(k.sets, name)
	return nil
}

func (k *fakeKernel) swap(name, other string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	a, there := k.sets[name]
	if !there {
		return unix.ENOENT
	}
	b, there := k.sets[other]
	if !there {
		return ErrNoOtherSet
	}
	if a.Type.kernel() != b.Type.kernel() || a.Family != b.Family {
		return ErrTypeMismatch
	}
	a.Name, b.Name = b.Name, a.Name
	k.sets[name], k.sets[other] = b, a
	return nil
}

func (k *fakeKernel) members(changes []Change) error {
	for _, c := range changes {
		if err := k.refuse(c); err != nil {
			return err
		}
		if err := k.member(c); err != nil {
			return err
		}
	}
	return nil
}

func (k *fakeKernel) has(set Set, e Entry) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	there, ok := k.sets[set.Name]
	if !ok {
		return unix.ENOENT
	}
	if _, member := there.Entries[e]; !member {
		return errNoMember
	}
	return nil
}

func (k *fakeKernel) member(c Change) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	there, err := k.find(c.Set, c.Entry)
	if err != nil {
		return err
	}
	if c.Op == DeleteEntry {
		delete(there.Entries, c.Entry)
		return nil
	}
	if _, member := there.Entries[c.Entry]; !member && there.Type != BitmapPort && len(there.Entries) >= int(there.maxElem) {
		return ErrFull
	}
	if c.Mark != 0 && !there.Type.hasMarks() {
		return ErrNoMarks
	}
	there.Entries[c.Entry] = c.Mark
	return nil
}

// find returns the set for an entry, or why it does not fit.
func (k *fakeKernel) find(set Set, e Entry) (listing, error) {
	there, ok := k.sets[set.Name]
	if !ok {
		return listing{}, unix.ENOENT
	}
	if there.Type == HashIP && e.Addr.IsValid() && e.Addr.IsUnspecified() {
		return listing{}, ErrNullElement
	}
	err := there.checkEntry(e)
	switch {
	case errors.Is(err, ErrInvalidCIDR):
		return listing{}, ErrInvalidCIDR
	case err != nil:
		return listing{}, ErrProtocol
	}
	return there, nil
}
