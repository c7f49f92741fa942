package ipset

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

const (
	// defaultMaxElem is how many members a hash set can have at first, as
	// kube-proxy makes them.
	defaultMaxElem = 65536
	// maxNameLength is IPSET_MAXNAMELEN without the terminating zero.
	maxNameLength = 31
)

// raw is IP sets as the kernel offers them. What callers rely on beyond that
// is in client, so that it is the same code for the kernel and for the Fake.
type raw interface {
	// list reads one set, or all of them if the name is empty, with or
	// without members. A set that is not there is ENOENT.
	list(name string, members bool) ([]listing, error)
	// create makes a set that holds up to maxElem members. EEXIST if there
	// is one of that name, of whatever make.
	create(set Set, maxElem uint32) error
	// destroy is ErrBusy while the set is referred to.
	destroy(name string) error
	// swap exchanges the members of two sets of one make; references stay
	// with the names.
	swap(name, other string) error
	// members adds members to one set, or removes them, in order, up to the
	// first that is refused; all changes are of one kind. A member that is
	// there is added, which replaces its mark, and one that is not there is
	// removed. The set being full is ErrFull.
	members([]Change) error
	close()
}

// listing is a set as the kernel lists it.
type listing struct {
	Contents
	maxElem uint32
	count   int // of members, also where these are not listed; -1 where the kernel does not say (before 4.10)
}

// client gives raw sets the semantics of this package. Its methods may be
// called concurrently; they are carried out one at a time, but that changes come
// between the sets that Observe reads.
type client struct {
	mu  sync.Mutex
	raw raw
}

// Close gives back the socket. No other method may be called after it.
func (c *client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.close()
}

// Observe reads the sets whose names pass; nil lets all pass. The members of
// others are not read. After an error nothing is known: there is no partial
// state. Transient errors have been retried.
//
// Comments, counters and timeouts are not part of State; nor are members that
// are exceptions ("nomatch"). Of a type that is not in use here, the set is
// in State without its members.
func (c *client) Observe(names func(string) bool) (State, error) {
	var state State
	err := kernel.Retry(func() (err error) {
		state, err = c.observe(names)
		return err
	})
	return state, err
}

func (c *client) observe(names func(string) bool) (State, error) {
	headers, err := c.headers()
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	state := State{}
	for _, header := range headers {
		if names != nil && !names(header.Name) {
			continue
		}
		set, err := c.contents(header.Name)
		if kernel.IsNotExist(err) {
			continue // destroyed since it was listed
		}
		if err != nil {
			return nil, fmt.Errorf("list set %s: %w", header.Name, err)
		}
		state[set.Name] = set.Contents
	}
	return state, nil
}

func (c *client) headers() ([]listing, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.raw.list("", false)
}

func (c *client) contents(name string) (listing, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.one(name, true)
}

// one reads a set; the caller has the lock.
func (c *client) one(name string, members bool) (listing, error) {
	sets, err := c.raw.list(name, members)
	if err != nil {
		return listing{}, err
	}
	if len(sets) != 1 {
		return listing{}, fmt.Errorf("%d sets are listed as %s: %w", len(sets), name, unix.EINTR)
	}
	return sets[0], nil
}

// Count returns how many members a set has, without reading them; false where the
// kernel does not say. Fails with ENOENT if there is no such set.
func (c *client) Count(name string) (n int, known bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	set, err := c.one(name, false)
	if err != nil {
		return 0, false, fmt.Errorf("count members of set %s: %w", name, err)
	}
	return set.count, set.count >= 0, nil
}

