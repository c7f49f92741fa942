package proxy

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
	"github.com/kube-ipvs/kube-ipvs/test/fakenode"
	"github.com/kube-ipvs/kube-ipvs/test/scenario"
)

// machine is a node with the cluster's objects and a fake kernel that outlives the
// processes programming it. A process is driven by hand: it acts only when told to, and
// finishes before the call returns.
type machine struct {
	*fakenode.Node
	t       testing.TB
	cfg     plan.Config
	process *Proxy
	running bool // the process writes rules on demand; see plan.Demands

	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice // by name of the Service

	errors []string   // logged errors
	logged sync.Mutex // clients of an API server log concurrently
}

func newMachine(t testing.TB) *machine {
	m := &machine{
		t: t, cfg: scenario.DefaultConfig(),
		services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{},
	}
	m.cfg.NodeName, m.cfg.Families, m.cfg.LocalhostNodePorts = "node1", ip.Families, true
	m.cfg.VIPs.LoadBalancers, m.cfg.VIPs.ExternalIPs = plan.ClaimPort, plan.ClaimRoute
	m.Node = fakenode.New(fakenode.Parameters(&m.cfg, withENI))
	m.network(false)
	m.makeForeign()
	return m
}

// withENI are parameters that the plan sets on a node with an ENI.
var withENI = sysctl.State{"net/ipv4/conf/all/src_valid_mark": "0", "net/ipv4/vs/snat_reroute": "0"}

// makeForeign adds foreign state to the kernel.
func (m *machine) makeForeign() {
	key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("192.168.7.7"), Port: 80}
	m.IPVS.Apply([]ipvs.Change{
		{Op: ipvs.AddVirtualServer, Key: key, VirtualServer: ipvs.VirtualServer{Scheduler: "wlc"}},
		{Op: ipvs.AddRealServer, Key: key, Dest: netip.MustParseAddrPort("192.168.7.8:80"), RealServer: ipvs.RealServer{Weight: 3}},
	})
	for _, f := range m.NAT {
		if err := f.Restore("*nat\n:OTHERS - [0:0]\n-A OTHERS -j RETURN\n-A POSTROUTING -o eth0 -j OTHERS\nCOMMIT\n"); err != nil {
			m.t.Fatal(err)
		}
	}
	m.IPSet.Apply([]ipset.Change{{Op: ipset.CreateSet, Set: ipset.Set{Name: "OTHERS", Type: ipset.HashIP, Family: ip.IPv4}}})
}

// boot starts a process that replaces the previous one. It returns false if the kernel
// cannot be read.
func (m *machine) boot() bool {
	m.process = New(m.options(&world{checks: map[types.NamespacedName]plan.HealthCheck{}}))
	for _, name := range slices.Sorted(maps.Keys(m.services)) {
		m.process.inbox.SetService(m.services[name])
	}
	for _, name := range slices.Sorted(maps.Keys(m.slices)) {
		m.process.inbox.SetEndpointSlice(m.slices[name])
	}
	m.process.inbox.Synced()
	if !m.process.prepare(m.context()) {
		return false
	}
	m.process.start(m.context())
	return true
}

func (m *machine) options(w *world) Options {
	return Options{
		Config: m.cfg,
		Kernel: reconcile.Kernel{
			IPVS: m.IPVS, IPSet: m.IPSet, Routing: m.Routing, Sysctl: m.Sysctl, Conntrack: m.Conntrack, Loopback: m.Loopback, KubeProxy: m.KubeProxy,
			NAT: map[ip.Family]reconcile.NAT{ip.IPv4: m.NAT[ip.IPv4], ip.IPv6: m.NAT[ip.IPv6]},
		},
		BridgeNetfilter: func(bool) plan.BridgeNetfilter { return plan.BridgeEnabled },
		ProbeScheduler:  func(string) error { return nil },
		Network:         m.Routing, Rules: m.NAT[ip.IPv4], HealthChecks: w, Observer: w, Meter: w, Events: w,
		Running:    m.running,
		SyncPeriod: time.Hour, DrainPeriod: -2 * time.Hour /* always due */, DrainDeadline: 15 * time.Minute,
	}
}

// context returns a context whose logger records errors and drops everything else,
// which is too much.
func (m *machine) context() context.Context {
	return klog.NewContext(m.t.Context(), funcr.New(func(_, line string) {
		if strings.Contains(line, `"error"=`) {
			m.logged.Lock()
			defer m.logged.Unlock()
			m.errors = append(m.errors, line)
		}
	}, funcr.Options{}))
}

