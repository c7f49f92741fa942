package proxy

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// The Service that others must not harm. Its address is also a load balancer IP.
const (
	goodVIP      = "10.96.0.10"
	goodBalancer = "192.0.2.10"
)

// newGood returns the Service and its slice. It is older than objects without a time,
// and allows one source range.
func newGood() (*corev1.Service, *discoveryv1.EndpointSlice) {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "good", CreationTimestamp: metav1.Unix(1, 0)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: goodVIP, ClusterIPs: []string{goodVIP},
			LoadBalancerSourceRanges: []string{"198.51.100.0/24"},
			Ports:                    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: goodBalancer}}}},
	}
	return svc, newSlice("good", "10.244.1.5", "10.244.1.6")
}

// bad holds the fields that another user may write. Every text and number is arbitrary.
type bad struct {
	cluster, external, balancer, sources string
	protocol, scheduler, weights         string
	first, second, kind                  string
	port, nodePort, target, seconds      int32
	flags                                uint8
}

func (b *bad) service() *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "bad", CreationTimestamp: metav1.Unix(2, 0),
			Annotations: map[string]string{
				service.AnnotationScheduler: b.scheduler, service.AnnotationWeights: b.weights,
				service.AnnotationIPMode: b.scheduler, service.AnnotationMasquerade: b.weights,
				service.AnnotationSchedulerFlags: b.weights,
			},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: b.cluster, ClusterIPs: []string{b.cluster},
			ExternalIPs: []string{b.external, b.external}, LoadBalancerSourceRanges: []string{b.sources},
			SessionAffinity:       corev1.ServiceAffinityClientIP,
			SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &b.seconds}},
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: corev1.Protocol(b.protocol), Port: b.port, NodePort: b.nodePort},
				{Name: "again", Protocol: corev1.Protocol(b.protocol), Port: b.nodePort, NodePort: b.port},
			},
			HealthCheckNodePort: b.nodePort,
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: b.balancer}}}},
	}
	if b.flags&1 != 0 {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if b.flags&2 != 0 {
		svc.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if b.flags&64 != 0 {
		b.onlyNames(svc)
	}
	return svc
}

// onlyNames removes fields that only the Service's owner controls, and makes the
// Service the older one: it existed before the other was allocated anything.
func (b *bad) onlyNames(svc *corev1.Service) {
	svc.CreationTimestamp = metav1.Unix(0, 0)
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "10.96.0.11", []string{"10.96.0.11"}
	svc.Spec.ExternalIPs = []string{b.external, b.cluster, b.balancer}
	svc.Status = corev1.ServiceStatus{}
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = 0
	}
}

func (b *bad) slice() *discoveryv1.EndpointSlice {
	s := newSlice("bad", b.first, b.second)
	s.AddressType = discoveryv1.AddressType(b.kind)
	s.Ports[0] = discoveryv1.EndpointPort{Name: ptr.To("http"), Port: &b.target, Protocol: ptr.To(corev1.Protocol(b.protocol))}
	e := &s.Endpoints[0]
	e.Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(b.flags&4 != 0), Serving: ptr.To(b.flags&8 != 0), Terminating: ptr.To(b.flags&16 != 0)}
	if b.flags&32 != 0 {
		e.NodeName = ptr.To("node1")
	}
	return s
}

