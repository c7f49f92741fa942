package apply

import (
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// Owner is who wants something in the kernel: a Service, or the node itself
// (nodeOwner).
type Owner struct {
	Name    types.NamespacedName
	Created time.Time
}

// nodeOwner wants what no Service does. It comes before every Service.
var nodeOwner = &Owner{}

// before orders owners that want the same thing: the older one has it, and of
// two of the same second the one whose name comes first, on every node alike.
func (o *Owner) before(p *Owner) bool {
	if !o.Created.Equal(p.Created) {
		return o.Created.Before(p.Created)
	}
	return strings.Compare(o.Name.String(), p.Name.String()) < 0
}

// claim is what one owner wants under a key, and by what right.
type claim[V any] struct {
	owner *Owner
	right plan.Right
	value V
}

// before orders claims on one key: by their right, and then by their owners.
func (c claim[V]) before(d claim[V]) bool {
	if c.right != d.right {
		return c.right < d.right
	}
	return c.owner.before(d.owner)
}

// ledger knows who wants what. Several owners may want the same key: for a
// set's member or an address that is a count of references; for a virtual
// server it is a conflict, which the first claim wins until it goes.
//
// A key is dirty from when its winning value may have changed until the
// kernel is known to hold it.
type ledger[K comparable, V any] struct {
	claims map[K][]claim[V] // never empty; the winner first
	// counted is called, unless it is nil, when a key gets its first claim (1) or
	// loses its last one (-1).
	counted func(key K, by int)
	dirty   map[K]struct{}
	most    int // that dirty has held
	// stuck are keys that the kernel refused, and that wait for their retry
	// so as not to be tried with every other change.
	stuck map[K]struct{}
}

func newLedger[K comparable, V any]() ledger[K, V] {
	return ledger[K, V]{claims: map[K][]claim[V]{}, dirty: map[K]struct{}{}, stuck: map[K]struct{}{}}
}

// mark makes a key dirty.
func (l *ledger[K, V]) mark(key K) {
	delete(l.stuck, key)
	l.dirty[key] = struct{}{}
	l.most = max(l.most, len(l.dirty))
}

// compared notes what an observation found. A key that waits for its retry
// goes on waiting.
func (l *ledger[K, V]) compared(key K, differs bool) {
	if _, waits := l.stuck[key]; differs && !waits {
		l.mark(key)
	} else if !differs {
		l.clean(key)
	}
}

// clean says that the kernel holds what is wanted.
func (l *ledger[K, V]) clean(key K) {
	delete(l.stuck, key)
	delete(l.dirty, key)
}

// refused puts a key aside until its retry.
func (l *ledger[K, V]) refused(key K) {
	delete(l.dirty, key)
	l.stuck[key] = struct{}{}
}

// fewDirty is how many keys are dirty with a batch of Services at the start, or
// less: a map that holds as many goes on to be used.
const fewDirty = 1024

// rest gives back what the map of dirty keys has grown to: to go through it
// costs its size, however little there is in it.
func (l *ledger[K, V]) rest() {
	if len(l.dirty) == 0 && l.most > fewDirty {
		l.dirty, l.most = map[K]struct{}{}, 0
	}
}

// retry makes stuck keys dirty again: all those that an owner wants, or,
// without a name, those that nobody but the node wants.
func (l *ledger[K, V]) retry(name types.NamespacedName) {
	for key := range l.stuck {
		owners := l.owners(key)
		if slices.Contains(owners, name) || len(owners) == 0 && name == nodeOwner.Name {
			l.mark(key)
		}
	}
}

// put sets what an owner wants under a key. For what several may have all have
// one right.
func (l *ledger[K, V]) put(key K, owner *Owner, right plan.Right, value V) {
	had := len(l.claims[key]) > 0
	list, put := l.without(key, owner), claim[V]{owner, right, value}
	at, _ := slices.BinarySearchFunc(list, put, func(c, put claim[V]) int {
		if c.before(put) {
			return -1
		}
		return 1
	})
	l.claims[key] = slices.Insert(list, at, put)
	if l.counted != nil && !had {
		l.counted(key, 1)
	}
	l.mark(key)
}

// drop takes an owner's claim back.
func (l *ledger[K, V]) drop(key K, owner *Owner) {
	had := len(l.claims[key]) > 0
	list := l.without(key, owner)
	if len(list) == 0 {
		delete(l.claims, key)
		if l.counted != nil && had {
			l.counted(key, -1)
		}
	} else {
		l.claims[key] = list
	}
	l.mark(key)
}

// without is the claims on a key, an owner's left out.
func (l *ledger[K, V]) without(key K, owner *Owner) []claim[V] {
	return slices.DeleteFunc(l.claims[key], func(c claim[V]) bool { return c.owner.Name == owner.Name })
}

// of is what one owner wants under a key.
func (l *ledger[K, V]) of(key K, name types.NamespacedName) (V, bool) {
	for _, c := range l.claims[key] {
		if c.owner.Name == name {
			return c.value, true
		}
	}
	var none V
	return none, false
}

// want is the winner's value.
func (l *ledger[K, V]) want(key K) (V, bool) {
	list := l.claims[key]
	if len(list) == 0 {
		var none V
		return none, false
	}
	return list[0].value, true
}

// winner is whose value that is; the zero name if nobody's but the node's.
func (l *ledger[K, V]) winner(key K) types.NamespacedName {
	if list := l.claims[key]; len(list) > 0 {
		return list[0].owner.Name
	}
	return nodeOwner.Name
}

// owners are all who want a key, the winner first. The node is not listed.
func (l *ledger[K, V]) owners(key K) []types.NamespacedName {
	var out []types.NamespacedName
	for _, c := range l.claims[key] {
		if c.owner != nodeOwner {
			out = append(out, c.owner.Name)
		}
	}
	return out
}
