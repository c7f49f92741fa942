package reconcile

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// drain adds a real server to the draining ones. The list is not persisted: after a restart,
// weight 0 in the kernel on a real server that is not desired says the same.
func (a *Reconciler) drain(key ipvs.Key, dest netip.AddrPort) {
	if a.draining[key] == nil {
		a.draining[key] = map[netip.AddrPort]time.Time{}
	}
	if _, listed := a.draining[key][dest]; !listed {
		a.draining[key][dest] = time.Time{}
		a.drainingCount++
	}
}

func (a *Reconciler) undrain(key ipvs.Key, dest netip.AddrPort) {
	if _, listed := a.draining[key][dest]; !listed {
		return
	}
	delete(a.draining[key], dest)
	a.drainingCount--
	if len(a.draining[key]) == 0 {
		delete(a.draining, key)
	}
}

// undrainAll forgets the draining real servers of a deleted virtual server.
func (a *Reconciler) undrainAll(key ipvs.Key) {
	a.drainingCount -= len(a.draining[key])
	delete(a.draining, key)
}

// Draining returns the number of draining real servers. It is cheap: the proxy loop calls it
// several times for each change.
func (a *Reconciler) Draining() int { return a.drainingCount }

// Drain removes draining real servers whose last connection has ended. A closing connection
// still counts, because its last packets need the real server. One call checks at most most
// virtual servers; the next call continues with the others, see DrainsOn.
//
// Once an endpoint is in no EndpointSlice any more, its connections have until the deadline,
// measured from the first call that notices. The pod is gone: a client that keeps sending
// would keep its connection and never get an answer (kubernetes#84322, #89392, #77903).
// Removing the real server resets the connection. While the endpoint is in a slice, in
// whatever condition, there is no deadline. On an unreachable node the deadline is zero.
func (a *Reconciler) Drain(now time.Time, deadline time.Duration, most int) Problems {
	f := &flush{Reconciler: a}
	var changes []ipvs.Change
	open := map[ipvs.Change]Cut{}
	for _, key := range a.drainNext(most) {
		conns, err := a.kernel.IPVS.Connections(key)
		if kernel.IsNotExist(err) {
			a.undrainAll(key)
			continue
		}
		if err != nil {
			f.fail(a.servers.owners(key), err)
			continue
		}
		for dest := range a.draining[key] {
			late, lost := a.missingFor(key, dest, now) >= deadline, a.onUnreachableNode(key, dest)
			left := conns[dest].Active + conns[dest].Inactive
			if left == 0 || late || lost {
				c := ipvs.Change{Op: ipvs.DeleteRealServer, Key: key, Dest: dest}
				changes = append(changes, c)
				open[c] = Cut{key, dest, left, lost}
			}
		}
	}
	f.applyServers(changes)
	for _, c := range changes {
		if s := a.actual(c.Key); s == nil || !s.has(c.Dest) {
			a.undrain(c.Key, c.Dest)
			if cut := open[c]; cut.Connections > 0 {
				a.cuts = append(a.cuts, cut)
			}
		}
	}
	f.deleteRetired()
	return f.problems
}

// drainNext returns up to most virtual servers that this round of Drain has not checked. If
// none are left, it begins a new round with all virtual servers that drain.
func (a *Reconciler) drainNext(most int) []ipvs.Key {
	if len(a.toDrain) == 0 {
		a.toDrain = slices.Collect(maps.Keys(a.draining))
	}
	next := a.toDrain[:min(most, len(a.toDrain))]
	if a.toDrain = a.toDrain[len(next):]; len(a.toDrain) == 0 {
		a.toDrain = nil // release its array
	}
	return slices.DeleteFunc(next, func(key ipvs.Key) bool { return len(a.draining[key]) == 0 })
}

// DrainsOn reports whether this round of Drain has virtual servers left to check.
func (a *Reconciler) DrainsOn() bool { return len(a.toDrain) > 0 }

// Cut is a real server that was removed at the deadline, or because its node is unreachable,
// while connections were open.
type Cut struct {
	Key         ipvs.Key
	Dest        netip.AddrPort
	Connections int
	Lost        bool // its node is unreachable
}

// TakeCuts returns the cuts since its last call.
func (a *Reconciler) TakeCuts() []Cut {
	cuts := a.cuts
	a.cuts = nil
	return cuts
}

func (a *Reconciler) onUnreachableNode(key ipvs.Key, dest netip.AddrPort) bool {
	want, wanted := a.desiredFor(key)
	return wanted && want.is(dest, isLost)
}

// desiredFor returns the desired virtual server whose endpoints the draining real servers of
// key belong to: key itself or, if key is retired, its address and port.
func (a *Reconciler) desiredFor(key ipvs.Key) (*wantedServer, bool) {
	if want, wanted := a.wantServer(key); wanted {
		return want, true
	}
	address, _ := a.addressOf(key)
	if s := a.servers.records[address]; s != nil && s.wanted() {
		return &s.value, true
	}
	return nil, false
}

// missingFor returns how long a draining real server has had no endpoint.
func (a *Reconciler) missingFor(key ipvs.Key, dest netip.AddrPort, now time.Time) time.Duration {
	since := a.draining[key][dest]
	if want, wanted := a.desiredFor(key); wanted && want.is(dest, isEndpoint) {
		since = time.Time{}
	} else if since.IsZero() {
		since = now
	}
	a.draining[key][dest] = since
	if since.IsZero() {
		return 0
	}
	return now.Sub(since)
}