// Apply carries out changes and gives back those that failed; none keeps
// another from being tried. The order is that of the changes, but that members
// for one set are brought together if only those for other sets come between. What a change asks for is made true: a set
// that is there with the type and family that it should have is created, a
// set or member that is not there is deleted, a member that is there is
// added. Whether a set has extensions (comments, counters) makes no
// difference.
//
// A hash set that is full is grown to twice its size: its members are copied
// to a set with the name's last byte replaced by "~" or with "~" appended, the
// two are swapped, and the old one is destroyed. Packets always see all
// members.
//
// A set that is there with another type or family is destroyed and created
// anew. While something refers to it this cannot be done: that is EEXIST and
// ErrBusy in one.
//
// Fails with EINVAL for an entry or a name that does not fit the set, with
// ErrInvalidCIDR for a /0, with ENOENT for a member of a set that is not
// there, with ErrBusy for destroying a set that is referred to, with ErrNoType
// if the kernel lacks the type, with EPERM without CAP_NET_ADMIN.
func (c *client) Apply(changes []Change) []Failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := make([]error, len(changes))
	for _, batch := range batches(changes) {
		// If one of several is refused, it turns out below which.
		if len(batch) > 1 && c.applyTogether(changes, batch) == nil {
			continue
		}
		for _, i := range batch {
			errs[i] = c.applyAlone(changes[i])
		}
	}
	var failures []Failure
	for i, err := range errs {
		if err != nil {
			failures = append(failures, Failure{Change: changes[i], Err: explain(changes[i], err)})
		}
	}
	return failures
}

// batchSize is how many members go to the kernel in one request. Their
// attribute must not exceed 64 KiB.
const batchSize = 256

// batches puts together, by their indexes, what can go in one request: members
// to be added to one set, or to be removed from it, if nothing else comes
// between but the same for other sets.
func batches(changes []Change) [][]int {
	var out [][]int
	open := map[Set]int{} // the set's batch
	for i, c := range changes {
		if i > 0 && c.Op != changes[i-1].Op {
			clear(open)
		}
		at, ok := open[c.Set]
		if !ok || !c.isOfMember() || len(out[at]) == batchSize {
			at = len(out)
			open[c.Set] = at
			out = append(out, nil)
		}
		out[at] = append(out[at], i)
	}
	return out
}

func (c Change) isOfMember() bool { return c.Op == AddEntry || c.Op == DeleteEntry }

func (c *client) applyTogether(changes []Change, batch []int) error {
	together := make([]Change, len(batch))
	for i, at := range batch {
		together[i] = changes[at]
		if err := together[i].check(); err != nil {
			return err
		}
	}
	return c.raw.members(together)
}

func (c *client) applyAlone(change Change) error {
	if err := change.check(); err != nil {
		return err
	}
	return kernel.Retry(func() error { return c.apply(change) })
}

func (c *client) apply(change Change) error {
	switch change.Op {
	case CreateSet:
		return c.create(change.Set)
	case DestroySet:
		return gone(c.raw.destroy(change.Set.Name))
	case AddEntry:
		return c.add(change)
	default: // check lets nothing else pass
		return gone(c.raw.members([]Change{change}))
	}
}

func (c *client) create(set Set) error {
	err := c.raw.create(set, defaultMaxElem)
	if !kernel.IsExist(err) {
		return err
	}
	there, err := c.one(set.Name, false)
	if err != nil || there.fits(set) {
		return err
	}
	if err := gone(c.raw.destroy(set.Name)); err != nil {
		return fmt.Errorf("%w as %s, and cannot be replaced: %w", unix.EEXIST, there.kind(), err)
	}
	return c.raw.create(set, defaultMaxElem)
}

func (c *client) add(change Change) error {
	set := change.Set
	err := c.raw.members([]Change{change})
	if !errors.Is(err, ErrFull) || set.Type == BitmapPort {
		return err
	}
	if err := c.grow(set); err != nil {
		return fmt.Errorf("%w, and cannot be grown: %w", ErrFull, err)
	}
	return c.raw.members([]Change{change})
}

// grow doubles a set's capacity. A temporary set that was left behind by a
// process that ended amid this is of no use.
func (c *client) grow(set Set) error {
	full, err := c.one(set.Name, true)
	if err != nil {
		return err
	}
	temporary := Set{Name: TemporaryName(set.Name), Type: full.Type, Family: full.Family}
	if err := gone(c.raw.destroy(temporary.Name)); err != nil {
		return err
	}
	if err := c.raw.create(temporary, 2*full.maxElem); err != nil {
		return err
	}
	// Whichever of the two sets has the temporary name in the end is not
	// needed. Should it stay, Observe shows it.
	defer func() { _ = c.raw.destroy(temporary.Name) }()
	var copies []Change
	for entry, mark := range full.Entries {
		copies = append(copies, Change{Op: AddEntry, Set: temporary, Entry: entry, Mark: mark})
	}
	for batch := range slices.Chunk(copies, batchSize) {
		if err := c.raw.members(batch); err != nil {
			return err
		}
	}
	return c.raw.swap(set.Name, temporary.Name)
}

