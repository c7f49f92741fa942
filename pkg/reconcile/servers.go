package reconcile

import (
	"cmp"
	"net/netip"
	"slices"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// serverTable has the virtual servers. Its setCached and clearCached shadow those of table, to count.
type serverTable struct {
	table[ipvs.Key, wantedServer, cachedServer]
	realServers int                   // in the kernel
	ipv4Servers int                   // IPv4 virtual servers in the kernel
	foreign     ipvs.State            // virtual servers of other programs
	unsure      map[ipvs.Key]struct{} // virtual servers whose addition failed; a failure without an answer may have added them
}

// setCached records that the kernel has a virtual server.
func (t *serverTable) setCached(s *server, is cachedServer) {
	if !s.exists && s.key.Addr.Is4() {
		t.ipv4Servers++
	}
	t.realServers += len(is.reals) - len(s.cached.reals)
	t.table.setCached(s, is)
}

// clearCached records that the kernel does not have a virtual server.
func (t *serverTable) clearCached(s *server) {
	if s.exists && s.key.Addr.Is4() {
		t.ipv4Servers--
	}
	t.realServers -= len(s.cached.reals)
	place := s.cached.place
	t.table.clearCached(s)
	s.cached.place = place
}

// setRealServer records that the kernel has a real server.
func (t *serverTable) setRealServer(s *server, dest netip.AddrPort, rs ipvs.RealServer) {
	before := len(s.cached.reals)
	s.cached.setRealServer(dest, rs)
	t.realServers += len(s.cached.reals) - before
}

// deleteRealServer records that the kernel does not have a real server.
func (t *serverTable) deleteRealServer(s *server, dest netip.AddrPort) {
	before := len(s.cached.reals)
	s.cached.deleteRealServer(dest)
	t.realServers += len(s.cached.reals) - before
}

// cachedServer returns the virtual server in the kernel; nil if there is none.
func (t *serverTable) cachedServer(key ipvs.Key) *cachedServer {
	if s := t.records.Get(key); s != nil && s.exists {
		return &s.cached
	}
	return nil
}

// adoptForeign makes another program's virtual server ours, because a Service wants its key.
func (t *serverTable) adoptForeign(s *server) {
	if is, ok := t.foreign[s.key]; ok {
		t.setCached(s, newCached(is))
		delete(t.foreign, s.key)
	}
}

// serverWriter writes virtual and real servers.
type serverWriter struct {
	t        *serviceTables
	kernel   *Kernel
	problems *Problems
}

// due returns the changes of desired virtual servers: those to apply first, and those that remove
// or drain real servers. Fwmark virtual servers come first in the former.
func (w *serverWriter) due() (grow, shrink []ipvs.Change) {
	var fwmarked []ipvs.Change
	for _, s := range w.dirty() {
		want := w.t.desiredIn(s)
		if want == nil {
			continue // see delete
		}
		changes := w.t.serverChanges(s, want)
		if len(changes) == 0 {
			s.cached.share(want)
			w.t.servers.setClean(s)
			continue
		}
		for _, c := range changes {
			switch {
			case c.Op == ipvs.DeleteRealServer || c.Op == ipvs.UpdateRealServer && c.RealServer.Weight == 0:
				shrink = append(shrink, c)
			case s.key.FWMark != 0:
				fwmarked = append(fwmarked, c)
			default:
				grow = append(grow, c)
			}
		}
	}
	if len(fwmarked) > 0 {
		grow = append(fwmarked, grow...)
	}
	return grow, shrink
}

// dirty returns the dirty virtual servers, those last in the kernel's list first.
//
// This is for the case that another program deleted all virtual servers, in the order of that list.
// The kernel keeps each deleted real server for two minutes or more, and looks each added one up
// among them, from the last deleted to the first (ip_vs_trash_get_dest in
// net/netfilter/ipvs/ip_vs_ctl.c). If the last deleted is added first, each look-up ends at the first
// entry. Otherwise the look-ups take time that grows with the square of the number of real servers.
func (w *serverWriter) dirty() []*server {
	dirty := slices.Collect(w.t.servers.allDirty())
	slices.SortStableFunc(dirty, func(a, b *server) int { return cmp.Compare(b.cached.place, a.cached.place) })
	return dirty
}

// serverChanges returns the changes that turn a virtual server into the desired one. It adds TCP real
// servers that are to drain to the drainer. It allocates nothing if there are no changes, however many
// real servers drain.
func (t *serviceTables) serverChanges(s *server, want *wantedServer) []ipvs.Change {
	var have *cachedServer
	if s.exists {
		have = &s.cached
	}
	var drain *drainer
	if address, _ := t.marks.addressOf(s.key); address.Protocol == ip.TCP {
		drain = &t.drainer
	}
	changes := diffServer(s.key, have, want, drain)
	if len(changes) > 0 {
		orderAdditions(t.cfg.NodeName, s.key, want.settings.Value().Scheduler, changes)
	}
	return changes
}

// orderAdditions orders the additions of real servers, which are adjacent and all for one
// virtual server.
func orderAdditions(node string, key ipvs.Key, scheduler string, changes []ipvs.Change) {
	adds := func(c ipvs.Change) bool { return c.Op == ipvs.AddRealServer }
	first := slices.IndexFunc(changes, adds)
	if first < 0 {
		return
	}
	end := first
	for end < len(changes) && adds(changes[end]) {
		end++
	}
	plan.OrderRealServers(node, key, scheduler, changes[first:end], func(c ipvs.Change) netip.AddrPort { return c.Dest })
}

// delete deletes virtual servers that are not desired, unless they must be retired first (mustRetire).
// Those in unsure are deleted too: without their members they would look foreign.
// Fwmark virtual servers are deleted last: without its own, an internal client would use the
// virtual server of the address, whose endpoints are for external clients.
func (w *serverWriter) delete() {
	var changes []ipvs.Change
	for s := range w.t.servers.allDirty() {
		if w.t.desiredIn(s) != nil || w.t.mustRetire(s) {
			continue
		}
		if _, unsure := w.t.servers.unsure[s.key]; s.exists || unsure {
			changes = append(changes, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: s.key})
		} else {
			w.t.servers.setClean(s)
		}
	}
	slices.SortStableFunc(changes, func(a, b ipvs.Change) int { return cmp.Compare(min(a.Key.FWMark, 1), min(b.Key.FWMark, 1)) })
	w.apply(changes)
}

