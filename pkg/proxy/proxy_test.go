package proxy

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/test/fakenode"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// world is a proxy over fakes. Time is synctest's: it advances when all goroutines
// wait, so a test that sleeps for a minute takes no time and is exact.
type world struct {
	t       testing.TB
	cfg     plan.Config
	node    *fakenode.Node
	sink    source.Sink
	proxy   *Proxy
	checks  map[types.NamespacedName]plan.HealthCheck
	passes  []time.Time
	compare int
	failing string      // last reported failures
	queued  atomic.Bool // work was queued since the last pass
	nodes   int         // number of reads of the Node
	again   Options

	conflicts int
	changed   changes
	planned   int
	latencies []time.Duration
	noLocal   [2]int
	modes     []plan.InterfaceMode
	serving   int // calls of Serving
	cut       atomic.Int64
	restored  atomic.Int64
	events    []event.Warning

	ordering sync.Mutex

	mu     sync.Mutex
	writes []string // of IPVS and routing
	lines  []string // lines logged at the default level
	refuse func(string) error
}

// Run is the world's source: it passes its sink to the test.
func (w *world) Run(ctx context.Context, sink source.Sink) error {
	w.sink = sink
	<-ctx.Done()
	return nil
}

// order only orders memory accesses. Unlike mu it is released at once, so no goroutine
// waits for it.
func (w *world) order() {
	w.ordering.Lock()
	defer w.ordering.Unlock()
}

func (w *world) Queued() {
	w.order()
	w.queued.Store(true)
}

func (w *world) Idle() {
	w.order()
	w.queued.Store(false)
}

func (w *world) Passed(_ time.Duration, _, _ int) {
	w.order()
	w.queued.Store(false)
	w.passes = append(w.passes, time.Now())
}

func (w *world) Compared(time.Duration, int) {
	w.order()
	w.compare++
}

func (w *world) Failing(node bool, services, all int) {
	w.order()
	w.failing = fmt.Sprintf("node %t, %d of %d Services", node, services, all)
}
func (w *world) Serving()              { w.serving++ }
func (w *world) Held(int, int, int)    {}
func (w *world) Node(bool, bool, bool) { w.nodes++ }
func (w *world) Conflicts(n int)       { w.conflicts = n }
func (w *world) Changes(s, e int) {
	w.changed.services += s
	w.changed.endpoints += e
}
func (w *world) Planned(time.Duration)                 { w.planned++ }
func (w *world) Programmed(d time.Duration)            { w.latencies = append(w.latencies, d) }
func (w *world) NoLocalEndpoints(in, out int)          { w.noLocal = [2]int{in, out} }
func (w *world) Interfaces(modes []plan.InterfaceMode) { w.modes = modes }
func (w *world) Cut(connections int)                   { w.cut.Add(int64(connections)) }
func (w *world) Restored(count int)                    { w.restored.Add(int64(count)) }
func (w *world) Warn(e event.Warning)                  { w.events = append(w.events, e) }

func (w *world) Set(n types.NamespacedName, c plan.HealthCheck) {
	w.checks[n] = c
	_ = w.asked(fmt.Sprintf("health check node port %d: %d endpoints", c.Port, c.ReadyHere))
}
func (w *world) Delete(n types.NamespacedName) { delete(w.checks, n) }

func newWorld(t testing.TB) *world {
	w := &world{t: t, checks: map[types.NamespacedName]plan.HealthCheck{}, cfg: scenario.DefaultConfig()}
	w.cfg.NodeName, w.cfg.Families = "node1", ip.Families
	w.cfg.VIPs.LoadBalancers, w.cfg.VIPs.ExternalIPs = plan.ClaimAddress, plan.ClaimAddress
	w.node = fakenode.New(fakenode.Parameters(&w.cfg, withENI))
	w.node.OnChange = w.asked
	w.node.IPSet.Refuse, w.node.Sysctl.Refuse, w.node.Conntrack.Refuse = nil, nil, nil // see writes
	for _, f := range w.node.NAT {
		f.Refuse = nil
	}
	return w
}

// run starts a proxy in a bubble and calls the test once the source runs.
func run(t *testing.T, options func(*Options), test func(*world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		o := w.options()
		if options != nil {
			options(&o)
		}
		w.again = o
		w.proxy = New(o)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), funcr.New(w.log, funcr.Options{})))
		done := make(chan error, 1)
		go func() { done <- w.proxy.Run(ctx, w) }()
		synctest.Wait()
		test(w)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the proxy ended with %v", err)
		}
	})
}

// restarted runs another proxy on the same kernel.
func (w *world) restarted(test func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- New(w.again).Run(ctx, w) }()
	synctest.Wait()
	test()
	cancel()
	if err := <-done; err != nil {
		w.t.Errorf("the proxy ended with %v", err)
	}
}

