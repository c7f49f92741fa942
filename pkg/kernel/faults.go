package kernel

import "sync"

// Faults lets a test fail the calls of a Fake, and counts its changes. C is the type of a
// change, O that of its operation. Set the fields before use; the methods may be called
// concurrently.
type Faults[C any, O comparable] struct {
	// Refuse, if set, is called before each change. If it returns an error, that is the
	// kernel's response, and the change is not applied.
	Refuse func(C) error
	// FailObserve, if set, is called before each read, which returns its error.
	FailObserve func() error

	mu     sync.Mutex
	counts map[O]int
	next   []error
}

// FailNext refuses the next changes with errs, one each. A nil error lets one change pass.
func (f *Faults[C, O]) FailNext(errs ...error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next = append(f.next, errs...)
}

// Counts returns the number of changes by operation since the last call, including refused
// ones.
func (f *Faults[C, O]) Counts() map[O]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts := f.counts
	f.counts = nil
	return counts
}

// OnChange counts a change, and returns the error that it is refused with. A Fake calls it.
func (f *Faults[C, O]) OnChange(change C, operation O) error {
	f.mu.Lock()
	if f.counts == nil {
		f.counts = map[O]int{}
	}
	f.counts[operation]++
	var err error
	if len(f.next) > 0 {
		err, f.next = f.next[0], f.next[1:]
	}
	f.mu.Unlock()
	if err == nil && f.Refuse != nil {
		err = f.Refuse(change)
	}
	return err
}

// OnRead returns the error that a read fails with. A Fake calls it.
func (f *Faults[C, O]) OnRead() error {
	if f.FailObserve == nil {
		return nil
	}
	return f.FailObserve()
}
