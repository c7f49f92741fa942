package reconcile

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// meanwhile is a world in which Services change and the kernel is damaged at random.
type meanwhile struct {
	*world
	random *rand.Rand
	now    map[string]service.Service
}

// change adds, changes or deletes one Service.
func (m *meanwhile) change() {
	i := m.random.IntN(8)
	name, vip := fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", 10+i)
	endpoints := []string{"10.244.0.2:8000", "10.244.0.3:8000", "10.244.0.4:8000"}[:m.random.IntN(4)]
	var s service.Service
	switch {
	case m.random.IntN(3) == 0:
		delete(m.now, name)
		m.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: name})
		m.reconciler.Flush()
		return
	case i < 3:
		s = clusterIP(name, vip, endpoints...)
	case i < 5:
		s = loadBalancer(name, vip, fmt.Sprintf("203.0.113.%d", i), endpoints...)
	default:
		s = externalLocal(name, []ip.Protocol{ip.TCP, ip.UDP}[i%2], fmt.Sprintf("203.0.113.%d", i), endpoints...)
		s.ClusterIPs = []netip.Addr{netip.MustParseAddr(vip)}
	}
	m.now[name] = s
	m.apply(s) // what damage has it refused is tried again in the end
}

// damage deletes or alters one of the existing objects, or adds a foreign one.
func (m *meanwhile) damage() {
	key, entry := m.anyServer(), m.anyEntry()
	state, _ := m.Routing.Observe()
	switch m.random.IntN(13) {
	case 0:
		m.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: key}})
	case 1:
		m.IPVS.Apply([]ipvs.Change{{Op: ipvs.UpdateVirtualServer, Key: key, VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}}})
	case 2:
		m.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddRealServer, Key: key, Dest: netip.MustParseAddrPort("10.244.0.66:1"), RealServer: ipvs.RealServer{Weight: 1}}})
	case 3:
		m.IPSet.Apply([]ipset.Change{entry(ipset.DeleteEntry)})
	case 4:
		m.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: m.reconciler.node.sets[plan.ClusterIP.In(ip.IPv4)], Entry: ipset.Entry{Addr: netip.MustParseAddr("10.96.9.9"), Port: 1, Protocol: ip.TCP}}})
	case 5:
		for _, addr := range slices.SortedFunc(maps.Keys(state.Addresses), netip.Addr.Compare) {
			m.Routing.Do(routing.Change{Op: routing.DeleteAddress, Address: addr})
			break
		}
	case 6:
		m.Routing.Do(routing.Change{Op: routing.AddAddress, Address: netip.MustParseAddr("10.96.8.8")})
	case 7:
		for r := range state.Routes {
			m.Routing.Do(routing.Change{Op: routing.DeleteRoute, Route: r})
			break
		}
	case 8:
		m.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: foreignKey, VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
	case 9:
		m.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: foreignKey}})
	case 10:
		m.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: m.reconciler.node.sets[plan.ClusterIP.In(ip.IPv4)], Entry: plan.EntryOf(foreignKey)}})
	case 11:
		m.IPSet.Apply([]ipset.Change{{Op: ipset.DestroySet, Set: entry(ipset.DeleteEntry).Set}})
	case 12:
		for addr := range state.Addresses {
			m.Routing.AddWrongScope(addr)
			break
		}
	}
}

var foreignKey = ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("192.0.2.77"), Port: 77}

func (m *meanwhile) anyServer() ipvs.Key {
	state, _ := m.IPVS.Observe()
	delete(state, foreignKey)
	for key := range state {
		return key
	}
	return ipvs.Key{}
}

// anyEntry returns a change of any member of a set that has one.
func (m *meanwhile) anyEntry() func(ipset.Op) ipset.Change {
	state, _ := m.IPSet.Observe(func(string) bool { return true })
	for _, set := range state {
		for e := range set.Entries {
			return func(op ipset.Op) ipset.Change { return ipset.Change{Op: op, Set: set.Set, Entry: e} }
		}
	}
	return func(ipset.Op) ipset.Change { return ipset.Change{} }
}

