package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/test/fakenode"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// world is a Reconciler over fakes, and a record of the order of its writes.
type world struct {
	*fakenode.Node
	t          testing.TB
	cfg        plan.Config
	facts      plan.Facts
	reconciler *Reconciler
	order      []string
	indexes    map[ipvs.Key]uint32       // given in the order in which they are asked for
	refuse     func(change string) error // asked of every change, except of flows
	now        time.Time
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, cfg: scenario.DefaultConfig(), indexes: map[ipvs.Key]uint32{}}
	w.cfg.NodeName, w.cfg.Families = "node1", ip.Families
	w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = plan.ClaimPort, plan.ClaimPort
	w.Node = fakenode.New(fakenode.Parameters(&w.cfg, nil))
	w.OnChange = w.asked
	w.Conntrack.Refuse = nil
	w.restart()
	return w
}

// asked records a write, unless refuse selects it.
func (w *world) asked(change string) error {
	if w.refuse != nil {
		if err := w.refuse(change); err != nil {
			return err
		}
	}
	w.order = append(w.order, change)
	return nil
}

// restart creates a new Reconciler on the same kernel, as a new process would.
func (w *world) restart() {
	w.reconciler = New(&w.cfg, Kernel{
		IPVS: w.IPVS, IPSet: w.IPSet, Routing: w.Routing, Sysctl: w.Sysctl, Conntrack: w.Conntrack, Loopback: w.Loopback,
		NAT: map[ip.Family]NAT{ip.IPv4: w.NAT[ip.IPv4], ip.IPv6: w.NAT[ip.IPv6]},
	}, Periods{Sync: 30 * time.Second})
	node := plan.Node{}
	w.facts = plan.NewFacts(&w.cfg, &node)
	w.reconciler.setNode(plan.ForNode(&w.cfg, &node)) // for all sets, in use or not
}

// start does what the proxy does at startup.
func (w *world) start(services ...service.Service) Problems {
	w.t.Helper()
	if _, err := w.observe(); err != nil {
		w.t.Fatal(err)
	}
	problems := w.reconciler.Flush()
	problems = append(problems, w.apply(services...)...)
	return append(problems, w.reconciler.Prune()...)
}

// checkHeld recounts what the Reconciler counts incrementally.
func (w *world) checkHeld() {
	w.t.Helper()
	a := w.reconciler
	reals, ipv4 := 0, 0
	for s := range a.servers.allExisting() {
		reals += len(s.cached.reals)
		if s.key.Addr.Is4() {
			ipv4++
		}
	}
	if a.servers.realServers != reals || a.servers.ipv4Servers != ipv4 {
		w.t.Errorf("%d real servers and %d virtual servers of IPv4 are counted, there are %d and %d", a.servers.realServers, a.servers.ipv4Servers, reals, ipv4)
	}
	checkTable(w.t, &a.servers.table)
	checkTable(w.t, &a.members.table)
	checkTable(w.t, &a.vips.table)
	held := map[uint16]int{}
	for m := range a.members.allExisting() {
		held[m.key.set]++
	}
	for i, set := range a.sets.list {
		if set.existing != held[uint16(i)] {
			w.t.Errorf("%d members of %s are counted, there are %d", set.existing, set.name, held[uint16(i)])
		}
	}
	draining := 0
	for _, dests := range a.drainer.draining {
		draining += len(dests)
	}
	if got := a.drainer.count; got != draining {
		w.t.Errorf("%d draining real servers are counted, there are %d", got, draining)
	}
}

func (w *world) observe() (differences int, err error) {
	w.t.Helper()
	defer w.checkHeld()
	o, err := w.reconciler.beginObserve(everything)()
	if err != nil {
		return 0, err
	}
	return w.reconciler.runResync(o), nil
}

func (w *world) apply(services ...service.Service) Problems {
	w.t.Helper()
	defer w.checkHeld()
	w.set(services...)
	return w.reconciler.Flush()
}

// set makes services desired.
func (w *world) set(services ...service.Service) {
	for i := range services {
		s := &services[i]
		part := plan.ForService(&w.cfg, &w.facts, s)
		for _, o := range part.Internal {
			if w.indexes[o.Key] == 0 {
				w.indexes[o.Key] = uint32(len(w.indexes) + 1)
			}
		}
		w.reconciler.Set(&Owner{Name: s.Name, Created: s.Created}, plan.AssignMarks(&w.cfg, part, w.indexes))
	}
}

// deadline is that of connections to deleted endpoints.
const deadline = 15 * time.Minute

func (w *world) drain() Problems { return w.reconciler.checkDraining(w.now, deadline, math.MaxInt) }

func (w *world) mustApply(services ...service.Service) {
	w.t.Helper()
	if err := w.apply(services...).Err(); err != nil {
		w.t.Fatal(err)
	}
}

// position returns the index of a write in the order, or -1.
func (w *world) position(text string) int {
	return slices.IndexFunc(w.order, func(s string) bool { return strings.Contains(s, text) })
}

// kernel returns everything that the fakes hold, for comparison.
func (w *world) kernel() string {
	return w.IPVS.Dump() + w.IPSet.Dump() + w.routes() + w.NAT[ip.IPv4].Save() + w.NAT[ip.IPv6].Save()
}