func (w *world) options() Options {
	n := w.node
	return Options{
		Config: w.cfg,
		Kernel: reconcile.Kernel{
			IPVS: n.IPVS, IPSet: n.IPSet, Routing: n.Routing, Sysctl: n.Sysctl, Conntrack: n.Conntrack,
			NAT: map[ip.Family]reconcile.NAT{ip.IPv4: n.NAT[ip.IPv4], ip.IPv6: n.NAT[ip.IPv6]},
		},
		BridgeNetfilter: func(bool) plan.BridgeNetfilter { return plan.BridgeEnabled },
		ProbeScheduler:  w.node.IPVS.Probe,
		Network:         w.node.Routing, Rules: w.node.NAT[ip.IPv4], HealthChecks: w, Observer: w, Meter: w, Events: w,
		SyncPeriod: 30 * time.Second, DrainPeriod: 5 * time.Second, DrainDeadline: 15 * time.Minute,
	}
}

// asked records a write, unless refuse selects it.
func (w *world) asked(change string) error {
	w.order()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuse != nil {
		if err := w.refuse(change); err != nil {
			return err
		}
	}
	w.writes = append(w.writes, change)
	return nil
}

// taken returns the writes since the last call.
func (w *world) taken() []string { return w.take(&w.writes) }

// logged returns the lines logged since the last call.
func (w *world) logged() []string { return w.take(&w.lines) }

func (w *world) take(list *[]string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := *list
	*list = nil
	return out
}

func (w *world) log(_, line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, line)
}

func (w *world) setRefuse(f func(string) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = f
}

// service adds a Service with one TCP port, and its slice.
func (w *world) service(name, vip string, endpoints ...string) {
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip, ClusterIPs: []string{vip},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	})
	w.slice(name, endpoints...)
}

func (w *world) slice(name string, endpoints ...string) {
	w.sink.SetEndpointSlice(newSlice(name, endpoints...))
}

func newSlice(name string, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8000)}},
	}
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{e}})
	}
	return s
}

func (w *world) synced() {
	w.sink.Synced()
	synctest.Wait()
}

// sleep advances time until every goroutine waits. A timer may wake the proxy, which
// establishes no order between the test and the proxy. Both call order, so that what
// the test did before happens before what the proxy then reports and writes.
func (w *world) sleep(d time.Duration) {
	w.order()
	time.Sleep(d)
	synctest.Wait()
}

// realServers counts the real servers with a weight of a cluster IP's port 80.
func (w *world) realServers(vip string) int { return w.realServersOf(vip, 80) }

func (w *world) realServersOf(vip string, port uint16) int {
	s, err := w.node.IPVS.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	n := 0
	for _, rs := range s[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: port}].RealServers {
		if rs.Weight > 0 {
			n++
		}
	}
	return n
}

// nodePort adds a Service with a node port and no endpoints.
func (w *world) nodePort(name, clusterIP string, port int32) {
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: port}},
		},
	})
}

func TestNothingIsWrittenBeforeTheSourceIsSynced(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.sleep(time.Hour)
		if got := w.taken(); len(got) != 0 {
			t.Errorf("wrote %q", got)
		}
		w.synced()
		if w.realServers("10.96.0.10") != 1 {
			t.Error("not programmed after the sync")
		}
	})
}

// The node's plan does not depend on Services. Its inputs may change until the Services
// are delivered.
func TestNodeIsProgrammedWhileServicesAreDelivered(t *testing.T) {
	run(t, nil, func(w *world) {
		w.sink.Begun()
		synctest.Wait()
		if got := w.taken(); !slices.Contains(got, "add link kube-ipvs0") {
			t.Errorf("wrote %q, want the node's plan", got)
		}
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.sink.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}})
		w.sleep(time.Hour)
		if got := w.taken(); len(got) != 0 {
			t.Errorf("wrote %q before the sync", got)
		}
		w.synced()
		if w.realServers("10.96.0.10") != 1 {
			t.Error("not programmed after the sync")
		}
		if w.nodes != 2 {
			t.Errorf("%d Nodes were read, want none and the one set in between", w.nodes)
		}
	})
}

// Services that others need to start are served before everything is delivered, but no
// later objects, which may be incomplete.
func TestIssue133773FirstServices(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("kubernetes", "10.96.0.1", "192.168.0.1")
		w.sink.Begun()
		w.service("web", "10.96.0.10", "10.244.0.2")
		synctest.Wait()
		if w.realServers("10.96.0.1") != 1 {
			t.Error("the API server's Service is not programmed")
		}
		if w.realServers("10.96.0.10") != 0 {
			t.Error("a Service that may be incomplete is programmed")
		}
		w.synced()
		if w.realServers("10.96.0.1") != 1 || w.realServers("10.96.0.10") != 1 {
			t.Error("not programmed after the sync")
		}
	})
}

// After a restart the kernel already serves them. An incomplete desired state must not
// replace it.
func TestFirstServicesAfterARestart(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("kubernetes", "10.96.0.1", "192.168.0.1", "192.168.0.2")
		w.synced()
		w.restarted(func() {
			w.service("kubernetes", "10.96.0.1", "192.168.0.1")
			w.sink.Begun()
			synctest.Wait()
			if w.realServers("10.96.0.1") != 2 {
				t.Error("programmed before the sync")
			}
		})
	})
}

