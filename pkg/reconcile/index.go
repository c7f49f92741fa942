package reconcile

import (
	"encoding/binary"
	"iter"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// index finds the records of a table by key. It is a hash table of pointers with open
// addressing. A map would store every key a second time: about 70 bytes for a set member, and
// a Service has at least two members.
type index[K comparable, W, C any] struct {
	hash    func(K) uint64
	slots   []*record[K, W, C] // their number is a power of two
	deleted *record[K, W, C]   // takes the place of a removed record, so that probing continues
	count   int
	used    int // slots that are not nil
}

func newIndex[K comparable, W, C any](hash func(K) uint64) index[K, W, C] {
	return index[K, W, C]{hash: hash, deleted: &record[K, W, C]{}}
}

// slot returns the slot of a key or, if it has none, of the first slot to put it into.
func (x *index[K, W, C]) slot(key K) int {
	mask, free := len(x.slots)-1, -1
	for i := int(x.hash(key)) & mask; ; i = (i + 1) & mask {
		switch r := x.slots[i]; {
		case r == nil && free >= 0:
			return free
		case r == nil, r != x.deleted && r.key == key:
			return i
		case r == x.deleted && free < 0:
			free = i
		}
	}
}

// get returns the record of a key; nil if there is none.
func (x *index[K, W, C]) get(key K) *record[K, W, C] {
	if x.count == 0 {
		return nil
	}
	if r := x.slots[x.slot(key)]; r != x.deleted {
		return r
	}
	return nil
}

// add adds a record whose key has none.
func (x *index[K, W, C]) add(r *record[K, W, C]) {
	if 8*(x.used+1) > 7*len(x.slots) {
		x.resize()
	}
	i := x.slot(r.key)
	if x.slots[i] == nil {
		x.used++
	}
	x.slots[i] = r
	x.count++
}

// resize adapts the number of slots to the number of records, and drops the slots of deleted
// records.
func (x *index[K, W, C]) resize() {
	old := x.slots
	x.slots = make([]*record[K, W, C], max(16, 1<<bits.Len(uint(x.count*3/2))))
	x.used = x.count
	for _, r := range old {
		if r != nil && r != x.deleted {
			x.slots[x.slot(r.key)] = r
		}
	}
}

// remove removes a record, if the index has it. After many removals it releases memory.
func (x *index[K, W, C]) remove(r *record[K, W, C]) {
	if x.get(r.key) != r {
		return
	}
	x.slots[x.slot(r.key)] = x.deleted
	if x.count--; len(x.slots) > reusableSize && 8*x.count < len(x.slots) {
		x.resize()
	}
}

// all returns all records. Records may be added and removed during the iteration.
func (x *index[K, W, C]) all() iter.Seq[*record[K, W, C]] {
	return func(yield func(*record[K, W, C]) bool) {
		for _, r := range x.slots {
			if r != nil && r != x.deleted && !yield(r) {
				return
			}
		}
	}
}

// some returns the records of up to n slots, from a random one on.
func (x *index[K, W, C]) some(n int) iter.Seq[*record[K, W, C]] {
	return func(yield func(*record[K, W, C]) bool) {
		if len(x.slots) == 0 {
			return
		}
		start := rand.IntN(len(x.slots))
		for i := range min(n, len(x.slots)) {
			if r := x.slots[(start+i)%len(x.slots)]; r != nil && r != x.deleted && !yield(r) {
				return
			}
		}
	}
}

// seeds make hashes unpredictable: users choose addresses and ports.
var seeds = [2]uint64{rand.Uint64(), rand.Uint64()}

// hashAddr hashes an address and another value.
func hashAddr(a netip.Addr, more uint64) uint64 {
	b := a.As16()
	high, low := bits.Mul64(binary.NativeEndian.Uint64(b[:8])^more^seeds[0], binary.NativeEndian.Uint64(b[8:])^seeds[1])
	high, low = bits.Mul64(high^more^seeds[1], low^seeds[0])
	return high ^ low
}

func hashServer(k ipvs.Key) uint64 {
	return hashAddr(k.Addr, uint64(k.FWMark)<<32|uint64(k.Port)<<8|uint64(k.Protocol))
}

func hashMember(k memberKey) uint64 {
	h := hashAddr(k.addr, uint64(k.set)<<32|uint64(k.port)<<8|uint64(k.protocol))
	if k.more != (unique.Handle[memberRest]{}) {
		rest := k.more.Value()
		h ^= hashAddr(rest.addr2, 0) ^ hashAddr(rest.net.Addr(), uint64(rest.net.Bits()))
	}
	return h
}

func hashVIP(v plan.VIP) uint64 { return hashAddr(v.Addr, 0) }
