package routing

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Fake is the kernel's routing in memory. It rejects what the kernel rejects, but does not
// check whether gateways are reachable. It is safe for concurrent use; set the hooks before.
type Fake struct {
	kernel.Faults[Change, Op]

	mu        sync.Mutex
	dummyLink bool
	addresses map[netip.Addr]bool // true: wrongScope
	rules     []rawRule           // ours and foreign, in order
	routes    map[RouteKey]foundRoute
	ours      bool      // the current change is Apply's
	inventory Inventory // Links and Defaults
	listeners []Listener
	watchers  []*watcher
	guard     guard
	removed   []rawRule // rules that the current change deleted
	sources   map[netip.Addr]int
	observes  int
	applied   int
}

// NewFake returns a Fake with a loopback link and the kernel's own rules.
func NewFake() *Fake {
	f := &Fake{addresses: map[netip.Addr]bool{}, routes: map[RouteKey]foundRoute{}}
	f.inventory.Links = []Link{{
		Index: 1, Name: "lo", Type: "device", Up: true, Loopback: true,
		Addresses: []Address{
			{Prefix: netip.MustParsePrefix("127.0.0.1/8")},
			{Prefix: netip.MustParsePrefix("::1/128")},
		},
	}}
	for _, family := range ip.Families {
		f.rules = append(f.rules,
			rawRule{Rule{Family: family, Priority: 0, Table: TableLocal}, unix.RTPROT_KERNEL},
			rawRule{Rule{Family: family, Priority: PriorityMain, Table: TableMain}, unix.RTPROT_KERNEL})
	}
	return f
}

// Clone returns a Fake with the same network, and without hooks, watchers and guarded rules.
func (f *Fake) Clone() *Fake {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &Fake{
		dummyLink: f.dummyLink, addresses: maps.Clone(f.addresses), rules: slices.Clone(f.rules), routes: maps.Clone(f.routes),
		inventory: f.inventory, listeners: f.listeners,
	}
}

