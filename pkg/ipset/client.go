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
	// defaultMaxElem is the initial capacity of a hash set, as in kube-proxy.
	defaultMaxElem = 65536
	// maxNameLength is IPSET_MAXNAMELEN without the terminating zero.
	maxNameLength = 31
)

// raw is the kernel's interface to IP sets. The semantics that callers rely on are in
// client, which the kernel and the Fake share.
type raw interface {
	// list reads one set, or all if the name is empty, with or without members. It
	// returns ENOENT if the set does not exist.
	list(name string, members bool) ([]listing, error)
	// create creates a set for up to maxElem members. It returns EEXIST if the name
	// exists, whatever its type.
	create(set Set, maxElem uint32) error
	// destroy returns ErrBusy while the set is referred to.
	destroy(name string) error
	// swap exchanges the members of two sets of the same type; references stay with the
	// names.
	swap(name, other string) error
	// members adds or removes members of one set, in order, up to the first refused
	// one. All changes are of one kind. Adding an existing member replaces its mark;
	// removing a missing one succeeds. It returns ErrFull if the set is full.
	members([]Change) error
	// has returns errNoMember if the set does not have the member.
	has(Set, Entry) error
	close()
}

// listing is a set as listed by the kernel.
type listing struct {
	Contents
	maxElem uint32
	count   int // of members, even if they are not listed; -1 if unknown (kernels before 4.10)
}

// client implements this package's semantics on raw. Its methods may be called
// concurrently. They are serialized, except that changes may run between the sets that
// Observe reads.
type client struct {
	mu   sync.Mutex
	raw  raw
	sets int // their number in the last full list
}

// Close closes the socket. No other method may be called afterwards.
func (c *client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.close()
}

// Observe reads the sets whose names the function accepts; nil accepts all. It does not read
// members of other sets. It retries transient errors. On an error it returns no state.
//
// State omits comments, counters, timeouts, and members that are exceptions ("nomatch"). It
// contains sets of other types than ours without their members. See Contents.Partial.
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
			continue // destroyed meanwhile
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
	list, err := c.raw.list("", false)
	c.sets = len(list)
	return list, err
}

func (c *client) contents(name string) (listing, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.one(name, true)
}

// one reads a set. The caller holds the lock.
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

// listedForOne is the number of sets in a full list that costs as much as one request for a
// single set.
const listedForOne = 3

// Sizes returns the numbers of members of sets without reading them, -1 for one that the
// kernel does not report. It omits sets that do not exist. If the kernel has many more sets
// than there are names, it requests each set separately instead of all at once.
func (c *client) Sizes(names []string) (map[string]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sizes := make(map[string]int, len(names))
	if c.sets <= listedForOne*len(names) {
		list, err := c.raw.list("", false)
		if err != nil {
			return nil, fmt.Errorf("count members of sets: %w", err)
		}
		c.sets = len(list)
		for _, set := range list {
			if slices.Contains(names, set.Name) {
				sizes[set.Name] = set.count
			}
		}
		return sizes, nil
	}
	for _, name := range names {
		set, err := c.one(name, false)
		if kernel.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("count members of set %s: %w", name, err)
		}
		sizes[name] = set.count
	}
	return sizes, nil
}

// Has reports whether a set has a member, whatever its mark. The time does not depend on the
// number of members. It fails with ENOENT if the set does not exist. An entry that does not
// fit the set is not a member.
func (c *client) Has(set Set, e Entry) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.raw.has(set, e)
	if errors.Is(err, errNoMember) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up %s in set %s: %w", e, set.Name, err)
	}
	return true, nil
}

// Apply makes the changes and returns those that failed; a failure does not affect the
// others. It keeps the order of the changes, with one exception: in a sequence of additions
// of members, or of removals, it batches those of one set. It is idempotent: creating an
// existing set of the same type and family, deleting a missing set or member, and
// adding an existing member succeed. Extensions of a set (comments, counters) are
// ignored.
//
// A full hash set is grown to twice its size: its members are copied to a set whose
// name ends in "~" instead of its last byte, or with "~" appended, the two are swapped,
// and the old one is destroyed. Packets always see all members.
//
// An existing set of another type or family is destroyed and created again. This fails
// while something refers to it, with EEXIST and ErrBusy.
//
// Apply returns EINVAL for an entry or name that does not fit the set, ErrInvalidCIDR
// for a /0, ENOENT for a member of a missing set, ErrBusy for destroying a set that is
// referred to, ErrNoType if the kernel lacks the type, and EPERM without CAP_NET_ADMIN.
func (c *client) Apply(changes []Change) []Failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := make([]error, len(changes))
	for _, batch := range batches(changes) {
		// A refused batch is repeated change by change, to find the refused ones.
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

// batchSize is the number of members per request. Their attribute must not exceed 64
// KiB.
const batchSize = 256

// batches groups the indexes of changes that fit into one request: additions to one set, or
// removals from it, without another operation in between.
func batches(changes []Change) [][]int {
	var out [][]int
	open := map[Set]int{} // the current batch of each set
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
		return ignoreMissing(c.raw.destroy(change.Set.Name))
	case AddEntry:
		return c.add(change)
	default: // excluded by check
		return ignoreMissing(c.raw.members([]Change{change}))
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
	if err := ignoreMissing(c.raw.destroy(set.Name)); err != nil {
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

// grow doubles a set's capacity. It discards a temporary set that an interrupted
// process has left.
func (c *client) grow(set Set) error {
	full, err := c.one(set.Name, true)
	if err != nil {
		return err
	}
	temporary := Set{Name: TemporaryName(set.Name), Type: full.Type, Family: full.Family}
	if err := ignoreMissing(c.raw.destroy(temporary.Name)); err != nil {
		return err
	}
	if err := c.raw.create(temporary, 2*full.maxElem); err != nil {
		return err
	}
	// The set that has the temporary name afterwards, old or new, is not needed. If
	// destroying it fails, Observe returns it.
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

// TemporaryName returns the name of the set that exists while a set is grown. An
// interrupted process leaves it behind.
func TemporaryName(name string) string {
	return name[:min(len(name), maxNameLength-1)] + "~"
}

// ignoreMissing returns nil for an error that means that the object does not exist.
func ignoreMissing(err error) error {
	if kernel.IsNotExist(err) {
		return nil
	}
	return err
}

// fits reports whether an existing set can be used. Additional extensions do not
// matter.
func (s Set) fits(as Set) bool {
	return s == as || s.Name == as.Name && s.Family == as.Family && s.Type == as.Type+withMarks
}

// kind describes a set's type and family.
func (s Set) kind() string {
	if s.Family == 0 {
		return string(s.Type)
	}
	return string(s.Type) + " " + s.Family.String()
}

// check rejects what the kernel would refuse, or store in another form. A member stored in
// another form would be missing in every comparison, and added again each time.
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

// fields are the fields of Entry that a type uses.
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

// fields returns an error for a type that is not used here, and for a family that the
// type does not support.
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
		// Only some kernels and types accept it, and no packet has it.
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

// holds reports whether the address has the set's family. The kernel would store an
// IPv4-mapped address as one that no packet has.
func (s Set) holds(a netip.Addr) bool {
	return ip.Of(a) == s.Family && !a.Is4In6() && a.Zone() == ""
}
