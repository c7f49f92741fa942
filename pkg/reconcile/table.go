package reconcile

import (
	"iter"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Owner is a Service, or the node itself (nodeOwner), that wants state in the kernel.
type Owner struct {
	Name    types.NamespacedName
	Created time.Time
}

// nodeOwner owns the node-wide state. It precedes every Service.
var nodeOwner = &Owner{}

// before orders owners that want the same key: the older one precedes and, if both were
// created in the same second, the one whose name sorts first. The order is the same on every
// node.
func (o *Owner) before(p *Owner) bool {
	if !o.Created.Equal(p.Created) {
		return o.Created.Before(p.Created)
	}
	return strings.Compare(o.Name.String(), p.Name.String()) < 0
}

// desired is the value that one owner wants under a key, and its precedence.
type desired[W any] struct {
	owner      *Owner
	precedence plan.Precedence
	value      W
}

// before orders the values of one key by precedence, then by owner.
func (c desired[W]) before(d desired[W]) bool {
	if c.precedence != d.precedence {
		return c.precedence < d.precedence
	}
	return c.owner.before(d.owner)
}

// record is the desired and the cached state of one object. It is dirty from when they may
// have begun to differ until the kernel is known to hold the desired value.
type record[K comparable, W, A any] struct {
	key        K
	desired[W]      // of the owner that precedes all others; its owner is nil if no owner wants the key
	actual     A    // the cached state, if there
	there      bool // the kernel holds the object
	dirty      bool
	queued     bool // in table.queue
	touched    bool // in table.touched
	round      uint32
}

// wanted reports whether any owner wants the object.
func (r *record[K, W, A]) wanted() bool { return r.owner != nil }

// table holds one kind of object by key, with its desired and its cached state. Several
// owners may want the same key. For a set member or a VIP this counts references; for a
// virtual server it is a conflict, which the first in order of precedence wins.
type table[K comparable, W, A any] struct {
	records index[K, W, A]
	losers  map[K][]desired[W] // of keys that several owners want, without the winner; sorted
	// counted, if not nil, is called with 1 when a key gets its first owner, and with -1
	// when it loses its last one.
	counted func(key K, by int)
	held    int // records that are there
	// queue lists every dirty record, and records that were dirty since the last call of
	// compact.
	queue []*record[K, W, A]
	// stuck are keys that the kernel refused. They wait for a retry, so that not every
	// Flush repeats them.
	stuck map[K]*record[K, W, A]
	// touched lists the records written since the kernel is being read: the observed value
	// may be older than the write. Meanwhile idle records are not deleted.
	observing bool
	touched   []*record[K, W, A]
	idle      []*record[K, W, A]
	round     uint32 // of setAll
}

func newTable[K comparable, W, A any](hash func(K) uint64) table[K, W, A] {
	return table[K, W, A]{
		records: newIndex[K, W, A](hash), losers: map[K][]desired[W]{}, stuck: map[K]*record[K, W, A]{},
	}
}

// get returns the record of a key, a new one if necessary.
func (t *table[K, W, A]) get(key K) *record[K, W, A] {
	r := t.records.get(key)
	if r == nil {
		r = &record[K, W, A]{key: key}
		t.records.add(r)
	}
	return r
}

// wanted reports whether any owner wants a key.
func (t *table[K, W, A]) wanted(key K) bool {
	r := t.records.get(key)
	return r != nil && r.wanted()
}

// holds reports whether the kernel holds a key, as far as is known.
func (t *table[K, W, A]) holds(key K) bool {
	r := t.records.get(key)
	return r != nil && r.there
}

// isDirty reports whether a key is dirty.
func (t *table[K, W, A]) isDirty(key K) bool {
	r := t.records.get(key)
	return r != nil && r.dirty
}

// release deletes a record that says nothing: now or, while the kernel is being read, at
// the end of the resync.
func (t *table[K, W, A]) release(r *record[K, W, A]) {
	if r.wanted() || r.there || r.dirty || t.stuck[r.key] == r {
		return
	}
	if t.observing {
		t.idle = append(t.idle, r)
		return
	}
	t.records.remove(r)
}

// markDirty makes a record dirty.
func (t *table[K, W, A]) markDirty(r *record[K, W, A]) {
	delete(t.stuck, r.key)
	r.dirty = true
	if !r.queued {
		r.queued = true
		t.queue = append(t.queue, r)
	}
}

// markKey makes a key dirty that an owner wants or the kernel holds.
func (t *table[K, W, A]) markKey(key K) {
	if r := t.records.get(key); r != nil {
		t.markDirty(r)
	}
}

// setDirty records the result of a comparison. A stuck key that differs stays stuck.
func (t *table[K, W, A]) setDirty(r *record[K, W, A], differs bool) {
	if _, waits := t.stuck[r.key]; differs && !waits {
		t.markDirty(r)
	} else if !differs {
		t.markClean(r)
	}
}

// markClean records that the kernel holds the desired value.
func (t *table[K, W, A]) markClean(r *record[K, W, A]) {
	delete(t.stuck, r.key)
	r.dirty = false
	t.release(r)
}

// markStuck sets a record aside until its retry.
func (t *table[K, W, A]) markStuck(r *record[K, W, A]) {
	r.dirty = false
	t.stuck[r.key] = r
}

// allDirty returns the records that are dirty now.
func (t *table[K, W, A]) allDirty() iter.Seq[*record[K, W, A]] {
	return func(yield func(*record[K, W, A]) bool) {
		for _, r := range t.queue {
			if r.dirty && !yield(r) {
				return
			}
		}
	}
}

// allHeld returns the records that are there. Records may be deleted meanwhile.
func (t *table[K, W, A]) allHeld() iter.Seq[*record[K, W, A]] {
	return func(yield func(*record[K, W, A]) bool) {
		for r := range t.records.all() {
			if r.there && !yield(r) {
				return
			}
		}
	}
}

// list returns all records. It is a snapshot that stays valid while the kernel is read.
func (t *table[K, W, A]) list() []*record[K, W, A] {
	out := make([]*record[K, W, A], 0, t.records.count)
	for r := range t.records.all() {
		out = append(out, r)
	}
	return out
}

// reusableSize is about the number of keys that one batch of Services makes dirty at
// startup. A queue for as many is reused.
const reusableSize = 1024

// compact removes clean records from the queue.
func (t *table[K, W, A]) compact() {
	t.queue = slices.DeleteFunc(t.queue, func(r *record[K, W, A]) bool {
		r.queued = r.dirty
		return !r.dirty
	})
	if len(t.queue) == 0 && cap(t.queue) > reusableSize {
		t.queue = nil
	}
}

// retry makes stuck keys dirty again: those that the named owner wants or, with the zero
// name, those that no Service wants.
func (t *table[K, W, A]) retry(name types.NamespacedName) {
	for _, r := range t.stuck {
		owners := t.owners(r.key)
		if slices.Contains(owners, name) || len(owners) == 0 && name == nodeOwner.Name {
			t.markDirty(r)
		}
	}
}

// put sets the value that an owner wants under a key. Members and VIPs, which owners share,
// all have precedence 0.
func (t *table[K, W, A]) put(r *record[K, W, A], owner *Owner, precedence plan.Precedence, value W) {
	put := desired[W]{owner, precedence, value}
	switch {
	case !r.wanted():
		r.desired = put
		if t.counted != nil {
			t.counted(r.key, 1)
		}
	case r.owner.Name == owner.Name && len(t.losers[r.key]) == 0:
		r.desired = put
	default:
		list := t.without(r, owner)
		at, _ := slices.BinarySearchFunc(list, put, func(c, put desired[W]) int {
			if c.before(put) {
				return -1
			}
			return 1
		})
		t.setAllDesired(r, slices.Insert(list, at, put))
	}
	t.markDirty(r)
}

// drop removes the value that an owner wants under a key.
func (t *table[K, W, A]) drop(r *record[K, W, A], owner *Owner) {
	had := r.wanted()
	t.setAllDesired(r, t.without(r, owner))
	if had && !r.wanted() && t.counted != nil {
		t.counted(r.key, -1)
	}
	t.markDirty(r)
}

// without returns the values of a key except the owner's.
func (t *table[K, W, A]) without(r *record[K, W, A], owner *Owner) []desired[W] {
	return slices.DeleteFunc(t.allDesired(r), func(c desired[W]) bool { return c.owner.Name == owner.Name })
}

// allDesired returns a copy of all values of a key, the winner's first.
func (t *table[K, W, A]) allDesired(r *record[K, W, A]) []desired[W] {
	if !r.wanted() {
		return nil
	}
	return append([]desired[W]{r.desired}, t.losers[r.key]...)
}

func (t *table[K, W, A]) setAllDesired(r *record[K, W, A], list []desired[W]) {
	if len(list) == 0 {
		r.desired = desired[W]{}
	} else {
		r.desired = list[0]
	}
	if len(list) > 1 {
		t.losers[r.key] = slices.Clone(list[1:])
	} else {
		delete(t.losers, r.key)
	}
}

// desiredBy returns what one owner wants under a key.
func (t *table[K, W, A]) desiredBy(r *record[K, W, A], name types.NamespacedName) (desired[W], bool) {
	if r == nil || !r.wanted() {
		return desired[W]{}, false
	}
	if r.owner.Name == name {
		return r.desired, true
	}
	for _, c := range t.losers[r.key] {
		if c.owner.Name == name {
			return c, true
		}
	}
	return desired[W]{}, false
}

// winner returns the owner of the desired value; the zero name for the node, or if there is
// none.
func (t *table[K, W, A]) winner(key K) types.NamespacedName {
	if r := t.records.get(key); r != nil && r.wanted() {
		return r.owner.Name
	}
	return nodeOwner.Name
}

// owners returns all Services that want a key, the winner first. The node is not listed.
func (t *table[K, W, A]) owners(key K) []types.NamespacedName {
	r := t.records.get(key)
	if r == nil || !r.wanted() {
		return nil
	}
	var out []types.NamespacedName
	if r.owner != nodeOwner {
		out = append(out, r.owner.Name)
	}
	for _, c := range t.losers[key] {
		if c.owner != nodeOwner {
			out = append(out, c.owner.Name)
		}
	}
	return out
}

// hold records that the kernel holds a value.
func (t *table[K, W, A]) hold(r *record[K, W, A], actual A) {
	if !r.there {
		r.there = true
		t.held++
	}
	r.actual = actual
}

// markMissing records that the kernel does not hold a key.
func (t *table[K, W, A]) markMissing(r *record[K, W, A]) {
	if !r.there {
		return
	}
	var none A
	r.there, r.actual = false, none
	t.held--
	t.release(r)
}

// touch notes that a key is being written.
func (t *table[K, W, A]) touch(r *record[K, W, A]) {
	if t.observing && !r.touched {
		r.touched = true
		t.touched = append(t.touched, r)
	}
}

// beginObserve notes from now on which keys are written.
func (t *table[K, W, A]) beginObserve() {
	t.endObserve()
	t.observing = true
}

// endObserve forgets which keys were written, and deletes records that became idle.
func (t *table[K, W, A]) endObserve() {
	for _, r := range t.touched {
		r.touched = false
	}
	idle := t.idle
	t.observing, t.touched, t.idle = false, nil, nil
	for _, r := range idle {
		if t.records.get(r.key) == r {
			t.release(r)
		}
	}
}

// entry is what an owner wants under one key.
type entry[K comparable, W any] struct {
	key        K
	precedence plan.Precedence
	value      W
}

// replaceAll replaces what an owner wants: it puts the entries that are new or differ from
// what the owner wanted under the key, and then drops the keys of old that entries lacks. It
// returns the records of the entries.
func replaceAll[K comparable, W, A any](
	t *table[K, W, A], owner *Owner, old []*record[K, W, A], n int, entryOf func(i int) entry[K, W],
	same func(a, b W) bool, put func(*record[K, W, A], entry[K, W]), drop func(*record[K, W, A]),
) []*record[K, W, A] {
	t.round++
	round := t.round
	var records []*record[K, W, A]
	if n > 0 {
		records = make([]*record[K, W, A], 0, n)
	}
	for i := range n {
		e := entryOf(i)
		r := t.get(e.key)
		if was, wanted := t.desiredBy(r, owner.Name); !wanted || was.precedence != e.precedence || !was.owner.Created.Equal(owner.Created) || !same(was.value, e.value) {
			put(r, e)
		}
		if r.round != round {
			r.round = round
			records = append(records, r)
		}
	}
	for _, r := range old {
		if r.round != round {
			drop(r)
		}
	}
	return records
}

// replace is replaceAll for entries that owners share.
func (t *table[K, W, A]) replace(owner *Owner, old []*record[K, W, A], n int, entryOf func(i int) entry[K, W], same func(a, b W) bool) []*record[K, W, A] {
	put := func(r *record[K, W, A], e entry[K, W]) { t.put(r, owner, e.precedence, e.value) }
	drop := func(r *record[K, W, A]) { t.drop(r, owner) }
	return replaceAll(t, owner, old, n, entryOf, same, put, drop)
}