// routes returns our routes in the fake.
func (w *world) routes() string {
	s, err := w.Routing.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	return fmt.Sprintf("link %v\naddresses %v\nrules %v\nroutes %v\n", s.DummyLink, slices.SortedFunc(maps.Keys(s.Addresses), netip.Addr.Compare), s.Rules, s.Routes)
}

// clusterIP returns a Service with TCP port 80 and endpoints given as "10.244.0.2:8000".
func clusterIP(name, vip string, endpoints ...string) service.Service {
	s := service.Service{
		Name:       types.NamespacedName{Namespace: "default", Name: name},
		ClusterIPs: []netip.Addr{netip.MustParseAddr(vip)},
		Ports:      []service.Port{{Protocol: ip.TCP, Port: 80}},
	}
	for _, e := range endpoints {
		s.Ports[0].Endpoints = append(s.Ports[0].Endpoints, service.Endpoint{Addr: netip.MustParseAddrPort(e), Ready: true, Serving: true})
	}
	return s
}

// loadBalancer returns a clusterIP with a LoadBalancer IP.
func loadBalancer(name, vip, lb string, endpoints ...string) service.Service {
	s := clusterIP(name, vip, endpoints...)
	s.LoadBalancers = []netip.Addr{netip.MustParseAddr(lb)}
	return s
}

func byPort(a netip.Addr) plan.VIP { return plan.VIP{Addr: a, Claim: plan.ClaimPort} }

func byAddress(a netip.Addr) plan.VIP { return plan.VIP{Addr: a, Claim: plan.ClaimAddress} }

func key(protocol ip.Protocol, s string) ipvs.Key {
	a := netip.MustParseAddrPort(s)
	return ipvs.Key{Protocol: protocol, Addr: a.Addr(), Port: a.Port()}
}

func (w *world) realServers(k ipvs.Key) map[netip.AddrPort]ipvs.RealServer {
	w.t.Helper()
	s, err := w.IPVS.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	return s[k].RealServers
}

func TestStartWritesTheNodeBeforeAnyVirtualServer(t *testing.T) {
	w := newWorld(t)
	if err := w.start(clusterIP("web", "10.96.0.10", "10.244.0.2:8000")).Err(); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"set sysctl net/ipv4/vs/conntrack",
		"create set KUBE-CLUSTER-IP",
		"write chain IPv4 nat/KUBE-POSTROUTING",
		"insert into IPv4 nat/POSTROUTING",
		"add 10.96.0.10,tcp:80 to set KUBE-CLUSTER-IP",
		"add virtual server TCP 10.96.0.10:80",
		"add real server 10.244.0.2:8000",
		"add address 10.96.0.10",
	}
	for i := 1; i < len(want); i++ {
		before, after := w.position(want[i-1]), w.position(want[i])
		if before < 0 || after < before {
			t.Errorf("%q at %d, then %q at %d\n%s", want[i-1], before, want[i], after, strings.Join(w.order, "\n"))
		}
	}
}

// A VIP claimed by port becomes local last and stops being local first, like one claimed by
// address.
func TestOrderOfAClaimedPort(t *testing.T) {
	w := newWorld(t)
	w.start()
	for _, step := range []struct {
		do   func()
		want []string
	}{
		{func() { w.mustApply(loadBalancer("web", "10.96.0.10", "192.168.1.200", "10.244.0.2:8000")) }, []string{
			"add 192.168.1.200,tcp:80 to set KUBE-LOAD-BALANCER",
			"add virtual server TCP 192.168.1.200:80",
			"add local route 192.168.1.200/32 dev lo table 80080",
		}},
		{func() {
			w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "web"})
			w.reconciler.Flush()
		}, []string{
			"delete local route 192.168.1.200/32 dev lo table 80080",
			"delete virtual server TCP 192.168.1.200:80",
			"delete 192.168.1.200,tcp:80 from set KUBE-LOAD-BALANCER",
		}},
	} {
		w.order = nil
		step.do()
		for i, text := range step.want {
			if at := w.position(text); at < 0 || i > 0 && at < w.position(step.want[i-1]) {
				t.Errorf("%q at %d\n%s", text, at, strings.Join(w.order, "\n"))
			}
		}
	}
	if w.reconciler.vips.noteRemoved([]routing.Removal{{Addr: netip.MustParseAddr("192.168.1.200"), Table: 80080}}) != 0 {
		t.Error("a route that we deleted is to be added again")
	}
}

// While source ranges change, clients that are allowed before and after are allowed at every
// moment in between.
func TestSourceRangesChangeWithoutAGap(t *testing.T) {
	w := newWorld(t)
	w.start()
	svc := loadBalancer("web", "10.96.0.10", "192.168.1.200", "10.244.0.2:8000")
	w.mustApply(svc)
	for range 20 { // changes are gathered from a map
		for _, step := range []struct {
			ranges        []string
			first, second string
		}{
			{[]string{"10.0.0.0/8"}, "add 192.168.1.200,tcp:80,10.0.0.0/8 to set", "add 192.168.1.200,tcp:80 to set KUBE-LOAD-BALANCER-FW"},
			{[]string{"10.0.0.0/9"}, "add 192.168.1.200,tcp:80,10.0.0.0/9 to set", "delete 192.168.1.200,tcp:80,10.0.0.0/8 from set"},
			{nil, "delete 192.168.1.200,tcp:80 from set KUBE-LOAD-BALANCER-FW", "delete 192.168.1.200,tcp:80,10.0.0.0/9 from set"},
		} {
			svc.SourceRanges = nil
			for _, r := range step.ranges {
				svc.SourceRanges = append(svc.SourceRanges, netip.MustParsePrefix(r))
			}
			w.order = nil
			w.mustApply(svc)
			if a, b := w.position(step.first), w.position(step.second); a < 0 || b < a {
				t.Fatalf("%q at %d, then %q at %d:\n%s", step.first, a, step.second, b, strings.Join(w.order, "\n"))
			}
		}
	}
}