// Observe is like Netlink.Observe.
func (f *Fake) Observe() (State, error) {
	if err := f.read(); err != nil {
		return State{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	snap := snapshot{dummyLink: f.dummyLink, rules: f.rules}
	for a, wrongScope := range f.addresses {
		snap.addresses = append(snap.addresses, dummyAddress{netip.PrefixFrom(a, a.BitLen()), wrongScope})
	}
	for _, r := range f.routes {
		snap.routes = append(snap.routes, r)
	}
	return snap.state(), nil
}

// Inventory is like Netlink.Inventory. It returns what SetInventory set, and the rules that
// Apply added since.
func (f *Fake) Inventory() (Inventory, error) {
	if err := f.read(); err != nil {
		return Inventory{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	inv := Inventory{
		Links:    slices.Clone(f.inventory.Links),
		Rules:    inventoryRules(f.rules),
		Defaults: slices.Clone(f.inventory.Defaults),
		Attached: slices.Clone(f.inventory.Attached),
		Direct:   slices.Clone(f.inventory.Direct),
		Peers:    slices.Clone(f.inventory.Peers),
		Gateways: slices.Clone(f.inventory.Gateways),
	}
	for _, r := range f.routes {
		if r.Dst.Bits() == 0 && !r.Local {
			inv.Defaults = append(inv.Defaults, r.Route)
		}
	}
	inv.sort()
	return inv, nil
}

// SetInventory replaces the node's network, including all rules. It copies the lists, not
// what they refer to.
func (f *Fake) SetInventory(inv Inventory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inventory = Inventory{Links: slices.Clone(inv.Links), Defaults: slices.Clone(inv.Defaults), Attached: slices.Clone(inv.Attached), Direct: slices.Clone(inv.Direct), Peers: slices.Clone(inv.Peers), Gateways: slices.Clone(inv.Gateways)}
	f.rules = nil
	for _, r := range inv.Rules {
		protocol := uint8(unix.RTPROT_KERNEL)
		if r.Own {
			protocol, r.Own = Protocol, false
		}
		f.rules = append(f.rules, rawRule{r, protocol})
	}
	for _, w := range f.watchers {
		w.all()
	}
}

// SetSources sets what Sources returns.
func (f *Fake) SetSources(sources map[netip.Addr]int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sources = maps.Clone(sources)
}

// Sources returns what SetSources set.
func (f *Fake) Sources() (map[netip.Addr]int, error) {
	if err := f.OnRead(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.sources), nil
}

// DefaultSource returns the first address of the interface of the default route.
func (f *Fake) DefaultSource(family ip.Family) (netip.Addr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.inventory.Defaults {
		for _, l := range f.inventory.Links {
			for _, a := range l.Addresses {
				if l.Name == r.Link && r.Family == family && ip.Of(a.Prefix.Addr()) == family {
					return a.Prefix.Addr(), nil
				}
			}
		}
	}
	return netip.Addr{}, nil
}

// AddUnreported adds a route of Inventory.Direct to a single address, which the kernel adds
// without a message that Watch reads.
func (f *Fake) AddUnreported(r Route) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inventory.Direct = append(f.inventory.Direct, r)
}

// Listeners returns what SetListeners set.
func (f *Fake) Listeners() ([]Listener, error) {
	if err := f.OnRead(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.listeners), nil
}

// SetListeners replaces the listening ports.
func (f *Fake) SetListeners(list ...Listener) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners = sortListeners(slices.Clone(list))
}

// ClientPorts returns no ports.
func (f *Fake) ClientPorts() ([]PortRange, error) { return nil, f.OnRead() }

// AddWrongScope adds an address to DummyLink with the scope that kube-proxy uses.
func (f *Fake) AddWrongScope(a netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addresses[a] = true
}

// Apply is like Netlink.Apply.
func (f *Fake) Apply(changes []Change) []Failure {
	var failures []Failure
	for _, c := range changes {
		if err := f.OnChange(c, c.Op); err != nil {
			failures = append(failures, Failure{Change: c, Err: err})
			continue
		}
		failures = append(failures, f.do(true, c)...)
	}
	return failures
}

// Do makes changes as another program would, without calling Refuse.
func (f *Fake) Do(changes ...Change) []Failure { return f.do(false, changes...) }

func (f *Fake) do(ours bool, changes ...Change) []Failure {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ours = ours
	f.applied += len(changes)
	defer f.restore()
	return apply((*fakeStack)(f), changes)
}

// Guard is like Netlink.Guard.
func (f *Fake) Guard(rules []Rule) { f.guard.set(rules) }

// restore restores deleted rules as Watch does.
func (f *Fake) restore() {
	restorable := f.removed
	f.removed = nil
	if len(f.watchers) == 0 {
		return
	}
	f.ours = true
	for _, r := range restorable {
		removals, ok := f.guard.restore((*fakeStack)(f), r, true)
		for _, w := range f.watchers {
			w.reportRemovals(removals...)
			if !ok {
				w.reportAnything()
			}
		}
	}
}

// Watch is like Netlink.Watch.
func (f *Fake) Watch(ctx context.Context, inventory func(), removed func(...Removal)) error {
	w := newWatcher(&cache{})
	w.all()
	f.mu.Lock()
	f.watchers = append(f.watchers, w)
	f.mu.Unlock()
	w.notify(ctx, inventory, removed)
	f.mu.Lock()
	f.watchers = slices.DeleteFunc(f.watchers, func(other *watcher) bool { return other == w })
	f.mu.Unlock()
	return ctx.Err()
}

// Observes returns the number of calls of Observe and Inventory.
func (f *Fake) Observes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.observes
}

// Applied returns the number of changes tried, by Apply and by Do.
func (f *Fake) Applied() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}

func (f *Fake) read() error {
	f.mu.Lock()
	f.observes++
	f.mu.Unlock()
	return f.OnRead()
}

// fakeStack implements stack for the Fake. The Fake's lock is held.
type fakeStack Fake

// notify schedules the calls of the watchers that the kernel's message about a change would
// cause.
func (f *fakeStack) notify(inventory bool, removals ...Removal) {
	for _, w := range f.watchers {
		if inventory {
			signal(w.inventory)
		}
		w.reportRemovals(removals...)
	}
}

func (f *fakeStack) addLink() error {
	if f.dummyLink {
		return unix.EEXIST
	}
	f.dummyLink = true
	return nil
}

func (f *fakeStack) deleteLink() error {
	if !f.dummyLink {
		return unix.ENODEV
	}
	for _, w := range f.watchers {
		w.reportAnything()
	}
	f.dummyLink = false
	clear(f.addresses)
	maps.DeleteFunc(f.routes, func(_ RouteKey, r foundRoute) bool { return r.Link == DummyLink })
	return nil
}