func TestAPIServersServiceIsFirst(t *testing.T) {
	run(t, nil, func(w *world) {
		for i := range 600 {
			w.service(fmt.Sprintf("a%d", i), fmt.Sprintf("10.96.%d.%d", 1+i/200, 1+i%200), "10.244.0.2")
		}
		w.service("kubernetes", "10.96.0.1", "192.168.0.1")
		w.synced()
		servers := 0
		for _, write := range w.taken() {
			if strings.HasPrefix(write, "add virtual server") {
				servers++
				if first := "add virtual server TCP 10.96.0.1:80"; servers == 1 && write != first {
					t.Errorf("first write %q, want %q", write, first)
				}
			}
		}
		if servers != 601 {
			t.Errorf("%d virtual servers, want 601", servers)
		}
	})
}

func TestChangesAreCoalesced(t *testing.T) {
	run(t, func(o *Options) { o.MinSyncPeriod = 10 * time.Second }, func(w *world) {
		w.service("web", "10.96.0.10")
		w.synced()
		w.sleep(20 * time.Second)
		w.passes = nil
		for i := range 20 {
			w.slice("web", fmt.Sprintf("10.244.0.%d", 2+i))
			w.sleep(time.Second)
		}
		w.sleep(20 * time.Second)
		if n := len(w.passes); n < 2 || n > 3 {
			t.Errorf("%d passes for 20 changes in 20 s, want one each 10 s", n)
		}
		for i := 1; i < len(w.passes); i++ {
			if d := w.passes[i].Sub(w.passes[i-1]); d < 10*time.Second {
				t.Errorf("two passes within %s", d)
			}
		}
		if w.realServers("10.96.0.10") != 1 {
			t.Error("the last change is missing")
		}
	})
}

func TestFirstChangeAfterAPauseIsAtOnce(t *testing.T) {
	run(t, func(o *Options) { o.MinSyncPeriod = 10 * time.Second }, func(w *world) {
		w.service("web", "10.96.0.10")
		w.synced()
		w.sleep(time.Minute)
		w.slice("web", "10.244.0.2")
		synctest.Wait()
		if w.realServers("10.96.0.10") != 1 {
			t.Error("the change waits")
		}
	})
}

func TestRefusedServiceIsRetriedWithBackoffAndOthersGoOn(t *testing.T) {
	run(t, nil, func(w *world) {
		var tries atomic.Int32
		w.setRefuse(func(change string) error {
			if strings.HasPrefix(change, "add virtual server TCP 10.96.0.10:80") {
				tries.Add(1)
				return unix.ENOMEM
			}
			return nil
		})
		w.service("bad", "10.96.0.10", "10.244.0.2")
		w.service("good", "10.96.0.11", "10.244.0.3")
		w.synced()
		if w.realServers("10.96.0.11") != 1 {
			t.Error("another Service is affected")
		}
		if want := "node false, 1 of 2 Services"; w.failing != want {
			t.Errorf("reported failing: %s, want %s", w.failing, want)
		}
		w.sleep(time.Second)
		if n := tries.Load(); n < 2 || n > 5 {
			t.Errorf("%d tries within the first second, want a few", n)
		}
		w.sleep(10 * time.Minute)
		before := tries.Load()
		w.sleep(10 * time.Minute)
		if n := tries.Load() - before; n < 18 || n > 22 {
			t.Errorf("%d tries in ten late minutes, want about one each 30 s", n)
		}
		w.setRefuse(nil)
		w.sleep(time.Minute)
		if w.realServers("10.96.0.10") != 1 {
			t.Error("not programmed once the kernel accepts it")
		}
		if want := "node false, 0 of 2 Services"; w.failing != want {
			t.Errorf("reported failing: %s, want %s", w.failing, want)
		}
	})
}

func TestRefusedNodePartIsReported(t *testing.T) {
	var refused atomic.Bool
	refused.Store(true)
	run(t, nil, func(w *world) {
		w.node.NAT[ip.IPv4].Refuse = func(nat.Change) error {
			if refused.Load() {
				return unix.EPERM
			}
			return nil
		}
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(time.Second)
		if want := "node true, 0 of 1 Services"; w.failing != want {
			t.Errorf("reported failing: %s, want %s", w.failing, want)
		}
		refused.Store(false)
		w.sleep(time.Minute)
		if want := "node false, 0 of 1 Services"; w.failing != want {
			t.Errorf("reported failing once the kernel accepts it: %s, want %s", w.failing, want)
		}
	})
}

