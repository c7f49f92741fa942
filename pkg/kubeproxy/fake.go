package kubeproxy

import "sync"

// Fake holds tables in memory. It may be used concurrently; set the hooks before.
type Fake struct {
	// Refuse, if set, is called before each change and may return an error that refuses
	// it.
	Refuse func(Change) error
	// FailObserve, if set, is called before each Observe, which returns its error.
	FailObserve func() error

	mu    sync.Mutex
	state State
}

// NewFake returns a Fake with kube-proxy's tables in the families of a state.
func NewFake(state State) *Fake {
	f := &Fake{state: State{}}
	for family, there := range state {
		f.state[family] = there
	}
	return f
}

// Observe is like NFT.Observe.
func (f *Fake) Observe() (State, error) {
	if f.FailObserve != nil {
		if err := f.FailObserve(); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	have := State{}
	for family, there := range f.state {
		if there {
			have[family] = true
		}
	}
	return have, nil
}

// Apply is like NFT.Apply.
func (f *Fake) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		if f.Refuse != nil {
			if err := f.Refuse(c); err != nil {
				failures = append(failures, Failure{Change: c, Err: err})
				continue
			}
		}
		f.mu.Lock()
		delete(f.state, c.Family)
		f.mu.Unlock()
	}
	return failures
}