// apply writes changes. later are those that another call will write: the virtual servers
// that they belong to stay dirty.
func (w *serverWriter) apply(changes []ipvs.Change, later ...ipvs.Change) {
	if len(changes) == 0 {
		return
	}
	applyChanges(changes, w.kernel.writeIPVS, w.done, w.refused())
	w.clean(changes, later)
	w.addFlows(changes)
}

// refused returns a function that reports changes which one write of the kernel refused, and sets them
// aside.
func (w *serverWriter) refused() func(ipvs.Change, error) {
	reported := map[ipvs.Key]bool{} // later refusals of a key follow from the first
	return func(c ipvs.Change, err error) {
		if !reported[c.Key] {
			w.problems.add(w.t.servers.owners(c.Key), err)
		}
		reported[c.Key] = true
		if c.Op == ipvs.AddVirtualServer {
			w.t.servers.unsure[c.Key] = struct{}{}
		}
		w.t.servers.setStuck(w.t.servers.get(c.Key))
	}
}

// clean makes changed virtual servers clean if they are up to date. It skips those with changes in
// later. Comparing a virtual server takes time for each real server, so each is compared once,
// however many of its real servers changed.
func (w *serverWriter) clean(changes, later []ipvs.Change) {
	seen := map[ipvs.Key]bool{}
	for _, c := range later {
		seen[c.Key] = true
	}
	for _, c := range changes {
		if seen[c.Key] {
			continue
		}
		seen[c.Key] = true
		s := w.t.servers.records.Get(c.Key)
		if s == nil {
			continue // deleted
		}
		switch want := w.t.desiredIn(s); {
		case want != nil && len(w.t.serverChanges(s, want)) == 0:
			s.cached.share(want)
			w.t.servers.setClean(s)
		case want == nil && w.t.mustRetire(s) && len(w.t.retireChanges(s)) == 0:
			w.t.servers.setClean(s)
		}
	}
}

// done updates the cached state after a change.
func (w *serverWriter) done(c ipvs.Change) {
	s := w.t.servers.get(c.Key)
	w.t.servers.noteWritten(s)
	switch c.Op {
	case ipvs.AddVirtualServer, ipvs.UpdateVirtualServer:
		delete(w.t.servers.unsure, c.Key)
		is := s.cached
		is.settings = unique.Make(c.VirtualServer)
		w.t.servers.setCached(s, is)
	case ipvs.DeleteVirtualServer:
		delete(w.t.servers.unsure, c.Key)
		w.t.clearCachedServer(s)
		w.t.servers.setClean(s)
		w.t.marks.setDrainEntryDirty(c.Key)
	case ipvs.AddRealServer, ipvs.UpdateRealServer:
		w.t.servers.setRealServer(s, c.Dest, c.RealServer)
		if c.RealServer.Weight > 0 {
			w.t.drainer.remove(c.Key, c.Dest)
		}
	case ipvs.DeleteRealServer:
		w.t.servers.deleteRealServer(s, c.Dest)
	}
}

// addFlows adds the UDP flows that lead to a removed real server, or are older than the virtual
// server, to those to delete. Otherwise a client that keeps sending from one port would reach no
// endpoint for as long as it sends (kubernetes#71514, #76664).
func (w *serverWriter) addFlows(changes []ipvs.Change) {
	for _, c := range changes {
		if c.Op == ipvs.AddVirtualServer || c.Op == ipvs.DeleteRealServer || c.Op == ipvs.DeleteVirtualServer {
			w.t.addStaleFlows(c.Key)
		}
	}
}
