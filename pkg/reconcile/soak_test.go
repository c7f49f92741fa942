package reconcile

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// soak is a world in which Services change at random; see TestSoak.
type soak struct {
	*world
	random *rand.Rand
	now    map[string]service.Service
	mode   soakMode
	lossy  bool
}

func (m *soak) pick(list ...string) string { return list[m.random.IntN(len(list))] }

// service returns a random Service that shares addresses and ports with others.
func (m *soak) service() service.Service {
	r := m.random
	i := r.IntN(5)
	name := fmt.Sprintf("s%d", i)
	s := service.Service{
		Name:    types.NamespacedName{Namespace: "default", Name: name},
		Created: time.Unix(int64(r.IntN(3)), 0),
	}
	if old, ok := m.now[name]; ok && r.IntN(4) > 0 {
		s.Created = old.Created
	}
	if r.IntN(8) > 0 {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr(fmt.Sprintf("10.96.0.%d", 10+i)))
	}
	if r.IntN(3) == 0 || len(s.ClusterIPs) == 0 {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr(fmt.Sprintf("fd00:96::%d", 10+i)))
	}
	if r.IntN(3) == 0 {
		s.LoadBalancers = append(s.LoadBalancers, netip.MustParseAddr(fmt.Sprintf("203.0.113.%d", r.IntN(3))))
	}
	if r.IntN(4) == 0 {
		s.LoadBalancers = append(s.LoadBalancers, netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", r.IntN(3))))
	}
	if r.IntN(4) == 0 {
		s.ExternalIPs = append(s.ExternalIPs, netip.MustParseAddr(fmt.Sprintf("203.0.113.%d", r.IntN(4))))
	}
	if r.IntN(4) == 0 {
		s.SourceRanges = []netip.Prefix{netip.MustParsePrefix(m.pick("10.0.0.0/8", "100.64.0.0/10", "fd00::/8"))}
	}
	s.ExternalLocal = r.IntN(2) == 0
	s.InternalLocal = r.IntN(5) == 0
	s.Masquerade = r.IntN(6) == 0
	if r.IntN(4) == 0 {
		s.AffinitySeconds = uint32(1 + r.IntN(3))
	}
	if r.IntN(4) == 0 {
		s.MaxConnections = uint32(r.IntN(3))
	}
	if r.IntN(3) == 0 {
		s.Scheduling.Scheduler = m.pick("rr", "wrr", "lc", "mh")
	}
	for p := range 1 + r.IntN(2) {
		port := service.Port{Protocol: []ip.Protocol{ip.TCP, ip.UDP, ip.SCTP}[r.IntN(3)], Port: uint16(80 + p), Name: fmt.Sprint("p", p)}
		if r.IntN(3) == 0 {
			port.NodePort = uint16(30000 + r.IntN(3) + 10*p)
		}
		for e := range 4 {
			if r.IntN(2) == 0 {
				continue
			}
			ready, serving := r.IntN(4) > 0, r.IntN(3) > 0
			for _, a := range []string{fmt.Sprintf("10.244.0.%d:8000", e+1), fmt.Sprintf("[fd00:244::%d]:8000", e+1)} {
				port.Endpoints = append(port.Endpoints, service.Endpoint{
					Addr: netip.MustParseAddrPort(a), Node: []string{"node1", "node2", ""}[e%3], Ready: ready, Serving: serving || ready, Terminating: !ready,
					Weight: []int32{0, 0, 1, 3}[r.IntN(4)],
				})
			}
		}
		slices.SortFunc(port.Endpoints, func(a, b service.Endpoint) int { return a.Addr.Compare(b.Addr) })
		s.Ports = append(s.Ports, port)
	}
	return s
}

// change sets or deletes one Service, and flushes in most cases.
func (m *soak) change() {
	s := m.service()
	if m.random.IntN(4) == 0 {
		delete(m.now, s.Name.Name)
		m.reconciler.Delete(s.Name)
	} else {
		m.now[s.Name.Name] = s
		m.set(s)
	}
	if m.random.IntN(4) > 0 {
		m.flush()
	}
}

