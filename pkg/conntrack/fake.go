package conntrack

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Fake holds the table in memory. It shares the selection code with the real one.
type Fake struct {
	client

	// FailDump, if set, is called before each dump, which returns its error.
	FailDump func() error
	// Refuse, if set, is called before each deletion and may return an error that
	// refuses it.
	Refuse func(Entry) error

	// Timeout, if set, returns when an entry expires.
	Timeout func(Entry) time.Duration

	kernel fakeKernel
}

// NewFake returns an empty table.
func NewFake() *Fake {
	f := &Fake{}
	f.kernel.fake = f
	f.client.raw = &f.kernel
	return f
}

// Clone returns a Fake with the same entries, and without hooks.
func (f *Fake) Clone() *Fake {
	out := NewFake()
	out.Add(f.Entries()...)
	return out
}

// Add adds entries to the table, as packets would.
func (f *Fake) Add(entries ...Entry) {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entries = append(k.entries, entries...)
}

// Entries returns the table in insertion order.
func (f *Fake) Entries() []Entry {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.entries)
}

// Dumps returns how often the table has been read since the last call.
func (f *Fake) Dumps() int {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	dumps := k.dumps
	k.dumps = 0
	return dumps
}

// fakeKernel is the kernel's interface of a Fake.
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
			t := tracked{Entry: e}
			if k.fake.Timeout != nil {
				t.timeout = k.fake.Timeout(e)
			}
			found = append(found, t)
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
