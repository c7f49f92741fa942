package nft

import (
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// FakeLoopback holds the rules in memory. It may be used concurrently; set the hooks before.
type FakeLoopback struct {
	// Refuse, if set, is called before each change and may return an error that refuses
	// it.
	Refuse func(LoopbackChange) error
	// FailObserve, if set, is called before each Observe, which returns its error.
	FailObserve func() error

	mu    sync.Mutex
	state Loopback
}

// NewFakeLoopback returns a FakeLoopback without rules.
func NewFakeLoopback() *FakeLoopback { return &FakeLoopback{state: Loopback{}} }

// Observe is like LoopbackRules.Observe.
func (f *FakeLoopback) Observe() (Loopback, error) {
	if f.FailObserve != nil {
		if err := f.FailObserve(); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state.clone(), nil
}

// Apply is like LoopbackRules.Apply.
func (f *FakeLoopback) Apply(changes []LoopbackChange) []LoopbackFailure {
	var failures []LoopbackFailure
	for _, c := range changes {
		err := c.check()
		if err == nil && f.Refuse != nil {
			err = f.Refuse(c)
		}
		if err != nil {
			failures = append(failures, LoopbackFailure{Change: c, Err: err})
			continue
		}
		f.mu.Lock()
		f.state.apply(c)
		f.mu.Unlock()
	}
	return failures
}

// Spoil changes the rules of a family as another program would.
func (f *FakeLoopback) Spoil(family ip.Family) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, there := f.state[family]; there {
		f.state[family] = Exchange{}
	}
}

// FakeKubeProxy holds tables in memory. It may be used concurrently; set the hooks before.
type FakeKubeProxy struct {
	// Refuse, if set, is called before each change and may return an error that refuses
	// it.
	Refuse func(KubeProxyChange) error
	// FailObserve, if set, is called before each Observe, which returns its error.
	FailObserve func() error

	mu    sync.Mutex
	state KubeProxy
}

// NewFakeKubeProxy returns a FakeKubeProxy with kube-proxy's tables in the families of a state.
func NewFakeKubeProxy(state KubeProxy) *FakeKubeProxy {
	f := &FakeKubeProxy{state: KubeProxy{}}
	for family, there := range state {
		f.state[family] = there
	}
	return f
}

// Observe is like KubeProxyTables.Observe.
func (f *FakeKubeProxy) Observe() (KubeProxy, error) {
	if f.FailObserve != nil {
		if err := f.FailObserve(); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	have := KubeProxy{}
	for family, there := range f.state {
		if there {
			have[family] = true
		}
	}
	return have, nil
}

// Apply is like KubeProxyTables.Apply.
func (f *FakeKubeProxy) Apply(changes []KubeProxyChange) []KubeProxyFailure {
	var failures []KubeProxyFailure
	for _, c := range changes {
		if f.Refuse != nil {
			if err := f.Refuse(c); err != nil {
				failures = append(failures, KubeProxyFailure{Change: c, Err: err})
				continue
			}
		}
		f.mu.Lock()
		delete(f.state, c.Family)
		f.mu.Unlock()
	}
	return failures
}
