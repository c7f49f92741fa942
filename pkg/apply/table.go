package apply

import (
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
type desired[V any] struct {
	owner *Owner
	right plan.Precedence
	value V
}

// before orders the values of one key by precedence, then by owner.
func (c desired[V]) before(d desired[V]) bool {
	if c.right != d.right {
		return c.right < d.right
	}
	return c.owner.before(d.owner)
}

// table is the desired state of one kind of object, by key. Several owners may want the same
// key. For a set member or a VIP this counts references; for a virtual server it is a
// conflict, which the first in order of precedence wins.
//
// A key is dirty from when its winning value may have changed until the kernel is known to
// hold it.
type table[K comparable, V any] struct {
	desired map[K][]desired[V] // lists are never empty; the winner is first
	// counted, if not nil, is called with 1 when a key gets its first owner, and with -1
	// when it loses its last one.
	counted func(key K, by int)
	dirty   map[K]struct{}
	peak    int // largest size of dirty since it was allocated
	// stuck are keys that the kernel refused. They wait for a retry, so that not every
	// Flush repeats them.
	stuck map[K]struct{}
}

func newTable[K comparable, V any]() table[K, V] {
	return table[K, V]{desired: map[K][]desired[V]{}, dirty: map[K]struct{}{}, stuck: map[K]struct{}{}}
}

// markDirty makes a key dirty.
func (t *table[K, V]) markDirty(key K) {
	delete(t.stuck, key)
	t.dirty[key] = struct{}{}
	t.peak = max(t.peak, len(t.dirty))
}

// setDirty records the result of comparing a key. A stuck key that differs stays stuck.
func (t *table[K, V]) setDirty(key K, differs bool) {
	if _, waits := t.stuck[key]; differs && !waits {
		t.markDirty(key)
	} else if !differs {
		t.markClean(key)
	}
}

// markClean records that the kernel holds the desired value.
func (t *table[K, V]) markClean(key K) {
	delete(t.stuck, key)
	delete(t.dirty, key)
}

// markStuck sets a key aside until its retry.
func (t *table[K, V]) markStuck(key K) {
	delete(t.dirty, key)
	t.stuck[key] = struct{}{}
}

// reusableSize is about the number of keys that one batch of Services makes dirty at
// startup. A map that has held at most as many is reused.
const reusableSize = 1024

// shrink replaces a dirty map that has grown large. Iterating over a map costs its capacity,
// not its length.
func (t *table[K, V]) shrink() {
	if len(t.dirty) == 0 && t.peak > reusableSize {
		t.dirty, t.peak = map[K]struct{}{}, 0
	}
}

// retry makes stuck keys dirty again: those that the named owner wants or, with the zero
// name, those that no Service wants.
func (t *table[K, V]) retry(name types.NamespacedName) {
	for key := range t.stuck {
		owners := t.owners(key)
		if slices.Contains(owners, name) || len(owners) == 0 && name == nodeOwner.Name {
			t.markDirty(key)
		}
	}
}

// put sets the value that an owner wants under a key. Members and VIPs, which owners share,
// all have precedence 0.
func (t *table[K, V]) put(key K, owner *Owner, right plan.Precedence, value V) {
	had := len(t.desired[key]) > 0
	list, put := t.without(key, owner), desired[V]{owner, right, value}
	at, _ := slices.BinarySearchFunc(list, put, func(c, put desired[V]) int {
		if c.before(put) {
			return -1
		}
		return 1
	})
	t.desired[key] = slices.Insert(list, at, put)
	if t.counted != nil && !had {
		t.counted(key, 1)
	}
	t.markDirty(key)
}

// drop removes the value that an owner wants under a key.
func (t *table[K, V]) drop(key K, owner *Owner) {
	had := len(t.desired[key]) > 0
	list := t.without(key, owner)
	if len(list) == 0 {
		delete(t.desired, key)
		if t.counted != nil && had {
			t.counted(key, -1)
		}
	} else {
		t.desired[key] = list
	}
	t.markDirty(key)
}

// without returns the values of a key except the owner's.
func (t *table[K, V]) without(key K, owner *Owner) []desired[V] {
	return slices.DeleteFunc(t.desired[key], func(c desired[V]) bool { return c.owner.Name == owner.Name })
}

// valueFor returns the value that one owner wants under a key.
func (t *table[K, V]) valueFor(key K, name types.NamespacedName) (V, bool) {
	for _, c := range t.desired[key] {
		if c.owner.Name == name {
			return c.value, true
		}
	}
	var none V
	return none, false
}

// want returns the desired value of a key: the winner's.
func (t *table[K, V]) want(key K) (V, bool) {
	list := t.desired[key]
	if len(list) == 0 {
		var none V
		return none, false
	}
	return list[0].value, true
}

// winner returns the owner of the desired value; the zero name for the node, or if there is
// none.
func (t *table[K, V]) winner(key K) types.NamespacedName {
	if list := t.desired[key]; len(list) > 0 {
		return list[0].owner.Name
	}
	return nodeOwner.Name
}

// owners returns all Services that want a key, the winner first. The node is not listed.
func (t *table[K, V]) owners(key K) []types.NamespacedName {
	var out []types.NamespacedName
	for _, c := range t.desired[key] {
		if c.owner != nodeOwner {
			out = append(out, c.owner.Name)
		}
	}
	return out
}