// A new process with another claim leaves nothing of the old one, and releases nothing
// before its replacement exists.
func TestClaimsChangeWithTheConfiguration(t *testing.T) {
	svc := loadBalancer("web", "10.96.0.10", "192.168.1.200", "10.244.0.2:8000")
	states := map[plan.ClaimMode]string{}
	for _, claim := range []plan.ClaimMode{plan.ClaimPort, plan.ClaimAddress, plan.ClaimRoute} {
		w := newWorld(t)
		w.claimBy(claim)
		w.restart()
		w.start(svc)
		states[claim] = w.kernel()
	}
	w := newWorld(t)
	for _, claim := range []plan.ClaimMode{
		plan.ClaimPort, plan.ClaimAddress, plan.ClaimRoute, plan.ClaimAddress, plan.ClaimPort, plan.ClaimRoute, plan.ClaimPort,
	} {
		w.claimBy(claim)
		w.restart()
		w.order = nil
		w.start(svc)
		given := slices.IndexFunc(w.order, func(c string) bool {
			return strings.HasPrefix(c, "delete address") || strings.HasPrefix(c, "delete local")
		})
		taken := slices.IndexFunc(w.order, func(c string) bool { return strings.HasPrefix(c, "add address") || strings.HasPrefix(c, "add local") })
		if given >= 0 && given < taken {
			t.Errorf("by %s: given up before it was taken:\n%s", claim, strings.Join(w.order, "\n"))
		}
		if got := w.kernel(); got != states[claim] {
			t.Errorf("by %s:\n%s\nwant\n%s", claim, got, states[claim])
		}
	}
}

// claimBy sets the claim of LoadBalancer IPs, and of cluster IPs if it is valid for them.
func (w *world) claimBy(claim plan.ClaimMode) {
	w.cfg.VIPs.ClusterIPs, w.cfg.VIPs.LoadBalancers = plan.ClaimAddress, claim
	if claim == plan.ClaimRoute {
		w.cfg.VIPs.ClusterIPs = claim
	}
}

func TestChangeCostsWhatChanged(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"), clusterIP("b", "10.96.0.2", "10.244.0.3:8000"))
	w.order = nil
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.4:8000"))
	want := []string{"add real server 10.244.0.4:8000 to TCP 10.96.0.1:80"}
	if !slices.Equal(w.order, want) {
		t.Errorf("wrote %q, want %q", w.order, want)
	}
	w.order = nil
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.4:8000"))
	if len(w.order) != 0 {
		t.Errorf("nothing changed, and %q was written", w.order)
	}
}

func TestRestartWritesNothing(t *testing.T) {
	w := newWorld(t)
	services := []service.Service{clusterIP("a", "10.96.0.1", "10.244.0.2:8000"), clusterIP("b", "fd00::2", "[fd00:1::3]:8000")}
	w.start(services...)
	w.order = nil
	w.restart()
	if err := w.start(services...).Err(); err != nil {
		t.Fatal(err)
	}
	if len(w.order) != 0 {
		t.Errorf("a restart wrote\n%s", strings.Join(w.order, "\n"))
	}
}

func TestRestartRemovesWhatWentMeanwhile(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	alone := w.kernel()

	w.mustApply(clusterIP("b", "10.96.0.2", "10.244.0.3:8000"))
	w.restart()
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	if got := w.kernel(); got != alone {
		t.Errorf("left over:\n%s\nwant\n%s", got, alone)
	}
}

func TestRemovalUnbindsFirst(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	w.order = nil
	w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "a"})
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	address, server, member := w.position("delete address"), w.position("delete virtual server"), w.position("from set KUBE-CLUSTER-IP")
	if address < 0 || server < address || member < server {
		t.Errorf("order %q", w.order)
	}
}

func TestForeignVirtualServersAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	foreign := key(ip.TCP, "192.168.7.7:80") // keepalived's
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: foreign, VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}}})
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	if differences, err := w.observe(); differences != 0 || err != nil {
		t.Errorf("%d differences, %v", differences, err)
	}
	w.reconciler.Flush()
	if s, _ := w.IPVS.Observe(); s[foreign].Scheduler != "wlc" {
		t.Errorf("the foreign virtual server is gone: %v", s)
	}
}

