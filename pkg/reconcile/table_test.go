package reconcile

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

func owner(name string, second int64) *Owner {
	return &Owner{Name: types.NamespacedName{Namespace: "default", Name: name}, Created: time.Unix(second, 0)}
}

// letters is a table with easy keys and values.
type letters struct{ table[string, int, int] }

func newLetters() *letters {
	return &letters{newTable[string, int, int](func(s string) uint64 { return uint64(len(s)) })}
}

func (l *letters) set(key string, o *Owner, value int) { l.put(l.get(key), o, 0, value) }

// want returns the desired value of a key; 0 if there is none.
func (l *letters) want(key string) int {
	if r := l.records.Get(key); r != nil {
		return r.value
	}
	return 0
}

// dirty returns the dirty keys in order.
func (l *letters) dirty() (keys []string) {
	for r := range l.allDirty() {
		keys = append(keys, r.key)
	}
	slices.Sort(keys)
	return keys
}

// checkTable verifies that what a table keeps beside its records agrees with them.
func checkTable[K comparable, W, C any](t testing.TB, table *table[K, W, C]) {
	t.Helper()
	held, dirty := 0, 0
	for r := range table.records.All() {
		key := r.key
		if r.exists {
			held++
		}
		if r.dirty {
			dirty++
		}
		if table.records.Get(key) != r || len(table.losers[key]) > 0 && !r.wanted() {
			t.Errorf("record %v under key %v", r, key)
		}
		if !r.wanted() && !r.exists && !r.dirty && table.stuck[key] == nil && !table.observing {
			t.Errorf("%v is neither wanted nor there, and still has a record", key)
		}
	}
	queued := 0
	for r := range table.allDirty() {
		queued++
		if table.records.Get(r.key) != r {
			t.Errorf("%v is dirty and has no record", r.key)
		}
	}
	if table.existing != held || queued != dirty {
		t.Errorf("%d records counted, there are %d; %d are dirty, %d of them queued", table.existing, held, dirty, queued)
	}
	for key, r := range table.stuck {
		if table.records.Get(key) != r || r.dirty {
			t.Errorf("%v is stuck, and dirty or without a record", key)
		}
	}
	for key, list := range table.losers {
		if all := append([]want[W]{table.records.Get(key).winner()}, list...); !slices.IsSortedFunc(all, func(a, b want[W]) int {
			if a.before(b) {
				return -1
			}
			return 1
		}) {
			t.Errorf("the owners of %v are not in order", key)
		}
	}
}

func TestTableOlderOwnerWinsAndYoungerTakesOver(t *testing.T) {
	l := newLetters()
	young, old := owner("a", 20), owner("b", 10)
	l.set("key", young, 1)
	l.set("key", old, 2)
	if v := l.want("key"); v != 2 {
		t.Errorf("the younger owner has the key: %d", v)
	}
	l.set("key", old, 3) // a new value keeps the place
	if v := l.want("key"); v != 3 {
		t.Errorf("the winner's new value does not count: %d", v)
	}
	checkTable(t, &l.table)
	l.drop(l.get("key"), old)
	if v := l.want("key"); v != 1 {
		t.Errorf("the other owner did not take over: %d", v)
	}
	l.drop(l.get("key"), young)
	l.setClean(l.get("key"))
	if l.records.Len()+len(l.losers) != 0 {
		t.Error("a key without an owner is still in the table")
	}
}

func TestTableRightPrecedesAge(t *testing.T) {
	l := newLetters()
	r := l.get("key")
	l.put(r, owner("old", 10), 1, 1)
	l.put(r, owner("young", 20), 0, 2)
	if r.value != 2 {
		t.Error("the weaker precedence won")
	}
	l.put(r, owner("young", 20), 2, 2) // now weaker
	if r.value != 1 {
		t.Error("a precedence that became weaker kept the key")
	}
	checkTable(t, &l.table)
}