// TemporaryName is that of the set which stands beside one that is grown. A process
// that ends amid this leaves it.
func TemporaryName(name string) string {
	return name[:min(len(name), maxNameLength-1)] + "~"
}

// gone takes for success that what was to be deleted is not there.
func gone(err error) error {
	if kernel.IsNotExist(err) {
		return nil
	}
	return err
}

// fits tells whether a set can be used as one of another make. It can have
// extensions that are not asked for.
func (s Set) fits(as Set) bool {
	return s == as || s.Name == as.Name && s.Family == as.Family && s.Type == as.Type+withMarks
}

// kind is a set's type and family in words.
func (s Set) kind() string {
	if s.Family == 0 {
		return string(s.Type)
	}
	return string(s.Type) + " " + s.Family.String()
}

// check refuses what the kernel would refuse, or store as something else: then
// it would be missed and added again for ever.
func (c Change) check() error {
	if name := c.Set.Name; name == "" || len(name) > maxNameLength {
		return fmt.Errorf("name %q, want 1 to %d bytes: %w", name, maxNameLength, unix.EINVAL)
	}
	switch c.Op {
	case DestroySet:
		return nil
	case CreateSet:
		_, err := c.Set.fields()
		return err
	case AddEntry:
		if (c.Mark != 0) != c.Set.Type.hasMarks() {
			return fmt.Errorf("mark %#x of a member of a %s: %w", c.Mark, c.Set.kind(), unix.EINVAL)
		}
		return c.Set.checkEntry(c.Entry)
	case DeleteEntry:
		return c.Set.checkEntry(c.Entry)
	}
	return fmt.Errorf("unknown operation: %w", unix.EINVAL)
}

// fields tells which fields of Entry a type uses.
type fields struct{ addr, port, protocol, addr2, net bool }

var fieldsOf = map[Type]fields{
	HashIP:         {addr: true},
	HashNet:        {net: true},
	HashIPPort:     {addr: true, port: true, protocol: true},
	HashIPPortMark: {addr: true, port: true, protocol: true},
	HashIPPortIP:   {addr: true, port: true, protocol: true, addr2: true},
	HashIPPortNet:  {addr: true, port: true, protocol: true, net: true},
	BitmapPort:     {port: true},
}

// fields fails for a type that is not in use here, and for a family that the
// type cannot have.
func (s Set) fields() (fields, error) {
	used, ok := fieldsOf[s.Type]
	if !ok {
		return fields{}, fmt.Errorf("set type %q: %w", s.Type, unix.EINVAL)
	}
	if s.Type == BitmapPort && s.Family != 0 || s.Type != BitmapPort && s.Family != ip.IPv4 && s.Family != ip.IPv6 {
		return fields{}, fmt.Errorf("family %s of a %s: %w", s.Family, s.Type, unix.EINVAL)
	}
	return used, nil
}

func (s Set) checkEntry(e Entry) error {
	used, err := s.fields()
	if err != nil {
		return err
	}
	switch {
	case used != fields{e.Addr.IsValid(), e.Port != 0 || used.port, e.Protocol != 0, e.Addr2.IsValid(), e.Net.IsValid()}:
		err = unix.EINVAL
	case used.addr && !s.holds(e.Addr), used.addr2 && !s.holds(e.Addr2):
		err = unix.EINVAL
	case used.addr && e.Addr.IsUnspecified(), used.addr2 && e.Addr2.IsUnspecified():
		// Only some kernels and types take it, and no packet has it.
		err = unix.EINVAL
	case used.net && (!s.holds(e.Net.Addr()) || e.Net != e.Net.Masked()):
		err = unix.EINVAL
	case used.net && e.Net.Bits() == 0:
		return ErrInvalidCIDR
	}
	if err != nil {
		return fmt.Errorf("entry %q does not fit %s: %w", e, s.kind(), err)
	}
	return nil
}

// holds tells whether the set's family is the address's. An IPv4 address in
// IPv6 clothes would be stored as something that no packet has.
func (s Set) holds(a netip.Addr) bool {
	return ip.Of(a) == s.Family && !a.Is4In6() && a.Zone() == ""
}
