package reconcile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// more is the number of real servers that must wait in these tests.
const more = 400

// drainMany makes paceBurst+more endpoints of a Service drain.
func drainMany(t *testing.T, w *world, change func(*service.Service)) (many, one service.Service) {
	t.Helper()
	w.now = time.Unix(1e9, 0)
	endpoints := []string{"10.244.0.2:8000"}
	for i := range paceBurst + more {
		endpoints = append(endpoints, fmt.Sprintf("10.245.%d.%d:8000", i/250, i%250+1))
	}
	many, one = clusterIP("a", "10.96.0.1", endpoints...), clusterIP("a", "10.96.0.1", endpoints[0])
	change(&many)
	change(&one)
	w.start(many)
	w.mustApply(one)
	if n := w.reconciler.drainer.count; n != paceBurst+more {
		t.Fatalf("%d drain", n)
	}
	return many, one
}

// waiting checks draining real servers, and how many still drain.
func (w *world) waiting(when string, want int) {
	w.t.Helper()
	if err := w.drain().Err(); err != nil {
		w.t.Fatal(err)
	}
	w.checkHeld()
	if n := w.reconciler.drainer.count; n != want {
		w.t.Errorf("%s: %d drain, want %d", when, n, want)
	}
}

// TestManyDrainedServersArePaced deletes the first ones at once. Endpoints that come back
// meanwhile are not added, and a new process completes the deletion.
func TestManyDrainedServersArePaced(t *testing.T) {
	w := newWorld(t)
	many, one := drainMany(t, w, func(*service.Service) {})
	w.waiting("at once", more)
	w.now = w.now.Add(time.Second)
	w.waiting("after a second", more-paceFloor)
	w.now = w.now.Add(500 * time.Millisecond)
	w.waiting("after half a second", more-paceFloor*3/2)

	w.order = nil
	w.mustApply(many)
	added := 0
	for _, change := range w.order {
		if strings.HasPrefix(change, "add real server") {
			added++
		}
	}
	if n := w.reconciler.drainer.count; n != 0 || added != paceBurst+paceFloor*3/2 {
		t.Errorf("endpoints are back: %d drain, and %d were added", n, added)
	}

	w.mustApply(one)
	w.restart()
	w.start(one)
	if n := w.reconciler.drainer.count; n != paceBurst+more {
		t.Errorf("after a restart %d drain", n)
	}
	w.waiting("after a restart", more)
	w.now = w.now.Add(more / paceFloor * time.Second)
	w.waiting("at the end", 0)
	if n := len(w.realServers(key(ip.TCP, "10.96.0.1:80"))); n != 1 {
		t.Errorf("%d real servers are left", n)
	}
}

// TestPacingDelaysNothingElse: neither the deadline, nor the deletion of a Service, nor real
// servers whose scheduler needs their deletion.
func TestPacingDelaysNothingElse(t *testing.T) {
	k := key(ip.TCP, "10.96.0.1:80")
	t.Run("deadline", func(t *testing.T) {
		w := newWorld(t)
		drainMany(t, w, func(*service.Service) {})
		last := netip.MustParseAddrPort("10.245.9.150:8000")
		w.IPVS.SetConnections(k, last, ipvs.Connections{Active: 1})
		w.reconciler.drainer.pace = pace{at: w.now}
		w.waiting("none is allowed", paceBurst+more)
		for i := range 3 {
			w.IPVS.SetConnections(k, last, ipvs.Connections{Active: 1, In: uint32(i)})
			w.now = w.now.Add(deadline)
			w.reconciler.drainer.pace = pace{at: w.now}
			w.drain()
		}
		w.waiting("at the deadline", paceBurst+more-1)
		if cuts := w.reconciler.drainer.takeCuts(); !slices.Equal(cuts, []Cut{{k, last, 1, false}}) {
			t.Errorf("cut: %v", cuts)
		}
	})
	t.Run("deleted Service", func(t *testing.T) {
		w := newWorld(t)
		drainMany(t, w, func(*service.Service) {})
		w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "a"})
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatal(err)
		}
		if n := w.reconciler.drainer.count; n != 0 || w.reconciler.servers.cachedServer(k) != nil {
			t.Errorf("%d drain", n)
		}
	})
	for _, scheduler := range []string{"sh", "dh", "mh"} {
		t.Run(scheduler, func(t *testing.T) {
			w := newWorld(t)
			drainMany(t, w, func(s *service.Service) { s.Scheduling.Scheduler = scheduler })
			w.waiting("at once", 0)
		})
	}
}

// TestPaceOfVeryMany deletes the more the more wait.
func TestPaceOfVeryMany(t *testing.T) {
	now := time.Unix(1e9, 0)
	p, waiting, took := pace{}, 60000, time.Duration(0)
	for ; waiting > 0; took += 5 * time.Second {
		p.refill(now.Add(took), waiting)
		for ; waiting > 0 && p.left(); waiting-- {
			p.spend()
		}
	}
	if took < pacePeriod || took > 2*pacePeriod {
		t.Errorf("60,000 take %s", took)
	}
}
