package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// rounds is how often Apply tries what is worth it. Two are enough for changes
// that meet another state than expected; the others are for transient errors.
const rounds = 4

// flagHashed is IP_VS_SVC_F_HASHED: set by the kernel on every virtual server
// that it has, and ignored in a request.
const flagHashed Flags = 0x2

// raw is IPVS as the kernel offers it: one state per network namespace, and
// requests that it carries out or answers with an errno. What callers rely on
// beyond that is in client, so that it is the same code for the kernel and
// for the Fake.
type raw interface {
	// services lists the virtual servers, without their real servers.
	services() (map[Key]VirtualServer, error)
	// destinations lists the real servers of one virtual server. For one that is
	// not there the kernel returns an empty list, not an error.
	destinations(Key) ([]destination, error)
	// list returns the real servers of all virtual servers that have an address.
	// It may leave virtual servers out, and not every kernel has it; those that it
	// returns are whole. Its cost grows with the square of their number.
	list() (map[Key]map[netip.AddrPort]RealServer, error)
	// count returns how many virtual servers of IPv4 there are, at the cost of one
	// system call.
	count() (int, error)
	// execute carries out changes in order, as they are, and gives one
	// answer for each.
	execute([]Change) []error
	timeouts() (Timeouts, error)
	setTimeouts(Timeouts) error
	close()
}

// destination is a real server and the connections to it.
type destination struct {
	Dest netip.AddrPort
	RealServer
	Connections
}

// client gives raw IPVS the semantics of this package. Its methods may be
// called concurrently. To read all takes seconds where there are thousands of
// virtual servers: nothing waits for that. So there is a lock for what writes, one
// for each single request that reads, and one for the list.
type client struct {
	writing, reading, listing sync.Mutex
	raw                       raw

	// limited are the virtual servers whose real servers were given a limit of
	// connections, which the list of all does not show.
	limited      map[Key]struct{}
	limitedMutex sync.Mutex
}

// limits notes which virtual servers have limits.
func (c *client) limits(changes []Change) {
	c.limitedMutex.Lock()
	defer c.limitedMutex.Unlock()
	for _, change := range changes {
		switch {
		case change.RealServer.MaxConnections != 0:
			if c.limited == nil {
				c.limited = map[Key]struct{}{}
			}
			c.limited[change.Key] = struct{}{}
		case change.Op == DeleteVirtualServer:
			delete(c.limited, change.Key)
		}
	}
}

func (c *client) isLimited(key Key) bool {
	c.limitedMutex.Lock()
	defer c.limitedMutex.Unlock()
	_, limited := c.limited[key]
	return limited
}

func (c *client) services() (map[Key]VirtualServer, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.raw.services()
}

func (c *client) destinations(key Key) ([]destination, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.raw.destinations(key)
}

// Close gives back the socket. No other method may be called after it.
func (c *client) Close() {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.reading.Lock()
	defer c.reading.Unlock()
	c.listing.Lock()
	defer c.listing.Unlock()
	c.raw.close()
}

// Observe reads every virtual server of the network namespace with its real
// servers, whoever made them. After an error nothing is known: there is no
// partial state. Transient errors have been retried. What is written meanwhile
// is in it or not.
//
// Connections and a real server's forwarding method are not part of State.
func (c *client) Observe() (State, error) {
	var state State
	err := kernel.Retry(func() (err error) {
		state, err = c.observe()
		return err
	})
	return state, err
}

func (c *client) observe() (State, error) {
	services, err := c.services()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	list := c.list(services)
	state := make(State, len(services))
	for key, vs := range services {
		dests, listed := list[key]
		if !listed || c.isLimited(key) {
			if dests, err = c.realServers(key); err != nil {
				return nil, fmt.Errorf("list real servers of %s: %w", key, err)
			}
		}
		state[key] = Service{VirtualServer: vs, RealServers: dests}
	}
	return state, nil
}

// listAtMost is the number of virtual servers up to which the list of all is read. A
// request for the real servers of one virtual server of IPv6 costs as much as 0.3 ms on
// an emulated machine; the list costs more where there are more virtual servers.
const listAtMost = 10_000

// list reads the real servers of as many virtual servers as the kernel lists together;
// those of the others are asked for one by one. With IPv4 alone that is cheap, and
// nothing is listed.
func (c *client) list(services map[Key]VirtualServer) map[Key]map[netip.AddrPort]RealServer {
	if len(services) > listAtMost || !hasIPv6(services) {
		return nil
	}
	c.listing.Lock()
	defer c.listing.Unlock()
	list, err := c.raw.list()
	if err != nil {
		return nil
	}
	return list
}

func hasIPv6(services map[Key]VirtualServer) bool {
	for key := range services {
		if key.Family() == ip.IPv6 {
			return true
		}
	}
	return false
}