func (f *fakeStack) addAddress(a netip.Addr) error {
	if !f.dummyLink {
		return unix.ENODEV
	}
	if _, ok := f.addresses[a]; ok {
		return unix.EEXIST
	}
	f.addresses[a] = false
	return nil
}

func (f *fakeStack) deleteAddress(a netip.Addr) error {
	if !f.dummyLink {
		return unix.ENODEV
	}
	if _, ok := f.addresses[a]; !ok {
		return unix.EADDRNOTAVAIL
	}
	f.notify(false, Removal{Addr: a})
	delete(f.addresses, a)
	return nil
}

func (f *fakeStack) wrongScope() (map[netip.Addr]struct{}, error) {
	out := map[netip.Addr]struct{}{}
	for a, wrongScope := range f.addresses {
		if wrongScope {
			out[a] = struct{}{}
		}
	}
	return out, nil
}

func (f *fakeStack) addRule(r Rule) error {
	raw := rawRule{r, f.protocol()}
	if slices.Contains(f.rules, raw) {
		return unix.EEXIST
	}
	return f.addRaw(raw)
}

// orderLock returns a lock without effect: the Fake's own lock is held.
func (f *fakeStack) orderLock() sync.Locker { return &sync.Mutex{} }

func (f *fakeStack) protocol() uint8 {
	if f.ours {
		return Protocol
	}
	return unix.RTPROT_STATIC
}

func (f *fakeStack) deleteRule(r Rule) error {
	return f.deleteFirst(func(raw rawRule) bool { return raw.Rule == r && (!f.ours || raw.protocol == Protocol) })
}

func (f *fakeStack) rawRules(family ip.Family) ([]rawRule, error) {
	var out []rawRule
	for _, r := range f.rules {
		if r.Family == family {
			out = append(out, r)
		}
	}
	return out, nil
}

func (f *fakeStack) addRaw(r rawRule) error {
	f.notify(true)
	f.rules = append(f.rules, r)
	slices.SortStableFunc(f.rules, func(a, b rawRule) int { return compareOrder(a.Rule, b.Rule) })
	return nil
}

func (f *fakeStack) deleteRaw(r rawRule) error {
	r.Target = 0
	return f.deleteFirst(func(raw rawRule) bool { // the kernel does not compare targets
		raw.Target = 0
		return raw == r
	})
}

func (f *fakeStack) deleteFirst(like func(rawRule) bool) error {
	i := slices.IndexFunc(f.rules, like)
	if i < 0 {
		return unix.ENOENT
	}
	f.notify(true)
	f.removed = append(f.removed, f.rules[i])
	f.rules = slices.Delete(f.rules, i, i+1)
	return nil
}

func (f *fakeStack) replaceRoute(r Route) error {
	up, err := f.isUp(r.Link)
	switch {
	case err != nil:
		return err
	case !up && !r.Local:
		return unix.ENETDOWN
	case r.Src.IsValid() && !f.isLocal(r.Src):
		return unix.EINVAL
	}
	f.notify(r.Dst.Bits() == 0)
	f.routes[r.Key()] = foundRoute{r, f.ours}
	return nil
}

func (f *fakeStack) deleteRoute(r Route) error {
	if _, err := f.isUp(r.Link); err != nil {
		return err
	}
	found := f.routes[r.Key()]
	if found.Route != r {
		return unix.ESRCH
	}
	if found.ours && r.Dst.IsSingleIP() {
		f.notify(false, Removal{Addr: r.Dst.Addr(), Table: r.Table})
	}
	f.notify(r.Dst.Bits() == 0)
	delete(f.routes, r.Key())
	return nil
}

// applyBatch returns all changes, to be applied one by one.
func (f *fakeStack) applyBatch(changes []Change) []Change { return changes }

func (f *fakeStack) isUp(link string) (bool, error) {
	if link == DummyLink && f.dummyLink {
		return false, nil
	}
	for _, l := range f.inventory.Links {
		if l.Name == link {
			return l.Up, nil
		}
	}
	return false, unix.ENODEV
}

func (f *fakeStack) isLocal(a netip.Addr) bool {
	if _, ok := f.addresses[a]; ok {
		return true
	}
	return slices.ContainsFunc(f.inventory.Links, func(l Link) bool { return l.HasAddress(a) })
}
