package reconcile

import (
	"iter"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/index"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Owner is a Service, or the node itself (nodeOwner), that wants state in the kernel.
type Owner struct {
	Name    types.NamespacedName
	Created time.Time
}

// nodeOwner owns the node-wide state. It precedes every Service. Its name is the zero name.
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

// want is the value that one owner wants under a key, and its precedence. The desired value is
// chosen among the wants; see desiredServer and desiredMember.
type want[W any] struct {
	owner      *Owner
	precedence plan.Precedence
	value      W
}

// before orders the values of one key by precedence, then by owner.
func (w want[W]) before(o want[W]) bool {
	if w.precedence != o.precedence {
		return w.precedence < o.precedence
	}
	return w.owner.before(o.owner)
}

// record holds what the owners want of one object, and its cached state. It is dirty while
// the kernel may not have the desired value, except while it is stuck: see table.stuck.
//
// There is a record for each virtual server, set member and VIP. The order of the fields avoids
// padding.
type record[K comparable, W, C any] struct {
	key        K
	owner      *Owner // the one with precedence; nil if none wants the key
	value      W      // what the owner wants
	cached     C      // the value in the kernel, if exists
	precedence plan.Precedence
	exists     bool // in the kernel, as far as is known
	dirty      bool
	queued     bool // in table.queue
	written    bool // in table.written
	kept       bool // see replaceAll
}

// winner returns what the owner with precedence wants.
func (r *record[K, W, C]) winner() want[W] { return want[W]{r.owner, r.precedence, r.value} }

// setWinner sets what the owner with precedence wants.
func (r *record[K, W, C]) setWinner(w want[W]) {
	r.owner, r.precedence, r.value = w.owner, w.precedence, w.value
}

// wanted reports whether any owner wants the object.
func (r *record[K, W, C]) wanted() bool { return r.owner != nil }

// table holds one kind of object by key. Several owners may want the same key. A set member
// or VIP is shared by them; a virtual server goes to the owner with precedence.
type table[K comparable, W, C any] struct {
	records index.Index[K, record[K, W, C]]
	losers  map[K][]want[W] // of keys that several owners want, without the winner; sorted
	// counted, if not nil, is called with 1 when a key gets its first owner, with -1 when it
	// loses its last one, and with 0 when its owner's precedence changes.
	counted  func(key K, by int)
	existing int // records that exist in the kernel
	// queue lists every dirty record, and records that were dirty since the last call of
	// compact.
	queue []*record[K, W, C]
	// stuck holds keys that the kernel refused. They wait for their retry, instead of being
	// repeated by every Flush.
	stuck map[K]*record[K, W, C]
	// While the kernel is being read (observing), written lists the records that are written
	// meanwhile: their observed value may be older than the write. Records that become idle
	// are deleted afterwards.
	observing bool
	written   []*record[K, W, C]
	idle      []*record[K, W, C]
}

func newTable[K comparable, W, C any](hash func(K) uint64) table[K, W, C] {
	return table[K, W, C]{
		records: index.New(hash, func(r *record[K, W, C]) K { return r.key }), losers: map[K][]want[W]{}, stuck: map[K]*record[K, W, C]{},
	}
}

// get returns the record of a key, a new one if necessary.
func (t *table[K, W, C]) get(key K) *record[K, W, C] {
	r := t.records.Get(key)
	if r == nil {
		r = &record[K, W, C]{key: key}
		t.records.Put(r)
	}
	return r
}

// wanted reports whether any owner wants a key.
func (t *table[K, W, C]) wanted(key K) bool {
	r := t.records.Get(key)
	return r != nil && r.wanted()
}

// exists reports whether the kernel has a key, as far as is known.
func (t *table[K, W, C]) exists(key K) bool {
	r := t.records.Get(key)
	return r != nil && r.exists
}

// isDirty reports whether a key is dirty.
func (t *table[K, W, C]) isDirty(key K) bool {
	r := t.records.Get(key)
	return r != nil && r.dirty
}

// release deletes a record that is no longer needed: at once or, while the kernel is being
// read, at the end of the resync.
func (t *table[K, W, C]) release(r *record[K, W, C]) {
	if r.wanted() || r.exists || r.dirty || t.stuck[r.key] == r {
		return
	}
	if t.observing {
		t.idle = append(t.idle, r)
		return
	}
	if t.records.Get(r.key) == r {
		t.records.Delete(r.key)
	}
}

// setDirty makes a record dirty.
func (t *table[K, W, C]) setDirty(r *record[K, W, C]) {
	delete(t.stuck, r.key)
	r.dirty = true
	if !r.queued {
		r.queued = true
		t.queue = append(t.queue, r)
	}
}

// setKeyDirty makes a key dirty, if it has a record.
func (t *table[K, W, C]) setKeyDirty(key K) {
	if r := t.records.Get(key); r != nil {
		t.setDirty(r)
	}
}

// compared records the result of a comparison. A stuck key that differs stays stuck.
func (t *table[K, W, C]) compared(r *record[K, W, C], differs bool) {
	if _, waits := t.stuck[r.key]; differs && !waits {
		t.setDirty(r)
	} else if !differs {
		t.setClean(r)
	}
}

// setClean records that the kernel has the desired value.
func (t *table[K, W, C]) setClean(r *record[K, W, C]) {
	delete(t.stuck, r.key)
	r.dirty = false
	t.release(r)
}

// setStuck sets a record aside until its retry.
func (t *table[K, W, C]) setStuck(r *record[K, W, C]) {
	r.dirty = false
	t.stuck[r.key] = r
}

// allDirty returns the records that are dirty now.
func (t *table[K, W, C]) allDirty() iter.Seq[*record[K, W, C]] {
	return func(yield func(*record[K, W, C]) bool) {
		for _, r := range t.queue {
			if r.dirty && !yield(r) {
				return
			}
		}
	}
}

// allExisting returns the records that exist in the kernel. Records may be deleted during
// the iteration.
func (t *table[K, W, C]) allExisting() iter.Seq[*record[K, W, C]] {
	return func(yield func(*record[K, W, C]) bool) {
		for r := range t.records.All() {
			if r.exists && !yield(r) {
				return
			}
		}
	}
}

// list returns all records. It is a snapshot that stays valid while the kernel is read.
func (t *table[K, W, C]) list() []*record[K, W, C] {
	out := make([]*record[K, W, C], 0, t.records.Len())
	for r := range t.records.All() {
		out = append(out, r)
	}
	return out
}

// reusableSize is the capacity up to which an empty queue keeps its memory. It is
// about the number of keys that one batch of Services makes dirty at startup.
const reusableSize = 1024

// compact removes clean records from the queue.
func (t *table[K, W, C]) compact() {
	t.queue = slices.DeleteFunc(t.queue, func(r *record[K, W, C]) bool {
		r.queued = r.dirty
		return !r.dirty
	})
	if len(t.queue) == 0 && cap(t.queue) > reusableSize {
		t.queue = nil
	}
}

// retry makes stuck keys dirty again: those that a Service in due wants or, if the zero name is in
// it, those that no Service wants.
func (t *table[K, W, C]) retry(due map[types.NamespacedName]bool) {
	for _, r := range t.stuck {
		owners := t.owners(r.key)
		if slices.ContainsFunc(owners, func(name types.NamespacedName) bool { return due[name] }) || len(owners) == 0 && due[nodeOwner.Name] {
			t.setDirty(r)
		}
	}
}

// put sets the value that an owner wants under a key. All members, which owners share, have
// precedence 0.
func (t *table[K, W, C]) put(r *record[K, W, C], owner *Owner, precedence plan.Precedence, value W) {
	put, had, before := want[W]{owner, precedence, value}, r.wanted(), r.precedence
	switch {
	case !had:
		r.setWinner(put)
	case r.owner.Name == owner.Name && len(t.losers[r.key]) == 0:
		r.setWinner(put)
	default:
		list := t.without(r, owner)
		at, _ := slices.BinarySearchFunc(list, put, func(w, put want[W]) int {
			if w.before(put) {
				return -1
			}
			return 1
		})
		t.setWants(r, slices.Insert(list, at, put))
	}
	t.count(r, had, before)
	t.setDirty(r)
}

// count calls counted if a record has got its first owner, lost its last one, or an owner with
// another precedence has it now.
func (t *table[K, W, C]) count(r *record[K, W, C], had bool, before plan.Precedence) {
	switch has := r.wanted(); {
	case t.counted == nil:
	case has && !had:
		t.counted(r.key, 1)
	case had && !has:
		t.counted(r.key, -1)
	case r.precedence != before:
		t.counted(r.key, 0)
	}
}

// drop removes the value that an owner wants under a key.
func (t *table[K, W, C]) drop(r *record[K, W, C], owner *Owner) {
	had, before := r.wanted(), r.precedence
	t.setWants(r, t.without(r, owner))
	t.count(r, had, before)
	t.setDirty(r)
}

// without returns the values of a key except the owner's.
func (t *table[K, W, C]) without(r *record[K, W, C], owner *Owner) []want[W] {
	return slices.DeleteFunc(t.allWants(r), func(w want[W]) bool { return w.owner.Name == owner.Name })
}

// allWants returns a copy of all values of a key, the winner's first.
func (t *table[K, W, C]) allWants(r *record[K, W, C]) []want[W] {
	if !r.wanted() {
		return nil
	}
	return append([]want[W]{r.winner()}, t.losers[r.key]...)
}

// setWants replaces all values of a key. list is sorted.
func (t *table[K, W, C]) setWants(r *record[K, W, C], list []want[W]) {
	if len(list) == 0 {
		r.setWinner(want[W]{})
	} else {
		r.setWinner(list[0])
	}
	if len(list) > 1 {
		t.losers[r.key] = slices.Clone(list[1:])
	} else {
		delete(t.losers, r.key)
	}
}

// wantOf returns what one owner wants under a key; false if it wants nothing.
func (t *table[K, W, C]) wantOf(r *record[K, W, C], name types.NamespacedName) (want[W], bool) {
	if r == nil || !r.wanted() {
		return want[W]{}, false
	}
	if r.owner.Name == name {
		return r.winner(), true
	}
	for _, w := range t.losers[r.key] {
		if w.owner.Name == name {
			return w, true
		}
	}
	return want[W]{}, false
}

// winner returns the owner with precedence. It returns the zero name for the node and for a
// key without an owner.
func (t *table[K, W, C]) winner(key K) types.NamespacedName {
	if r := t.records.Get(key); r != nil && r.wanted() {
		return r.owner.Name
	}
	return nodeOwner.Name
}

// ownerCount returns the number of owners that want a record's key.
func (t *table[K, W, C]) ownerCount(r *record[K, W, C]) int {
	if !r.wanted() {
		return 0
	}
	return 1 + len(t.losers[r.key])
}

// owners returns all Services that want a key, the winner first. The node is not listed.
func (t *table[K, W, C]) owners(key K) []types.NamespacedName {
	r := t.records.Get(key)
	if r == nil || !r.wanted() {
		return nil
	}
	var out []types.NamespacedName
	if r.owner != nodeOwner {
		out = append(out, r.owner.Name)
	}
	for _, w := range t.losers[key] {
		if w.owner != nodeOwner {
			out = append(out, w.owner.Name)
		}
	}
	return out
}

// setCached records that the kernel has a value under a key.
func (t *table[K, W, C]) setCached(r *record[K, W, C], value C) {
	if !r.exists {
		r.exists = true
		t.existing++
	}
	r.cached = value
}

// clearCached records that the kernel does not have a key.
func (t *table[K, W, C]) clearCached(r *record[K, W, C]) {
	if !r.exists {
		return
	}
	var none C
	r.exists, r.cached = false, none
	t.existing--
	t.release(r)
}

// noteWritten notes that a key was written.
func (t *table[K, W, C]) noteWritten(r *record[K, W, C]) {
	if t.observing && !r.written {
		r.written = true
		t.written = append(t.written, r)
	}
}

// beginObserve begins to note which keys are written.
func (t *table[K, W, C]) beginObserve() {
	t.endObserve()
	t.observing = true
}

// endObserve forgets which keys were written, and deletes records that became idle.
func (t *table[K, W, C]) endObserve() {
	for _, r := range t.written {
		r.written = false
	}
	idle := t.idle
	t.observing, t.written, t.idle = false, nil, nil
	for _, r := range idle {
		if t.records.Get(r.key) == r {
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

// replaceAll replaces what an owner wants by n entries. It calls put for each entry that is
// new or differs from what the owner wanted before, then drop for each record in old that has
// no entry. It returns the records of the entries.
func replaceAll[K comparable, W, C any](
	t *table[K, W, C], owner *Owner, old []*record[K, W, C], n int, entryOf func(i int) entry[K, W],
	same func(a, b W) bool, put func(*record[K, W, C], entry[K, W]), drop func(*record[K, W, C]),
) []*record[K, W, C] {
	var records []*record[K, W, C]
	if n > 0 {
		records = make([]*record[K, W, C], 0, n)
	}
	for i := range n {
		e := entryOf(i)
		r := t.get(e.key)
		if was, wanted := t.wantOf(r, owner.Name); !wanted || was.precedence != e.precedence || !was.owner.Created.Equal(owner.Created) || !same(was.value, e.value) {
			put(r, e)
		}
		if !r.kept {
			r.kept = true
			records = append(records, r)
		}
	}
	for _, r := range old {
		if !r.kept {
			drop(r)
		}
	}
	for _, r := range records {
		r.kept = false
	}
	return records
}

// replace is replaceAll for entries that owners share.
func (t *table[K, W, C]) replace(owner *Owner, old []*record[K, W, C], n int, entryOf func(i int) entry[K, W], same func(a, b W) bool) []*record[K, W, C] {
	put := func(r *record[K, W, C], e entry[K, W]) { t.put(r, owner, e.precedence, e.value) }
	drop := func(r *record[K, W, C]) { t.drop(r, owner) }
	return replaceAll(t, owner, old, n, entryOf, same, put, drop)
}
