package reconcile

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// drainer holds the draining real servers: those of weight 0 whose connections have not ended. It
// need not be persisted: after a restart, a real server drains if it has weight 0 in the kernel and
// is not desired. See checkDraining.
type drainer struct {
	draining map[ipvs.Key][]drainingServer // those of each virtual server, sorted by address and port
	count    int                           // real servers in draining
	toCheck  []ipvs.Key                    // virtual servers that this round has not checked yet
	pace     pace                          // of deletions
	cuts     []Cut                         // since the last call of takeCuts
	checkAt  time.Time                     // next check
}

// drainingServer is a draining real server. There can be tens of thousands, so it takes little memory.
type drainingServer struct {
	dest    netip.AddrPort
	removed bool     // it has no endpoint; without that, nothing else is set
	closed  bool     // the last check found no connections
	silence *silence // of its connections; nil before a check has found some
}

// update notes the connections of the real server as of a check. expires returns when its
// longest-lived conntrack entry expires, or zero if that is unknown.
func (s *drainingServer) update(now time.Time, is ipvs.Connections, expires func() time.Time) {
	if s.closed = is.Active+is.Inactive == 0; s.closed {
		s.silence = nil
		return
	}
	if s.silence == nil {
		s.silence = &silence{}
	}
	s.silence.update(now, is, expires)
}

// silence records for how long a draining real server without an endpoint has not answered.
type silence struct {
	read bool             // last and answered are set
	last ipvs.Connections // as of the last check
	// answered is as of the last check that found an answer.
	answered ipvs.Connections
	// from and to are the first and the last check, since the real server's last answer, that found
	// new packets of clients.
	from, to time.Time
	// expires is when its longest-lived conntrack entry expired, as of the last check that found an
	// answer; zero: unknown.
	expires time.Time
}

// update notes the connections of the real server; see drainingServer.update.
func (s *silence) update(now time.Time, is ipvs.Connections, expires func() time.Time) {
	was := s.last
	s.last = is
	switch {
	case !s.read || is.Out != was.Out && !s.onlyErrors(was, is, expires):
		s.answered = is
		s.from, s.to = time.Time{}, time.Time{}
	case is.In != was.In && s.from.IsZero():
		s.from, s.to = now, now
	case is.In != was.In:
		s.to = now
	}
	s.read = true
}

// retransmissions is the number of packets that a client whose packets are not acknowledged sends
// between two checks, at most.
const retransmissions = 8

// onlyErrors reports whether all packets to clients since the last answer were ICMP errors. For the
// address of a deleted pod, nodes and routers answer with "host unreachable", and IPVS counts that as
// a packet of the real server (handle_response_icmp in net/netfilter/ipvs/ip_vs_core.c).
//
// More packets than the clients sent cannot all be errors, and clients that get no acknowledgements
// send few packets. If neither shows an answer, conntrack decides: an acknowledgement restores the
// long timeout of an established connection, an error does not.
func (s *silence) onlyErrors(was, is ipvs.Connections, expires func() time.Time) bool {
	connections := uint32(is.Active + is.Inactive)
	if is.Out-s.answered.Out > is.In-s.answered.In || is.In-was.In > retransmissions*connections {
		s.expires = time.Time{}
		return false
	}
	const rounding = 2 * time.Second
	before, now := s.expires, expires()
	if !before.IsZero() && !now.IsZero() && now.Sub(before) < rounding {
		return true
	}
	s.expires = now
	return false
}

// exceeds reports whether clients have sent packets without an answer for this time. One packet
// is not enough, because it may need no answer.
func (s *silence) exceeds(limit time.Duration, now time.Time) bool {
	return !s.from.IsZero() && now.Sub(s.from) >= limit && s.to.Sub(s.from) >= limit/2
}

// find returns the index of a real server among those of a virtual server, or where to insert it.
func (d *drainer) find(key ipvs.Key, dest netip.AddrPort) (i int, listed bool) {
	return slices.BinarySearchFunc(d.draining[key], dest, func(s drainingServer, dest netip.AddrPort) int {
		return s.dest.Compare(dest)
	})
}

func (d *drainer) add(key ipvs.Key, dest netip.AddrPort) {
	if i, listed := d.find(key, dest); !listed {
		d.draining[key] = slices.Insert(d.draining[key], i, drainingServer{dest: dest})
		d.count++
	}
}

