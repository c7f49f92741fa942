package apply

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// drain lists a real server among those that wait for their connections to
// end. The list needs no storage of its own: weight 0 in the kernel, on a
// real server that nobody wants, says the same after a restart.
func (a *Applier) drain(key ipvs.Key, dest netip.AddrPort) {
	if a.draining[key] == nil {
		a.draining[key] = map[netip.AddrPort]time.Time{}
	}
	if _, listed := a.draining[key][dest]; !listed {
		a.draining[key][dest] = time.Time{}
		a.drainingCount++
	}
}

func (a *Applier) undrain(key ipvs.Key, dest netip.AddrPort) {
	if _, listed := a.draining[key][dest]; !listed {
		return
	}
	delete(a.draining[key], dest)
	a.drainingCount--
	if len(a.draining[key]) == 0 {
		delete(a.draining, key)
	}
}

// undrainAll is for a virtual server that is gone.
func (a *Applier) undrainAll(key ipvs.Key) {
	a.drainingCount -= len(a.draining[key])
	delete(a.draining, key)
}

// Draining returns the number of real servers that wait for their connections to end.
// The loop asks for it several times for each change.
func (a *Applier) Draining() int { return a.drainingCount }

// Drain removes the real servers whose last connection has ended. A
// connection that is being closed still counts: its last packets must find
// the way. It looks at no more virtual servers than most, and goes on with the
// others when it is called again, as DrainsOn tells.
//
// Connections to an endpoint that is in no slice any more have until the
// deadline, measured from the first call that finds it so: the pod is gone, and
// a client that goes on sending would keep its connection and never have an
// answer (kubernetes#84322, #89392, #77903). With the real server it gets a
// reset. While the endpoint is there, in whatever state, they have all the time;
// unless the cluster does not hear of its node any more: then they have none.
func (a *Applier) Drain(now time.Time, deadline time.Duration, most int) Problems {
	f := &flush{Applier: a}
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
			late, lost := a.goneFor(key, dest, now) >= deadline, a.isLost(key, dest)
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
		if _, there := a.have.servers[c.Key].RealServers[c.Dest]; !there {
			a.undrain(c.Key, c.Dest)
			if cut := open[c]; cut.Connections > 0 {
				a.cuts = append(a.cuts, cut)
			}
		}
	}
	f.deleteRetired()
	return f.problems
}

// drainNext takes virtual servers from those at which this round of Drain has not
// looked; if there are none, a round begins, with all that drain by then.
func (a *Applier) drainNext(most int) []ipvs.Key {
	if len(a.toDrain) == 0 {
		a.toDrain = slices.Collect(maps.Keys(a.draining))
	}
	next := a.toDrain[:min(most, len(a.toDrain))]
	if a.toDrain = a.toDrain[len(next):]; len(a.toDrain) == 0 {
		a.toDrain = nil // not what is left of its array
	}
	return slices.DeleteFunc(next, func(key ipvs.Key) bool { return len(a.draining[key]) == 0 })
}

// DrainsOn tells whether Drain has not looked at all that drains.
func (a *Applier) DrainsOn() bool { return len(a.toDrain) > 0 }

// Cut is a real server that went at the deadline, or with its node, with connections
// that were still open.
type Cut struct {
	Key         ipvs.Key
	Dest        netip.AddrPort
	Connections int
	Lost        bool // with its node
}

// TakeCuts gives those since it was last called.
func (a *Applier) TakeCuts() []Cut {
	cuts := a.cuts
	a.cuts = nil
	return cuts
}

func (a *Applier) isLost(key ipvs.Key, dest netip.AddrPort) bool {
	vs, wanted := a.draws(key)
	return wanted && vs.HasLost(dest)
}

// draws returns the desired virtual server whose endpoints the draining real servers
// of one are: itself, or if it is retired that of its address and port.
func (a *Applier) draws(key ipvs.Key) (*plan.VirtualServer, bool) {
	if vs, wanted := a.wantServer(key); wanted {
		return vs, true
	}
	address, _ := a.serves(key)
	return a.servers.want(address)
}

// goneFor is for how long a draining real server has had no endpoint.
func (a *Applier) goneFor(key ipvs.Key, dest netip.AddrPort, now time.Time) time.Duration {
	since := a.draining[key][dest]
	if vs, wanted := a.draws(key); wanted && vs.HasEndpoint(dest) {
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