// RealServers reads those of one virtual server, without retrying. One that is not
// there has none.
func (c *client) RealServers(key Key) (map[netip.AddrPort]RealServer, error) {
	return c.realServers(key)
}

func (c *client) realServers(key Key) (map[netip.AddrPort]RealServer, error) {
	dests, err := c.destinations(key)
	if err != nil {
		return nil, err
	}
	out := make(map[netip.AddrPort]RealServer, len(dests))
	for _, dest := range dests {
		out[dest.Dest] = dest.RealServer
	}
	return out, nil
}

// Connections counts the connections of each real server of a virtual
// server. A virtual server that is not there has none.
func (c *client) Connections(key Key) (map[netip.AddrPort]Connections, error) {
	if err := key.check(); err != nil {
		return nil, fmt.Errorf("count connections: %w", err)
	}
	var dests []destination
	err := kernel.Retry(func() (err error) {
		dests, err = c.destinations(key)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count connections of %s: %w", key, err)
	}
	counts := make(map[netip.AddrPort]Connections, len(dests))
	for _, dest := range dests {
		counts[dest.Dest] = dest.Connections
	}
	return counts, nil
}

// Count returns how many virtual servers of IPv4 there are, whoever made them. It
// costs one system call, and waits for no other method. The kernel does not count those
// of IPv6.
func (c *client) Count() (int, error) {
	n, err := c.raw.count()
	if err != nil {
		return 0, fmt.Errorf("count virtual servers: %w", err)
	}
	return n, nil
}

// Timeouts reads the connection table's timeouts.
func (c *client) Timeouts() (Timeouts, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	var t Timeouts
	err := kernel.Retry(func() (err error) {
		t, err = c.raw.timeouts()
		return err
	})
	if err != nil {
		return Timeouts{}, fmt.Errorf("read timeouts: %w", err)
	}
	return t, nil
}

// SetTimeouts sets the connection table's timeouts; 0 leaves the present
// value. Existing connections keep theirs until their next packet. Fails with
// EINVAL for a timeout that the kernel cannot count in its ticks.
func (c *client) SetTimeouts(t Timeouts) error {
	if t == (Timeouts{}) {
		return nil
	}
	c.reading.Lock() // it goes over the socket that reads
	defer c.reading.Unlock()
	if err := kernel.Retry(func() error { return c.raw.setTimeouts(t) }); err != nil {
		return fmt.Errorf("set timeouts %+v: %w", t, err)
	}
	return nil
}

// Probe finds out whether the kernel has a scheduler, loading its module if
// need be and possible, by adding a virtual server and removing it. Its
// address, 198.51.100.0:20000, is of a range for documentation; nothing is
// ever sent there. An error says what can be done.
func (c *client) Probe(scheduler string) error {
	key := Key{Protocol: ip.TCP, Addr: netip.AddrFrom4([4]byte{198, 51, 100, 0}), Port: 20000}
	add := Change{Op: AddVirtualServer, Key: key, VirtualServer: VirtualServer{Scheduler: scheduler}}
	if err := kernel.Join(c.Apply([]Change{add})); err != nil {
		return fmt.Errorf("probe scheduler %q: %w", scheduler, err)
	}
	return kernel.Join(c.Apply([]Change{{Op: DeleteVirtualServer, Key: key}}))
}

// Apply carries out changes in order and gives back those that failed; none
// keeps another from being tried. What a change asks for is made true: what
// is to be added and is there is updated, what is to be updated and is not
// there is added, what is to be deleted and is not there counts as deleted. A
// real server cannot be added to a virtual server that is not there (ESRCH).
//
// Changes that depend on each other must stand in Diff's order, and an object
// must be changed at most once: whatever meets an unexpected state is made
// true after all others have been tried.
//
// Fails with EINVAL for a key, an address or a combination that IPVS has no
// use for, with ERANGE for a weight outside 0 to 65535, with ENOENT for a
// scheduler that the kernel does not have, with EPERM without CAP_NET_ADMIN.
func (c *client) Apply(changes []Change) []Failure {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.limits(changes)
	errs := make([]error, len(changes))
	todo, indexes := make([]Change, 0, len(changes)), make([]int, 0, len(changes))
	for i, change := range changes {
		if errs[i] = change.check(); errs[i] == nil {
			todo, indexes = append(todo, change), append(indexes, i)
		}
	}
	for range rounds {
		todo, indexes = c.execute(todo, indexes, errs)
	}
	var failures []Failure
	for i, err := range errs {
		if err != nil {
			failures = append(failures, Failure{Change: changes[i], Err: explain(changes[i], err)})
		}
	}
	return failures
}

// execute carries out changes, of which the indexes are those in Apply's argument,
// notes their errors there, and gives back what is worth to be tried next.
func (c *client) execute(changes []Change, indexes []int, errs []error) (next []Change, nextIndexes []int) {
	if len(changes) == 0 {
		return nil, nil
	}
	for i, err := range c.raw.execute(changes) {
		if done(changes[i], err) {
			err = nil
		} else if again, ok := correct(changes[i], err); ok {
			next, nextIndexes = append(next, again), append(nextIndexes, indexes[i])
		}
		errs[indexes[i]] = err
	}
	return next, nextIndexes
}

// done tells whether the kernel's state is as the change wants it.
func done(c Change, err error) bool {
	switch c.Op {
	case DeleteVirtualServer, DeleteRealServer:
		return err == nil || kernel.IsNotExist(err)
	}
	return err == nil
}

// correct gives the change to make after c met err, if there is one. ESRCH
// says that the virtual server is missing, ENOENT that the real server is (or
// the scheduler: nothing to do about that).
func correct(c Change, err error) (Change, bool) {
	missingVS, missingRS := errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT)
	switch {
	case kernel.IsTransient(err):
	case c.Op == AddVirtualServer && kernel.IsExist(err):
		c.Op = UpdateVirtualServer
	case c.Op == UpdateVirtualServer && missingVS:
		c.Op = AddVirtualServer
	case c.Op == AddRealServer && kernel.IsExist(err):
		c.Op = UpdateRealServer
	case c.Op == AddRealServer && missingVS:
		// The virtual server may be added before, in the next round.
	case c.Op == UpdateRealServer && (missingVS || missingRS):
		c.Op = AddRealServer
	default:
		return Change{}, false
	}
	return c, true
}