func (d *drainer) remove(key ipvs.Key, dest netip.AddrPort) {
	i, listed := d.find(key, dest)
	if !listed {
		return
	}
	d.count--
	if left := slices.Delete(d.draining[key], i, i+1); len(left) > 0 {
		d.draining[key] = left
	} else {
		delete(d.draining, key)
	}
}

// removeAll removes the real servers of a deleted virtual server.
func (d *drainer) removeAll(key ipvs.Key) {
	d.count -= len(d.draining[key])
	delete(d.draining, key)
}

// next returns up to most virtual servers that this round has not checked. If none are left, it
// begins a new round with all virtual servers that drain. Those that have most come first.
func (d *drainer) next(most int) []ipvs.Key {
	if len(d.toCheck) == 0 {
		d.toCheck = slices.SortedFunc(maps.Keys(d.draining), func(a, b ipvs.Key) int {
			return cmp.Compare(len(d.draining[b]), len(d.draining[a]))
		})
	}
	next := d.toCheck[:min(most, len(d.toCheck))]
	if d.toCheck = d.toCheck[len(next):]; len(d.toCheck) == 0 {
		d.toCheck = nil // release its array
	}
	return slices.DeleteFunc(next, func(key ipvs.Key) bool { return len(d.draining[key]) == 0 })
}

// Cut is a real server that was removed at the deadline, or because its node is unreachable,
// while connections were open.
type Cut struct {
	Key         ipvs.Key
	Dest        netip.AddrPort
	Connections int
	Unreachable bool // its node is unreachable
}

// takeCuts returns the cuts since its last call.
func (d *drainer) takeCuts() []Cut {
	cuts := d.cuts
	d.cuts = nil
	return cuts
}

// noteEndpoints notes which draining real servers of a virtual server have no endpoint in want any
// more; want is nil if none is desired. It returns those on unreachable nodes, and whether one
// without an endpoint may have connections.
func (d *drainer) noteEndpoints(key ipvs.Key, want *wantedServer) (lost map[netip.AddrPort]struct{}, open bool) {
	list := d.draining[key]
	for i := range list {
		s := &list[i]
		if want != nil && want.is(s.dest, plan.IsEndpoint) {
			*s = drainingServer{dest: s.dest}
		} else {
			s.removed = true
		}
		open = open || s.removed && !s.closed
		if want != nil && want.is(s.dest, plan.IsUnreachable) {
			if lost == nil {
				lost = map[netip.AddrPort]struct{}{}
			}
			lost[s.dest] = struct{}{}
		}
	}
	return lost, open
}

// mayDelete reports whether a draining real server without connections may be deleted now; want is
// its virtual server, or nil. Retired virtual servers do not wait, because they are deleted with
// their last real server. Nor do those with a scheduler that hashes: it may assign clients to a
// real server of weight 0, and refuse them (ip_vs_sh_schedule, ip_vs_dh_schedule).
func (d *drainer) mayDelete(want *wantedServer) bool {
	return d.pace.left() || want == nil || ipvs.Hashes(want.settings.Value().Scheduler)
}

