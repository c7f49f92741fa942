package ipset

import (
	"errors"
	"maps"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Fake holds sets in memory. It keeps state and refuses what the kernel refuses, with
// the same errors: one table of tests runs against both. It shares the code above raw with
// Netlink.
//
// Set the fields before use. All methods may be called concurrently.
type Fake struct {
	client

	kernel.Faults[Change, Op]

	kernel fakeKernel
}

// NewFake returns a kernel without sets.
func NewFake() *Fake {
	f := &Fake{}
	f.kernel = fakeKernel{fake: f, sets: map[string]listing{}, references: map[string]int{}}
	f.client.raw = &f.kernel
	return f
}

// Clone returns a Fake with the same sets, and without hooks.
func (f *Fake) Clone() *Fake {
	out := NewFake()
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, set := range k.sets {
		set.Entries = maps.Clone(set.Entries)
		out.kernel.sets[name] = set
	}
	maps.Copy(out.kernel.references, k.references)
	return out
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

// fakeKernel is the kernel's interface of a Fake.
type fakeKernel struct {
	fake *Fake

	mu         sync.Mutex
	sets       map[string]listing
	references map[string]int
}

func (k *fakeKernel) close() {}

func (k *fakeKernel) refer(name string, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.references[name] += n
}

func (k *fakeKernel) list(name string, members bool) ([]listing, error) {
	if err := k.fake.OnRead(); err != nil {
		return nil, err
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
	if err := k.fake.OnChange(Change{Op: CreateSet, Set: set}, CreateSet); err != nil {
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
	k.sets[set.Name] = listing{Contents: Contents{Set: set, Entries: map[Entry]uint32{}}, maxElem: maxElem}
	return nil
}

func (k *fakeKernel) destroy(name string) error {
	if err := k.fake.OnChange(Change{Op: DestroySet, Set: Set{Name: name}}, DestroySet); err != nil {
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
		if err := k.fake.OnChange(c, c.Op); err != nil {
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

// find returns the set for an entry, or an error if the entry does not fit it.
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
