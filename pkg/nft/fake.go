package nft

import (
	"maps"
	"sync"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// FakeLoopback holds the rules in memory. It may be used concurrently; set the hooks before.
type FakeLoopback struct {
	kernel.Faults[LoopbackChange, ip.Family]

	mu    sync.Mutex
	state Loopback
}

// NewFakeLoopback returns a FakeLoopback without rules.
func NewFakeLoopback() *FakeLoopback { return &FakeLoopback{state: Loopback{}} }

// Clone returns a FakeLoopback with the same rules, and without hooks.
func (f *FakeLoopback) Clone() *FakeLoopback {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &FakeLoopback{state: f.state.clone()}
}

// Observe is like LoopbackRules.Observe.
func (f *FakeLoopback) Observe() (Loopback, error) {
	if err := f.OnRead(); err != nil {
		return nil, err
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
		if err == nil {
			err = f.OnChange(c, c.Family)
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
	kernel.Faults[KubeProxyChange, ip.Family]

	mu    sync.Mutex
	state KubeProxy
}

// NewFakeKubeProxy returns a FakeKubeProxy with kube-proxy's tables in some families.
func NewFakeKubeProxy(families ...ip.Family) *FakeKubeProxy {
	f := &FakeKubeProxy{state: KubeProxy{}}
	f.Create(families...)
	return f
}

// Clone returns a FakeKubeProxy with the same tables, and without hooks.
func (f *FakeKubeProxy) Clone() *FakeKubeProxy {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &FakeKubeProxy{state: maps.Clone(f.state)}
}

// Create creates kube-proxy's tables, as kube-proxy would.
func (f *FakeKubeProxy) Create(families ...ip.Family) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, family := range families {
		f.state[family] = true
	}
}

// Observe is like KubeProxyTables.Observe.
func (f *FakeKubeProxy) Observe() (KubeProxy, error) {
	if err := f.OnRead(); err != nil {
		return nil, err
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
		if err := f.OnChange(c, c.Family); err != nil {
			failures = append(failures, KubeProxyFailure{Change: c, Err: err})
			continue
		}
		f.mu.Lock()
		delete(f.state, c.Family)
		f.mu.Unlock()
	}
	return failures
}