func (m *soak) flush() {
	m.reconciler.Flush()
	m.checkHeld()
	if m.random.IntN(2) == 0 {
		m.replan()
	}
}

// replan plans the node with the sets that are in use.
func (m *soak) replan() {
	m.reconciler.SetNode(plan.Node{}, 0)
	m.reconciler.Flush()
}

// connections opens and closes connections to all real servers.
func (m *soak) connections() {
	state, _ := m.world.IPVS.Observe()
	keys := slices.SortedFunc(maps.Keys(state), ipvs.Key.Compare)
	for _, k := range keys {
		for _, d := range slices.SortedFunc(maps.Keys(state[k].RealServers), netip.AddrPort.Compare) {
			m.world.IPVS.SetConnections(k, d, ipvs.Connections{Active: m.random.IntN(2)})
		}
	}
}

// TestSoak changes Services at random, also with lost answers, damage by other programs and
// refusals. In the end the kernel is as after a start with the last Services.
func TestSoak(t *testing.T) {
	for _, mode := range []soakMode{{}, {lost: true}, {damage: true}, {lost: true, damage: true, refuse: true}} {
		for seed := range uint64(5) {
			m := newSoak(t, mode, seed)
			for range 25 {
				m.step()
			}
			m.settle()
			m.check()
			if t.Failed() {
				t.Fatalf("%+v with seed %d", mode, seed)
			}
		}
	}
}

// soakMode is what happens besides changes of Services.
type soakMode struct{ lost, damage, refuse bool }

func newSoak(t *testing.T, mode soakMode, seed uint64) *soak {
	m := &soak{world: newWorld(t), mode: mode, random: rand.New(rand.NewPCG(seed, 77)), now: map[string]service.Service{}}
	k := &m.reconciler.kernel
	k.IPVS, k.IPSet, k.Routing = lossyIPVS{m.world.IPVS, m}, lossyIPSet{m.world.IPSet, m}, lossyRouting{m.world.Routing, m}
	m.start()
	return m
}

// step changes one Service, and does what the mode permits.
func (m *soak) step() {
	m.lossy = m.mode.lost && m.random.IntN(2) == 0
	if m.mode.damage && m.random.IntN(4) == 0 {
		m.damage()
		m.compare()
	}
	m.change()
	if m.random.IntN(2) == 0 {
		m.connections()
	}
	switch m.random.IntN(6) {
	case 0:
		m.drain()
	case 1:
		if kind := m.pick("real server", "virtual server", "add ", "delete ", "address", "KUBE-IPVS-LOCAL", "KUBE-IPVS-DRAIN"); m.mode.refuse {
			m.refuse = func(c string) error {
				if strings.Contains(c, kind) && m.random.IntN(2) == 0 {
					return unix.ENOMEM
				}
				return nil
			}
		}
	case 2:
		m.refuse = nil
		m.retryAll()
	case 3:
		m.compare()
	}
}

func (m *soak) compare() {
	if _, err := m.observe(); err != nil {
		m.t.Fatal(err)
	}
	m.flush()
}

