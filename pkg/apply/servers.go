package apply

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// wantService is the wanted virtual server in the kernel package's form.
func wantService(vs *plan.VirtualServer) *ipvs.Service {
	s := &ipvs.Service{VirtualServer: vs.VirtualServer, RealServers: make(map[netip.AddrPort]ipvs.RealServer, len(vs.RealServers))}
	for _, rs := range vs.RealServers {
		s.RealServers[rs.AddrPort] = wantRealServer(vs, rs)
	}
	return s
}

// wantRealServer is a real server in the kernel package's form. One that drains gets no
// connections, so that it needs no limit.
func wantRealServer(vs *plan.VirtualServer, rs plan.RealServer) ipvs.RealServer {
	if rs.Weight == 0 {
		return ipvs.RealServer{}
	}
	return ipvs.RealServer{Weight: rs.Weight, MaxConnections: vs.MaxConnections}
}

// flushServers adds and updates virtual and real servers, all additions
// before the first removal, and takes away real servers that nobody wants. The
// virtual servers that a mark leads to come first: when the one of the address
// gets the endpoints of other nodes, who comes from outside is led past it.
func (f *flush) flushServers() {
	var marked, grow, shrink []ipvs.Change
	for key := range f.servers.dirty {
		vs, wanted := f.wantServer(key)
		if !wanted {
			continue // deleteServers' part
		}
		changes := f.serverChanges(key, vs)
		if len(changes) == 0 {
			f.servers.clean(key)
			continue
		}
		for _, c := range changes {
			switch {
			case c.Op == ipvs.DeleteRealServer || c.Op == ipvs.UpdateRealServer && c.RealServer.Weight == 0:
				shrink = append(shrink, c)
			case key.FWMark != 0:
				marked = append(marked, c)
			default:
				grow = append(grow, c)
			}
		}
	}
	if len(marked) > 0 {
		grow = append(marked, grow...)
	}
	f.applyServers(grow)
	f.addMembers() // those that lead to a virtual server that was retired
	f.unmark()
	f.applyServers(append(shrink, f.retirements()...))
}

// serverChanges compares one virtual server. A TCP real server that nobody
// wants is drained first: with weight 0 it keeps the connections that it has.
// One that is draining already needs nothing.
func (f *flush) serverChanges(key ipvs.Key, vs *plan.VirtualServer) []ipvs.Change {
	var have *ipvs.Service
	if s, ok := f.have.servers[key]; ok {
		have = &s
	}
	all := ipvs.DiffService(key, have, wantService(vs))
	spread(f.cfg.NodeName, key, vs.Scheduler, all)
	address, _ := f.serves(key)
	changes := all[:0]
	for _, c := range all {
		if c.Op == ipvs.DeleteRealServer && address.Protocol == ip.TCP {
			f.drain(key, c.Dest)
			if have.RealServers[c.Dest].Weight == 0 {
				continue
			}
			c.Op = ipvs.UpdateRealServer
		}
		changes = append(changes, c)
	}
	return changes
}

// spread orders the additions of real servers, which stand together and are
// all for one virtual server.
func spread(node string, key ipvs.Key, scheduler string, changes []ipvs.Change) {
	adds := func(c ipvs.Change) bool { return c.Op == ipvs.AddRealServer }
	first := slices.IndexFunc(changes, adds)
	if first < 0 {
		return
	}
	end := first
	for end < len(changes) && adds(changes[end]) {
		end++
	}
	plan.Spread(node, key, scheduler, changes[first:end], func(c ipvs.Change) netip.AddrPort { return c.Dest })
}

// deleteServers removes virtual servers that nobody wants, but for those that are
// retired.
func (f *flush) deleteServers() {
	var changes []ipvs.Change
	for key := range f.servers.dirty {
		if _, wanted := f.wantServer(key); wanted || f.outlives(key) {
			continue
		}
		if _, there := f.have.servers[key]; there {
			changes = append(changes, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: key})
		} else {
			f.servers.clean(key)
		}
	}
	f.applyServers(changes)
}

func (f *flush) applyServers(changes []ipvs.Change) {
	reported := map[ipvs.Key]bool{} // what follows from the first refusal is no news
	settle(changes, f.kernel.IPVS.Apply, f.serverDone, func(c ipvs.Change, err error) {
		if !reported[c.Key] {
			f.fail(f.servers.owners(c.Key), err)
		}
		reported[c.Key] = true
		f.servers.refused(c.Key)
	})
	f.cleanServers(changes)
	f.forgetFlows(changes)
}

// cleanServers finds the virtual servers for which nothing is left to do.
// Each is compared once, however many of its real servers have changed.
func (f *flush) cleanServers(changes []ipvs.Change) {
	seen := map[ipvs.Key]bool{}
	for _, c := range changes {
		if seen[c.Key] {
			continue
		}
		seen[c.Key] = true
		vs, wanted := f.wantServer(c.Key)
		if wanted && (f.stands(c.Key, vs) || len(f.serverChanges(c.Key, vs)) == 0) ||
			!wanted && f.outlives(c.Key) && len(f.retireChanges(c.Key)) == 0 {
			f.servers.clean(c.Key)
		}
	}
}

