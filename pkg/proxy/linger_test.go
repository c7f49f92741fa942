package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// network returns a node network with these addresses on eth0 and, with main, a default
// route through it.
func network(main bool, addresses ...string) routing.Inventory {
	eth0 := routing.Link{Index: 2, Name: "eth0", Up: true}
	for _, a := range addresses {
		eth0.Addresses = append(eth0.Addresses, routing.Address{Prefix: netip.MustParsePrefix(a), Global: true})
	}
	inv := routing.Inventory{Links: []routing.Link{eth0}}
	if main {
		inv.Defaults = []routing.Route{{Family: ip.IPv4, Table: 254, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: "eth0"}}
	}
	return inv
}

func TestLinger(t *testing.T) {
	l := newLinger()
	began := time.Now()
	for _, step := range []struct {
		after time.Duration
		inv   routing.Inventory
		gone  string
		main  int
		next  time.Duration // 0: nothing lingers
	}{
		{0, network(true, "192.0.2.1/24", "192.0.2.2/24", "fe80::1/64"), "[]", 1, 0},
		{time.Second, network(false, "192.0.2.2/24"), "[192.0.2.1]", 1, 31 * time.Second},
		{2 * time.Second, network(true, "192.0.2.1/24", "192.0.2.2/24"), "[]", 1, 0},
		{3 * time.Second, network(false), "[192.0.2.1 192.0.2.2]", 1, 33 * time.Second},
		{32 * time.Second, network(false, "192.0.2.2/24"), "[192.0.2.1]", 1, 33 * time.Second},
		{33 * time.Second, network(false, "192.0.2.2/24"), "[]", 1, 63 * time.Second},
		{63 * time.Second, network(false, "192.0.2.2/24"), "[]", 0, 0},
		{64 * time.Second, network(true, "192.0.2.2/24"), "[]", 1, 0},
		{65 * time.Second, routing.Inventory{}, "[192.0.2.2]", 0, 95 * time.Second}, // eth0 is removed
	} {
		present := len(step.inv.Defaults) > 0
		got := l.update(&step.inv, began.Add(step.after))
		if gone := l.mainGone()[ip.IPv4]; step.main == 1 && gone == present {
			t.Errorf("after %s: the default route is gone: %t", step.after, gone)
		}
		if fmt.Sprint(got) != step.gone || len(step.inv.Defaults) != step.main {
			t.Errorf("after %s: %s linger, and %d default routes; want %s and %d", step.after, got, len(step.inv.Defaults), step.gone, step.main)
		}
		if next := l.next(); next.IsZero() != (step.next == 0) || step.next != 0 && !next.Equal(began.Add(step.next)) {
			t.Errorf("after %s: the next is %s", step.after, next.Sub(began))
		}
	}
}

// An address that is removed and added again keeps the virtual servers of its node
// ports. One that stays away loses them after a time.
func TestAddressLingers(t *testing.T) {
	run(t, nil, func(w *world) {
		inventory := func(addresses ...string) {
			w.node.Routing.SetInventory(network(true, addresses...))
		}
		inventory("192.0.2.1/24", "192.0.2.2/24")
		w.nodePort("web", "10.96.0.10", 30080)
		w.slice("web", "10.244.0.2")
		w.synced()
		served := func(want bool, when string) {
			t.Helper()
			if got := w.realServersOf("192.0.2.1", 30080) == 1; got != want {
				t.Errorf("%s: served: %t, want %t", when, got, want)
			}
		}
		served(true, "to begin with")
		w.taken()
		inventory("192.0.2.2/24")
		w.sleep(300 * time.Millisecond)
		served(true, "for 0.3 s without the address")
		inventory("192.0.2.1/24", "192.0.2.2/24")
		w.sleep(10 * time.Second)
		served(true, "with the address again")
		if writes := w.taken(); len(writes) > 0 {
			t.Errorf("written: %q", writes)
		}
		inventory("192.0.2.2/24")
		w.sleep(29 * time.Second)
		served(true, "for 29 s without the address")
		w.sleep(2 * time.Second)
		served(false, "for 31 s without the address")
	})
}

// turns counts the turns of the loop that find work.
type turns struct {
	*world
	count atomic.Int64
}

func (b *turns) Queued() {
	if b.count.Add(1) > 1000 {
		time.Sleep(time.Second) // a busy loop would keep the test's time from advancing
	}
}

// An address that stops lingering before the next pass is allowed, or while the node cannot be
// read, does not keep the loop busy.
func TestLingerWaitsForAPass(t *testing.T) {
	var fails atomic.Bool
	observer := &turns{}
	run(t, func(o *Options) {
		observer.world = o.Observer.(*world)
		o.Observer, o.MinSyncPeriod = observer, 45*time.Second
		o.Network.(*routing.Fake).FailObserve = func() error {
			if fails.Load() {
				return errors.New("no memory")
			}
			return nil
		}
	}, func(w *world) {
		w.node.Routing.SetInventory(network(true, "192.0.2.1/24", "192.0.2.2/24"))
		w.synced()
		check := func(when string) {
			t.Helper()
			w.sleep(time.Minute)
			if n := observer.count.Swap(0); n > 50 {
				t.Errorf("%s: %d turns in a minute", when, n)
			}
		}
		check("without a change")
		w.node.Routing.SetInventory(network(true, "192.0.2.2/24"))
		check("without the address")
		w.node.Routing.SetInventory(network(true))
		w.sleep(time.Second)
		fails.Store(true)
		check("unreadable")
	})
}
