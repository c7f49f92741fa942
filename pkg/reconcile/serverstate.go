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

// wantedServer is a virtual server that a Service wants. It is immutable once it is in a
// table.
type wantedServer struct {
	settings
	endpoints []endpoint // sorted by address and port
}

// settings are the settings of a virtual server. Many virtual servers share few of them.
type settings = unique.Handle[ipvs.VirtualServer]

// endpoint is an endpoint of a desired virtual server, or a real server in the kernel.
type endpoint = plan.Endpoint

// cachedServer is a virtual server in the kernel, as far as is known. Its real servers are
// sorted by address and port.
type cachedServer struct {
	settings
	reals  []endpoint
	shared bool   // reals is also the list of the desired state: copy it before a change
	place  uint32 // see ipvs.Service, kept when the virtual server is deleted
}

// compareDest orders endpoints by address and port.
func compareDest(a, b endpoint) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
}

// search returns the position of an address and port in a sorted list, or the one to insert it at.
func search(list []endpoint, dest netip.AddrPort) (at int, found bool) {
	return slices.BinarySearchFunc(list, endpoint{Addr: ip.Pack(dest.Addr()), Port: dest.Port()}, compareDest)
}

func sameDest(a, b *endpoint) bool { return a.Addr == b.Addr && a.Port == b.Port }

// sameRealServer reports whether two endpoints have the same settings as real servers.
func sameRealServer(a, b *endpoint) bool {
	return a.Weight == b.Weight && a.MaxConnections == b.MaxConnections
}

func newEndpoint(dest netip.AddrPort, rs ipvs.RealServer) endpoint {
	return endpoint{Addr: ip.Pack(dest.Addr()), Port: dest.Port(), Flags: plan.IsRealServer, Weight: int32(rs.Weight), MaxConnections: rs.MaxConnections}
}

// newWanted returns the value of a planned virtual server. If its endpoints are those of shared,
// it shares the list.
func newWanted(vs *plan.VirtualServer, shared []endpoint) wantedServer {
	if slices.Equal(vs.Endpoints, shared) {
		return wantedServer{unique.Make(vs.VirtualServer), shared}
	}
	return wantedServer{unique.Make(vs.VirtualServer), vs.Endpoints}
}

func sameWanted(a, b wantedServer) bool {
	return a.settings == b.settings && slices.Equal(a.endpoints, b.endpoints)
}

// is reports whether an address and port has any of the given flags.
func (w *wantedServer) is(dest netip.AddrPort, any plan.EndpointFlags) bool {
	i, found := search(w.endpoints, dest)
	return found && w.endpoints[i].Flags&any != 0
}

// newCached converts an observed virtual server.
func newCached(s ipvs.Service) cachedServer {
	a := cachedServer{settings: unique.Make(s.VirtualServer), place: s.Place}
	if len(s.RealServers) == 0 {
		return a
	}
	a.reals = make([]endpoint, 0, len(s.RealServers))
	for dest, rs := range s.RealServers {
		a.reals = append(a.reals, newEndpoint(dest, rs))
	}
	slices.SortFunc(a.reals, compareDest)
	return a
}

func (s *cachedServer) find(dest netip.AddrPort) (at int, found bool) { return search(s.reals, dest) }

func (s *cachedServer) has(dest netip.AddrPort) bool {
	_, found := s.find(dest)
	return found
}

func (s *cachedServer) setRealServer(dest netip.AddrPort, rs ipvs.RealServer) {
	r := newEndpoint(dest, rs)
	switch i, found := s.find(dest); {
	case found:
		s.unshare()
		s.reals[i] = r
	case s.shared || len(s.reals) == cap(s.reals) && len(s.reals) < 8: // most virtual servers have few
		s.reals, s.shared = slices.Concat(s.reals[:i], []endpoint{r}, s.reals[i:]), false
	default:
		s.reals = slices.Insert(s.reals, i, r)
	}
}

func (s *cachedServer) deleteRealServer(dest netip.AddrPort) {
	if i, found := s.find(dest); found {
		s.unshare()
		s.reals = slices.Delete(s.reals, i, i+1)
	}
}

// share drops the list of real servers if that of the desired state is equal, and uses that.
func (s *cachedServer) share(want *wantedServer) {
	if len(s.reals) != len(want.endpoints) {
		return
	}
	for i := range s.reals {
		r, e := &s.reals[i], &want.endpoints[i]
		if e.Flags&plan.IsRealServer == 0 || !sameDest(r, e) || !sameRealServer(r, e) {
			return
		}
	}
	s.reals, s.shared = want.endpoints, true
}

// unshare precedes a change of the real servers.
func (s *cachedServer) unshare() {
	if s.shared {
		s.reals, s.shared = slices.Clone(s.reals), false
	}
}

// equals reports whether observed real servers are the cached ones.
func (s *cachedServer) equals(seen map[netip.AddrPort]ipvs.RealServer) bool {
	if len(s.reals) != len(seen) {
		return false
	}
	for _, r := range s.reals {
		if is, there := seen[r.Dest()]; !there || is != r.RealServer() {
			return false
		}
	}
	return true
}

// diffServer returns the changes that turn have into want; a nil server does not exist. At no point
// does the virtual server have fewer real servers than in the smaller of the two. Additions come
// first (the virtual server directly before its real servers), then updates, then deletions. Each
// kind is sorted by address and port.
//
// With drain, stale real servers are added to it instead of being deleted: with weight 0 they keep
// their established connections. One that drains already needs no change.
func diffServer(key ipvs.Key, have *cachedServer, want *wantedServer, drain *drainer) []ipvs.Change {
	var adds, updates, removals []ipvs.Change
	var reals []endpoint
	if have == nil {
		adds = make([]ipvs.Change, 0, 1+len(want.endpoints))
		adds = append(adds, ipvs.Change{Op: ipvs.AddVirtualServer, Key: key, VirtualServer: want.settings.Value()})
	} else {
		reals = have.reals
		if have.settings != want.settings {
			updates = append(updates, ipvs.Change{Op: ipvs.UpdateVirtualServer, Key: key, VirtualServer: want.settings.Value()})
		}
	}
	remove := func(r *endpoint) {
		op := ipvs.DeleteRealServer
		if drain != nil {
			drain.add(key, r.Dest())
			op = ipvs.UpdateRealServer
		}
		if drain == nil || r.Weight != 0 {
			removals = append(removals, ipvs.Change{Op: op, Key: key, Dest: r.Dest()})
		}
	}
	i := 0
	for at := range want.endpoints {
		e := &want.endpoints[at]
		if e.Flags&plan.IsRealServer == 0 {
			continue
		}
		if i < len(reals) && sameDest(&reals[i], e) && sameRealServer(&reals[i], e) {
			i++ // nearly all pairs are equal
			continue
		}
		for ; i < len(reals) && compareDest(reals[i], *e) < 0; i++ {
			remove(&reals[i])
		}
		switch there := i < len(reals) && sameDest(&reals[i], e); {
		case !there:
			adds = append(adds, ipvs.Change{Op: ipvs.AddRealServer, Key: key, Dest: e.Dest(), RealServer: e.RealServer()})
			continue
		case !sameRealServer(&reals[i], e):
			updates = append(updates, ipvs.Change{Op: ipvs.UpdateRealServer, Key: key, Dest: e.Dest(), RealServer: e.RealServer()})
		}
		i++
	}
	for ; i < len(reals); i++ {
		remove(&reals[i])
	}
	return append(append(adds, updates...), removals...)
}
