package reconcile

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// wantedServer is a desired virtual server. It is not changed once it is in a table.
type wantedServer struct {
	ipvs.VirtualServer
	maxConnections uint32
	endpoints      []endpoint // sorted by address and port
}

// endpoint is an endpoint of a desired virtual server, as plan.VirtualServer lists it.
type endpoint struct {
	addr   netip.Addr
	port   uint16
	is     endpointIs
	weight int32 // of a real server
}

type endpointIs uint8

const (
	isRealServer endpointIs = 1 << iota // in RealServers
	isEndpoint                          // in Endpoints
	isLost                              // in Lost
)

// realServer is a real server in the kernel.
type realServer struct {
	addr   netip.Addr
	port   uint16
	weight int32
	max    uint32
}

// actualServer is a virtual server in the kernel. Its real servers are sorted by address and
// port.
type actualServer struct {
	ipvs.VirtualServer
	reals []realServer
}

func compareDest(addr netip.Addr, port uint16, dest netip.AddrPort) int {
	return cmp.Or(addr.Compare(dest.Addr()), cmp.Compare(port, dest.Port()))
}

func (e endpoint) dest() netip.AddrPort   { return netip.AddrPortFrom(e.addr, e.port) }
func (r realServer) dest() netip.AddrPort { return netip.AddrPortFrom(r.addr, r.port) }

func (r realServer) settings() ipvs.RealServer {
	return ipvs.RealServer{Weight: int(r.weight), MaxConnections: r.max}
}

// newWanted converts a planned virtual server. If its endpoints are those of shared, it
// shares the list.
func newWanted(vs *plan.VirtualServer, shared []endpoint) wantedServer {
	list := make([]endpoint, 0, max(len(vs.RealServers), len(vs.Endpoints)))
	for _, rs := range vs.RealServers {
		list = append(list, endpoint{addr: rs.Addr(), port: rs.Port(), is: isRealServer, weight: int32(rs.Weight)})
	}
	list = addEndpoints(list, vs.Endpoints, isEndpoint)
	list = addEndpoints(list, vs.Lost, isLost)
	if slices.Equal(list, shared) {
		list = shared
	}
	return wantedServer{vs.VirtualServer, vs.MaxConnections, slices.Clip(list)}
}

// addEndpoints notes in a sorted list what addresses and ports are.
func addEndpoints(list []endpoint, dests []netip.AddrPort, is endpointIs) []endpoint {
	i, sorted := 0, len(list)
	for _, dest := range dests {
		for i < sorted && compareDest(list[i].addr, list[i].port, dest) < 0 {
			i++
		}
		if i < sorted && list[i].dest() == dest {
			list[i].is |= is
			continue
		}
		list = append(list, endpoint{addr: dest.Addr(), port: dest.Port(), is: is})
	}
	if len(list) > sorted {
		slices.SortFunc(list, func(a, b endpoint) int { return compareDest(a.addr, a.port, b.dest()) })
	}
	return list
}

func sameWanted(a, b wantedServer) bool {
	return a.VirtualServer == b.VirtualServer && a.maxConnections == b.maxConnections && slices.Equal(a.endpoints, b.endpoints)
}

// is reports whether an address and port is any of the given.
func (w *wantedServer) is(dest netip.AddrPort, any endpointIs) bool {
	i, found := slices.BinarySearchFunc(w.endpoints, dest, func(e endpoint, dest netip.AddrPort) int { return compareDest(e.addr, e.port, dest) })
	return found && w.endpoints[i].is&any != 0
}

// settings converts a desired real server for package ipvs. A draining one gets no
// connections, so it needs no limit.
func (w *wantedServer) settings(e endpoint) ipvs.RealServer {
	if e.weight == 0 {
		return ipvs.RealServer{}
	}
	return ipvs.RealServer{Weight: int(e.weight), MaxConnections: w.maxConnections}
}