func TestUnreadableKernelIsNotWritten(t *testing.T) {
	broken := true
	var mu sync.Mutex
	fail := func() error {
		mu.Lock()
		defer mu.Unlock()
		if broken {
			return unix.EPERM
		}
		return nil
	}
	run(t, nil, func(w *world) {
		w.node.IPVS.FailObserve = fail
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(time.Minute)
		if got := w.taken(); len(got) != 0 {
			t.Errorf("wrote %q without knowing the kernel's state", got)
		}
		mu.Lock()
		broken = false
		mu.Unlock()
		w.sleep(time.Minute)
		if w.realServers("10.96.0.10") != 1 {
			t.Error("not programmed once the kernel can be read")
		}
	})
}

// TestUnreadableKernelIsReadWithBackoff: reading takes programs and time, so a kernel that stays
// unreadable must not be read all the time. The node is not ready meanwhile.
func TestUnreadableKernelIsReadWithBackoff(t *testing.T) {
	run(t, nil, func(w *world) {
		var broken atomic.Bool
		var tries atomic.Int32
		// Spot checks do not read rules.
		w.node.NAT[ip.IPv4].FailObserve = func() error {
			if broken.Load() {
				tries.Add(1)
				return unix.EPERM
			}
			return nil
		}
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		broken.Store(true)
		w.sleep(10 * time.Minute)
		before := tries.Load()
		w.sleep(10 * time.Minute)
		if n := tries.Load() - before; before < 20 || n < 18 || n > 22 {
			t.Errorf("read %d times in ten minutes and %d times in the next ten, want about one each 30 s", before, n)
		}
		if want := "node true, 0 of 1 Services"; w.failing != want {
			t.Errorf("reported failing: %s, want %s", w.failing, want)
		}
		broken.Store(false)
		w.sleep(time.Minute)
		if want := "node false, 0 of 1 Services"; w.failing != want {
			t.Errorf("reported failing once the kernel can be read: %s, want %s", w.failing, want)
		}
	})
}

func TestDriftIsRepairedWithinAPeriod(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.10"), Port: 80}
		w.node.IPVS.Apply([]ipvs.Change{{Op: ipvs.DeleteVirtualServer, Key: key}})
		w.sleep(31 * time.Second)
		if w.realServers("10.96.0.10") != 1 {
			t.Error("the virtual server was not restored")
		}
	})
}

func TestDeletedAddressIsRestoredSoon(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(10 * time.Second)
		address := netip.MustParseAddr("10.96.0.10")
		w.taken()
		w.node.Routing.Do(routing.Change{Op: routing.DeleteAddress, Address: address})
		w.sleep(4 * time.Second)
		if got := strings.Join(w.taken(), "\n"); !strings.Contains(got, "add address 10.96.0.10") {
			t.Errorf("wrote %q within seconds", got)
		}
		if n := w.restored.Load(); n != 1 {
			t.Errorf("%d are counted, want 1", n)
		}
	})
}

// TestDeletionBeforeTheFirstSync deletes an address of an earlier process after the kernel was
// read, while the Services are still being delivered.
func TestDeletionBeforeTheFirstSync(t *testing.T) {
	w := newWorld(t)
	o := w.options()
	ctx := klog.NewContext(t.Context(), klog.Background())
	prepared := func() *Proxy {
		p := New(o)
		w.sink = p.inbox
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.sink.Synced()
		p.inbox.deleted() // the watch begins
		if !p.prepare(ctx) {
			t.Fatal("the kernel cannot be read")
		}
		return p
	}
	prepared().start(ctx)
	p := prepared()
	address := netip.MustParseAddr("10.96.0.10")
	w.node.Routing.Do(routing.Change{Op: routing.DeleteAddress, Address: address})
	p.inbox.deleted(routing.Removal{Addr: address})
	w.taken()
	p.start(ctx)
	p.turn(ctx, time.Now())
	if got := strings.Join(w.taken(), "\n"); !strings.Contains(got, "add address 10.96.0.10") {
		t.Errorf("wrote %q after the start", got)
	}
	if w.compare > 0 {
		t.Errorf("compared the whole kernel %d times", w.compare)
	}
}

// TestChangedRuleIsRestoredSoon makes another program flush one of our chains, add to
// another, and change one of its own, which does not concern us.
func TestChangedRuleIsRestoredSoon(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.sleep(10 * time.Second)
		whole := w.node.NAT[ip.IPv4].Save()
		jump := regexp.MustCompile(`(?m)^-A (POSTROUTING .*)$`).FindStringSubmatch(whole)[1]
		for _, step := range []struct {
			input    string
			compared int
		}{
			{"*nat\n-F KUBE-SERVICES\nCOMMIT\n", 1},
			{"*nat\n-A KUBE-POSTROUTING -j ACCEPT\nCOMMIT\n", 1},
			{"*nat\n-D " + jump + "\nCOMMIT\n", 1},
			{"*filter\n:OTHERS -\n-A OTHERS -j ACCEPT\n-F OTHERS\n-X OTHERS\nCOMMIT\n", 0},
		} {
			w.compare = 0
			if err := w.node.NAT[ip.IPv4].Restore(step.input); err != nil {
				t.Fatal(err)
			}
			w.sleep(4 * time.Second)
			if diff := cmp.Diff(whole, w.node.NAT[ip.IPv4].Save()); diff != "" || w.compare != step.compared {
				t.Errorf("%q: the kernel was compared %d times, and differs: %s", step.input, w.compare, diff)
			}
		}
	})
}

