package proxy

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// addressLingers is how long node ports are served on an address that was removed: the
// default period of kube-proxy's syncs, up to which kube-proxy serves them. mainLingers is
// how long the main table's default route is assumed to exist after it was removed. DHCP
// clients and network managers remove and add both again, mostly within a second. Without
// this, the virtual servers of the address would be deleted with their connections, and the
// primary interface could be mistaken for an ENI.
const (
	addressLingers = 30 * time.Second
	mainLingers    = time.Minute
)

// linger remembers what was recently removed from the node's network.
type linger struct {
	present map[netip.Addr]bool // at the last update
	gone    map[netip.Addr]time.Time
	main    map[ip.Family]mainRoutes
}

// mainRoutes holds the main table's last known default routes of a family.
type mainRoutes struct {
	routes []routing.Route
	gone   time.Time // when they were removed; zero: they exist
}

func newLinger() linger {
	return linger{gone: map[netip.Addr]time.Time{}, main: map[ip.Family]mainRoutes{}}
}

// update processes the current network of the node. It adds the lingering default
// routes to inv, and returns the lingering addresses, sorted.
func (l *linger) update(inv *routing.Inventory, now time.Time) []netip.Addr {
	l.updateAddresses(inv, now)
	for _, family := range ip.Families {
		l.updateMain(inv, family, now)
	}
	return slices.SortedFunc(maps.Keys(l.gone), netip.Addr.Compare)
}

func (l *linger) updateAddresses(inv *routing.Inventory, now time.Time) {
	present := map[netip.Addr]bool{}
	for _, link := range inv.Links {
		for _, a := range link.Addresses {
			if !a.Prefix.Addr().IsLinkLocalUnicast() {
				present[a.Prefix.Addr()] = true
				delete(l.gone, a.Prefix.Addr())
			}
		}
	}
	for a := range l.present {
		if _, known := l.gone[a]; !present[a] && !known {
			l.gone[a] = now
		}
	}
	maps.DeleteFunc(l.gone, func(_ netip.Addr, since time.Time) bool { return now.Sub(since) >= addressLingers })
	l.present = present
}

func (l *linger) updateMain(inv *routing.Inventory, family ip.Family, now time.Time) {
	routes := plan.MainDefaults(inv, family)
	last := l.main[family]
	switch {
	case len(routes) > 0:
		last = mainRoutes{routes: routes}
	case last.gone.IsZero() && len(last.routes) > 0:
		last.gone = now
	}
	last.routes = slices.DeleteFunc(slices.Clone(last.routes), func(r routing.Route) bool {
		return !slices.ContainsFunc(inv.Links, func(l routing.Link) bool { return l.Name == r.Link })
	})
	if len(routes) == 0 && now.Sub(last.gone) >= mainLingers {
		last = mainRoutes{}
	}
	if len(routes) == 0 {
		inv.Defaults = append(inv.Defaults, last.routes...)
	}
	l.main[family] = last
}

// mainGone returns the families whose default routes linger.
func (l *linger) mainGone() map[ip.Family]bool {
	out := map[ip.Family]bool{}
	for family, m := range l.main {
		if !m.gone.IsZero() {
			out[family] = true
		}
	}
	return out
}

// next returns when something stops lingering, or zero if nothing lingers.
func (l *linger) next() time.Time {
	var next time.Time
	sooner := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for _, since := range l.gone {
		sooner(since.Add(addressLingers))
	}
	for _, m := range l.main {
		if !m.gone.IsZero() && len(m.routes) > 0 {
			sooner(m.gone.Add(mainLingers))
		}
	}
	return next
}