// resync changes Services before, during and after the read of the kernel, and between any
// two steps of the resync. It returns the differences found.
func (m *meanwhile) resync() int {
	m.t.Helper()
	for range m.random.IntN(4) {
		m.change()
	}
	read := m.reconciler.beginObserve(everything)
	o, err := read()
	if err != nil {
		m.t.Fatal(err)
	}
	for range m.random.IntN(4) {
		m.change()
	}
	d := m.reconciler.beginResync(o)
	d.stepSize = 1
	for d.step() {
		if m.random.IntN(20) == 0 {
			m.change()
		}
	}
	defer m.checkHeld()
	defer func() {
		if len(m.reconciler.servers.written)+len(m.reconciler.members.written)+len(m.reconciler.vips.written) > 0 {
			m.t.Error("what is written is still listed")
		}
	}()
	return d.end()
}

// repair compares again, because changes written meanwhile were not compared, and retries
// what was refused.
func (m *meanwhile) repair() {
	m.t.Helper()
	m.reconciler.Flush()
	if _, err := m.observe(); err != nil {
		m.t.Fatal(err)
	}
	m.reconciler.retry(types.NamespacedName{})
	for i := range 8 {
		m.reconciler.retry(types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%d", i)})
	}
	if err := m.reconciler.Flush().Err(); err != nil {
		m.t.Error(err)
	}
	if _, known := m.reconciler.servers.foreign[foreignKey]; known != strings.Contains(m.IPVS.Dump(), "192.0.2.77:77") {
		m.t.Errorf("the foreign virtual server is known: %t", known)
	}
}

// TestResyncInSteps finds no difference without damage, whatever is written meanwhile. After
// damage it leaves nothing to write for a process that starts.
func TestResyncInSteps(t *testing.T) {
	found := 0
	for seed := range uint64(50) {
		m := &meanwhile{world: newWorld(t), random: rand.New(rand.NewPCG(seed, 1)), now: map[string]service.Service{}}
		m.start()
		for range 12 {
			m.change()
		}
		if n := m.resync(); n != 0 {
			t.Errorf("%d differences, all of them newer than the observation", n)
		}
		for range 3 {
			for range m.random.IntN(4) {
				m.damage()
			}
			found += m.resync()
			m.repair()
		}
		m.drain()
		m.restart()
		m.order = nil
		m.start(slices.Collect(maps.Values(m.now))...)
		if len(m.order) > 0 {
			t.Errorf("a new process writes %q", m.order)
		}
		if t.Failed() {
			t.Fatalf("with seed %d", seed)
		}
	}
	if found < 50 {
		t.Errorf("%d differences found, the damage did little", found)
	}
}

// TestRepairFollowsTheListBackwards deletes all virtual servers, as `ipvsadm -C` does, and
// expects the last ones in the kernel's list to be added first: so the list is as before.
func TestRepairFollowsTheListBackwards(t *testing.T) {
	w := newWorld(t)
	var services []service.Service
	for n := range 50 {
		services = append(services, clusterIP(fmt.Sprintf("s%d", n), fmt.Sprintf("10.96.1.%d", n+1), "192.0.2.1:80", "192.0.2.2:80"))
	}
	w.start(services...)
	places := func() map[ipvs.Key]uint32 {
		state, err := w.IPVS.Observe()
		if err != nil {
			t.Fatal(err)
		}
		places := map[ipvs.Key]uint32{}
		for key, s := range state {
			places[key] = s.Place
		}
		return places
	}
	if differences, err := w.observe(); differences != 0 || err != nil {
		t.Fatalf("%d differences after the start: %v", differences, err)
	}
	before := places()
	for range 2 {
		var deleted []ipvs.Change
		for key := range before {
			deleted = append(deleted, ipvs.Change{Op: ipvs.DeleteVirtualServer, Key: key})
		}
		w.IPVS.Apply(deleted)
		if differences, err := w.observe(); differences < len(services) || err != nil {
			t.Fatalf("%d differences after the deletion: %v", differences, err)
		}
		if problems := w.reconciler.Flush(); len(problems) > 0 {
			t.Fatal(problems.Err())
		}
		if after := places(); !maps.Equal(before, after) {
			t.Fatalf("the list has another order:\n%v, before\n%v", after, before)
		}
	}
}
