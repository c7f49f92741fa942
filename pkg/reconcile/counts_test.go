package reconcile

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// TestSuspicious expects suspicion of changes by other programs, and none of our own.
func TestSuspicious(t *testing.T) {
	dest := netip.MustParseAddrPort("10.244.0.2:8000")
	k := key(ip.TCP, "10.96.0.1:80")
	clusterIPs := ipset.Set{Name: string(plan.ClusterIP), Type: ipset.HashIPPort, Family: ip.IPv4}
	for name, tc := range map[string]struct {
		damage  func(*world)
		within  int // calls
		differs extent
	}{
		"a virtual server is deleted": {func(w *world) {
			w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: k}})
		}, 1, extent{servers: true}},
		"a virtual server is added": {func(w *world) {
			w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: key(ip.TCP, "192.0.2.1:1"), VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
		}, 1, extent{servers: true}},
		"a member is deleted": {func(w *world) {
			w.IPSet.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: clusterIPs, Entry: plan.EntryOf(k)}})
		}, 1, state},
		"a set is destroyed": {func(w *world) {
			w.NAT[ip.IPv4].Apply(nil)
			w.IPSet.Apply([]ipset.Change{{Op: ipset.DestroySet, Set: clusterIPs}})
		}, 1, state},
		"a real server is deleted": {func(w *world) {
			w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteRealServer, Key: k, Dest: dest}})
		}, 30, extent{servers: true}},
		"a weight is changed": {func(w *world) {
			w.IPVS.Apply([]ipvs.Change{{Op: ipvs.UpdateRealServer, Key: k, Dest: dest, RealServer: ipvs.RealServer{Weight: 9}}})
		}, 30, extent{servers: true}},
		"those of IPv6 are gone": {func(w *world) {
			for i := range 20 {
				w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: key(ip.TCP, fmt.Sprintf("[fd00:96::%d]:80", i+1))}})
			}
		}, 12, extent{servers: true}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: key(ip.TCP, "192.0.2.9:9"), VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
			w.start()
			for i := range 20 {
				w.mustApply(clusterIP(fmt.Sprint("a", i), fmt.Sprintf("10.96.0.%d", i+1), "10.244.0.2:8000"))
				w.mustApply(clusterIP(fmt.Sprint("b", i), fmt.Sprintf("fd00:96::%d", i+1), "[fd00:244::2]:8000"))
			}
			w.mustApply(clusterIP("gone", "10.96.0.99", "10.244.0.2:8000"))
			w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "gone"})
			w.mustApply(clusterIP("a1", "10.96.0.2", "10.244.0.3:8000"))
			w.IPVS.SetConnections(key(ip.TCP, "10.96.0.2:80"), dest, ipvs.Connections{})
			w.drain()
			for range 30 {
				if w.reconciler.spotChecker.differs() != (extent{}) {
					t.Fatal("suspects what we wrote ourselves")
				}
			}
			tc.damage(w)
			for range tc.within {
				if got := w.reconciler.spotChecker.differs(); got != (extent{}) {
					if got != tc.differs {
						t.Errorf("%+v differs, want %+v", got, tc.differs)
					}
					return
				}
			}
			t.Errorf("not seen in %d calls", tc.within)
		})
	}
}

// TestLargeSetsSuspicious expects suspicion of an emptied set at once, and of one deleted member
// after all large sets were counted.
func TestLargeSetsSuspicious(t *testing.T) {
	w := newWorld(t)
	w.start()
	for i := range countedAtOnce + 1 {
		w.set(clusterIP(fmt.Sprint("a", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255), "10.244.0.2:8000"),
			clusterIP(fmt.Sprint("b", i), fmt.Sprintf("fd00:96::%x", i+1), "[fd00:244::2]:8000"))
	}
	w.apply()
	var calls int // that count every large set
	var names []string
	for _, set := range w.reconciler.sets.list {
		if set.existing > smallSet {
			names = append(names, set.name)
			calls += set.existing
		}
	}
	calls = calls/countedAtOnce + 1
	if len(names) < 2 || calls < 4 {
		t.Fatalf("%d large sets, counted by %d calls, want 2 or more by 4 or more", len(names), calls)
	}
	for range 2 * calls {
		if w.reconciler.spotChecker.differs() != (extent{}) {
			t.Fatal("suspects what we wrote ourselves")
		}
	}
	for _, name := range names {
		state, err := w.IPSet.Observe(func(n string) bool { return n == name })
		if err != nil {
			t.Fatal(err)
		}
		contents := state[name]
		var changes []ipset.Change
		for e := range contents.Entries {
			changes = append(changes, ipset.Change{Op: ipset.DeleteEntry, Set: contents.Set, Entry: e})
		}
		w.IPSet.Apply(changes[:1])
		seen := 0
		for seen < calls && w.reconciler.spotChecker.differs() == (extent{}) {
			seen++
		}
		if seen == calls {
			t.Errorf("a deleted member of %s was not noticed in %d spot checks", name, calls)
		}
		w.IPSet.Apply(changes)
		if w.reconciler.spotChecker.differs() == (extent{}) {
			t.Errorf("the emptied set %s was not noticed at once", name)
		}
		for i, c := range changes {
			changes[i] = ipset.Change{Op: ipset.AddEntry, Set: c.Set, Entry: c.Entry, Mark: contents.Entries[c.Entry]}
		}
		w.IPSet.Apply(changes)
	}
}