// explain adds the cure to an errno that does not tell it.
func explain(c Change, err error) error {
	switch {
	case c.VirtualServer.Scheduler != "" && errors.Is(err, unix.ENOENT):
		return fmt.Errorf("the kernel has no scheduler %q (%w); load it with \"modprobe ip_vs_%[1]s\" on the node, or choose another", c.VirtualServer.Scheduler, err)
	case kernel.IsPermission(err):
		return fmt.Errorf("%w; IPVS needs the capability NET_ADMIN", err)
	}
	return err
}

// check refuses what the kernel would refuse, or take and never use, or what
// does not survive the way there and back.
func (c Change) check() error {
	if err := c.Key.check(); err != nil {
		return err
	}
	switch c.Op {
	case AddVirtualServer, UpdateVirtualServer:
		return c.checkVirtualServer()
	case AddRealServer, UpdateRealServer:
		if w := c.RealServer.Weight; w < 0 || w > math.MaxUint16 {
			return fmt.Errorf("weight %d, want 0 to %d: %w", w, math.MaxUint16, unix.ERANGE)
		}
		return c.checkDest()
	case DeleteRealServer:
		return c.checkDest()
	case DeleteVirtualServer:
		return nil
	}
	return fmt.Errorf("unknown operation: %w", unix.EINVAL)
}

// checkVirtualServer refuses the port 0 (all ports) without persistence: the
// kernel takes it, and then drops what arrives.
func (c Change) checkVirtualServer() error {
	if c.Key.FWMark == 0 && c.Key.Port == 0 && c.VirtualServer.Flags&FlagPersistent == 0 {
		return fmt.Errorf("port 0 needs persistence or a mark: %w", unix.EINVAL)
	}
	return nil
}

// checkDest refuses a real server of the other family: masquerading cannot
// translate between families.
func (c Change) checkDest() error {
	if !plain(c.Dest.Addr()) || ip.Of(c.Dest.Addr()) != c.Key.Family() {
		return fmt.Errorf("address %s, want one of %s: %w", c.Dest.Addr(), c.Key.Family(), unix.EINVAL)
	}
	return nil
}

// check refuses a key that names nothing in the kernel.
func (k Key) check() error {
	switch {
	case !plain(k.Addr):
		return fmt.Errorf("virtual server's address %s: %w", k.Addr, unix.EINVAL)
	case k.FWMark != 0 && (k != Key{Addr: k.Family().Unspecified(), FWMark: k.FWMark}):
		return fmt.Errorf("mark %#x together with an address, a port or a protocol: %w", k.FWMark, unix.EINVAL)
	case k.FWMark == 0 && k.Protocol == 0:
		return fmt.Errorf("virtual server without a protocol: %w", unix.EINVAL)
	}
	return nil
}

// plain tells whether an address has one meaning in the kernel: it is not an
// IPv4 address in IPv6 clothes, and has no zone.
func plain(a netip.Addr) bool {
	return a.IsValid() && !a.Is4In6() && a.Zone() == ""
}
