package conntrack

import (
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Fake is the kernel's table in memory. What is selected and how is the real
// code.
type Fake struct {
	client

	// FailDump is asked before each dump; an error fails that dump.
	FailDump func() error
	// Refuse is asked before each entry is deleted; an error keeps it.
	Refuse func(Entry) error

	kernel fakeKernel
}

// NewFake gives an empty table.
func NewFake() *Fake {
	f := &Fake{}
	f.kernel.fake = f
	f.client.raw = &f.kernel
	return f
}

// Add puts entries in the table, as packets would.
func (f *Fake) Add(entries ...Entry) {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entries = append(k.entries, entries...)
}

// Entries gives the table in the order in which it was filled.
func (f *Fake) Entries() []Entry {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.entries)
}

// Dumps gives how often the table has been read since the last call.
func (f *Fake) Dumps() int {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	dumps := k.dumps
	k.dumps = 0
	return dumps
}

// fakeKernel is the raw side of a Fake.
type fakeKernel struct {
	fake *Fake

	mu      sync.Mutex
	entries []Entry
	dumps   int
}

func (k *fakeKernel) close() {}

func (k *fakeKernel) dump(family ip.Family, f filter, wanted func(Entry) bool) ([]tracked, error) {
	if k.fake.FailDump != nil {
		if err := k.fake.FailDump(); err != nil {
			return nil, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dumps++
	var found []tracked
	for _, e := range k.entries {
		if ip.Of(e.OriginalDst.Addr()) == family && f.passes(e) && wanted(e) {
			found = append(found, tracked{Entry: e})
		}
	}
	return found, nil
}

func (k *fakeKernel) remove(_ ip.Family, entry tracked) error {
	if k.fake.Refuse != nil {
		if err := k.fake.Refuse(entry.Entry); err != nil {
			return err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	i := slices.Index(k.entries, entry.Entry)
	if i < 0 {
		return unix.ENOENT
	}
	k.entries = slices.Delete(k.entries, i, i+1)
	return nil
}