// FuzzObjects passes a Service and its EndpointSlice through to the kernel's fakes,
// beside an existing Service. Nothing may panic, the kernel refuses nothing, an error
// names an object and a field, and the other Service is served as before.
func FuzzObjects(f *testing.F) {
	f.Add("10.96.0.11", "203.0.113.5", "192.0.2.11", "10.0.0.0/8", "TCP", "wrr", "node/node1=3", "10.244.2.5", "10.244.2.6", "IPv4", int32(80), int32(30081), int32(8080), int32(60), uint8(0xff))
	// Values of the good Service, in various fields.
	f.Add(goodVIP, goodBalancer, goodVIP, "0.0.0.0/0", "TCP", "", "true", "10.244.1.5", "10.244.2.6", "IPv4", int32(80), int32(30080), int32(8000), int32(86400), uint8(0x25))
	f.Add("10.96.0.11", goodVIP, goodBalancer, "10.0.0.0/8", "TCP", "Proxy", "zone-a=2", "::ffff:10.244.2.5", "fd00::1", "IPv4", int32(80), int32(80), int32(8000), int32(0), uint8(0x01))
	f.Add("10.96.0.11", goodBalancer, "", "", "TCP", "VIP", "", "", "", "", int32(80), int32(0), int32(8000), int32(1), uint8(0x00))
	f.Add("10.96.0.11", goodBalancer, "192.168.0.11", "::/0", "", "", "", "10.244.2.5", "10.244.2.5", "IPv6", int32(80), int32(30080), int32(1), int32(1), uint8(0x21))
	f.Add("::ffff:10.96.0.11", "fe80::1%eth0", "0.0.0.0", " 010.0.0.0/8", "UDP", "mh", "a=0,b=65536", "127.0.0.1", "224.0.0.1", "FQDN", int32(65536), int32(-1), int32(0), int32(-1), uint8(0))
	f.Add(goodVIP, goodBalancer, "192.168.0.11", "", "TCP", "", "", "10.244.2.5", "", "IPv4", int32(80), int32(30080), int32(8000), int32(1), uint8(0x65))
	f.Fuzz(func(t *testing.T, cluster, external, balancer, sources, protocol, scheduler, weights, first, second, kind string, port, nodePort, target, seconds int32, flags uint8) {
		b := &bad{cluster, external, balancer, sources, protocol, scheduler, weights, first, second, kind, port, nodePort, target, seconds, flags}
		alone := programTogether(t)
		both := programTogether(t, b)
		if diff := cmp.Diff(alone.ofGood(alone), both.ofGood(alone)); diff != "" {
			t.Errorf("beside %+v the other Service is served differently (-alone +beside):\n%s", *b, diff)
		}
	})
}

// together is the kernel's state.
type together struct {
	servers ipvs.State
	sets    ipset.State
}

// programTogether programs the good Service and then the others.
func programTogether(t *testing.T, others ...*bad) together {
	w := newWorld(t)
	w.node.Routing.SetInventory(fuzzInventory())
	o := w.options()
	o.Config.VIPs.LoadBalancers, o.Config.VIPs.ExternalIPs = plan.ClaimPort, plan.ClaimPort
	p := New(o)
	svc, slice := newGood()
	p.inbox.SetService(svc)
	p.inbox.SetEndpointSlice(slice)
	for _, b := range others {
		p.inbox.SetService(b.service())
		p.inbox.SetEndpointSlice(b.slice())
	}
	ctx := klog.NewContext(t.Context(), logr.Discard())
	if _, err := p.begin(ctx); err != nil {
		t.Fatal(err)
	}
	if err := p.programAll(ctx).Err(); err != nil {
		t.Errorf("the kernel refused: %v", err)
	}
	for _, e := range w.events {
		checkNote(t, e.Note)
	}
	servers, err := w.node.IPVS.Observe()
	if err != nil {
		t.Fatal(err)
	}
	sets, err := o.Kernel.IPSet.Observe(func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	return together{servers.WithoutPlaces(), sets}
}

// fuzzInventory returns a node with a single interface.
func fuzzInventory() routing.Inventory {
	return routing.Inventory{
		Links:    []routing.Link{{Index: 1, Name: "lo", Type: "device", Up: true, Loopback: true}, {Index: 2, Name: "eth0", Type: "device", Up: true, Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("192.168.0.11/24"), Global: true}}}},
		Defaults: []routing.Route{{Family: ip.IPv4, Table: 254, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: "eth0", Via: netip.MustParseAddr("192.168.0.1")}},
	}
}

var objectAndField = regexp.MustCompile(`^(Service|EndpointSlice) default/[a-z0-9-]+: (spec|status|metadata|endpoints|ports)\S*: `)

// checkNote checks that each line of an Event's note names the object and the field.
func checkNote(t *testing.T, note string) {
	for line := range strings.Lines(note) {
		if !objectAndField.MatchString(line) {
			t.Errorf("an error without object and field: %q", line)
		}
	}
}

// ofGood returns the kernel's state for the addresses and ports of the good Service, as
// listed in a kernel that has nothing else.
func (k *together) ofGood(good together) map[string]string {
	out := map[string]string{}
	for key := range good.servers {
		out[key.String()] = fmt.Sprint(k.servers[key])
		for name, set := range k.sets {
			for e, mark := range set.Entries {
				if name != plan.LoopBack.In(key.Family()) && e.Addr == key.Addr && e.Port == key.Port && e.Protocol == key.Protocol {
					out[fmt.Sprintf("%s in %s", e, name)] = fmt.Sprintf("mark %#x", mark)
				}
			}
		}
	}
	return out
}
