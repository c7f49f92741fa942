package apiserver

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// TestGuard delivers lists that lack objects. One that lacks all of them is ignored until
// a list has objects again.
func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var removed []string
		s := newStore(&mu, klog.Background(), func(*corev1.Service) {}, func(n types.NamespacedName) { removed = append(removed, n.Name) })
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		list := func(names ...string) {
			t.Helper()
			var objects []*corev1.Service
			for _, n := range names {
				objects = append(objects, &corev1.Service{ObjectMeta: meta(n)})
			}
			must(replace(s, objects...))
		}
		one := func(do func(any) error, names ...string) {
			t.Helper()
			for _, n := range names {
				must(do(&corev1.Service{ObjectMeta: meta(n)}))
			}
		}
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
		all := []string{"kubernetes"}
		for i := range 5 {
			all = append(all, fmt.Sprint("web", i))
		}
		list(all...)
		one(s.Delete, "web0")
		check("a deletion", "web0")
		list("kubernetes", "web2", "web3", "web4")
		check("a list without one", "web1")
		list("kubernetes")
		check("a list of kubernetes alone")
		list()
		check("a list of nothing")
		one(s.Update, "kubernetes")
		check("kubernetes once more")
		one(s.Add, "web3", "web9")
		check("the data are back, but for two", "web2", "web4")
		one(s.Delete, "web3", "web9")
		check("all deleted, one by one", "web3", "web9")
		one(s.Add, "last")
		list("kubernetes")
		check("the only one is not listed", "last")
		list(all...)
		list("kubernetes")
		for range 2000 {
			one(s.Update, "web1")
			time.Sleep(settleTime * 4 / 5)
		}
		mu.Lock()
		if len(removed) == 0 {
			t.Error("nothing is removed while an object changes all the time")
		}
		mu.Unlock()
		check("the data are back, but for some", "web0", "web2", "web3", "web4")
		list(all...)
		list("kubernetes")
		list("kubernetes", "web1", "web4")
		check("a list with some of what was kept", "web0", "web2", "web3")
	})
}