// TestDeletionDuringComparison deletes an address that the running comparison has already
// read.
func TestDeletionDuringComparison(t *testing.T) {
	slow := func(o *Options) {
		o.Kernel.NAT[ip.IPv4].(*nat.Fake).FailObserve = func() error {
			time.Sleep(time.Second)
			return nil
		}
	}
	run(t, slow, func(w *world) {
		for i, address := range []string{"10.96.0.10", "10.96.0.11"} {
			w.service(fmt.Sprintf("web%d", i), address, "10.244.0.2")
		}
		w.synced()
		w.sleep(10 * time.Second)
		w.taken()
		w.compare = 0
		for _, address := range []string{"10.96.0.10", "10.96.0.11"} {
			w.node.Routing.Do(routing.Change{Op: routing.DeleteAddress, Address: netip.MustParseAddr(address)})
			w.sleep(500 * time.Millisecond)
		}
		w.sleep(6 * time.Second)
		got := w.taken()
		for _, address := range []string{"10.96.0.10", "10.96.0.11"} {
			if !slices.ContainsFunc(got, func(write string) bool { return strings.Contains(write, "add address "+address) }) {
				t.Errorf("%s was not restored; wrote %q", address, got)
			}
		}
		if w.compare != 0 {
			t.Errorf("the kernel was compared %d times", w.compare)
		}
	})
}

// TestOwnRemovalIsNoDrift deletes Services. The kernel reports each deleted address;
// reading everything because of that would cost time in proportion to the whole state.
func TestOwnRemovalIsNoDrift(t *testing.T) {
	run(t, nil, func(w *world) {
		for i := range 10 {
			w.service(fmt.Sprintf("web%d", i), fmt.Sprintf("10.96.0.%d", 10+i), "10.244.0.2")
		}
		w.synced()
		w.sleep(time.Second)
		w.compare = 0
		for i := range 10 {
			w.sink.DeleteService(types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("web%d", i)})
			w.sleep(2 * time.Second)
		}
		if w.compare != 0 {
			t.Errorf("compared the whole kernel %d times because of ten deletions", w.compare)
		}
	})
}

// twoInterfaces returns the node's network with eth0, which has the default route of table main, and
// eth1, which has that of table 1003.
func (w *world) twoInterfaces() routing.Inventory {
	inventory, err := w.node.Routing.Inventory()
	if err != nil {
		w.t.Fatal(err)
	}
	for i, table := range []int{254, 1003} {
		name := fmt.Sprintf("eth%d", i)
		inventory.Links = append(inventory.Links, routing.Link{Index: 2 + i, Name: name, Type: "device", Up: true})
		inventory.Defaults = append(inventory.Defaults, routing.Route{Family: ip.IPv4, Table: table, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: name})
	}
	return inventory
}

// TestNewENIIsCheckedSoon adds a policy rule of a pod that makes an interface an ENI:
// seconds later it is known whether its reverse-path check conflicts.
func TestNewENIIsCheckedSoon(t *testing.T) {
	run(t, nil, func(w *world) {
		inventory := w.twoInterfaces()
		w.node.Routing.SetInventory(inventory)
		w.synced()
		w.sleep(10 * time.Second)
		w.compare = 0
		pod := netip.MustParsePrefix("10.12.192.44/32")
		w.node.Routing.Do(routing.Change{Op: routing.AddRule, Rule: routing.Rule{Family: ip.IPv4, Priority: 2000, From: pod, Table: 1003}})
		w.sleep(4 * time.Second)
		if w.compare != 1 {
			t.Errorf("the kernel was compared %d times", w.compare)
		}
		want := []plan.InterfaceMode{{Family: ip.IPv4, Link: "eth1", Mode: plan.SNATFWMark}}
		if !slices.Equal(w.modes, want) {
			t.Errorf("metrics show %v, want %v", w.modes, want)
		}
	})
}

// TestUnreportedRoute adds a route to a single address by an ENI. The kernel does not report such
// routes: the rules follow within two minutes.
func TestUnreportedRoute(t *testing.T) {
	run(t, nil, func(w *world) {
		inventory := w.twoInterfaces()
		pod := netip.MustParsePrefix("10.12.192.44/32")
		inventory.Rules = append(inventory.Rules, routing.Rule{Family: ip.IPv4, Priority: 2000, From: pod, Table: 1003})
		w.node.Routing.SetInventory(inventory)
		w.synced()
		w.sleep(10 * time.Second)
		peer := netip.MustParsePrefix("198.51.100.7/32")
		w.node.Routing.AddUnreported(routing.Route{Family: ip.IPv4, Table: 254, Dst: peer, Link: "eth1"})
		w.sleep(2 * time.Minute)
		if rules := w.node.NAT[ip.IPv4].Save(); !strings.Contains(rules, peer.Addr().String()) {
			t.Errorf("no rule has the address:\n%s", rules)
		}
	})
}

