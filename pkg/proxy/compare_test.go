package proxy

import (
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
)

// TestChangeDoesNotWaitForAComparison changes a Service while a reading of thousands is
// being compared.
func TestChangeDoesNotWaitForAComparison(t *testing.T) {
	p, w := still(t, 3000)
	ctx := klog.NewContext(t.Context(), klog.Background())
	if !p.prepare(ctx) {
		t.Fatal("the kernel cannot be read")
	}
	p.start(ctx)
	p.inbox.deleted()
	turn := func() { p.turn(ctx, time.Now()) }
	turn()
	_, ready := p.nextWake()
	<-ready
	turn()
	turn()
	w.slice("web7", "10.244.0.2", "10.244.1.1")
	turn()
	compares := func() bool {
		next, _ := p.reconciler.Next(time.Now())
		return !next.After(time.Now())
	}
	if !compares() || w.compare > 0 || !strings.Contains(w.node.IPVS.Dump(), "-a -t 10.96.0.8:80 -r 10.244.1.1:8000 -m -w 1") {
		t.Errorf("comparison in progress: %t; web7 is:\n%s", compares(), grep(w.node.IPVS.Dump(), "10.96.0.8:80"))
	}
	w.taken()
	turns := 2
	for ; w.compare == 0; turns++ {
		if next, _ := p.nextWake(); next.After(time.Now()) {
			t.Fatal("the comparison was abandoned")
		}
		turn()
	}
	if turns < 10 {
		t.Errorf("a comparison in %d turns", turns)
	}
	if got := w.taken(); len(got) > 0 {
		t.Errorf("writes during the comparison counted as differences: %q", got)
	}
}

// firstServer is the virtual server of the first Service.
var firstServer = ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}

// clearIPVS does what ipvsadm -C does.
func clearIPVS(t *testing.T, k *ipvs.Fake) {
	t.Helper()
	state, err := k.Observe()
	if err != nil {
		t.Fatal(err)
	}
	for key := range state {
		k.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: key}})
	}
}

// TestMassDeletionIsRepaired deletes everything in IPVS, or in a set. The kernel does
// not report it, and the periodic comparison is half a minute away.
func TestMassDeletionIsRepaired(t *testing.T) {
	for name, damage := range map[string]func(*testing.T, *world, *ipset.Fake){
		"ipvsadm -C": func(t *testing.T, w *world, _ *ipset.Fake) { clearIPVS(t, w.node.IPVS) },
		"ipset flush": func(t *testing.T, _ *world, sets *ipset.Fake) {
			state, err := sets.Observe(nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range state {
				for e := range s.Entries {
					sets.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: s.Set, Entry: e}})
				}
			}
		},
		"a weight": func(_ *testing.T, w *world, _ *ipset.Fake) {
			w.node.IPVS.Apply([]ipvs.Change{{Op: ipvs.UpdateRealServer, Key: firstServer, Dest: netip.MustParseAddrPort("10.244.0.1:8000"), RealServer: ipvs.RealServer{Weight: 7}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			sets := ipset.NewFake()
			run(t, func(o *Options) { o.Kernel.IPSet = sets }, func(w *world) {
				w.service("a", "10.96.0.1", "10.244.0.1")
				w.service("b", "10.96.0.2", "10.244.0.2")
				w.synced()
				w.sleep(5 * time.Second)
				whole := w.node.IPVS.Dump() + sets.Dump()
				compared := w.compare
				w.sleep(10 * time.Second)
				if w.compare != compared {
					t.Fatal("compared for no reason")
				}
				damage(t, w, sets)
				w.sleep(time.Second)
				if got := w.node.IPVS.Dump() + sets.Dump(); got != whole {
					t.Errorf("after a second:\n%s\nwant\n%s", got, whole)
				}
			})
		})
	}
}

