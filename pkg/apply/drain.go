package apply

import (
	"net/netip"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// drain lists a real server among those that wait for their connections to
// end. The list needs no storage of its own: weight 0 in the kernel, on a
// real server that nobody wants, says the same after a restart.
func (a *Applier) drain(key ipvs.Key, dest netip.AddrPort) {
	if a.draining[key] == nil {
		a.draining[key] = map[netip.AddrPort]struct{}{}
	}
	a.draining[key][dest] = struct{}{}
}

func (a *Applier) undrain(key ipvs.Key, dest netip.AddrPort) {
	delete(a.draining[key], dest)
	if len(a.draining[key]) == 0 {
		delete(a.draining, key)
	}
}

// Draining counts the real servers that wait for their connections to end.
func (a *Applier) Draining() int {
	n := 0
	for _, dests := range a.draining {
		n += len(dests)
	}
	return n
}

// Drain removes the real servers whose last connection has ended. A
// connection that is being closed still counts: its last packets must find
// the way.
func (a *Applier) Drain() Problems {
	f := &flush{Applier: a}
	var changes []ipvs.Change
	for key, dests := range a.draining {
		conns, err := a.kernel.IPVS.Connections(key)
		if kernel.IsNotExist(err) {
			delete(a.draining, key)
			continue
		}
		if err != nil {
			f.fail(a.servers.owners(key), err)
			continue
		}
		for dest := range dests {
			if c := conns[dest]; c.Active+c.Inactive == 0 {
				changes = append(changes, ipvs.Change{Op: ipvs.DeleteRealServer, Key: key, Dest: dest})
			}
		}
	}
	f.applyServers(changes)
	for _, c := range changes {
		if _, there := a.have.servers[c.Key].RealServers[c.Dest]; !there {
			a.undrain(c.Key, c.Dest)
		}
	}
	return f.problems
}
