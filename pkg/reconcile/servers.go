package reconcile

import (
	"cmp"
	"net/netip"
	"slices"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// flushServers adds and updates virtual and real servers, all additions before the first
// removal, and removes stale real servers. Fwmark virtual servers come first: before the
// virtual server of the address loses endpoints of other nodes, internal clients must already
// use the fwmark one. Internal clients that lose theirs use the virtual server of the address
// only once that has its endpoints and no others.
func (f *flush) flushServers() {
	var fwmarked, grow, shrink []ipvs.Change
	for _, s := range f.dirtyServers() {
		want, desired := f.desiredIn(s)
		if !desired {
			continue // left to deleteServers
		}
		changes := f.serverChanges(s, want)
		if len(changes) == 0 {
			s.cached.share(want)
			f.servers.setClean(s)
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
	f.applyServers(grow, shrink...)
	f.addMembers() // those that waited for a fwmark virtual server
	f.applyServers(shrink)
	f.deleteLocalMembers()
	f.applyServers(f.retirements())
}

// dirtyServers returns the dirty virtual servers, those last in the kernel's list first.
//
// The kernel keeps each deleted real server for two minutes or more, and looks each added one up
// among them, from the last deleted to the first (ip_vs_trash_get_dest in
// net/netfilter/ipvs/ip_vs_ctl.c). If all virtual servers were deleted, in the order of the
// list, each look-up in this order ends at the first entry. In another order the
// look-ups take time that grows with the square of the number of real servers.
func (f *flush) dirtyServers() []*server {
	dirty := slices.Collect(f.servers.allDirty())
	slices.SortStableFunc(dirty, func(a, b *server) int { return cmp.Compare(b.cached.place, a.cached.place) })
	return dirty
}

// serverChanges compares one virtual server. A stale TCP real server drains first: with
// weight 0 it keeps its established connections. One that drains already needs no change.
func (f *flush) serverChanges(s *server, want *wantedServer) []ipvs.Change {
	var have *cachedServer
	if s.exists {
		have = &s.cached
	}
	all := diffServer(s.key, have, want)
	orderAdditions(f.cfg.NodeName, s.key, want.settings.Value().Scheduler, all)
	address, _ := f.addressOf(s.key)
	changes := all[:0]
	for _, c := range all {
		if c.Op == ipvs.DeleteRealServer && address.Protocol == ip.TCP {
			f.drainer.add(s.key, c.Dest)
			if is, _ := have.realServer(c.Dest); is.Weight == 0 {
				continue
			}
			c.Op = ipvs.UpdateRealServer
		}
		changes = append(changes, c)
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

// deleteServers deletes virtual servers that are not desired, except those that mustDrain
// retains. Those in unsure are deleted too: without their members they would look foreign.
// Fwmark virtual servers are deleted last: without its own, an internal client would use the
// virtual server of the address, whose endpoints are for external clients.
func (f *flush) deleteServers() {
	var changes []ipvs.Change
	for s := range f.servers.allDirty() {
		if _, desired := f.desiredIn(s); desired || f.mustDrain(s) {
			continue
		}
		if _, unsure := f.unsure[s.key]; s.exists || unsure {
			changes = append(changes, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: s.key})
		} else {
			f.servers.setClean(s)
		}
	}
	slices.SortStableFunc(changes, func(a, b ipvs.Change) int { return cmp.Compare(min(a.Key.FWMark, 1), min(b.Key.FWMark, 1)) })
	f.applyServers(changes)
}

// applyServers writes changes. later are those that another call will write: the virtual servers
// that they belong to stay dirty.
func (f *flush) applyServers(changes []ipvs.Change, later ...ipvs.Change) {
	if len(changes) == 0 {
		return
	}
	reported := map[ipvs.Key]bool{} // later refusals of a key follow from the first
	applyChanges(changes, f.kernel.writeIPVS, f.serverDone, func(c ipvs.Change, err error) {
		if !reported[c.Key] {
			f.fail(f.servers.owners(c.Key), err)
		}
		reported[c.Key] = true
		if c.Op == ipvs.AddVirtualServer {
			f.unsure[c.Key] = struct{}{}
		}
		f.servers.setStuck(f.servers.get(c.Key))
	})
	f.cleanServers(changes, later)
	f.addFlows(changes)
}

// cleanServers makes changed virtual servers clean if they are up to date. It skips those that later
// changes too. Comparing a virtual server takes time for each real server, so each is compared once,
// however many of its real servers changed.
func (f *flush) cleanServers(changes, later []ipvs.Change) {
	seen := map[ipvs.Key]bool{}
	for _, c := range later {
		seen[c.Key] = true
	}
	for _, c := range changes {
		if seen[c.Key] {
			continue
		}
		seen[c.Key] = true
		s := f.servers.records.Get(c.Key)
		if s == nil {
			continue // deleted
		}
		want, desired := f.desiredIn(s)
		switch {
		case desired && (f.upToDate(s, want) || len(f.serverChanges(s, want)) == 0):
			s.cached.share(want)
			f.servers.setClean(s)
		case !desired && f.mustDrain(s) && len(f.retireChanges(s)) == 0:
			f.servers.setClean(s)
		}
	}
}

// upToDate reports whether the kernel has a virtual server exactly as desired, apart from
// draining real servers. It is cheaper than listing the differences.
func (f *flush) upToDate(s *server, want *wantedServer) bool {
	if !s.exists || s.cached.settings != want.settings {
		return false
	}
	reals, i, unwanted := s.cached.reals, 0, len(s.cached.reals)
	for at := range want.endpoints {
		e := &want.endpoints[at]
		if e.Flags&plan.IsRealServer == 0 {
			continue
		}
		for i < len(reals) && precedes(&reals[i], e) {
			i++
		}
		if i == len(reals) || !sameDest(&reals[i], e) || !sameRealServer(&reals[i], e) {
			return false
		}
		i, unwanted = i+1, unwanted-1
	}
	for dest := range f.drainer.draining[s.key] {
		if is, there := s.cached.realServer(dest); there && is.Weight == 0 {
			unwanted-- // only TCP drains, and desired TCP real servers have a weight
		}
	}
	return unwanted == 0
}

// serverDone updates the cached state after a change.
func (f *flush) serverDone(c ipvs.Change) {
	s := f.servers.get(c.Key)
	f.servers.noteWritten(s)
	switch c.Op {
	case ipvs.AddVirtualServer, ipvs.UpdateVirtualServer:
		delete(f.unsure, c.Key)
		is := s.cached
		is.settings = unique.Make(c.VirtualServer)
		f.setCachedServer(s, is)
	case ipvs.DeleteVirtualServer:
		delete(f.unsure, c.Key)
		f.clearCachedServer(s)
		f.servers.setClean(s)
		f.setDrainEntryDirty(c.Key)
	case ipvs.AddRealServer, ipvs.UpdateRealServer:
		f.setCachedRealServer(s, c.Dest, c.RealServer)
		if c.RealServer.Weight > 0 {
			f.drainer.remove(c.Key, c.Dest)
		}
	case ipvs.DeleteRealServer:
		f.clearCachedRealServer(s, c.Dest)
	}
}

// flows are the conntrack entries to delete:
//   - stale: UDP flows to these addresses and ports that lead to no current real server
//   - sources: flows translated to SNAT sources that are no longer used
//   - clients: UDP flows from these sources whose route changed
type flows struct {
	stale   map[ipvs.Key]struct{}
	sources map[translated]struct{}
	clients map[netip.Prefix]struct{}
	failed  bool // deleting them failed; the node's retry tries again
}

// translated are the flows of a protocol, or of all protocols if it is 0, whose client address
// is translated to the source.
type translated struct {
	protocol ip.Protocol
	source   netip.Addr
}

func newFlows() flows {
	return flows{stale: map[ipvs.Key]struct{}{}, sources: map[translated]struct{}{}, clients: map[netip.Prefix]struct{}{}}
}

// addFlows adds the UDP flows that lead to a removed real server, or are older than the virtual
// server, to those to delete. Otherwise a client that keeps sending from one port would reach no
// endpoint for as long as it sends (kubernetes#71514, #76664).
func (f *flush) addFlows(changes []ipvs.Change) {
	for _, c := range changes {
		if c.Op == ipvs.AddVirtualServer || c.Op == ipvs.DeleteRealServer || c.Op == ipvs.DeleteVirtualServer {
			f.addStaleFlows(c.Key)
		}
	}
}

// addStaleFlows adds the flows of a UDP virtual server to those to delete.
func (t *tables) addStaleFlows(key ipvs.Key) {
	address, known := t.addressOf(key)
	if !known || address.Protocol != ip.UDP {
		return
	}
	if _, added := t.flows.stale[address]; !added {
		t.flows.stale[address] = struct{}{}
		t.flows.failed = false // these have not been tried
	}
}

// deleteStaleFlows deletes the flows in f.flows, except those to a current real server of either
// virtual server of the address. In a flush it runs last: before its VIP is local, a datagram is
// forwarded untranslated, and IPVS does not translate later datagrams of that flow. Before Prune it
// does nothing, because each batch would read the whole conntrack table; Prune adds all flows. After
// an error it waits for the node's retry or for new flows.
func (f *flush) deleteStaleFlows() {
	if len(f.flows.stale)+len(f.flows.sources)+len(f.flows.clients) == 0 || !f.pruning || f.flows.failed {
		return
	}
	matches := f.sourceMatches()
	for key := range f.flows.stale {
		keep := map[netip.AddrPort]struct{}{}
		for _, k := range []ipvs.Key{key, fwmKey(key.Family(), f.markOf(key))} {
			if s := f.cachedServer(k); s != nil {
				for _, rs := range s.reals {
					keep[rs.Dest()] = struct{}{}
				}
			}
		}
		matches = append(matches, conntrack.Match{
			Protocol: key.Protocol, OriginalDst: netip.AddrPortFrom(key.Addr, key.Port), Keep: keep,
		})
	}
	err := f.kernel.deleteFlows(matches)
	if f.flows.failed = err != nil; f.flows.failed {
		f.fail(nil, err)
		return
	}
	f.flows = newFlows()
}
