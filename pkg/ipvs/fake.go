package ipvs

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// Fake is IPVS in memory. It is stateful and rejects what the kernel rejects, with the same
// errnos: the package's tests run one table against both. It shares the code above raw with
// Netlink.
//
// Set the fields before use. The methods that Netlink does not have may be called at any
// time.
type Fake struct {
	client

	// Schedulers are the schedulers that the kernel has; NewFake sets the usual ones.
	Schedulers []string
	kernel.Faults[Change, Op]
	// Unlisted, if set, selects virtual servers that the list omits and that are therefore
	// dumped one by one.
	Unlisted func(Key) bool

	kernel fakeKernel
}

// NewFake returns an empty IPVS.
func NewFake() *Fake {
	f := &Fake{Schedulers: []string{"rr", "wrr", "lc", "wlc", "sh", "dh", "sed", "nq", "mh", "fo", "ovf"}}
	f.kernel = fakeKernel{
		fake:   f,
		vs:     map[Key]fakeService{},
		limits: Timeouts{TCP: 900, TCPFin: 120, UDP: 300}, // the kernel's defaults
	}
	f.client.raw = &f.kernel
	return f
}

// Clone returns a Fake with the same virtual servers, and without hooks.
func (f *Fake) Clone() *Fake {
	out := NewFake()
	out.Schedulers = slices.Clone(f.Schedulers)
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	for key, service := range k.vs {
		service.dests = maps.Clone(service.dests)
		out.kernel.vs[key] = service
	}
	out.kernel.ipv4Count, out.kernel.added, out.kernel.limits = k.ipv4Count, k.added, k.limits
	return out
}

// Dump returns the state as text; see State.String.
func (f *Fake) Dump() string {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state().String()
}

// SetConnections sets the connection counts of a real server. They last until they are set
// again or the real server is deleted. It does nothing for a missing real server.
func (f *Fake) SetConnections(key Key, dest netip.AddrPort, c Connections) {
	k := &f.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	if d, ok := k.vs[key].dests[dest]; ok {
		d.Connections = c
		k.vs[key].dests[dest] = d
	}
}

// fakeKernel is the raw side of a Fake.
type fakeKernel struct {
	fake *Fake

	mu        sync.Mutex
	vs        map[Key]fakeService
	ipv4Count int // number of vs
	added     int // number of virtual servers ever added
	limits    Timeouts
}

type fakeService struct {
	VirtualServer
	dests  map[netip.AddrPort]destination
	number int // 1 for the first virtual server that was added
}

func (k *fakeKernel) close() {}

func (k *fakeKernel) state() State {
	state := make(State, len(k.vs))
	for key, service := range k.vs {
		rs := make(map[netip.AddrPort]RealServer, len(service.dests))
		for addr, d := range service.dests {
			rs[addr] = d.RealServer
		}
		state[key] = Service{VirtualServer: service.VirtualServer, RealServers: rs}
	}
	return state
}

// services lists the newest virtual server first, as the kernel does in each bucket of its table.
func (k *fakeKernel) services() ([]listed, error) {
	if err := k.fake.OnRead(); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	services := make([]listed, 0, len(k.vs))
	for key, service := range k.vs {
		services = append(services, listed{key, service.VirtualServer})
	}
	slices.SortFunc(services, func(a, b listed) int { return cmp.Compare(k.vs[b.Key].number, k.vs[a.Key].number) })
	return services, nil
}

func (k *fakeKernel) destinations(key Key) ([]destination, error) {
	if err := k.fake.OnRead(); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.vs[key].dests)), nil
}

func (k *fakeKernel) count() (int, error) {
	if err := k.fake.OnRead(); err != nil {
		return 0, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ipv4Count, nil
}

func (k *fakeKernel) list() (map[Key]map[netip.AddrPort]RealServer, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	list := map[Key]map[netip.AddrPort]RealServer{}
	for key, service := range k.state() {
		if key.FWMark == 0 && (k.fake.Unlisted == nil || !k.fake.Unlisted(key)) {
			list[key] = service.RealServers
		}
	}
	return list, nil
}

func (k *fakeKernel) timeouts() (Timeouts, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.limits, nil
}

func (k *fakeKernel) setTimeouts(t Timeouts) error {
	// The kernel counts in ticks, 100 to 1000 a second.
	const limit = math.MaxInt32 / 100
	if t.TCP > limit || t.TCPFin > limit || t.UDP > limit {
		return unix.EINVAL
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	set := func(have *uint32, want uint32) {
		if want != 0 {
			*have = want
		}
	}
	set(&k.limits.TCP, t.TCP)
	set(&k.limits.TCPFin, t.TCPFin)
	set(&k.limits.UDP, t.UDP)
	return nil
}

func (k *fakeKernel) execute(changes []Change) []error {
	errs := make([]error, len(changes))
	for i, c := range changes {
		errs[i] = k.applyOne(c)
	}
	return errs
}

func (k *fakeKernel) applyOne(c Change) error {
	if err := k.fake.OnChange(c, c.Op); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch c.Op {
	case AddVirtualServer, UpdateVirtualServer, DeleteVirtualServer:
		return k.virtualServer(c)
	}
	return k.realServer(c)
}

func (k *fakeKernel) virtualServer(c Change) error {
	service, exists := k.vs[c.Key]
	switch {
	case c.Op == AddVirtualServer && exists:
		return unix.EEXIST
	case c.Op != AddVirtualServer && !exists:
		return unix.ESRCH
	case c.Op == DeleteVirtualServer:
		delete(k.vs, c.Key)
		if c.Key.Family() == ip.IPv4 {
			k.ipv4Count--
		}
		return nil
	case !slices.Contains(k.fake.Schedulers, c.VirtualServer.Scheduler):
		return unix.ENOENT
	}
	if !exists {
		k.added++
		service.dests, service.number = map[netip.AddrPort]destination{}, k.added
		if c.Key.Family() == ip.IPv4 {
			k.ipv4Count++
		}
	}
	service.VirtualServer = c.VirtualServer
	service.Flags &^= flagHashed
	k.vs[c.Key] = service
	return nil
}

func (k *fakeKernel) realServer(c Change) error {
	service, exists := k.vs[c.Key]
	if !exists {
		return unix.ESRCH
	}
	dest, exists := service.dests[c.Dest]
	switch {
	case c.Op == AddRealServer && exists:
		return unix.EEXIST
	case c.Op == AddRealServer && !usable(c.Dest.Addr()):
		return unix.EINVAL
	case c.Op != AddRealServer && !exists:
		return unix.ENOENT
	case c.Op == DeleteRealServer:
		delete(service.dests, c.Dest)
		return nil
	}
	dest.Dest, dest.RealServer = c.Dest, c.RealServer
	service.dests[c.Dest] = dest
	return nil
}

// usable reports whether the kernel accepts an address for a real server: a unicast address,
// for IPv6 not a link-local one.
func usable(a netip.Addr) bool {
	switch {
	case a.IsMulticast():
		return false
	case ip.Of(a) == ip.IPv4:
		return a.As4()[0] != 0 && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
	}
	return !a.IsUnspecified() && !a.IsLinkLocalUnicast()
}
