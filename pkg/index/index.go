// Package index finds values by a key that they contain.
package index

import (
	"hash/maphash"
	"iter"
	"math/bits"
	"math/rand/v2"

	"k8s.io/apimachinery/pkg/types"
)

// Index is a hash table of pointers to values. A map would store every key a second time, with
// spare slots of that size: 70 to 110 bytes for a name or a set member, where an Index needs
// about 14.
//
// The key of a value must not change while an Index holds the value. An Index is for one
// goroutine at a time.
type Index[K comparable, V any] struct {
	hash func(K) uint64
	key  func(*V) K
	// slots is a table with open addressing, whose size is a power of two.
	slots []*V
	// tags holds a byte of the hash for each slot, so that most values with other keys need not
	// be read.
	tags  []uint8
	count int
	used  int // slots that are not empty
}

// Tags of slots without a value. Probing continues after a removed value.
const (
	empty uint8 = iota
	removed
	firstTag
)

// New creates an Index. key returns the key of a value.
func New[K comparable, V any](hash func(K) uint64, key func(*V) K) Index[K, V] {
	return Index[K, V]{hash: hash, key: key}
}

// OfNames creates an Index of objects of the API by namespace and name.
func OfNames[V any](name func(*V) types.NamespacedName) Index[types.NamespacedName, V] {
	return New(hashName, name)
}

var seed = maphash.MakeSeed()

func hashName(n types.NamespacedName) uint64 {
	return maphash.String(seed, n.Name) ^ bits.RotateLeft64(maphash.String(seed, n.Namespace), 1)
}

func tagOf(hash uint64) uint8 { return max(uint8(hash>>56), firstTag) }

// slot returns the slot of a key or, if it has none, the first slot to put it into.
func (x *Index[K, V]) slot(key K, hash uint64) (at int, found bool) {
	mask, tag := len(x.slots)-1, tagOf(hash)
	free := -1
	for i := int(hash) & mask; ; i = (i + 1) & mask {
		switch t := x.tags[i]; {
		case t == tag && x.key(x.slots[i]) == key:
			return i, true
		case t == empty && free >= 0:
			return free, false
		case t == empty:
			return i, false
		case t == removed && free < 0:
			free = i
		}
	}
}

// Len returns the number of values.
func (x *Index[K, V]) Len() int { return x.count }

// Get returns the value with a key; nil if there is none.
func (x *Index[K, V]) Get(key K) *V {
	if x.count == 0 {
		return nil
	}
	if at, found := x.slot(key, x.hash(key)); found {
		return x.slots[at]
	}
	return nil
}

// Put adds a value. It replaces the value with the same key, if there is one.
func (x *Index[K, V]) Put(v *V) {
	if 8*(x.used+1) > 7*len(x.slots) {
		x.resize()
	}
	key := x.key(v)
	hash := x.hash(key)
	at, found := x.slot(key, hash)
	if !found {
		if x.tags[at] == empty {
			x.used++
		}
		x.count++
	}
	x.slots[at], x.tags[at] = v, tagOf(hash)
}

// resize adapts the number of slots to the number of values, and drops the slots of removed
// ones.
func (x *Index[K, V]) resize() {
	old := *x
	size := max(16, 1<<bits.Len(uint(x.count*3/2)))
	x.slots, x.tags, x.used = make([]*V, size), make([]uint8, size), x.count
	for v := range old.All() {
		key := x.key(v)
		hash := x.hash(key)
		at, _ := x.slot(key, hash)
		x.slots[at], x.tags[at] = v, tagOf(hash)
	}
}

// shrinkAbove is the number of slots up to which an Index keeps its memory when values are
// removed.
const shrinkAbove = 1024

// Delete removes the value with a key, if there is one. After many removals it releases memory.
func (x *Index[K, V]) Delete(key K) {
	if x.count == 0 {
		return
	}
	at, found := x.slot(key, x.hash(key))
	if !found {
		return
	}
	x.slots[at], x.tags[at] = nil, removed
	if x.count--; len(x.slots) > shrinkAbove && 8*x.count < len(x.slots) {
		x.resize()
	}
}

// All returns all values. Values may be added and removed during the iteration.
func (x *Index[K, V]) All() iter.Seq[*V] {
	return func(yield func(*V) bool) {
		for _, v := range x.slots {
			if v != nil && !yield(v) {
				return
			}
		}
	}
}

// Some returns the values of up to n slots, from a random one on.
func (x *Index[K, V]) Some(n int) iter.Seq[*V] {
	return func(yield func(*V) bool) {
		if len(x.slots) == 0 {
			return
		}
		start := rand.IntN(len(x.slots))
		for i := range min(n, len(x.slots)) {
			if v := x.slots[(start+i)%len(x.slots)]; v != nil && !yield(v) {
				return
			}
		}
	}
}