// TestExcludedRange: as under kube-proxy, Services and node ports are served in a range of
// --ipvs-exclude-cidrs. A virtual server that no Service has stays, also at the number of a node
// port while the node ports are listed by port alone.
func TestExcludedRange(t *testing.T) {
	w := newWorld(t)
	w.cfg.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}
	foreign := key(ip.TCP, "192.168.7.7:30080") // keepalived's
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: foreign, VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}}})
	ports := ipset.Set{Name: "KUBE-NODE-PORT-TCP", Type: ipset.BitmapPort, Family: ip.IPv4}
	w.IPSet.Apply([]ipset.Change{{Op: ipset.CreateSet, Set: ports}, {Op: ipset.AddEntry, Set: ports, Entry: ipset.Entry{Port: 30080}}})
	w.start(loadBalancer("a", "10.96.0.1", "192.168.1.200", "10.244.0.2:8000"))
	if differences, err := w.observe(); differences != 0 || err != nil {
		t.Errorf("%d differences, %v", differences, err)
	}
	w.reconciler.Flush()
	s, _ := w.IPVS.Observe()
	if len(s[key(ip.TCP, "192.168.1.200:80")].RealServers) != 1 {
		t.Errorf("the load balancer's address is not served: %v", s)
	}
	if s[foreign].Scheduler != "wlc" {
		t.Errorf("the foreign virtual server is gone: %v", s)
	}
}