// turn runs everything that is due.
func (m *machine) turn() { m.process.turn(m.context(), m.process.lastPass) }

// pass runs everything that becomes due within an hour, including retries and a
// comparison of the kernel.
func (m *machine) pass() {
	m.process.turn(m.context(), time.Now().Add(time.Hour))
	_, ready := m.process.nextWake()
	if ready == nil {
		return
	}
	<-ready
	for ended := false; !ended; {
		done := m.process.step(m.context(), time.Now())
		ended = done.Compared != nil || done.ReadErr != nil
	}
}

// drain checks draining real servers.
func (m *machine) drain() { m.process.step(m.context(), m.process.lastPass) }

// set creates or changes an object.
func (m *machine) set(svc *corev1.Service, slice *discoveryv1.EndpointSlice) {
	m.services[svc.Name], m.slices[svc.Name] = svc, slice
	if m.process != nil {
		m.process.inbox.SetService(svc)
		m.process.inbox.SetEndpointSlice(slice)
	}
}

func (m *machine) delete(name string) {
	slice := m.slices[name]
	delete(m.services, name)
	delete(m.slices, name)
	m.process.inbox.DeleteEndpointSlice(types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name})
	m.process.inbox.DeleteService(types.NamespacedName{Namespace: slice.Namespace, Name: name})
}

// network sets the node's interfaces: eth0, and an ENI with a pod behind it.
func (m *machine) network(eni bool) {
	inventory, err := m.Routing.Inventory()
	if err != nil {
		m.t.Fatal(err)
	}
	// Another program's rules change; ours stay.
	inventory.Rules = slices.DeleteFunc(inventory.Rules, func(r routing.Rule) bool { return r.Priority == 2000 })
	inventory.Links, inventory.Defaults = inventory.Links[:1], nil
	link := func(index int, name string, table int, addresses ...routing.Address) {
		inventory.Links = append(inventory.Links, routing.Link{Index: index, Name: name, Type: "device", Up: true, Addresses: addresses})
		for _, family := range ip.Families {
			inventory.Defaults = append(inventory.Defaults, routing.Route{Family: family, Table: table, Dst: netip.PrefixFrom(family.Unspecified(), 0), Link: name})
		}
	}
	link(2, "eth0", 254, routing.Address{Prefix: netip.MustParsePrefix("192.168.0.7/24"), Global: true}, routing.Address{Prefix: netip.MustParsePrefix("fd00:50::7/64"), Global: true})
	if eni {
		link(3, "eth1", 1003)
		for _, pod := range []string{"10.12.192.44/32", "fd00:12::44/128"} {
			p := netip.MustParsePrefix(pod)
			inventory.Rules = append(inventory.Rules, routing.Rule{Family: ip.Of(p.Addr()), Priority: 2000, From: p, Table: 1003})
		}
	}
	m.Routing.SetInventory(inventory)
	if m.process != nil {
		m.process.inbox.networkChanged()
	}
}

// kernel returns the whole state in comparable form.
func (m *machine) kernel() string {
	s, err := m.Routing.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	rules, err := m.Loopback.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	tables, err := m.KubeProxy.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	return m.IPVS.Dump() + m.IPSet.Dump() + fmt.Sprintf("%v\n", s) + m.NAT[ip.IPv4].Save() + m.NAT[ip.IPv6].Save() +
		fmt.Sprintf("%v\n%v\n%v\n%v\n", rules, tables, m.Sysctl.Values(), m.Conntrack.Entries())
}

// exposed returns a Service with all kinds of VIPs, each port with every protocol, and
// its endpoints, the first of which is on this node. Its addresses and ports are
// derived from n.
func exposed(name string, n byte, change func(*corev1.Service), endpoints ...discoveryv1.Endpoint) (*corev1.Service, *discoveryv1.EndpointSlice) {
	v4 := func(third byte) string { return netip.AddrFrom4([4]byte{203, 0, third, n}).String() }
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, CreationTimestamp: metav1.Unix(1e9+int64(n), 0), Annotations: map[string]string{}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			ClusterIP: v4(1), ClusterIPs: []string{v4(1), fmt.Sprintf("fd00:10:96::%x", n)},
			ExternalIPs:              []string{v4(2)},
			LoadBalancerSourceRanges: []string{"10.0.0.0/8", "fd00::/8"},
			HealthCheckNodePort:      31000 + int32(n),
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: v4(113)}, {IP: fmt.Sprintf("fd00:203::%x", n)}}}},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
	}
	for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP} {
		port := strings.ToLower(string(protocol))
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: port, Protocol: protocol, Port: 80, NodePort: 30000 + 10*int32(n) + int32(i)})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: ptr.To(port), Protocol: ptr.To(protocol), Port: ptr.To[int32](8000)})
	}
	if change != nil {
		change(svc)
	}
	return svc, slice
}