// TestDeletionAmongManyIsRepaired deletes one of thousands, or all of them. The count of
// everything changes, so the next check of every second finds it.
func TestDeletionAmongManyIsRepaired(t *testing.T) {
	const services = 3000
	sets := ipset.NewFake()
	run(t, func(o *Options) { o.Kernel.IPSet = sets }, func(w *world) {
		for i := range services {
			w.service(fmt.Sprintf("web%d", i), fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), "10.244.0.1")
		}
		w.synced()
		w.sleep(5 * time.Second)
		whole := w.node.IPVS.Dump() + sets.Dump()
		last := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.11.250"), Port: 80}
		var clusterIPs ipset.Set
		entry := ipset.Entry{Addr: last.Addr, Protocol: ip.TCP, Port: 80}
		state, err := sets.Observe(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range state {
			if _, ok := s.Entries[entry]; ok {
				clusterIPs = s.Set
			}
		}
		for _, damage := range []struct {
			name string
			do   func()
		}{
			{"one virtual server", func() { w.node.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: last}}) }},
			{"one member", func() { sets.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: clusterIPs, Entry: entry}}) }},
			{"all virtual servers", func() { clearIPVS(t, w.node.IPVS) }},
		} {
			damage.do()
			if w.node.IPVS.Dump()+sets.Dump() == whole {
				t.Fatalf("%s is not deleted", damage.name)
			}
			w.sleep(3 * time.Second)
			if got := w.node.IPVS.Dump() + sets.Dump(); got != whole {
				t.Errorf("%s: after 3 s, %d lines are there, want %d", damage.name, strings.Count(got, "\n"), strings.Count(whole, "\n"))
			}
		}
	})
}

// TestForeignServersReduceLooks makes another program change its own virtual
// servers all the time.
func TestForeignServersReduceLooks(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("a", "10.96.0.1", "10.244.0.1")
		w.synced()
		w.sleep(5 * time.Second)
		compared := w.compare
		other := ipvs.Key{Protocol: ip.TCP, Addr: firstServer.Addr, Port: 9999}
		for i := range 300 {
			op := ipvs.AddVirtualServer
			if i%2 > 0 {
				op = ipvs.DeleteVirtualServer
			}
			w.node.IPVS.Apply([]ipvs.Change{{Op: op, Key: other, VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
			w.sleep(time.Second)
		}
		if n := w.compare - compared; n > 10+5*4 {
			t.Errorf("%d comparisons in 5 minutes, 10 of them periodic", n)
		}
	})
}

// TestRulesAreReadAfterChanges checks that rules are read only for a reason.
func TestRulesAreReadAfterChanges(t *testing.T) {
	for _, watched := range []bool{true, false} {
		read := &countedNAT{}
		run(t, func(o *Options) {
			o.RulesWatched = watched
			read.NAT = o.Kernel.NAT[ip.IPv4]
			o.Kernel.NAT[ip.IPv4] = read
		}, func(w *world) {
			w.service("a", "10.96.0.1", "10.244.0.1")
			w.synced()
			w.sleep(time.Second)
			before := read.times.Load()
			w.sleep(10 * time.Minute)
			if n := read.times.Load() - before; (n == 0) != watched {
				t.Errorf("watched %t: %d times in 10 minutes", watched, n)
			}
			before = read.times.Load()
			w.sink.(*inbox).rulesChanged()
			w.sleep(3 * time.Second)
			if read.times.Load() == before {
				t.Errorf("watched %t: not read after a change", watched)
			}
			before = read.times.Load()
			w.sleep(21 * time.Minute)
			if read.times.Load() == before {
				t.Errorf("watched %t: never read without a change", watched)
			}
		})
	}
}

type countedNAT struct {
	reconcile.NAT
	times atomic.Int32
}

func (n *countedNAT) Observe(own nat.Owned) (nat.State, error) {
	n.times.Add(1)
	return n.NAT.Observe(own)
}

func grep(text, what string) string {
	var out []string
	for _, line := range strings.Split(text, "\n") {
		if strings.Contains(line, what) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}
