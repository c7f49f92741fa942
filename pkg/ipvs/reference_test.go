package ipvs

import (
	"maps"
	"net/netip"
	"slices"
)

// Diff is the reference for what a client applies: it returns the changes that turn have
// into want. Both may be parts of the kernel's state if they cover the same keys.
//
// The order is deterministic. At no point does a connection find fewer objects than both
// before and after: additions come first (a virtual server directly before its real
// servers), then updates, then deletions of real servers and, last, of virtual servers. Each
// object is changed at most once.
func Diff(have, want State) []Change {
	keys := slices.Collect(maps.Keys(want))
	for key := range have {
		if _, wanted := want[key]; !wanted {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, Key.Compare)
	var p phases
	for _, key := range keys {
		p.service(key, find(have, key), find(want, key))
	}
	return p.changes()
}

func find(s State, key Key) *Service {
	if service, ok := s[key]; ok {
		return &service
	}
	return nil
}

// phases collects changes by the phase in which they are applied.
type phases struct {
	adds, updates, deletes, removals []Change
}

func (p *phases) changes() []Change {
	if len(p.updates)+len(p.deletes)+len(p.removals) == 0 {
		return p.adds
	}
	return slices.Concat(p.adds, p.updates, p.deletes, p.removals)
}

func (p *phases) service(key Key, have, want *Service) {
	switch {
	case have == nil && want == nil:
	case want == nil:
		p.removals = append(p.removals, Change{Op: DeleteVirtualServer, Key: key})
	case have == nil:
		p.adds = slices.Grow(p.adds, 1+len(want.RealServers))
		p.adds = append(p.adds, Change{Op: AddVirtualServer, Key: key, VirtualServer: want.VirtualServer})
		p.realServers(key, nil, want.RealServers)
	default:
		if have.VirtualServer != want.VirtualServer {
			p.updates = append(p.updates, Change{Op: UpdateVirtualServer, Key: key, VirtualServer: want.VirtualServer})
		}
		p.realServers(key, have.RealServers, want.RealServers)
	}
}

func (p *phases) realServers(key Key, have, want map[netip.AddrPort]RealServer) {
	for _, dest := range sortedDests(want) {
		rs := want[dest]
		old, there := have[dest]
		switch {
		case !there:
			p.adds = append(p.adds, Change{Op: AddRealServer, Key: key, Dest: dest, RealServer: rs})
		case old != rs:
			p.updates = append(p.updates, Change{Op: UpdateRealServer, Key: key, Dest: dest, RealServer: rs})
		}
	}
	for _, dest := range sortedDests(have) {
		if _, wanted := want[dest]; !wanted {
			p.deletes = append(p.deletes, Change{Op: DeleteRealServer, Key: key, Dest: dest})
		}
	}
}