func TestDriftIsRepaired(t *testing.T) {
	w := newWorld(t)
	w.start(loadBalancer("a", "10.96.0.1", "192.168.1.200", "10.244.0.2:8000"))
	want := w.kernel()
	claim := w.cfg.VIPs
	route, _ := claim.Route(byPort(netip.MustParseAddr("192.168.1.200")))
	other, _ := claim.Route(byPort(netip.MustParseAddr("192.168.1.201")))
	rule := routing.Rule{Family: ip.IPv4, Priority: claim.Priority, Mark: claim.Mark, Mask: claim.Mark, Table: claim.Table}
	k, dest := key(ip.TCP, "10.96.0.1:80"), netip.MustParseAddrPort("10.244.0.2:8000")
	set := ipset.Set{Name: "KUBE-CLUSTER-IP", Type: ipset.HashIPPort, Family: ip.IPv4}
	entry := ipset.Entry{Addr: k.Addr, Port: 80, Protocol: ip.TCP}
	chain := nat.Chain{Family: ip.IPv4, Table: nat.NAT, Name: "KUBE-SERVICES"}
	drifts := map[string]func(){
		"virtual server deleted": func() { w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: k}}) },
		"real server deleted":    func() { w.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteRealServer, Key: k, Dest: dest}}) },
		"member deleted":         func() { w.IPSet.Apply([]ipset.Change{{Op: ipset.DeleteEntry, Set: set, Entry: entry}}) },
		"member added": func() {
			e := entry
			e.Port = 81
			w.IPSet.Apply([]ipset.Change{{Op: ipset.AddEntry, Set: set, Entry: e}})
		},
		"address deleted": func() { w.Routing.Apply([]routing.Change{{Op: routing.DeleteAddress, Address: k.Addr}}) },
		"address added": func() {
			w.Routing.Apply([]routing.Change{{Op: routing.AddAddress, Address: netip.MustParseAddr("10.96.9.9")}})
		},
		"route deleted": func() { w.Routing.Apply([]routing.Change{{Op: routing.DeleteRoute, Route: route}}) },
		"route added":   func() { w.Routing.Apply([]routing.Change{{Op: routing.AddRoute, Route: other}}) },
		"rule deleted":  func() { w.Routing.Apply([]routing.Change{{Op: routing.DeleteRule, Rule: rule}}) },
		"link deleted":  func() { w.Routing.Apply([]routing.Change{{Op: routing.DeleteLink}}) },
		"chain emptied": func() { w.NAT[ip.IPv4].Apply([]nat.Change{{Op: nat.WriteChain, Chain: chain}}) },
	}
	for name, drift := range drifts {
		t.Run(name, func(t *testing.T) {
			drift()
			if w.kernel() == want {
				t.Fatal("the drift changed nothing")
			}
			if _, err := w.observe(); err != nil {
				t.Fatal(err)
			}
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
			if got := w.kernel(); got != want {
				t.Errorf("not repaired:\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestFailedReadIsNoEmptyList(t *testing.T) {
	for _, part := range []string{"ipvs", "ipset", "routing", "nat"} {
		t.Run(part, func(t *testing.T) {
			w := newWorld(t)
			w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
			want := w.kernel()
			fail := func() error { return unix.EPERM }
			switch part {
			case "ipvs":
				w.IPVS.FailObserve = fail
			case "ipset":
				w.IPSet.FailObserve = fail
			case "routing":
				w.Routing.FailObserve = fail
			case "nat":
				w.NAT[ip.IPv6].FailObserve = fail
			}
			if _, err := w.observe(); !errors.Is(err, unix.EPERM) {
				t.Errorf("error %v, want EPERM", err)
			}
			w.order = nil
			w.reconciler.Flush()
			w.IPVS.FailObserve, w.IPSet.FailObserve, w.Routing.FailObserve, w.NAT[ip.IPv6].FailObserve = nil, nil, nil, nil
			if got := w.kernel(); got != want || len(w.order) != 0 {
				t.Errorf("wrote %q", w.order)
			}
		})
	}
}

// TestEveryRefusalIsReportedAndRepaired refuses each write of a busy start in turn. Each
// time the error must name the Service, everything that does not need the refused write must
// exist, and the retry must leave the kernel as if nothing had been refused.
func TestEveryRefusalIsReportedAndRepaired(t *testing.T) {
	services := []service.Service{
		clusterIP("a", "10.96.0.1", "10.244.0.2:8000"),
		clusterIP("b", "10.96.0.2", "10.244.0.3:8000"),
	}
	reference := newWorld(t)
	reference.start(services...)
	want, writes := reference.kernel(), len(reference.order)
	for n := range writes {
		w := newWorld(t)
		seen := 0
		var refused string
		w.refuse = func(change string) error {
			seen++
			if seen-1 == n {
				refused = change
			}
			// Every attempt fails: members that are refused together are tried one by
			// one.
			if change == refused {
				return unix.ENOMEM
			}
			return nil
		}
		problems := w.start(services...)
		if len(problems) == 0 {
			t.Errorf("no problem reports that %q was refused", refused)
		}
		w.checkOthers(refused, problems, services)
		w.refuse = nil
		w.recover(problems)
		if got := w.kernel(); got != want {
			t.Errorf("after the refusal of %q:\n%s\nwant\n%s", refused, got, want)
		}
	}
	t.Logf("refused each of %d writes in turn", writes)
}

// checkOthers checks that an unaffected Service is served, and that a Service that lacks
// something is not half served.
func (w *world) checkOthers(refused string, problems Problems, services []service.Service) {
	w.t.Helper()
	blamed := map[types.NamespacedName]bool{}
	nodes := false
	for _, p := range problems {
		nodes = nodes || len(p.Owners) == 0
		for _, o := range p.Owners {
			blamed[o] = true
		}
	}
	for _, s := range services {
		k := ipvs.Key{Protocol: ip.TCP, Addr: s.ClusterIPs[0], Port: 80}
		if w.reconciler.vips.exists(byAddress(k.Addr)) && len(w.realServers(k)) == 0 && !strings.Contains(refused, "real server") {
			w.t.Errorf("refused %q: %s is bound without its virtual server", refused, k.Addr)
		}
		if !nodes && !blamed[s.Name] && len(w.realServers(k)) != 1 {
			w.t.Errorf("refused %q: %s suffers, which is not to blame", refused, s.Name)
		}
	}
}

// recover does what the proxy loop does after problems: it compares and retries.
func (w *world) recover(problems Problems) {
	w.t.Helper()
	if _, err := w.observe(); err != nil {
		w.t.Fatal(err)
	}
	for _, p := range problems {
		for _, o := range p.Owners {
			w.reconciler.retry(o)
		}
	}
	w.reconciler.retry(types.NamespacedName{})
	if err := w.reconciler.Flush().Err(); err != nil {
		w.t.Errorf("the retry failed: %v", err)
	}
}

// Two Services share a LoadBalancer IP. If a virtual server of one is refused, the other is served.
func TestRefusedServerOfSharedAddress(t *testing.T) {
	const shared = "192.0.2.1"
	good, bad := loadBalancer("good", "10.96.0.1", shared, "10.244.0.2:8000"), loadBalancer("bad", "10.96.0.2", shared, "10.244.0.3:8000")
	bad.Ports[0].Port = 81
	for _, what := range []string{"virtual server TCP 192.0.2.1:81", "add 192.0.2.1,tcp:81 to set KUBE-LOAD-BALANCER"} {
		w := newWorld(t)
		w.refuse = func(change string) error {
			if strings.Contains(change, what) {
				return unix.ENOMEM
			}
			return nil
		}
		if len(w.start(good, bad)) == 0 {
			t.Fatalf("%s: the refusal was not seen", what)
		}
		want := strings.HasPrefix(what, "virtual server")
		addr := netip.MustParseAddr(shared)
		if is := w.reconciler.vips.exists(byAddress(addr)) || w.reconciler.vips.exists(byPort(addr)); is != want {
			t.Errorf("refused %s: local: %t, want %t", what, is, want)
		}
	}
}

func TestRefusedKeyIsNotTriedWithEveryChange(t *testing.T) {
	w := newWorld(t)
	w.start()
	tries := 0
	w.refuse = func(change string) error {
		if strings.Contains(change, "virtual server TCP 10.96.0.1:80") {
			tries++
			return unix.ENOMEM
		}
		return nil
	}
	bad := clusterIP("bad", "10.96.0.1", "10.244.0.2:8000")
	if len(w.apply(bad)) == 0 || tries == 0 {
		t.Fatal("the refusal was not seen")
	}
	before := tries
	w.apply(clusterIP("good", "10.96.0.2", "10.244.0.3:8000"))
	if tries != before {
		t.Error("another Service's change tried it again")
	}
	if w.reconciler.vips.exists(byAddress(bad.ClusterIPs[0])) {
		t.Error("its address was bound by another Service's change")
	}
	w.refuse = nil
	w.reconciler.retry(bad.Name)
	if err := w.reconciler.Flush().Err(); err != nil || len(w.realServers(key(ip.TCP, "10.96.0.1:80"))) != 1 {
		t.Errorf("after the retry: %v", err)
	}
}

func TestSharedVIPStaysUntilTheLastServiceGoes(t *testing.T) {
	shared := netip.MustParseAddr("192.0.2.1")
	for _, vip := range []plan.VIP{byAddress(shared), byPort(shared)} {
		w := newWorld(t)
		w.cfg.VIPs.ExternalIPs = vip.Claim
		service := func(name, clusterVIP string, port uint16) service.Service {
			s := clusterIP(name, clusterVIP, "10.244.0.2:8000")
			s.ExternalIPs = []netip.Addr{shared}
			s.Ports[0].Port = port
			return s
		}
		w.start(service("a", "10.96.0.1", 80), service("b", "10.96.0.2", 443))
		claimed := func() bool { return w.reconciler.vips.exists(vip) }
		w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "a"})
		w.reconciler.Flush()
		if !claimed() || len(w.realServers(key(ip.TCP, "192.0.2.1:443"))) != 1 {
			t.Errorf("%s: it went with the first of its Services", vip)
		}
		w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "b"})
		w.reconciler.Flush()
		if claimed() {
			t.Errorf("%s: it stayed after the last of its Services", vip)
		}
	}
}