func TestTableSameAgeSortsByName(t *testing.T) {
	l := newLetters()
	l.set("key", owner("b", 10), 1)
	l.set("key", owner("a", 10), 2)
	if names := l.owners("key"); names[0].Name != "a" {
		t.Errorf("owners %v, want a first", names)
	}
}

func TestTableNodeComesFirstAndIsNoService(t *testing.T) {
	l := newLetters()
	l.set("key", owner("a", 10), 1)
	l.set("key", nodeOwner, 2)
	if v := l.want("key"); v != 2 {
		t.Errorf("a Service has the node's key")
	}
	if names := l.owners("key"); !slices.Equal(names, []types.NamespacedName{owner("a", 0).Name}) {
		t.Errorf("owners %v, want only the Service", names)
	}
}

func TestTableRefusedKeysWaitForTheirOwnersRetry(t *testing.T) {
	l := newLetters()
	a, b := owner("a", 1), owner("b", 2)
	l.set("of a", a, 1)
	l.set("of b", b, 1)
	for _, key := range []string{"of a", "of b", "unowned"} {
		l.setStuck(l.get(key))
	}
	l.compact()
	if l.retry(map[types.NamespacedName]bool{a.Name: true}); !slices.Equal(l.dirty(), []string{"of a"}) {
		t.Errorf("after the retry of a: dirty %v", l.dirty())
	}
	if l.retry(map[types.NamespacedName]bool{nodeOwner.Name: true}); !slices.Equal(l.dirty(), []string{"of a", "unowned"}) {
		t.Errorf("after the retry of the zero name: dirty %v", l.dirty())
	}
	l.compared(l.get("of b"), true)
	if l.isDirty("of b") {
		t.Error("a comparison did not leave a stuck key alone")
	}
	l.set("of b", b, 2) // a change does not wait
	if !l.isDirty("of b") || len(l.stuck) != 0 {
		t.Errorf("after a change: dirty %v, stuck %v", l.dirty(), l.stuck)
	}
	checkTable(t, &l.table)
}

// A record stays while the kernel is read, because the observed value may be older than its
// deletion.
func TestTableKeepsWrittenRecordsWhileObserving(t *testing.T) {
	l := newLetters()
	r := l.get("key")
	l.setCached(r, 1)
	l.beginObserve()
	l.noteWritten(r)
	l.clearCached(r)
	if again := l.get("key"); again != r || !again.written {
		t.Error("the deletion is forgotten")
	}
	l.endObserve()
	if l.records.Len() != 0 || r.written {
		t.Error("the record is kept after the resync")
	}
}

func TestTableReplacesWhatAnOwnerWants(t *testing.T) {
	l := newLetters()
	o := owner("a", 1)
	list := []entry[string, int]{{key: "b", value: 1}, {key: "c", value: 1}, {key: "c", value: 1}}
	set := func(old []*record[string, int, int], want []entry[string, int]) []*record[string, int, int] {
		for r := range l.records.All() {
			l.setClean(r)
		}
		return l.replace(o, old, len(want), func(i int) entry[string, int] { return want[i] }, func(a, b int) bool { return a == b })
	}
	had := set(nil, list)
	if len(had) != 2 || !slices.Equal(l.dirty(), []string{"b", "c"}) {
		t.Errorf("%d records, dirty %v", len(had), l.dirty())
	}
	had = set(had, []entry[string, int]{{key: "c", value: 1}, {key: "d", value: 1}})
	if len(had) != 2 || !slices.Equal(l.dirty(), []string{"b", "d"}) || l.want("b") != 0 || l.want("c") != 1 {
		t.Errorf("%d records, dirty %v", len(had), l.dirty())
	}
	had = set(had, []entry[string, int]{{key: "c", value: 2}, {key: "d", value: 1}})
	if !slices.Equal(l.dirty(), []string{"c"}) {
		t.Errorf("after a new value: dirty %v", l.dirty())
	}
	o = owner("a", 2) // deleted and created again
	if set(had, list); !slices.Equal(l.dirty(), []string{"b", "c", "d"}) {
		t.Errorf("after another creation: dirty %v", l.dirty())
	}
}
