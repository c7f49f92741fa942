package reconcile

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"unique"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// randomServer returns a planned virtual server with some of six endpoints.
func randomServer(random *rand.Rand) *plan.VirtualServer {
	vs := &plan.VirtualServer{VirtualServer: ipvs.VirtualServer{Scheduler: []string{"rr", "wrr"}[random.IntN(2)]}}
	for i := range byte(6) {
		e := plan.Endpoint{Addr: ip.Pack(netip.AddrFrom4([4]byte{10, 0, 0, i / 2})), Port: 80 + uint16(i%2), Flags: plan.EndpointFlags(random.IntN(8))}
		if e.Flags&plan.IsRealServer != 0 {
			e.Weight, e.MaxConnections = int32(random.IntN(3)), uint32(random.IntN(2))
		}
		if e.Flags != 0 {
			vs.Endpoints = append(vs.Endpoints, e)
		}
	}
	return vs
}

func TestEqualEndpointsAreShared(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		vs := randomServer(random)
		first := slices.Clone(vs.Endpoints)
		want := newWanted(vs, first)
		if len(first) > 0 && &want.endpoints[0] != &first[0] {
			t.Fatal("equal lists are not shared")
		}
		for _, e := range vs.Endpoints {
			for _, is := range []plan.EndpointFlags{plan.IsRealServer, plan.IsEndpoint, plan.IsUnreachable} {
				if want.is(e.Dest(), is) != (e.Flags&is != 0) {
					t.Fatalf("%+v is %d: %v", e, is, want.is(e.Dest(), is))
				}
			}
		}
	}
}

// The changes turn what the kernel has into what is desired, and add before they delete.
func TestDiffServerLeadsFromActualToDesired(t *testing.T) {
	key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}
	phases := map[ipvs.Op]int{
		ipvs.AddVirtualServer: 0, ipvs.AddRealServer: 1, ipvs.UpdateVirtualServer: 2, ipvs.UpdateRealServer: 3, ipvs.DeleteRealServer: 4,
	}
	random := rand.New(rand.NewPCG(2, 2))
	var have *cachedServer
	for range 2000 {
		want := newWanted(randomServer(random), nil)
		changes := diffServer(key, have, &want, nil)
		if !slices.IsSortedFunc(changes, func(a, b ipvs.Change) int { return phases[a.Op] - phases[b.Op] }) {
			t.Fatalf("out of order: %v", changes)
		}
		if have == nil {
			have = &cachedServer{}
		}
		for _, c := range changes {
			switch c.Op {
			case ipvs.AddVirtualServer, ipvs.UpdateVirtualServer:
				have.settings = unique.Make(c.VirtualServer)
			case ipvs.AddRealServer, ipvs.UpdateRealServer:
				if c.Op == ipvs.AddRealServer == have.has(c.Dest) {
					t.Fatalf("%s of a real server that is there or not", c)
				}
				have.setRealServer(c.Dest, c.RealServer)
			case ipvs.DeleteRealServer:
				have.deleteRealServer(c.Dest)
			}
		}
		if more := diffServer(key, have, &want, nil); len(more) > 0 {
			t.Fatalf("%v remain after %v", more, changes)
		}
		seen := map[netip.AddrPort]ipvs.RealServer{}
		for _, e := range want.endpoints {
			if e.Flags&plan.IsRealServer != 0 {
				seen[e.Dest()] = e.RealServer()
			}
		}
		if !have.equals(seen) {
			t.Fatalf("has %v, want %v", have.reals, seen)
		}
	}
}

// Stale real servers get weight 0 and drain. Those of weight 0 drain already and do not change.
func TestDiffServerDrains(t *testing.T) {
	key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}
	random := rand.New(rand.NewPCG(3, 3))
	for range 1000 {
		was, want := newWanted(randomServer(random), nil), newWanted(randomServer(random), nil)
		have, drain := &cachedServer{settings: was.settings}, &drainer{draining: map[ipvs.Key][]drainingServer{}}
		for _, e := range was.endpoints {
			if e.Flags&plan.IsRealServer != 0 {
				have.setRealServer(e.Dest(), e.RealServer())
			}
		}
		changes := diffServer(key, have, &want, drain)
		stale := 0
		for i := range have.reals {
			r := &have.reals[i]
			if want.is(r.Dest(), plan.IsRealServer) {
				continue
			}
			stale++
			_, drains := drain.find(key, r.Dest())
			changed := slices.Contains(changes, ipvs.Change{Op: ipvs.UpdateRealServer, Key: key, Dest: r.Dest()})
			if !drains || changed != (r.Weight != 0) {
				t.Fatalf("%v of weight %d drains: %v, is changed: %v", r.Dest(), r.Weight, drains, changed)
			}
		}
		if drain.count != stale || slices.ContainsFunc(changes, func(c ipvs.Change) bool { return c.Op == ipvs.DeleteRealServer }) {
			t.Fatalf("%d drain, want %d; %v", drain.count, stale, changes)
		}
	}
}