func TestTCPRealServerDrains(t *testing.T) {
	w := newWorld(t)
	k, gone := key(ip.TCP, "10.96.0.1:80"), netip.MustParseAddrPort("10.244.0.2:8000")
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000"))
	w.IPVS.SetConnections(k, gone, ipvs.Connections{Active: 1})
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
	if rs, there := w.realServers(k)[gone]; !there || rs.Weight != 0 {
		t.Fatalf("a real server with a connection: %v, there %v, want weight 0", rs, there)
	}
	if err := w.drain().Err(); err != nil {
		t.Fatal(err)
	}
	if _, there := w.realServers(k)[gone]; !there {
		t.Fatal("removed with a connection open")
	}

	// A restart continues draining; the weight stays 0.
	w.restart()
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
	if rs := w.realServers(k)[gone]; rs.Weight != 0 || w.reconciler.drainer.count != 1 {
		t.Fatalf("after a restart: %v, %d draining", rs, w.reconciler.drainer.count)
	}

	// The endpoint returns, and is deleted again.
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.2:8000", "10.244.0.3:8000"))
	if rs := w.realServers(k)[gone]; rs.Weight != 1 || w.reconciler.drainer.count != 0 {
		t.Fatalf("back again: %v, %d draining", rs, w.reconciler.drainer.count)
	}
	w.mustApply(clusterIP("a", "10.96.0.1", "10.244.0.3:8000"))
	w.IPVS.SetConnections(k, gone, ipvs.Connections{Inactive: 1})
	w.drain()
	if _, there := w.realServers(k)[gone]; !there {
		t.Fatal("removed while a connection is being closed")
	}
	w.IPVS.SetConnections(k, gone, ipvs.Connections{})
	w.drain()
	if _, there := w.realServers(k)[gone]; there || w.reconciler.drainer.count != 0 {
		t.Fatalf("still there after its last connection, %d draining", w.reconciler.drainer.count)
	}
}

// flowTo returns the conntrack entry of a client's datagrams to a VIP.
func flowTo(client, vip, endpoint string) conntrack.Entry {
	c := netip.MustParseAddrPort(client)
	return conntrack.Entry{
		Protocol: ip.UDP, OriginalSrc: c, OriginalDst: netip.MustParseAddrPort(vip),
		ReplySrc: netip.MustParseAddrPort(endpoint), ReplyDst: c,
	}
}

func TestUDPRealServerGoesAtOnceWithItsFlows(t *testing.T) {
	w := newWorld(t)
	udp := func(endpoints ...string) service.Service {
		s := clusterIP("dns", "10.96.0.10", endpoints...)
		s.Ports[0].Protocol, s.Ports[0].Port = ip.UDP, 53
		return s
	}
	w.start(udp("10.244.0.2:53", "10.244.0.3:53"))
	const vip = "10.96.0.10:53"
	gone, kept := flowTo("10.244.0.9:1000", vip, "10.244.0.2:53"), flowTo("10.244.0.9:1001", vip, "10.244.0.3:53")
	w.Conntrack.Add(gone, kept)
	w.mustApply(udp("10.244.0.3:53"))
	if rs := w.realServers(key(ip.UDP, "10.96.0.10:53")); len(rs) != 1 {
		t.Errorf("real servers %v", rs)
	}
	if got := w.Conntrack.Entries(); !slices.Equal(got, []conntrack.Entry{kept}) {
		t.Errorf("flows left: %v, want %v", got, kept)
	}
}

// TestFlowsFromBeforeTheVIPAreDeleted checks that a flow that was forwarded before its VIP became
// local is deleted: IPVS would not translate its later datagrams.
func TestFlowsFromBeforeTheVIPAreDeleted(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	dns := clusterIP("dns", "10.96.0.10", "10.244.0.2:53")
	dns.Ports[0].Protocol, dns.Ports[0].Port = ip.UDP, 53
	forwarded := flowTo("10.244.0.9:1000", "10.96.0.10:53", "10.96.0.10:53")
	w.refuse = func(change string) error {
		if strings.Contains(change, "add address 10.96.0.10") {
			w.Conntrack.Add(forwarded)
		}
		return nil
	}
	w.mustApply(dns)
	w.refuse = nil
	if got := w.Conntrack.Entries(); len(got) > 0 {
		t.Errorf("flows left after the VIP was added: %v", got)
	}
	w.Routing.Do(routing.Change{Op: routing.DeleteAddress, Address: netip.MustParseAddr("10.96.0.10")})
	w.Conntrack.Add(forwarded)
	w.reconciler.vips.noteRemoved([]routing.Removal{{Addr: netip.MustParseAddr("10.96.0.10")}})
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if got := w.Conntrack.Entries(); len(got) > 0 {
		t.Errorf("flows left after the VIP was added again: %v", got)
	}
}

