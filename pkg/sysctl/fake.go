package sysctl

import (
	"maps"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Fake holds parameters in memory. It has only the keys it was created with. It may be
// used concurrently; set the hooks before.
type Fake struct {
	kernel.Faults[Change, string]

	mu       sync.Mutex
	values   State
	observes int
	writes   int
}

// NewFake creates a Fake with a copy of the given keys and values.
func NewFake(values State) *Fake {
	f := &Fake{values: make(State, len(values))}
	maps.Copy(f.values, values)
	return f
}

// Observe is like Proc.Observe.
func (f *Fake) Observe(keys []string) (State, error) {
	if err := f.count(); err != nil {
		return nil, err
	}
	return observe(f, keys)
}

// Exists is like Proc.Exists.
func (f *Fake) Exists(key string) (bool, error) {
	if err := f.count(); err != nil {
		return false, err
	}
	return exists(f, key)
}

// Apply is like Proc.Apply.
func (f *Fake) Apply(changes []Change) []Failure { return apply(f, changes) }

// Set sets a value as another program would. It adds new keys.
func (f *Fake) Set(key, value string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.values[key] = value
}

// Values returns a copy of all keys and values.
func (f *Fake) Values() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.values)
}

// Observes returns the number of calls of Observe and Exists.
func (f *Fake) Observes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.observes
}

// Writes returns the number of values written.
func (f *Fake) Writes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.writes
}

func (f *Fake) count() error {
	f.mu.Lock()
	f.observes++
	f.mu.Unlock()
	return f.OnRead()
}

func (f *Fake) read(key string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	value, ok := f.values[key]
	if !ok {
		return "", unix.ENOENT
	}
	return value, nil
}

func (f *Fake) write(key, value string) error {
	if err := f.OnChange(Change{Key: key, Value: value}, key); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.values[key]; !ok {
		return unix.ENOENT
	}
	f.values[key] = value
	f.writes++
	return nil
}