// spotCosts is what spot checks ask of the kernel.
type spotCosts struct {
	counted int // members of counted sets
	lookups int // members and virtual servers
}

type countedSets struct {
	IPSet
	*spotCosts
}

type countedServers struct {
	IPVS
	*spotCosts
}

func (c countedSets) Sizes(names []string) (map[string]int, error) {
	sizes, err := c.IPSet.Sizes(names)
	for _, n := range sizes {
		c.counted += max(n, 0)
	}
	return sizes, err
}

func (c countedSets) Has(s ipset.Set, e ipset.Entry) (bool, error) {
	c.lookups++
	return c.IPSet.Has(s, e)
}

func (c countedServers) RealServers(k ipvs.Key) (map[netip.AddrPort]ipvs.RealServer, error) {
	c.lookups++
	return c.IPVS.RealServers(k)
}

// TestSpotCheckCost expects that what a spot check counts and looks up does not grow with the
// number of Services.
func TestSpotCheckCost(t *testing.T) {
	const calls = 200
	for _, services := range []int{2 * countedAtOnce, 4 * countedAtOnce} {
		w := newWorld(t)
		w.start()
		for i := range services {
			w.set(clusterIP(fmt.Sprint("a", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255), "10.244.0.2:8000"))
		}
		w.apply()
		sets, small := 0, 0
		for _, set := range w.reconciler.sets.list {
			if set.existing > smallSet {
				sets++
			} else {
				small += set.existing
			}
		}
		var costs spotCosts
		k := &w.reconciler.kernel
		k.IPSet, k.IPVS = countedSets{k.IPSet, &costs}, countedServers{k.IPVS, &costs}
		for range calls {
			if w.reconciler.spotChecker.differs() != (extent{}) {
				t.Fatal("suspects what we wrote ourselves")
			}
		}
		if limit := countedAtOnce + small; sets == 0 || costs.counted > calls*limit || costs.counted < calls*limit/2 {
			t.Errorf("%d Services: %d members of %d large sets counted in each call, want at most %d, and half of it", services, costs.counted/calls, sets, limit)
		}
		if limit := checkedAtOnce + sets; costs.lookups > calls*limit {
			t.Errorf("%d Services: %d lookups in each call, want at most %d", services, costs.lookups/calls, limit)
		}
	}
}

// wrongServer reads one virtual server in another way than Observe, always.
type wrongServer struct {
	IPVS
	key   ipvs.Key
	asked map[ipvs.Key]int
}

func (s wrongServer) RealServers(k ipvs.Key) (map[netip.AddrPort]ipvs.RealServer, error) {
	s.asked[k]++
	if k == s.key {
		return nil, nil
	}
	return s.IPVS.RealServers(k)
}

// TestSpotChecksGoOn expects that a difference which no comparison finds does not keep the other
// virtual servers from being checked.
func TestSpotChecksGoOn(t *testing.T) {
	w := newWorld(t)
	w.start()
	const services = 40
	for i := range services {
		w.mustApply(clusterIP(fmt.Sprint("a", i), fmt.Sprintf("10.96.0.%d", i+1), "10.244.0.2:8000"))
	}
	s := wrongServer{w.reconciler.kernel.IPVS, key(ip.TCP, "10.96.0.1:80"), map[ipvs.Key]int{}}
	w.reconciler.kernel.IPVS = s
	for range 3 * services {
		w.reconciler.spotChecker.differs()
	}
	if len(s.asked) != services {
		t.Errorf("%d of %d virtual servers were checked", len(s.asked), services)
	}
}