// TestDriftOfTheNodesPartIsCounted changes node-wide state.
func TestDriftOfTheNodesPartIsCounted(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	for _, step := range []struct {
		name   string
		damage func()
		want   int
	}{
		{"nothing", func() {}, 0},
		{"a parameter", func() { w.Sysctl.Set("net/ipv4/ip_forward", "0") }, 1},
		{"a chain", func() {
			if err := w.NAT[ip.IPv6].Restore("*nat\n-F KUBE-SERVICES\nCOMMIT\n"); err != nil {
				t.Fatal(err)
			}
		}, 1},
		{"a policy rule", func() {
			for _, r := range w.reconciler.node.Rules {
				w.Routing.Do(routing.Change{Op: routing.DeleteRule, Rule: r})
			}
		}, 2},
	} {
		step.damage()
		if got, err := w.observe(); err != nil || got != step.want {
			t.Errorf("%s: %d differences, want %d (%v)", step.name, got, step.want, err)
		}
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Error(err)
		}
	}
}

// TestRefusedFlowsAreForgottenLater makes conntrack refuse the deletion of a stale flow: the
// flow must be deleted with the retry.
func TestRefusedFlowsAreForgottenLater(t *testing.T) {
	w := newWorld(t)
	udp := func(endpoints ...string) service.Service {
		s := clusterIP("dns", "10.96.0.10", endpoints...)
		s.Ports[0].Protocol, s.Ports[0].Port = ip.UDP, 53
		return s
	}
	w.start(udp("10.244.0.2:53", "10.244.0.3:53"))
	w.Conntrack.Add(flowTo("10.244.0.9:1000", "10.96.0.10:53", "10.244.0.2:53"))
	w.Conntrack.FailDump = func() error { return unix.ENOMEM }
	if problems := w.apply(udp("10.244.0.3:53")); len(problems) != 1 {
		t.Errorf("problems %v, want the one of conntrack", problems)
	}
	w.Conntrack.Dumps()
	w.mustApply() // another Service's change does not try again
	w.Conntrack.FailDump = nil
	w.reconciler.retry(types.NamespacedName{})
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Error(err)
	}
	if left := w.Conntrack.Entries(); len(left) > 0 {
		t.Errorf("after the retry: %v", left)
	}
}

func TestWritesDuringAnObservationCount(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	read := w.reconciler.beginObserve(everything)
	o, err := read()
	if err != nil {
		t.Fatal(err)
	}
	w.mustApply(clusterIP("b", "10.96.0.2", "10.244.0.3:8000"))
	w.reconciler.Delete(types.NamespacedName{Namespace: "default", Name: "a"})
	w.reconciler.Flush()
	if n := w.reconciler.runResync(o); n != 0 {
		t.Errorf("%d differences, all of them newer than the observation", n)
	}
}

func TestSweepWaitsForAllServices(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	w.restart()
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	if len(w.realServers(key(ip.TCP, "10.96.0.1:80"))) != 1 {
		t.Error("a Service that is not known yet lost its virtual server")
	}
}

func TestConflictIsTheOlderServices(t *testing.T) {
	w := newWorld(t)
	w.start()
	older, younger := clusterIP("z", "10.96.0.1", "10.244.0.2:8000"), clusterIP("a", "10.96.0.1", "10.244.0.3:8000")
	older.Created, younger.Created = owner("", 10).Created, owner("", 20).Created
	w.mustApply(younger, older)
	k := key(ip.TCP, "10.96.0.1:80")
	// The younger one's endpoint drains, because it was served for a moment.
	if rs := w.realServers(k); rs[netip.MustParseAddrPort("10.244.0.2:8000")].Weight != 1 {
		t.Errorf("real servers %v", rs)
	}
	want := []Conflict{{Key: k, Loser: younger.Name, Winner: older.Name}}
	if c := w.reconciler.conflicts.begun(); !slices.Equal(c, want) || w.reconciler.conflicts.losers != 1 {
		t.Errorf("%d conflicts, %v", w.reconciler.conflicts.losers, c)
	}
	w.reconciler.Delete(older.Name)
	w.reconciler.Flush()
	if c := w.reconciler.conflicts.begun(); len(c) > 0 || w.reconciler.conflicts.losers != 0 {
		t.Errorf("%d conflicts, new ones %v", w.reconciler.conflicts.losers, c)
	}
	if rs := w.realServers(k); rs[netip.MustParseAddrPort("10.244.0.3:8000")].Weight != 1 {
		t.Errorf("the younger Service did not take over: %v", rs)
	}
}