// at returns endpoints with the given addresses.
func at(addresses ...string) []discoveryv1.Endpoint {
	out := make([]discoveryv1.Endpoint, len(addresses))
	for i, a := range addresses {
		out[i] = discoveryv1.Endpoint{Addresses: []string{a}, NodeName: ptr.To(fmt.Sprint("node", i+1))}
	}
	return out
}

// TestDryRun checks that a dry run writes nothing, lists what a start would write, and
// lists nothing after that start.
func TestDryRun(t *testing.T) {
	m := two(t)
	m.OnChange = func(operation string) error {
		t.Errorf("%s, in a dry run", operation)
		return nil
	}
	noted := func() map[string]int {
		parts := map[string]int{}
		w := &world{checks: map[types.NamespacedName]plan.HealthCheck{}}
		o := m.options(w)
		o.Kernel = o.Kernel.DryRun(func(part, _, _ string) { parts[part]++ })
		if err := New(o).Once(m.context(), m); err != nil {
			t.Fatal(err)
		}
		return parts
	}
	parts := noted()
	for _, part := range []string{"ipvs", "ipset", "iptables", "routing", "sysctl"} {
		if parts[part] == 0 {
			t.Errorf("no change of %s listed before a start: %v", part, parts)
		}
	}
	m.OnChange = nil
	m.boot()
	m.OnChange = func(operation string) error {
		t.Errorf("%s, in a dry run", operation)
		return nil
	}
	if parts := noted(); len(parts) > 0 {
		t.Errorf("changes listed after a start: %v", parts)
	}
}

// TestOnceDeletesDrained checks that a later --once deletes a removed endpoint's real servers,
// except those with connections. A dry run lists them.
func TestOnceDeletesDrained(t *testing.T) {
	m := two(t)
	once := func(k reconcile.Kernel) {
		o := m.options(&world{checks: map[types.NamespacedName]plan.HealthCheck{}})
		o.Kernel = k
		if err := New(o).Once(m.context(), m); err != nil {
			t.Fatal(err)
		}
	}
	kernel := m.options(nil).Kernel
	once(kernel)
	open := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("203.0.1.2"), Port: 80}
	endpoint := netip.MustParseAddrPort("10.244.1.2:8000")
	m.IPVS.SetConnections(open, endpoint, ipvs.Connections{Active: 1})
	m.set(exposed("web", 2, nil, at("10.244.0.2")...))
	listed := 0
	once(kernel.DryRun(func(part, operation, _ string) {
		if part == "ipvs" && strings.HasPrefix(operation, "delete") {
			listed++
		}
	}))
	if listed == 0 {
		t.Error("a dry run lists no real servers to delete")
	}
	once(kernel)
	if n := strings.Count(m.IPVS.Dump(), endpoint.String()); n != 1 {
		t.Errorf("%d real servers of the removed endpoint remain, want the one with a connection:\n%s", n, m.IPVS.Dump())
	}
	m.IPVS.SetConnections(open, endpoint, ipvs.Connections{})
	once(kernel)
	if n := strings.Count(m.IPVS.Dump(), endpoint.String()); n != 0 {
		t.Errorf("%d real servers of the removed endpoint remain without connections:\n%s", n, m.IPVS.Dump())
	}
}

// Run delivers the same as Load.
func (m *machine) Run(ctx context.Context, sink source.Sink) error { return m.Load(ctx, sink) }

// Load delivers the machine's Services once.
func (m *machine) Load(_ context.Context, sink source.Sink) error {
	for _, name := range slices.Sorted(maps.Keys(m.services)) {
		sink.SetService(m.services[name])
	}
	for _, name := range slices.Sorted(maps.Keys(m.slices)) {
		sink.SetEndpointSlice(m.slices[name])
	}
	sink.Synced()
	return nil
}
