package loopback

import (
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Fake holds the rules in memory. It may be used concurrently; set the hooks before.
type Fake struct {
	// Refuse, if set, is called before each change and may return an error that refuses
	// it.
	Refuse func(Change) error
	// FailObserve, if set, is called before each Observe, which returns its error.
	FailObserve func() error

	mu    sync.Mutex
	state State
}

// NewFake returns a Fake without rules.
func NewFake() *Fake { return &Fake{state: State{}} }

// Observe is like NFT.Observe.
func (f *Fake) Observe() (State, error) {
	if f.FailObserve != nil {
		if err := f.FailObserve(); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state.clone(), nil
}

// Apply is like NFT.Apply.
func (f *Fake) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		err := check(c)
		if err == nil && f.Refuse != nil {
			err = f.Refuse(c)
		}
		if err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
			continue
		}
		f.mu.Lock()
		f.state.apply(c)
		f.mu.Unlock()
	}
	return failures
}

// Spoil changes the rules of a family as another program would.
func (f *Fake) Spoil(family ip.Family) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, there := f.state[family]; there {
		f.state[family] = Exchange{}
	}
}
