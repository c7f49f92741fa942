package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// attempts is how often Apply tries a change that is worth retrying. Two suffice for changes
// that find unexpected state; the others are for transient errors.
const attempts = 4

// flagHashed is IP_VS_SVC_F_HASHED, which the kernel sets on every virtual server and
// ignores in requests.
const flagHashed Flags = 0x2

// raw is the kernel's interface to IPVS: one state per network namespace, and requests that
// succeed or fail with an errno. client adds all further guarantees, for Netlink and Fake
// alike.
type raw interface {
	// services lists the virtual servers, without their real servers, in the kernel's order.
	services() ([]listed, error)
	// destinations lists the real servers of one virtual server. For a missing virtual
	// server it returns an empty list, not an error.
	destinations(Key) ([]destination, error)
	// list returns the real servers of the virtual servers that have an address. It may
	// omit virtual servers, but none of the real servers of those that it returns. Some
	// kernels do not support it. Its cost grows with the square of their number.
	list() (map[Key]map[netip.AddrPort]RealServer, error)
	// count returns the number of IPv4 virtual servers with one system call.
	count() (int, error)
	// execute applies changes in order, without correction, and returns one answer for
	// each.
	execute([]Change) []error
	timeouts() (Timeouts, error)
	setTimeouts(Timeouts) error
	close()
}

// listed is a virtual server without its real servers.
type listed struct {
	Key
	VirtualServer
}

// destination is a real server and the connections to it.
type destination struct {
	Dest netip.AddrPort
	RealServer
	Connections
}

// client implements this package's semantics on raw. Its methods may be called concurrently.
// Reading everything takes seconds with thousands of virtual servers, and must not block
// other methods. So writes have one lock, each read request takes another one, and the list
// has a third one.
type client struct {
	writing, reading, listing sync.Mutex
	raw                       raw

	// limited holds the virtual servers with a connection limit that Apply has set, or that a
	// read has found. raw.list does not return limits.
	limited      map[Key]struct{}
	limitedMutex sync.Mutex
}

// recordLimits updates limited for changes that set a limit or delete a virtual server.
func (c *client) recordLimits(changes []Change) {
	c.limitedMutex.Lock()
	defer c.limitedMutex.Unlock()
	for _, change := range changes {
		switch {
		case change.RealServer.MaxConnections != 0:
			c.limit(change.Key)
		case change.Op == DeleteVirtualServer:
			delete(c.limited, change.Key)
		}
	}
}

// limit adds a virtual server to limited. Its lock must be held.
func (c *client) limit(key Key) {
	if c.limited == nil {
		c.limited = map[Key]struct{}{}
	}
	c.limited[key] = struct{}{}
}

func (c *client) isLimited(key Key) bool {
	c.limitedMutex.Lock()
	defer c.limitedMutex.Unlock()
	_, limited := c.limited[key]
	return limited
}

func (c *client) services() ([]listed, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.raw.services()
}

func (c *client) destinations(key Key) ([]destination, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.raw.destinations(key)
}

// Close closes the sockets. No other method may be called afterwards.
func (c *client) Close() {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.reading.Lock()
	defer c.reading.Unlock()
	c.listing.Lock()
	defer c.listing.Unlock()
	c.raw.close()
}

// Observe reads every virtual server of the network namespace with its real servers, foreign
// ones included. Transient errors are retried. On an error it returns no partial state.
// Changes written concurrently may or may not be included.
//
// Connections and the forwarding method of real servers are not part of State.
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
	for i, s := range services {
		dests, complete := list[s.Key]
		if !complete || c.isLimited(s.Key) {
			if dests, err = c.realServers(s.Key); err != nil {
				return nil, fmt.Errorf("list real servers of %s: %w", s.Key, err)
			}
		}
		state[s.Key] = Service{VirtualServer: s.VirtualServer, RealServers: dests, Place: uint32(i + 1)}
	}
	return state, nil
}