func (m *soak) retryAll() {
	m.reconciler.retry(nodeOwner.Name)
	for i := range 5 {
		m.reconciler.retry(types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%d", i)})
	}
	m.flush()
}

// settle lets everything succeed, and ends all connections.
func (m *soak) settle() {
	m.refuse, m.lossy = nil, false
	for range 3 {
		m.compare()
		m.retryAll()
		m.replan()
		state, _ := m.world.IPVS.Observe()
		for k := range state {
			for d := range state[k].RealServers {
				m.world.IPVS.SetConnections(k, d, ipvs.Connections{})
			}
		}
		m.drain()
	}
	if err := m.reconciler.Flush().Err(); err != nil {
		m.t.Error(err)
	}
}

// check compares the kernel with one that starts with the same Services.
func (m *soak) check() {
	m.t.Helper()
	m.order = nil
	if n, err := m.observe(); n != 0 || err != nil {
		m.t.Errorf("finally %d differences, %v", n, err)
	}
	if m.reconciler.Flush(); len(m.order) > 0 {
		m.t.Errorf("finally writes %q", m.order)
	}
	f := newWorld(m.t)
	f.indexes = maps.Clone(m.indexes)
	f.start(slices.Collect(maps.Values(m.now))...)
	g := &soak{world: f, random: m.random}
	g.settle()
	if diff := cmp.Diff(f.kernel(), m.kernel()); diff != "" {
		m.t.Errorf("differs from a new kernel:\n%s", diff)
	}
}

// lossyIPVS, lossyIPSet and lossyRouting apply all changes, but lose answers.
type lossyIPVS struct {
	*ipvs.Fake
	m *soak
}

func (l lossyIPVS) Apply(c []ipvs.Change) []ipvs.Failure { return lossy(l.m, c, l.Fake.Apply(c)) }

type lossyIPSet struct {
	*ipset.Fake
	m *soak
}

func (l lossyIPSet) Apply(c []ipset.Change) []ipset.Failure { return lossy(l.m, c, l.Fake.Apply(c)) }

type lossyRouting struct {
	*routing.Fake
	m *soak
}

func (l lossyRouting) Apply(c []routing.Change) []routing.Failure {
	return lossy(l.m, c, l.Fake.Apply(c))
}

// lossy reports a part of the changes as unanswered, from a random one on.
func lossy[C fmt.Stringer](m *soak, c []C, f []kernel.Failure[C]) []kernel.Failure[C] {
	if !m.lossy || len(f) > 0 || m.random.IntN(4) > 0 {
		return f
	}
	if len(c) == 0 {
		return f
	}
	for _, x := range c[m.random.IntN(len(c)):] {
		f = append(f, kernel.Failure[C]{Change: x, Err: unix.ETIMEDOUT})
	}
	return f
}

// damage changes the kernel as other programs do.
func (m *soak) damage() {
	state, _ := m.world.IPVS.Observe()
	keys := slices.SortedFunc(maps.Keys(state), ipvs.Key.Compare)
	sets, _ := m.world.IPSet.Observe(func(string) bool { return true })
	names := slices.Sorted(maps.Keys(sets))
	what := m.random.IntN(9)
	switch what {
	case 0, 1, 2:
		var c []ipvs.Change
		for _, k := range keys {
			if what == 0 || what == 1 && m.random.IntN(3) == 0 || what == 2 && k.FWMark != 0 {
				c = append(c, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: k})
			}
		}
		m.world.IPVS.Apply(c)
	case 3, 4, 5:
		var c []ipset.Change
		for _, n := range names {
			for _, e := range slices.SortedFunc(maps.Keys(sets[n].Entries), ipset.Entry.Compare) {
				if what == 3 || what == 4 && m.random.IntN(3) == 0 || what == 5 && (strings.HasSuffix(n, "LOCAL") || strings.HasSuffix(n, "DRAIN")) {
					c = append(c, ipset.Change{Op: ipset.DeleteEntry, Set: sets[n].Set, Entry: e})
				}
			}
		}
		m.world.IPSet.Apply(c)
	case 6:
		var c []ipset.Change
		for _, n := range names {
			if m.random.IntN(3) == 0 {
				c = append(c, ipset.Change{Op: ipset.DestroySet, Set: sets[n].Set})
			}
		}
		m.world.IPSet.Apply(c)
	case 7:
		for _, k := range keys {
			for _, d := range slices.SortedFunc(maps.Keys(state[k].RealServers), netip.AddrPort.Compare) {
				m.world.IPVS.Apply([]ipvs.Change{{Op: ipvs.UpdateRealServer, Key: k, Dest: d, RealServer: ipvs.RealServer{Weight: m.random.IntN(2)}}})
			}
		}
	case 8:
		m.world.Routing.Apply([]routing.Change{{Op: routing.DeleteLink}})
	}
}