// stands tells whether the kernel has a virtual server exactly as it is wanted, but
// for real servers that drain, which is less work than to list what differs.
func (f *flush) stands(key ipvs.Key, vs *plan.VirtualServer) bool {
	have, there := f.have.servers[key]
	if !there || have.VirtualServer != vs.VirtualServer {
		return false
	}
	unwanted := len(have.RealServers) - len(vs.RealServers)
	for _, rs := range vs.RealServers {
		got, there := have.RealServers[rs.AddrPort]
		if !there || got != wantRealServer(vs, rs) {
			return false
		}
	}
	for dest := range f.draining[key] {
		if got, there := have.RealServers[dest]; there && got.Weight == 0 {
			unwanted-- // what drains is of TCP, where nothing is wanted without weight
		}
	}
	return unwanted == 0
}

// serverDone notes what the kernel has now.
func (f *flush) serverDone(c ipvs.Change) {
	f.touched.server(c.Key)
	s := f.have.servers[c.Key]
	before := len(s.RealServers)
	switch c.Op {
	case ipvs.AddVirtualServer, ipvs.UpdateVirtualServer:
		s.VirtualServer = c.VirtualServer
	case ipvs.DeleteVirtualServer:
		f.have.deleteServer(c.Key)
		f.undrainAll(c.Key)
		f.servers.clean(c.Key)
		f.lookAtRecord(c.Key)
		return
	case ipvs.AddRealServer, ipvs.UpdateRealServer:
		if s.RealServers == nil {
			s.RealServers = map[netip.AddrPort]ipvs.RealServer{}
		}
		s.RealServers[c.Dest] = c.RealServer
		if c.RealServer.Weight > 0 {
			f.undrain(c.Key, c.Dest)
		}
	case ipvs.DeleteRealServer:
		delete(s.RealServers, c.Dest)
	}
	f.have.setServer(c.Key, s, before)
}

// flows are those of which conntrack may have entries that must go: by address and
// port, those of UDP that lead to no real server any more; and those that were
// translated to a source that is used no more; and those of UDP of clients that take
// another way than they began with.
type flows struct {
	stale   map[ipvs.Key]struct{}
	sources map[netip.Addr]struct{}
	clients map[netip.Prefix]struct{}
	wait    bool // deleting them has failed, and is tried again with the node's retry
}

func newFlows() flows {
	return flows{stale: map[ipvs.Key]struct{}{}, sources: map[netip.Addr]struct{}{}, clients: map[netip.Prefix]struct{}{}}
}

// forgetFlows drops conntrack's entries of UDP flows that lead to no real
// server of theirs any more, or that are older than the virtual server. A
// client that goes on sending from one port would be led nowhere for as long
// as it sends (kubernetes#71514, #76664).
func (f *flush) forgetFlows(changes []ipvs.Change) {
	news := false
	for _, c := range changes {
		if c.Op == ipvs.AddVirtualServer || c.Op == ipvs.DeleteRealServer || c.Op == ipvs.DeleteVirtualServer {
			news = f.mayBeStale(c.Key) || news
		}
	}
	if news {
		f.forgetStale()
	}
}

// mayBeStale notes that flows are to be looked at, if it is UDP's server.
func (a *Applier) mayBeStale(key ipvs.Key) bool {
	address, known := a.serves(key)
	if known = known && address.Protocol == ip.UDP; known {
		a.flows.stale[address] = struct{}{}
	}
	return known
}

// forgetStale deletes them, or has that tried again. What leads to a real server
// that stays is kept, whichever of an address's two virtual servers has it. Until
// every Service is programmed it waits: Sweep has all flows looked at together, while
// each batch at the start would read the whole table.
func (f *flush) forgetStale() {
	if len(f.flows.stale)+len(f.flows.sources)+len(f.flows.clients) == 0 || !f.swept {
		return
	}
	matches := f.sourceMatches()
	for key := range f.flows.stale {
		keep := map[netip.AddrPort]struct{}{}
		mark := f.have.sets[plan.Local.In(key.Family())].Entries[entryOf(key)]
		for _, k := range []ipvs.Key{key, fwmKey(key.Family(), mark)} {
			for dest := range f.have.servers[k].RealServers {
				keep[dest] = struct{}{}
			}
		}
		matches = append(matches, conntrack.Match{
			Protocol: key.Protocol, OriginalDst: netip.AddrPortFrom(key.Addr, key.Port), Keep: keep,
		})
	}
	_, err := f.kernel.Conntrack.Delete(matches)
	if f.flows.wait = err != nil; f.flows.wait {
		f.fail(nil, err)
		return
	}
	f.flows = newFlows()
}