// maxListed is the largest number of virtual servers for which the list is read. Requesting
// the real servers of one IPv6 virtual server costs up to 0.3 ms on an emulated machine;
// with more virtual servers the list costs more than that for each.
const maxListed = 10_000

// list reads the real servers of as many virtual servers as the kernel lists together;
// the others are requested one by one. If all are IPv4 it lists nothing, because single
// requests are cheap.
func (c *client) list(services []listed) map[Key]map[netip.AddrPort]RealServer {
	if len(services) > maxListed || !hasIPv6(services) {
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

func hasIPv6(services []listed) bool {
	return slices.ContainsFunc(services, func(s listed) bool { return s.Family() == ip.IPv6 })
}

// RealServers reads the real servers of one virtual server, without retrying. A missing
// virtual server has none.
func (c *client) RealServers(key Key) (map[netip.AddrPort]RealServer, error) {
	return c.realServers(key)
}

func (c *client) realServers(key Key) (map[netip.AddrPort]RealServer, error) {
	dests, err := c.destinations(key)
	if err != nil {
		return nil, err
	}
	limited := false
	out := make(map[netip.AddrPort]RealServer, len(dests))
	for _, dest := range dests {
		out[dest.Dest] = dest.RealServer
		if dest.MaxConnections != 0 {
			limited = true // by an earlier process, or by another program
		}
	}
	if limited {
		c.limitedMutex.Lock()
		defer c.limitedMutex.Unlock()
		c.limit(key)
	}
	return out, nil
}

// Connections counts the connections of each real server of a virtual server. A missing
// virtual server has none.
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

// Count returns the number of IPv4 virtual servers, foreign ones included. It costs one
// system call and waits for no other method. The kernel does not count those of IPv6.
func (c *client) Count() (int, error) {
	n, err := c.raw.count()
	if err != nil {
		return 0, fmt.Errorf("count virtual servers: %w", err)
	}
	return n, nil
}

// Timeouts reads the timeouts of the connection table.
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

// SetTimeouts sets the timeouts of the connection table; 0 keeps the current value. Existing
// connections keep their timeout until their next packet. It fails with EINVAL for a timeout
// that does not fit into the kernel's ticks.
func (c *client) SetTimeouts(t Timeouts) error {
	if t == (Timeouts{}) {
		return nil
	}
	c.reading.Lock() // it uses the socket for reads
	defer c.reading.Unlock()
	if err := kernel.Retry(func() error { return c.raw.setTimeouts(t) }); err != nil {
		return fmt.Errorf("set timeouts %+v: %w", t, err)
	}
	return nil
}

// Probe checks that the kernel has a scheduler, loading its module if necessary and
// possible, by adding and deleting a virtual server. Its address, 198.51.100.0:20000, is
// reserved for documentation; no traffic is sent there. The error names the fix.
func (c *client) Probe(scheduler string) error {
	key := Key{Protocol: ip.TCP, Addr: netip.AddrFrom4([4]byte{198, 51, 100, 0}), Port: 20000}
	add := Change{Op: AddVirtualServer, Key: key, VirtualServer: VirtualServer{Scheduler: scheduler}}
	if err := kernel.Join(c.Apply([]Change{add})); err != nil {
		return fmt.Errorf("probe scheduler %q: %w", scheduler, err)
	}
	return kernel.Join(c.Apply([]Change{{Op: DeleteVirtualServer, Key: key}}))
}

// Apply applies changes in order and returns those that failed; a failed change does not
// stop the others. It makes the requested outcome true: an add of an existing object updates
// it, an update of a missing object adds it, and a delete of a missing object succeeds. A
// real server cannot be added to a missing virtual server (ESRCH).
//
// Changes that depend on each other must be in Diff's order, and each object may be changed
// once: a change that finds unexpected state is corrected after all others were tried.
//
// It fails with EINVAL for a key, an address or a combination that IPVS cannot use, with
// ERANGE for a weight outside 0 to 65535, with ENOENT for a scheduler that the kernel lacks,
// with EPERM without CAP_NET_ADMIN.
func (c *client) Apply(changes []Change) []Failure {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.recordLimits(changes)
	errs := make([]error, len(changes))
	todo, indexes := make([]Change, 0, len(changes)), make([]int, 0, len(changes))
	for i, change := range changes {
		if errs[i] = change.check(); errs[i] == nil {
			todo, indexes = append(todo, change), append(indexes, i)
		}
	}
	for range attempts {
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

// execute applies changes, stores their errors in errs, and returns the changes to try next.
// indexes are the positions of the changes in Apply's argument.
func (c *client) execute(changes []Change, indexes []int, errs []error) (next []Change, nextIndexes []int) {
	if len(changes) == 0 {
		return nil, nil
	}
	for i, err := range c.raw.execute(changes) {
		if applied(changes[i], err) {
			err = nil
		} else if again, ok := retryAs(changes[i], err); ok {
			next, nextIndexes = append(next, again), append(nextIndexes, indexes[i])
		}
		errs[indexes[i]] = err
	}
	return next, nextIndexes
}

// applied reports whether the kernel's state is as the change requests.
func applied(c Change, err error) bool {
	switch c.Op {
	case DeleteVirtualServer, DeleteRealServer:
		return err == nil || kernel.IsNotExist(err)
	}
	return err == nil
}

// retryAs returns the change to try after c failed with err, if there is one. ESRCH means
// that the virtual server is missing. ENOENT means that the real server is missing, or the
// scheduler, which no change can fix.
func retryAs(c Change, err error) (Change, bool) {
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
		// The virtual server may be added before it in the next round.
	case c.Op == UpdateRealServer && (missingVS || missingRS):
		c.Op = AddRealServer
	default:
		return Change{}, false
	}
	return c, true
}

// explain adds the fix to an errno that does not suggest it.
func explain(c Change, err error) error {
	switch {
	case c.VirtualServer.Scheduler != "" && errors.Is(err, unix.ENOENT):
		return fmt.Errorf("the kernel has no scheduler %q (%w); load it with \"modprobe ip_vs_%[1]s\" on the node, or choose another", c.VirtualServer.Scheduler, err)
	case kernel.IsPermission(err):
		return fmt.Errorf("%w; IPVS needs CAP_NET_ADMIN", err)
	}
	return err
}

// check rejects a change that the kernel would reject, would accept but never use, or would
// not return unchanged.
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

// checkVirtualServer rejects port 0 (all ports) without persistence: the kernel accepts it,
// and then drops the packets.
func (c Change) checkVirtualServer() error {
	if c.Key.FWMark == 0 && c.Key.Port == 0 && c.VirtualServer.Flags&FlagPersistent == 0 {
		return fmt.Errorf("port 0 needs persistence or a mark: %w", unix.EINVAL)
	}
	return nil
}

// checkDest rejects a real server of the other family: masquerading cannot translate between
// families.
func (c Change) checkDest() error {
	if !unambiguous(c.Dest.Addr()) || ip.Of(c.Dest.Addr()) != c.Key.Family() {
		return fmt.Errorf("address %s, want one of %s: %w", c.Dest.Addr(), c.Key.Family(), unix.EINVAL)
	}
	return nil
}

// check rejects a key that identifies nothing in the kernel.
func (k Key) check() error {
	switch {
	case !unambiguous(k.Addr):
		return fmt.Errorf("virtual server's address %s: %w", k.Addr, unix.EINVAL)
	case k.FWMark != 0 && (k != Key{Addr: k.Family().Unspecified(), FWMark: k.FWMark}):
		return fmt.Errorf("mark %#x together with an address, a port or a protocol: %w", k.FWMark, unix.EINVAL)
	case k.FWMark == 0 && k.Protocol == 0:
		return fmt.Errorf("virtual server without a protocol: %w", unix.EINVAL)
	}
	return nil
}

// unambiguous reports whether an address has exactly one meaning in the kernel: it is not an
// IPv4-mapped IPv6 address and has no zone.
func unambiguous(a netip.Addr) bool {
	return a.IsValid() && !a.Is4In6() && a.Zone() == ""
}