// TestCutsAreCounted keeps connections open until their endpoint has not answered for the time of
// the drain deadline.
func TestCutsAreCounted(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2", "10.244.0.3")
		w.synced()
		key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.10"), Port: 80}
		in := uint32(0)
		unanswered := func(minutes int) {
			for range minutes {
				in++
				w.node.IPVS.SetConnections(key, netip.MustParseAddrPort("10.244.0.2:8000"), ipvs.Connections{Active: 3, Inactive: 3, In: in})
				w.sleep(time.Minute)
			}
		}
		unanswered(1)
		w.slice("web")
		unanswered(15)
		if got := w.node.IPVS.Dump(); w.cut.Load() != 0 || !strings.Contains(got, "10.244.0.2:8000 -m -w 0") || strings.Contains(got, "10.244.0.3") {
			t.Errorf("before the deadline %d were cut:\n%s", w.cut.Load(), got)
		}
		unanswered(2)
		if got := w.node.IPVS.Dump(); w.cut.Load() != 6 || strings.Contains(got, "10.244.0.2") {
			t.Errorf("at the deadline %d were cut, want 6:\n%s", w.cut.Load(), got)
		}
	})
}

// TestIssue89392LostNodesConnections checks that connections are cut as soon as the
// node is known to be unreachable.
func TestIssue89392LostNodesConnections(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2", "10.244.0.3")
		w.service("other", "10.96.0.11", "10.244.0.2", "10.244.0.3")
		w.synced()
		key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.10"), Port: 80}
		w.node.IPVS.SetConnections(key, netip.MustParseAddrPort("10.244.0.2:8000"), ipvs.Connections{Active: 3})
		slice := newSlice("web", "10.244.0.2", "10.244.0.3")
		slice.Endpoints[0].NodeName = ptr.To("node2")
		slice.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(false)}
		w.sink.SetEndpointSlice(slice)
		w.sleep(time.Hour)
		if got := w.node.IPVS.Dump(); w.cut.Load() != 0 || !strings.Contains(got, "10.244.0.2:8000 -m -w 0") {
			t.Errorf("while its node is reachable %d were cut:\n%s", w.cut.Load(), got)
		}
		w.passes = nil
		w.sink.SetUnreachableNodes([]string{"node2"})
		w.sleep(0)
		if got := w.node.IPVS.Dump(); w.cut.Load() != 3 || strings.Contains(got, "10.244.0.2:8000 -m -w 0") {
			t.Errorf("once it is unreachable %d were cut, want 3:\n%s", w.cut.Load(), got)
		}
		if len(w.passes) != 1 {
			t.Errorf("%d passes, want one", len(w.passes))
		}
	})
}

func TestIdleWritesNothing(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.synced()
		w.taken()
		w.passes = nil
		w.sleep(time.Hour)
		if got := w.taken(); len(got) != 0 || len(w.passes) != 0 {
			t.Errorf("in an idle hour: %d passes, wrote %q", len(w.passes), got)
		}
		if w.queued.Load() {
			t.Error("reported as queued without work")
		}
		if w.compare < 100 {
			t.Errorf("compared %d times in an hour, want every 30 s", w.compare)
		}
	})
}

// TestWorkIsReportedWhileTheLoopHangs hangs a retry, which is no pass: a change that arrives
// then is reported as pending, so that /livez fails.
func TestWorkIsReportedWhileTheLoopHangs(t *testing.T) {
	run(t, nil, func(w *world) {
		w.synced()
		var retries atomic.Bool
		hang := make(chan struct{})
		w.setRefuse(func(write string) error {
			if !strings.Contains(write, "10.96.0.10:80") {
				return nil
			}
			if retries.Load() {
				<-hang
			}
			return unix.ENOMEM
		})
		w.service("web", "10.96.0.10", "10.244.0.2")
		synctest.Wait()
		retries.Store(true)
		w.sleep(time.Minute)
		if w.queued.Load() {
			t.Error("a refused change counts as pending")
		}
		w.service("other", "10.96.0.11", "10.244.0.3")
		w.sleep(time.Minute)
		if !w.queued.Load() {
			t.Error("a change that arrived while the loop hangs is not reported")
		}
		close(hang)
		w.sleep(time.Minute)
		if w.queued.Load() || w.realServers("10.96.0.11") != 1 {
			t.Error("the change is still pending when the loop no longer hangs")
		}
	})
}