// newActual converts an observed virtual server.
func newActual(s ipvs.Service) actualServer {
	a := actualServer{VirtualServer: s.VirtualServer}
	if len(s.RealServers) == 0 {
		return a
	}
	a.reals = make([]realServer, 0, len(s.RealServers))
	for dest, rs := range s.RealServers {
		a.reals = append(a.reals, realServer{dest.Addr(), dest.Port(), int32(rs.Weight), rs.MaxConnections})
	}
	slices.SortFunc(a.reals, func(a, b realServer) int { return compareDest(a.addr, a.port, b.dest()) })
	return a
}

func (a *actualServer) find(dest netip.AddrPort) (int, bool) {
	return slices.BinarySearchFunc(a.reals, dest, func(r realServer, dest netip.AddrPort) int { return compareDest(r.addr, r.port, dest) })
}

// realServer returns the settings of a real server.
func (a *actualServer) realServer(dest netip.AddrPort) (ipvs.RealServer, bool) {
	if i, found := a.find(dest); found {
		return a.reals[i].settings(), true
	}
	return ipvs.RealServer{}, false
}

func (a *actualServer) has(dest netip.AddrPort) bool {
	_, found := a.find(dest)
	return found
}

func (a *actualServer) setRealServer(dest netip.AddrPort, rs ipvs.RealServer) {
	r := realServer{dest.Addr(), dest.Port(), int32(rs.Weight), rs.MaxConnections}
	i, found := a.find(dest)
	if found {
		a.reals[i] = r
		return
	}
	if len(a.reals) == cap(a.reals) && len(a.reals) < 8 { // most virtual servers have few
		a.reals = append(make([]realServer, 0, len(a.reals)+1), a.reals...)
	}
	a.reals = slices.Insert(a.reals, i, r)
}

func (a *actualServer) deleteRealServer(dest netip.AddrPort) {
	if i, found := a.find(dest); found {
		a.reals = slices.Delete(a.reals, i, i+1)
	}
}

// equals reports whether observed real servers are the cached ones.
func (a *actualServer) equals(seen map[netip.AddrPort]ipvs.RealServer) bool {
	if len(a.reals) != len(seen) {
		return false
	}
	for _, r := range a.reals {
		if is, there := seen[r.dest()]; !there || is != r.settings() {
			return false
		}
	}
	return true
}

// diffServer returns the changes that turn have into want; a nil server does not exist. At
// no point does a connection find fewer real servers than both before and after: additions
// come first (the virtual server directly before its real servers), then updates, then
// deletions. Each kind is sorted by address and port.
func diffServer(key ipvs.Key, have *actualServer, want *wantedServer) []ipvs.Change {
	var adds, updates, deletes []ipvs.Change
	var reals []realServer
	if have == nil {
		adds = make([]ipvs.Change, 0, 1+len(want.endpoints))
		adds = append(adds, ipvs.Change{Op: ipvs.AddVirtualServer, Key: key, VirtualServer: want.VirtualServer})
	} else {
		reals = have.reals
		if have.VirtualServer != want.VirtualServer {
			updates = append(updates, ipvs.Change{Op: ipvs.UpdateVirtualServer, Key: key, VirtualServer: want.VirtualServer})
		}
	}
	i := 0
	for _, e := range want.endpoints {
		if e.is&isRealServer == 0 {
			continue
		}
		dest := e.dest()
		for ; i < len(reals) && compareDest(reals[i].addr, reals[i].port, dest) < 0; i++ {
			deletes = append(deletes, ipvs.Change{Op: ipvs.DeleteRealServer, Key: key, Dest: reals[i].dest()})
		}
		settings := want.settings(e)
		switch there := i < len(reals) && reals[i].dest() == dest; {
		case !there:
			adds = append(adds, ipvs.Change{Op: ipvs.AddRealServer, Key: key, Dest: dest, RealServer: settings})
			continue
		case reals[i].settings() != settings:
			updates = append(updates, ipvs.Change{Op: ipvs.UpdateRealServer, Key: key, Dest: dest, RealServer: settings})
		}
		i++
	}
	for ; i < len(reals); i++ {
		deletes = append(deletes, ipvs.Change{Op: ipvs.DeleteRealServer, Key: key, Dest: reals[i].dest()})
	}
	if len(updates)+len(deletes) == 0 {
		return adds
	}
	return slices.Concat(adds, updates, deletes)
}