func TestCleanupLeavesTheNodeAsItWas(t *testing.T) {
	w := newWorld(t)
	foreign := key(ip.TCP, "192.168.7.7:80")
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: foreign, VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}}})
	input := "*nat\n-A POSTROUTING -o eth0 -j MASQUERADE\nCOMMIT\n"
	if err := w.NAT[ip.IPv4].Restore(input); err != nil {
		t.Fatal(err)
	}
	before := w.kernel()
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"), externalLocal("b", ip.TCP, "203.0.113.5", "10.244.0.2:8000"))
	if w.kernel() == before {
		t.Fatal("nothing was programmed")
	}
	w.restart() // --cleanup is a process of its own
	if _, err := w.cleaner().cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := w.kernel(); got != before {
		t.Errorf("left:\n%s\nwant\n%s", got, before)
	}
}

// A new process has other marks, tables and priorities. It leaves nothing of the first one,
// and VIPs stay local until each is claimed again.
func TestOtherRoutingLeavesNothing(t *testing.T) {
	services := []service.Service{loadBalancer("a", "10.96.0.1", "203.0.113.5", "10.244.0.2:8000")}
	fresh := newWorld(t)
	configure := func(w *world) {
		w.cfg.VIPs.Mark, w.cfg.VIPs.Table, w.cfg.VIPs.Priority = 0x80000, 80090, 90
		w.restart()
	}
	configure(fresh)
	fresh.start(services...)

	w := newWorld(t)
	before := w.routes()
	w.start(services...)
	old, _ := w.Routing.Observe()
	configure(w)
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	now, _ := w.Routing.Observe()
	for rule := range old.Rules {
		if _, ok := now.Rules[rule]; !ok && rule.Family == ip.IPv4 {
			t.Errorf("%s is gone before the VIPs are claimed anew", rule)
		}
	}
	w.apply(services...)
	if err := w.reconciler.Prune().Err(); err != nil {
		t.Fatal(err)
	}
	if got, want := w.routes(), fresh.routes(); got != want {
		t.Errorf("left:\n%s\nwant\n%s", got, want)
	}
	w.cfg = newWorld(t).cfg
	w.restart()
	if _, err := w.cleaner().cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := w.routes(); got != before {
		t.Errorf("after the cleanup:\n%s\nwant\n%s", got, before)
	}
}

// TestUnansweredVirtualServerGoesWithItsService: the kernel adds a virtual server, but its
// answer is lost, and the Service is deleted before the next comparison. No set lists the
// virtual server then, so it would look foreign and stay for good.
func TestUnansweredVirtualServerGoesWithItsService(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.refuse = func(change string) error {
		if strings.Contains(change, "virtual server") {
			return unix.ETIMEDOUT
		}
		return nil
	}
	s := clusterIP("a", "10.96.0.1", "10.244.0.2:8000")
	if w.apply(s).Err() == nil {
		t.Error("the error is not reported")
	}
	w.refuse = nil
	w.IPVS.Apply([]ipvs.Change{{Op: ipvs.AddVirtualServer, Key: key(ip.TCP, "10.96.0.1:80"), VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}}})
	w.reconciler.Delete(s.Name)
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	if got := w.IPVS.Dump(); got != "" || len(w.reconciler.servers.unsure) > 0 {
		t.Errorf("left, unsure of %v:\n%s", w.reconciler.servers.unsure, got)
	}
}

// TestLeftTemporarySetGoes ends a process while it resizes a set.
func TestLeftTemporarySetGoes(t *testing.T) {
	w := newWorld(t)
	w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000"))
	before := w.kernel()
	left := ipset.Set{Name: ipset.TemporaryName("KUBE-CLUSTER-IP"), Type: ipset.HashIPPort, Family: ip.IPv4}
	w.IPSet.Apply([]ipset.Change{
		{Op: ipset.CreateSet, Set: left},
		{Op: ipset.AddEntry, Set: left, Entry: ipset.Entry{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: ip.TCP}},
	})
	w.restart()
	if err := w.start(clusterIP("a", "10.96.0.1", "10.244.0.2:8000")).Err(); err != nil {
		t.Error(err)
	}
	if got := w.kernel(); got != before {
		t.Errorf("left:\n%s\nwant\n%s", got, before)
	}
}

// BenchmarkOneEndpointOfMany changes one endpoint of a Service, among many
// Services and among many endpoints.
func BenchmarkOneEndpointOfMany(b *testing.B) {
	for _, size := range []struct{ services, endpoints int }{{100, 2}, {10000, 2}, {1, 1000}, {1, 5000}} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", size.services, size.endpoints), func(b *testing.B) {
			w := newWorld(b)
			var services []service.Service
			for i := range size.services {
				services = append(services, clusterIP(fmt.Sprint(i), fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), endpoints(size.endpoints)...))
			}
			w.start(services...)
			all := endpoints(size.endpoints + 1)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				w.set(clusterIP("0", "10.96.0.1", all[:size.endpoints+i%2]...))
				if err := w.reconciler.Flush().Err(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func endpoints(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("10.%d.%d.%d:8000", 244+i/62500, i/250%250, 1+i%250)
	}
	return out
}

func TestServiceOfThousandsOfEndpoints(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.mustApply(clusterIP("big", "10.96.0.1", endpoints(5000)...))
	if n := len(w.realServers(key(ip.TCP, "10.96.0.1:80"))); n != 5000 {
		t.Errorf("%d real servers", n)
	}
}

func (w *world) cleaner() *cleaner { return &cleaner{w.reconciler} }