// TestQuietWhenNothingHappens checks that a problem is reported once, and nothing is
// reported in an hour of comparisons and repeated deliveries.
func TestQuietWhenNothingHappens(t *testing.T) {
	run(t, nil, func(w *world) {
		deliver := func() {
			w.service("web", "10.96.0.10", "10.244.0.2")
			w.service("rival", "10.96.0.10", "10.244.0.3")
			w.service("odd", "10.96.0.12", "no address")
		}
		deliver()
		w.synced()
		said := strings.Join(w.logged(), "\n")
		for _, want := range []string{"no address", "Two Services want"} {
			if n := strings.Count(said, want); n != 1 {
				t.Errorf("%q is logged %d times:\n%s", want, n, said)
			}
		}
		for range 4 {
			w.sleep(15 * time.Minute)
			deliver()
			synctest.Wait()
		}
		if lines := w.logged(); len(lines) > 0 || w.compare < 100 || len(w.passes) < 5 {
			t.Errorf("in an hour with %d comparisons and %d passes: %q", w.compare, len(w.passes), lines)
		}
	})
}

// TestNodeChangeCostsTheServicesThatDependOnIt adds an address to the node: only the
// Service with a node port is written.
func TestNodeChangeCostsTheServicesThatDependOnIt(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("web", "10.96.0.10", "10.244.0.2")
		w.nodePort("np", "10.96.0.11", 30080)
		w.synced()
		w.taken()
		inventory, err := w.node.Routing.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		inventory.Links = append(inventory.Links, routing.Link{
			Index: 2, Name: "eth0", Type: "device", Up: true,
			Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("192.168.0.7/24"), Global: true}},
		})
		w.node.Routing.SetInventory(inventory)
		synctest.Wait()
		want := "add virtual server TCP 192.168.0.7:30080"
		if got := w.taken(); len(got) != 1 || got[0] != want {
			t.Errorf("wrote %q, want %q", got, want)
		}
	})
}

// TestIssue129146UnreadableInterfaces makes the list of interfaces unreadable: node
// ports stay on the known addresses until it can be read again. (#112185)
func TestIssue129146UnreadableInterfaces(t *testing.T) {
	var unreadable atomic.Bool
	run(t, nil, func(w *world) {
		w.node.Routing.FailObserve = func() error {
			if unreadable.Load() {
				return unix.EINTR
			}
			return nil
		}
		inventory, err := w.node.Routing.Inventory()
		if err != nil {
			t.Fatal(err)
		}
		with := inventory
		with.Links = append(with.Links, routing.Link{
			Index: 2, Name: "eth0", Type: "device", Up: true,
			Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("192.168.0.7/24"), Global: true}},
		})
		w.node.Routing.SetInventory(with)
		w.nodePort("np", "10.96.0.11", 30080)
		w.synced()
		w.taken()
		unreadable.Store(true)
		w.node.Routing.SetInventory(inventory) // reports a change
		w.sleep(time.Minute)
		if got := w.taken(); len(got) != 0 {
			t.Errorf("while interfaces cannot be read, wrote %q", got)
		}
		unreadable.Store(false)
		w.sleep(10 * time.Minute)
		if got := w.taken(); len(got) != 1 || got[0] != "delete virtual server TCP 192.168.0.7:30080" {
			t.Errorf("once they can, wrote %q", got)
		}
	})
}

func TestSliceThatChangesItsServiceChangesBoth(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("a", "10.96.0.10", "10.244.0.2")
		w.service("b", "10.96.0.11")
		w.synced()
		w.sink.SetEndpointSlice(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "b"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8000)}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.2"}}},
		})
		synctest.Wait()
		if a, b := w.realServers("10.96.0.10"), w.realServers("10.96.0.11"); a != 0 || b != 1 {
			t.Errorf("%d and %d real servers, want 0 and 1", a, b)
		}
	})
}

func TestHealthCheckPortFollowsTheService(t *testing.T) {
	run(t, nil, func(w *world) {
		name := types.NamespacedName{Namespace: "default", Name: "lb"}
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.12", ClusterIPs: []string{"10.96.0.12"},
				ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 30333,
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
			},
		}
		w.sink.SetService(svc)
		w.synced()
		if got := w.checks[name]; got.Port != 30333 || got.ReadyHere != 0 {
			t.Errorf("check %+v", got)
		}
		w.sink.DeleteService(name)
		synctest.Wait()
		if _, left := w.checks[name]; left {
			t.Error("the check is still served")
		}
	})
}

