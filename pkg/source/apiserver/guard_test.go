package apiserver

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// TestGuard has lists come that lack objects. One that lacks all of them is not
// believed, until there is one again.
func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var removed []string
		g := newGuard(&mu, "Services", klog.Background(), func(n types.NamespacedName) { removed = append(removed, n.Name) })
		name := func(n string) types.NamespacedName { return types.NamespacedName{Namespace: "default", Name: n} }
		check := func(what string, want ...string) {
			t.Helper()
			time.Sleep(time.Hour)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(removed)
			if !slices.Equal(removed, want) {
				t.Errorf("%s: removed %q, want %q", what, removed, want)
			}
			removed = nil
		}
		locked := func(do func(types.NamespacedName), names ...string) {
			mu.Lock()
			defer mu.Unlock()
			for _, n := range names {
				do(name(n))
			}
		}
		all := []string{"kubernetes"}
		for i := range 5 {
			all = append(all, fmt.Sprint("web", i))
		}
		locked(g.there, all...)
		locked(g.deleted, "web0")
		check("a deletion", "web0")
		locked(g.notListed, "web1")
		check("a list without one", "web1")
		locked(g.notListed, "web2", "web3", "web4")
		check("a list of kubernetes alone")
		locked(g.there, "kubernetes")
		check("kubernetes once more")
		locked(g.there, "web3", "web9")
		check("the data are back, but for two", "web2", "web4")
		locked(g.deleted, "web3", "web9")
		check("all deleted, one by one", "web3", "web9")
		locked(g.there, "last")
		locked(g.notListed, "last")
		check("the only one is not listed", "last")
	})
}