// checkDraining removes draining real servers whose last connection has ended, as fast as the
// pace allows. A closing connection still counts, because its last packets need the real server.
// One call checks up to most virtual servers; the next call continues with the others.
//
// Once an endpoint is in no EndpointSlice any more, its pod may not exist: a client that keeps
// sending would keep its connection and never get an answer (kubernetes#84322, #89392, #77903).
// So the real server is removed, which resets its connections, if it has not answered its clients'
// packets for the time of the deadline. A pod that only left the Service answers. An endpoint that
// is still in a slice has no deadline, whatever its conditions. One on an unreachable node is
// removed at once.
func (r *Reconciler) checkDraining(now time.Time, deadline time.Duration, most int) Problems {
	f, d := r.newFlush(), &r.drainer
	d.pace.refill(now, d.count)
	var changes []ipvs.Change
	cuts := map[ipvs.Change]Cut{}
	for _, key := range d.next(most) {
		want := r.desiredServer(key)
		lost, open := d.noteEndpoints(key, r.desiredForDraining(key))
		if !d.mayDelete(want) && len(lost) == 0 && !open {
			continue
		}
		conns, err := r.kernel.IPVS.Connections(key)
		if kernel.IsNotExist(err) {
			d.removeAll(key)
			continue
		}
		if err != nil {
			f.problems.add(r.servers.owners(key), err)
			continue
		}
		var again []netip.AddrPort // desired; after an unanswered write, a resync may have found the weight restored
		list := d.draining[key]
		for i := range list {
			s, dest := &list[i], list[i].dest
			if want != nil && want.is(dest, plan.IsRealServer) {
				again = append(again, dest)
				continue
			}
			if s.removed {
				s.update(now, conns[dest], func() time.Time { return r.acknowledgedUntil(key, dest, now) })
			}
			_, unreachable := lost[dest]
			left := conns[dest].Active + conns[dest].Inactive
			if unreachable || s.silence != nil && s.silence.exceeds(deadline, now) || left == 0 && d.mayDelete(want) {
				c := ipvs.Change{Op: ipvs.DeleteRealServer, Key: key, Dest: dest}
				changes = append(changes, c)
				cuts[c] = Cut{key, dest, left, unreachable}
				d.pace.spend()
			}
		}
		for _, dest := range again {
			d.remove(key, dest)
		}
	}
	f.servers.apply(changes)
	for _, c := range changes {
		if s := r.servers.cachedServer(c.Key); s == nil || !s.has(c.Dest) {
			d.remove(c.Key, c.Dest)
			if cut := cuts[c]; cut.Connections > 0 {
				d.cuts = append(d.cuts, cut)
			}
		}
	}
	f.deleteRetired()
	f.deleteStaleFlows()
	r.noteRefused(f.problems)
	return f.problems
}

// DeleteDrained deletes the draining real servers that have no connections, for a process that
// does not call Step.
func (r *Reconciler) DeleteDrained(now time.Time) Problems {
	return r.checkDraining(now, r.periods.DrainDeadline, len(r.drainer.draining))
}

// unacknowledged is the timeout that conntrack gives connections whose packets are not acknowledged
// (nf_conntrack_tcp_timeout_unacknowledged and nf_conntrack_tcp_timeout_max_retrans), and
// establishedTimeout the parameter for other connections.
const (
	unacknowledged     = 5 * time.Minute
	establishedTimeout = "net/netfilter/nf_conntrack_tcp_timeout_established"
)

// acknowledgedUntil returns the latest expiry among a real server's conntrack entries of connections
// with acknowledged packets, or a fixed time in the past if there are none. It returns zero if that
// is unknown: without conntrack or entries, for protocols other than TCP, and if established
// connections have so short a timeout that it does not distinguish them.
func (r *Reconciler) acknowledgedUntil(key ipvs.Key, dest netip.AddrPort, now time.Time) time.Time {
	address, known := r.marks.addressOf(key)
	if !known || address.Protocol != ip.TCP || r.kernel.Conntrack == nil {
		return time.Time{}
	}
	parameters, err := r.kernel.Sysctl.Observe([]string{establishedTimeout})
	seconds, parseErr := strconv.Atoi(parameters[establishedTimeout])
	if err != nil || parseErr != nil || time.Duration(seconds)*time.Second <= 2*unacknowledged {
		return time.Time{}
	}
	vip := netip.AddrPortFrom(address.Addr, address.Port)
	longest, err := r.kernel.Conntrack.Longest(conntrack.Match{Protocol: ip.TCP, OriginalDst: vip, ReplySrc: dest})
	switch {
	case err != nil || longest == 0: // without an entry, the connections are not tracked
		return time.Time{}
	case longest <= unacknowledged:
		return time.Unix(0, 0)
	}
	return now.Add(longest)
}

// desiredForDraining returns the desired virtual server that lists the endpoints of key's
// draining real servers: that of key itself or, if key is retired, of its address and port. It
// returns nil if there is none.
func (t *serviceTables) desiredForDraining(key ipvs.Key) *wantedServer {
	if want := t.desiredServer(key); want != nil {
		return want
	}
	address, _ := t.marks.addressOf(key)
	if s := t.servers.records.Get(address); s != nil && s.wanted() {
		return &s.value
	}
	return nil
}
