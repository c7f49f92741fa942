package apply

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

func owner(name string, second int64) *Owner {
	return &Owner{Name: types.NamespacedName{Namespace: "default", Name: name}, Created: time.Unix(second, 0)}
}

func TestTableOlderOwnerWinsAndYoungerTakesOver(t *testing.T) {
	l := newTable[string, int]()
	young, old := owner("a", 20), owner("b", 10)
	l.put("key", young, 0, 1)
	l.put("key", old, 0, 2)
	if v, _ := l.want("key"); v != 2 {
		t.Errorf("the younger owner has the key: %d", v)
	}
	l.put("key", old, 0, 3) // a new value keeps the place
	if v, _ := l.want("key"); v != 3 {
		t.Errorf("the winner's new value does not count: %d", v)
	}
	l.drop("key", old)
	if v, _ := l.want("key"); v != 1 {
		t.Errorf("the other owner did not take over: %d", v)
	}
	l.drop("key", young)
	if _, ok := l.want("key"); ok || len(l.desired) != 0 {
		t.Error("a key without an owner is still in the table")
	}
}

func TestTableSameAgeSortsByName(t *testing.T) {
	l := newTable[string, int]()
	l.put("key", owner("b", 10), 0, 1)
	l.put("key", owner("a", 10), 0, 2)
	if names := l.owners("key"); names[0].Name != "a" {
		t.Errorf("owners %v, want a first", names)
	}
}

func TestTableNodeComesFirstAndIsNoService(t *testing.T) {
	l := newTable[string, int]()
	l.put("key", owner("a", 10), 0, 1)
	l.put("key", nodeOwner, 0, 2)
	if v, _ := l.want("key"); v != 2 {
		t.Errorf("a Service has the node's key")
	}
	if names := l.owners("key"); !slices.Equal(names, []types.NamespacedName{owner("a", 0).Name}) {
		t.Errorf("owners %v, want only the Service", names)
	}
}

func TestTableRefusedKeysWaitForTheirOwnersRetry(t *testing.T) {
	l := newTable[string, int]()
	a, b := owner("a", 1), owner("b", 2)
	l.put("of a", a, 0, 1)
	l.put("of b", b, 0, 1)
	l.markStuck("of a")
	l.markStuck("of b")
	l.markStuck("of nobody")
	l.retry(a.Name)
	if _, dirty := l.dirty["of a"]; !dirty || len(l.dirty) != 1 {
		t.Errorf("after the retry of a: dirty %v", l.dirty)
	}
	l.retry(nodeOwner.Name)
	if _, dirty := l.dirty["of nobody"]; !dirty || len(l.dirty) != 2 {
		t.Errorf("after the retry of the zero name: dirty %v", l.dirty)
	}
	l.put("of b", b, 0, 2) // a change does not wait
	if _, dirty := l.dirty["of b"]; !dirty || len(l.stuck) != 0 {
		t.Errorf("after a change: dirty %v, stuck %v", l.dirty, l.stuck)
	}
}