// TestAutoSwitchesToRoutes adds the thousand-and-first Service: every cluster IP gets a
// route before its address is removed. When the Service is deleted, nothing changes
// back.
func TestAutoSwitchesToRoutes(t *testing.T) {
	auto := func(o *Options) { o.Config.VIPs.ClusterIPs = plan.ClaimAuto }
	vip := func(i int) string { return fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250) }
	run(t, auto, func(w *world) {
		for i := range plan.AddressesAtMost {
			w.service(fmt.Sprint("web", i), vip(i), "10.244.0.2")
		}
		w.synced()
		if got := strings.Join(w.taken(), "\n"); strings.Count(got, "add address") != plan.AddressesAtMost || strings.Contains(got, "add route") {
			t.Errorf("with %d Services: %s", plan.AddressesAtMost, got)
		}
		w.service("more", vip(plan.AddressesAtMost), "10.244.0.2")
		w.sleep(time.Second)
		got := w.taken()
		added := map[string]bool{}
		for _, c := range got {
			words := strings.Fields(c)
			switch {
			case strings.HasPrefix(c, "add route"), strings.HasPrefix(c, "add local"):
				for _, word := range words {
					added[strings.TrimSuffix(word, "/32")] = true
				}
			case strings.HasPrefix(c, "delete address") && !added[words[2]]:
				t.Fatalf("%s, and there is no route:\n%s", c, strings.Join(got, "\n"))
			case strings.HasPrefix(c, "add address"):
				t.Errorf("with one Service more: %s", c)
			}
		}
		if n := strings.Count(strings.Join(got, "\n"), "delete address"); n != plan.AddressesAtMost {
			t.Errorf("%d addresses were deleted, want %d", n, plan.AddressesAtMost)
		}
		w.sink.DeleteService(types.NamespacedName{Namespace: "default", Name: "more"})
		w.sleep(time.Second)
		for _, c := range w.taken() {
			if strings.Contains(c, "address") || !strings.Contains(c, vip(plan.AddressesAtMost)) {
				t.Errorf("with a thousand again: %s", c)
			}
		}
	})
}

// TestHealthCheckFollowsTheKernel checks that a health check node port never promises an endpoint
// that is not in the kernel.
func TestHealthCheckFollowsTheKernel(t *testing.T) {
	run(t, nil, func(w *world) {
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
				ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, HealthCheckNodePort: 30333,
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
			},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}},
		}
		here := func(endpoints ...string) {
			slice := newSlice("web", endpoints...)
			for i := range slice.Endpoints {
				slice.Endpoints[i].NodeName = ptr.To(w.cfg.NodeName)
			}
			w.sink.SetEndpointSlice(slice)
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		w.sink.SetService(svc)
		w.sink.Begun()
		w.synced()
		here()
		w.taken()
		order := func(check, server string) {
			t.Helper()
			writes := w.taken()
			at := func(part string) int {
				return slices.IndexFunc(writes, func(s string) bool { return strings.Contains(s, part) })
			}
			if at(check) < 0 || at(server) < 0 || (at(check) < at(server)) == strings.HasPrefix(server, "add") {
				t.Errorf("%q at %d, %q at %d of %q", check, at(check), server, at(server), writes)
			}
		}
		here("10.244.0.2")
		order("30333: 1 endpoints", "add real server 10.244.0.2:8000 to TCP 203.0.113.1:80")
		here("10.244.0.2", "10.244.0.3")
		order("30333: 2 endpoints", "add real server 10.244.0.3:8000 to TCP 203.0.113.1:80")
		here("10.244.0.2")
		order("30333: 1 endpoints", "set weight 0 of real server 10.244.0.3:8000 of TCP 203.0.113.1:80")
	})
}

// TestServingAfterARestart checks that a proxy that finds virtual servers reports that the kernel
// serves, once, before the Services are delivered and after the Node is known. On a new node it does
// not, although it programs the first Services then.
func TestServingAfterARestart(t *testing.T) {
	run(t, nil, func(w *world) {
		w.service("kubernetes", "10.96.0.1", "10.244.0.2")
		w.sink.Begun()
		w.synced()
		w.sleep(time.Minute)
		if w.realServers("10.96.0.1") != 1 || w.serving != 0 {
			t.Errorf("%d real servers, reported %d times that a new node serves", w.realServers("10.96.0.1"), w.serving)
		}
		w.restarted(func() {
			passes := len(w.passes)
			if w.serving != 0 {
				t.Error("serves before the Node is known, which may be about to be removed")
			}
			w.sink.Begun()
			w.sleep(time.Minute)
			if w.serving != 1 || len(w.passes) != passes {
				t.Errorf("reported %d times that the node serves, after %d passes", w.serving, len(w.passes)-passes)
			}
			w.synced()
			if w.serving != 1 {
				t.Errorf("reported %d times that the node serves", w.serving)
			}
		})
	})
}

// TestProgressOfALongStart checks that a first sync that takes minutes counts as progress.
func TestProgressOfALongStart(t *testing.T) {
	server := health.NewServer(30*time.Second, nil)
	run(t, func(o *Options) { o.Observer = Observers{o.Observer.(*world), server} }, func(w *world) {
		for i := range 3 * batchSize {
			w.service(fmt.Sprint("web", i), fmt.Sprintf("10.96.%d.%d", 1+i/250, 1+i%250), "10.244.0.2")
		}
		began, unhealthy := time.Now(), 0
		w.setRefuse(func(change string) error {
			if strings.HasPrefix(change, "add virtual server") {
				time.Sleep(50 * time.Second / batchSize)
				if !server.Healthy() {
					unhealthy++
				}
			}
			return nil
		})
		w.synced()
		w.sleep(time.Hour)
		if took := w.passes[0].Sub(began); unhealthy > 0 || took < 2*time.Minute {
			t.Errorf("unhealthy at %d of %d changes in a sync of %s", unhealthy, 3*batchSize, took)
		}
	})
}
