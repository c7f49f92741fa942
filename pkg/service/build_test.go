package service

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// comparable converts a Service so that it compares by value, with nil and empty lists
// equal.
var byValue = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}, netip.AddrPort{}),
	cmpopts.EquateEmpty(),
}

func ptr[T any](v T) *T { return &v }

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// newService returns a Service with one unnamed TCP port 80, after changing it.
func newService(changes ...func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type:      corev1.ServiceTypeClusterIP,
			ClusterIP: "10.96.0.10",
			Ports:     []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, change := range changes {
		change(svc)
	}
	return svc
}

func loadBalancer(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeLoadBalancer }

// newSlice returns an IPv4 slice with TCP port 8080 and the given endpoints.
func newSlice(name string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: ptr[int32](8080)}},
		Endpoints:   endpoints,
	}
}

func endpoint(addr string, changes ...func(*discoveryv1.Endpoint)) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}}
	for _, change := range changes {
		change(&e)
	}
	return e
}

func terminating(e *discoveryv1.Endpoint) {
	e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}
}

func onNode(name string) func(*discoveryv1.Endpoint) {
	return func(e *discoveryv1.Endpoint) { e.NodeName = ptr(name) }
}

func mustBuild(t *testing.T, svc *corev1.Service, list ...*discoveryv1.EndpointSlice) Service {
	t.Helper()
	s, err := Build(svc, list)
	if err != nil {
		t.Errorf("Build: %v", err)
	}
	return s
}

func TestBuildEveryField(t *testing.T) {
	created := time.Date(2024, 2, 29, 12, 0, 0, 0, time.UTC)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", UID: "u-1", CreationTimestamp: metav1.NewTime(created),
		},
		Spec: corev1.ServiceSpec{
			Type:                     corev1.ServiceTypeLoadBalancer,
			ClusterIP:                "10.96.0.10",
			ClusterIPs:               []string{"10.96.0.10", "fd00:96::10"},
			ExternalIPs:              []string{"192.0.2.7", "2001:db8::7"},
			LoadBalancerSourceRanges: []string{"198.51.100.9/24", " 2001:db8:1::1/48 "},
			ExternalTrafficPolicy:    corev1.ServiceExternalTrafficPolicyLocal,
			InternalTrafficPolicy:    ptr(corev1.ServiceInternalTrafficPolicyLocal),
			SessionAffinity:          corev1.ServiceAffinityClientIP,
			SessionAffinityConfig:    &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr[int32](60)}},
			HealthCheckNodePort:      32000,
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080},
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53},
				{Name: "sig", Protocol: corev1.ProtocolSCTP, Port: 80, NodePort: 30080},
			},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "203.0.113.5"},
			{IP: "203.0.113.6", IPMode: ptr(corev1.LoadBalancerIPModeProxy)},
			{Hostname: "lb.example.com"},
			{IP: "2001:db8::5", IPMode: ptr(corev1.LoadBalancerIPModeVIP)},
		}}},
	}
	slice := newSlice("web-1", endpoint("10.244.1.5", onNode("node-1"), func(e *discoveryv1.Endpoint) {
		e.Hints = &discoveryv1.EndpointHints{
			ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}},
			ForNodes: []discoveryv1.ForNode{{Name: "node-1"}},
		}
	}))
	slice.Ports = []discoveryv1.EndpointPort{
		{Name: ptr("http"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr[int32](8080)},
		{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr[int32](5353)},
	}
	e := Endpoint{
		Node: "node-1", Ready: true, Serving: true, Hints: &Hints{Zones: []string{"a", "b"}, Nodes: []string{"node-1"}},
	}
	http, dns := e, e
	http.Addr = netip.MustParseAddrPort("10.244.1.5:8080")
	dns.Addr = netip.MustParseAddrPort("10.244.1.5:5353")

	want := Service{
		Name: types.NamespacedName{Namespace: "shop", Name: "web"}, UID: "u-1", Created: created,
		ClusterIPs:    addrs("10.96.0.10", "fd00:96::10"),
		ExternalIPs:   addrs("192.0.2.7", "2001:db8::7"),
		LoadBalancers: addrs("203.0.113.5", "2001:db8::5"),
		SourceRanges:  []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:1::/48")},
		ExternalLocal: true, InternalLocal: true,
		AffinitySeconds: 60, HealthCheckNodePort: 32000,
		Ports: []Port{
			{Name: "http", Protocol: ip.TCP, Port: 80, NodePort: 30080, Endpoints: []Endpoint{http}},
			{Name: "dns", Protocol: ip.UDP, Port: 53, Endpoints: []Endpoint{dns}},
			{Name: "sig", Protocol: ip.SCTP, Port: 80, NodePort: 30080},
		},
	}
	if diff := cmp.Diff(want, mustBuild(t, svc, slice), byValue); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// Fields that the API object omits have their defaults.
func TestBuildDefaults(t *testing.T) {
	svc := newService(func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "" })
	want := Service{
		Name:       types.NamespacedName{Namespace: "shop", Name: "web"},
		ClusterIPs: addrs("10.96.0.10"),
		Ports: []Port{{Protocol: ip.TCP, Port: 80, Endpoints: []Endpoint{
			{Addr: netip.MustParseAddrPort("10.244.1.5:8080"), Ready: true, Serving: true},
		}}},
	}
	got := mustBuild(t, svc, newSlice("web-1", endpoint("10.244.1.5")))
	if diff := cmp.Diff(want, got, byValue); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if got.SourceRanges != nil {
		t.Errorf("no source ranges must be nil, which means unrestricted, not %v", got.SourceRanges)
	}
}

// The annotation affects only load balancer addresses.
func TestIPModeAnnotation(t *testing.T) {
	for mode, want := range map[string][]netip.Addr{"": addrs("203.0.113.5"), "VIP": addrs("203.0.113.5"), "Proxy": nil} {
		svc := newService(func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeLoadBalancer, []string{"192.0.2.7"}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.5"}}
			if mode != "" {
				s.Annotations = map[string]string{AnnotationIPMode: mode}
			}
		})
		got := mustBuild(t, svc)
		if diff := cmp.Diff(want, got.LoadBalancers, byValue); diff != "" {
			t.Errorf("%q (-want +got)\n%s", mode, diff)
		}
		if len(got.ExternalIPs) != 1 || len(got.ClusterIPs) != 1 {
			t.Errorf("%q: %v and %v remain", mode, got.ExternalIPs, got.ClusterIPs)
		}
	}
}

// Each error names the object and the field, and affects only that field.
func TestBuildErrors(t *testing.T) {
	const service, slice = "Service shop/web: ", "EndpointSlice shop/web-1: "
	for _, tc := range []struct {
		name   string
		change func(*corev1.Service, *discoveryv1.EndpointSlice)
		want   []string
	}{
		{"nothing wrong", func(*corev1.Service, *discoveryv1.EndpointSlice) {}, nil},
		{"cluster IP", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.ClusterIP = "10.96.0"
		}, []string{service + `spec.clusterIP: "10.96.0" is not an IP address`}},
		{"cluster IPs", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.ClusterIPs = []string{"10.96.0.10", "::"}
		}, []string{service + `spec.clusterIPs[1]: "::" is unspecified, loopback, link-local, multicast or broadcast and cannot be served`}},
		{"masquerade", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{AnnotationMasquerade: "perhaps"}
		}, []string{service + `metadata.annotations[kube-ipvs.io/masquerade]: invalid value "perhaps", want true or false`}},
		{"ipMode", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.Type = corev1.ServiceTypeLoadBalancer
			s.Annotations = map[string]string{AnnotationIPMode: "proxy"}
		}, []string{service + `metadata.annotations[kube-ipvs.io/ip-mode]: invalid value "proxy", want Proxy or VIP`}},
		{"external IPs", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.ExternalIPs = []string{"127.0.0.1", "192.0.2.1", "fe80::1", "fe80::1%eth0", "224.0.0.1", "255.255.255.255", "169.254.169.254"}
		}, []string{
			service + `spec.externalIPs[0]: "127.0.0.1" is unspecified, loopback, link-local, multicast or broadcast and cannot be served`,
			service + `spec.externalIPs[2]: "fe80::1" is unspecified, loopback, link-local, multicast or broadcast and cannot be served`,
			service + `spec.externalIPs[3]: "fe80::1%eth0" has a zone`,
			service + `spec.externalIPs[4]: "224.0.0.1" is unspecified, loopback, link-local, multicast or broadcast and cannot be served`,
			service + `spec.externalIPs[5]: "255.255.255.255" is unspecified, loopback, link-local, multicast or broadcast and cannot be served`,
			service + `spec.externalIPs: 169.254.169.254 is link-local and cannot be served`,
		}},
		{"load balancer, by its place in the status", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			loadBalancer(s)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb"}, {IP: "203.0.113"}}
		}, []string{service + `status.loadBalancer.ingress[1].ip: "203.0.113" is not an IP address`}},
		{"addresses of a family that the Service lacks", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			loadBalancer(s)
			s.Spec.ExternalIPs = []string{"192.0.2.7", "2001:db8::7"}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "2001:db8::8"}}
		}, []string{
			service + `spec.externalIPs: 2001:db8::7 is IPv6, but the Service has no cluster IP of this family`,
			service + `status.loadBalancer.ingress: 2001:db8::8 is IPv6, but the Service has no cluster IP of this family`,
		}},
		{"source ranges", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			loadBalancer(s)
			s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "10.0.0.1", "::ffff:10.0.0.0/8", ""}
		}, []string{
			service + `spec.loadBalancerSourceRanges[1]: "10.0.0.1" is not a CIDR`,
			service + `spec.loadBalancerSourceRanges[2]: "::ffff:10.0.0.0/8" mixes IPv4 and IPv6`,
			service + `spec.loadBalancerSourceRanges[3]: "" is not a CIDR`,
		}},
		{"affinity", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr[int32](0)}}
		}, []string{service + `spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400, using 10800`}},
		{"health check", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			loadBalancer(s)
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			s.Spec.HealthCheckNodePort = 70000
		}, []string{service + `spec.healthCheckNodePort: 70000 is not a port`}},
		{"ports", func(s *corev1.Service, _ *discoveryv1.EndpointSlice) {
			s.Spec.Ports = append(s.Spec.Ports,
				corev1.ServicePort{Protocol: "ICMP", Port: 81},
				corev1.ServicePort{Port: 0},
				corev1.ServicePort{Port: 65536},
				corev1.ServicePort{Port: 82, NodePort: -1},
				corev1.ServicePort{Port: 80, Name: "again"})
		}, []string{
			service + `spec.ports[1].protocol: unknown protocol "ICMP", want TCP, UDP or SCTP`,
			service + `spec.ports[2].port: 0 is not a port`,
			service + `spec.ports[3].port: 65536 is not a port`,
			service + `spec.ports[4].nodePort: -1 is not a port`,
			service + `spec.ports[5]: TCP 80 appears twice`,
		}},
		{"slice's port", func(_ *corev1.Service, s *discoveryv1.EndpointSlice) {
			s.Ports = append(s.Ports,
				discoveryv1.EndpointPort{Port: ptr[int32](-7)},
				discoveryv1.EndpointPort{Port: ptr[int32](7), Protocol: ptr(corev1.Protocol("tcp"))})
		}, []string{
			slice + `ports[1].port: -7 is not a port`,
			slice + `ports[2].protocol: unknown protocol "tcp", want TCP, UDP or SCTP`,
		}},
		{"endpoint, once for all ports, whatever becomes of these", func(_ *corev1.Service, s *discoveryv1.EndpointSlice) {
			s.Ports = append([]discoveryv1.EndpointPort{{}}, s.Ports[0], discoveryv1.EndpointPort{Name: ptr("b"), Port: ptr[int32](9)})
			s.Endpoints = append(s.Endpoints, endpoint("10.244.1"), endpoint("fd00::1"))
		}, []string{
			slice + `endpoints[1].addresses[0]: "10.244.1" is not an IP address`,
			slice + `endpoints[2].addresses[0]: "fd00::1" is not of addressType IPv4`,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			svc, slice := newService(), newSlice("web-1", endpoint("10.244.1.5"))
			tc.change(svc, slice)
			s, err := Build(svc, []*discoveryv1.EndpointSlice{slice})
			if diff := cmp.Diff(tc.want, lines(err)); diff != "" {
				t.Errorf("errors (-want +got)\n%s", diff)
			}
			if len(s.Ports) == 0 || len(s.Ports[0].Endpoints) != 1 {
				t.Errorf("valid ports must remain, got %+v", s.Ports)
			}
		})
	}
}

func lines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

func TestAddresses(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   []string
		want []netip.Addr
	}{
		{"none", nil, nil},
		{"order is kept", []string{"192.0.2.9", "192.0.2.1"}, addrs("192.0.2.9", "192.0.2.1")},
		{"twice", []string{"192.0.2.9", "2001:db8::1", "192.0.2.9", "2001:DB8:0::1"}, addrs("192.0.2.9", "2001:db8::1")},
		{"mapped IPv4", []string{"::ffff:192.0.2.9", "192.0.2.9"}, addrs("192.0.2.9")},
		{"leading zeros are decimal", []string{"192.000.002.010"}, addrs("192.0.2.10")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := mustBuild(t, newService(func(s *corev1.Service) {
				s.Spec.ClusterIPs = []string{"10.96.0.10", "fd00:96::10"}
				s.Spec.ExternalIPs = tc.in
			}))
			if !slices.Equal(s.ExternalIPs, tc.want) {
				t.Errorf("got %v, want %v", s.ExternalIPs, tc.want)
			}
		})
	}
	t.Run("mapped loopback", func(t *testing.T) {
		s, err := Build(newService(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"::ffff:127.0.0.1"} }), nil)
		if err == nil || len(s.ExternalIPs) > 0 {
			t.Errorf("served as %v", s.ExternalIPs)
		}
	})
}

// TestTypes: as in kube-proxy, the status and the source ranges count for Services of every type. API
// servers before 1.27 keep the status of a load balancer that became another type, and that which a
// controller writes. The traffic policy counts for Services that are reachable externally by their type,
// and the health check node port for load balancers.
func TestTypes(t *testing.T) {
	set := func(s *corev1.Service) {
		s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"}
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = 32000
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.5"}}
	}
	externalIP := func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.7"} }
	for _, tc := range []struct {
		name       string
		change     func(*corev1.Service)
		local      bool
		healthPort uint16
	}{
		{"load balancer", loadBalancer, true, 32000},
		{"load balancer, Cluster", func(s *corev1.Service) {
			loadBalancer(s)
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		}, false, 0},
		{"node port", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }, true, 0},
		{"cluster IP", func(*corev1.Service) {}, false, 0},
		{"external IP", externalIP, true, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := mustBuild(t, newService(set, tc.change))
			if len(s.LoadBalancers) != 1 || len(s.SourceRanges) != 1 {
				t.Errorf("load balancers %v, source ranges %v, want one of each", s.LoadBalancers, s.SourceRanges)
			}
			if s.ExternalLocal != tc.local || s.HealthCheckNodePort != tc.healthPort {
				t.Errorf("local %t, health check port %d, want %t, %d", s.ExternalLocal, s.HealthCheckNodePort, tc.local, tc.healthPort)
			}
		})
	}
}

// TestIPMode: as in kube-proxy, only IPs of ipMode VIP, which is the default, are served.
func TestIPMode(t *testing.T) {
	for mode, served := range map[corev1.LoadBalancerIPMode]int{corev1.LoadBalancerIPModeVIP: 1, corev1.LoadBalancerIPModeProxy: 0, "Other": 0} {
		s := mustBuild(t, newService(loadBalancer, func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.5", IPMode: ptr(mode)}}
		}))
		if len(s.LoadBalancers) != served {
			t.Errorf("ipMode %s: serves %v, want %d", mode, s.LoadBalancers, served)
		}
	}
}

// Unusable ranges never open a Service.
func TestSourceRanges(t *testing.T) {
	for _, tc := range []struct {
		name   string
		in     []string
		want   []string // nil: unrestricted
		errors int
	}{
		{"none", nil, nil, 0},
		{"masked", []string{"10.1.2.3/8"}, []string{"10.0.0.0/8"}, 0},
		{"everybody is a range like any", []string{"0.0.0.0/0"}, []string{"0.0.0.0/0"}, 0},
		{"mapped", []string{"::ffff:10.0.0.0/104"}, []string{"10.0.0.0/8"}, 0},
		{"blanks", []string{" 10.0.0.0/8\t"}, []string{"10.0.0.0/8"}, 0},
		{"leading zeros are decimal", []string{"010.001.0.0/16"}, []string{"10.1.0.0/16"}, 0},
		{"some are wrong", []string{"x", "10.0.0.0/8"}, []string{"10.0.0.0/8"}, 1},
		{"one is wrong", []string{"10.0.0.0/33"}, []string{"255.255.255.255/32"}, 1},
		{"all are wrong", []string{"x", "::ffff:0.0.0.0/95"}, []string{"255.255.255.255/32"}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := Build(newService(loadBalancer, func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = tc.in }), nil)
			if got := fmt.Sprint(s.SourceRanges); got != fmt.Sprint(tc.want) || (s.SourceRanges == nil) != (tc.want == nil) {
				t.Errorf("got %s, want %s", got, tc.want)
			}
			if got := lines(err); len(got) != tc.errors {
				t.Errorf("errors %q, want %d", got, tc.errors)
			}
		})
	}
}

// TestReliabilityAnnotations: annotations that once restricted sources, or that clouds
// evaluate, have no effect on source ranges. A user who may annotate a Service must not
// be able to admit more clients than its ranges do.
func TestReliabilityAnnotations(t *testing.T) {
	record := reliability.Begin(t, reliability.Security, "annotations")
	annotations := []string{
		corev1.AnnotationLoadBalancerSourceRangesKey, "kube-ipvs.io/load-balancer-source-ranges", "kube-ipvs.io/source-ranges",
		AnnotationMasquerade, AnnotationIPMode, AnnotationScheduler, AnnotationSchedulerFlags, AnnotationWeights, corev1.AnnotationTopologyMode,
	}
	values := []string{"", "0.0.0.0/0", "::/0", "0.0.0.0/0,::/0", "true", "VIP", "Proxy", "wrr", "mh", "node/node1=5", "*"}
	tried, widened := 0, 0
	for _, annotation := range annotations {
		for _, value := range values {
			tried++
			s, _ := Build(newService(loadBalancer, func(s *corev1.Service) {
				s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"}
				s.Annotations = map[string]string{annotation: value}
			}), nil)
			if got := fmt.Sprint(s.SourceRanges); got != "[10.0.0.0/8]" {
				widened++
				t.Errorf("%s: %q: ranges %s", annotation, value, got)
			}
		}
	}
	record(
		reliability.Figure{Name: "annotation values on a Service with source ranges", Value: float64(tried), Shows: "kube-ipvs's own annotations, and those that configure source ranges in clouds"},
		reliability.Figure{Name: "of these, changed the ranges", Value: float64(widened)},
	)
}

func TestAffinity(t *testing.T) {
	for _, tc := range []struct {
		name    string
		kind    corev1.ServiceAffinity
		config  *corev1.SessionAffinityConfig
		want    uint32
		isError bool
	}{
		{"none", corev1.ServiceAffinityNone, nil, 0, false},
		{"none, with a timeout", corev1.ServiceAffinityNone, timeout(60), 0, false},
		{"default", corev1.ServiceAffinityClientIP, nil, 10800, false},
		{"default of an empty configuration", corev1.ServiceAffinityClientIP, &corev1.SessionAffinityConfig{}, 10800, false},
		{"default of an empty client IP configuration", corev1.ServiceAffinityClientIP,
			&corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{}}, 10800, false},
		{"shortest", corev1.ServiceAffinityClientIP, timeout(1), 1, false},
		{"longest", corev1.ServiceAffinityClientIP, timeout(86400), 86400, false},
		{"too long", corev1.ServiceAffinityClientIP, timeout(86401), 10800, true},
		{"negative", corev1.ServiceAffinityClientIP, timeout(-1), 10800, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := Build(newService(func(s *corev1.Service) {
				s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = tc.kind, tc.config
			}), nil)
			if s.AffinitySeconds != tc.want || (err != nil) != tc.isError {
				t.Errorf("%d seconds, error %v; want %d", s.AffinitySeconds, err, tc.want)
			}
		})
	}
}

func timeout(seconds int32) *corev1.SessionAffinityConfig {
	return &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
}

func TestTrafficPolicies(t *testing.T) {
	for _, local := range []bool{false, true} {
		s := mustBuild(t, newService(loadBalancer, func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
			s.Spec.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicyCluster)
			if local {
				s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
				s.Spec.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicyLocal)
			}
		}))
		if s.ExternalLocal != local || s.InternalLocal != local {
			t.Errorf("external %t, internal %t, want %t", s.ExternalLocal, s.InternalLocal, local)
		}
	}
}

func TestExternal(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*corev1.Service)
		want   bool
	}{
		{"cluster IP", func(*corev1.Service) {}, false},
		{"external IP", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} }, true},
		{"node port", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30080 }, true},
		{"load balancer", func(s *corev1.Service) {
			loadBalancer(s)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.5"}}
		}, true},
		{"load balancer without an address", loadBalancer, false},
	} {
		s := mustBuild(t, newService(tc.change))
		if got := s.External(); got != tc.want {
			t.Errorf("%s: External() = %t, want %t", tc.name, got, tc.want)
		}
	}
}

// The longest names that the API accepts: a DNS label for a Service, a subdomain for a
// slice, and 15 characters for a port.
func TestLongNames(t *testing.T) {
	label, subdomain := strings.Repeat("n", 63), strings.Repeat("s", 253)
	port := strings.Repeat("p", 15)
	svc := newService(func(s *corev1.Service) {
		s.Namespace, s.Name = label, label
		s.Spec.Ports[0].Name = port
		s.Spec.ExternalIPs = []string{"x"}
	})
	slice := newSlice(subdomain, endpoint("10.244.1.5"), endpoint("y"))
	slice.Namespace = label
	slice.Ports[0].Name = &port
	s, err := Build(svc, []*discoveryv1.EndpointSlice{slice})
	if s.Name.Name != label || len(s.Ports[0].Endpoints) != 1 {
		t.Errorf("built %+v", s)
	}
	want := []string{
		"Service " + label + "/" + label + `: spec.externalIPs[0]: "x" is not an IP address`,
		"EndpointSlice " + label + "/" + subdomain + `: endpoints[1].addresses[0]: "y" is not an IP address`,
	}
	if !reflect.DeepEqual(lines(err), want) {
		t.Errorf("errors are\n%v\nwant\n%s", err, strings.Join(want, "\n"))
	}
}

func TestProxied(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*corev1.Service)
		want   bool
	}{
		{"cluster IP", func(*corev1.Service) {}, true},
		{"headless", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }, false},
		{"not yet allocated", func(s *corev1.Service) { s.Spec.ClusterIP = "" }, false},
		{"external name", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName }, false},
		{"another proxy's", func(s *corev1.Service) { s.Labels = map[string]string{labelProxyName: "other"} }, false},
		{"another proxy's, of empty name", func(s *corev1.Service) { s.Labels = map[string]string{labelProxyName: ""} }, false},
		{"labelled headless, with an address", func(s *corev1.Service) { s.Labels = map[string]string{corev1.IsHeadlessService: ""} }, true},
		{"load balancer", loadBalancer, true},
	} {
		if got := Proxied(newService(tc.change)); got != tc.want {
			t.Errorf("%s: Proxied = %t, want %t", tc.name, got, tc.want)
		}
	}
}

func TestServiceOf(t *testing.T) {
	for _, tc := range []struct {
		name   string
		labels map[string]string
		kind   discoveryv1.AddressType
		want   bool
	}{
		{"ours", map[string]string{discoveryv1.LabelServiceName: "web"}, discoveryv1.AddressTypeIPv4, true},
		{"ours, IPv6", map[string]string{discoveryv1.LabelServiceName: "web"}, discoveryv1.AddressTypeIPv6, true},
		{"host names", map[string]string{discoveryv1.LabelServiceName: "web"}, discoveryv1.AddressTypeFQDN, false},
		{"no owner", nil, discoveryv1.AddressTypeIPv4, false},
		{"headless", map[string]string{discoveryv1.LabelServiceName: "web", corev1.IsHeadlessService: ""}, discoveryv1.AddressTypeIPv4, false},
		{"another proxy's once, or soon", map[string]string{discoveryv1.LabelServiceName: "web", labelProxyName: "other"}, discoveryv1.AddressTypeIPv4, true},
	} {
		slice := newSlice("web-1")
		slice.Labels, slice.AddressType = tc.labels, tc.kind
		name, ours := ServiceOf(slice)
		if ours != tc.want {
			t.Errorf("%s: ServiceOf = %t, want %t", tc.name, ours, tc.want)
		}
		if want := (types.NamespacedName{Namespace: "shop", Name: "web"}); ours && name != want {
			t.Errorf("%s: owner is %s, want %s", tc.name, name, want)
		}
	}
}

// The API server gets these selectors; see kube-proxy's.
func TestSelectors(t *testing.T) {
	if got, want := Selector().String(), "!service.kubernetes.io/service-proxy-name"; got != want {
		t.Errorf("Services: %s, want %s", got, want)
	}
	if got, want := EndpointSliceSelector().String(), "!service.kubernetes.io/headless"; got != want {
		t.Errorf("EndpointSlices: %s, want %s", got, want)
	}
}

// TestUIDIsKept passes UIDs through the compact form of a Service.
func TestUIDIsKept(t *testing.T) {
	for _, uid := range []types.UID{
		"0b9b8b6e-6c0e-4a53-9d0a-0f8f5d1f0d5e", "0B9B8B6E-6C0E-4A53-9D0A-0F8F5D1F0D5E", "00000000-0000-0000-0000-000000000000",
		"0b9b8b6e6c0e4a539d0a0f8f5d1f0d5e", "another form", "",
	} {
		p := Parse(&corev1.Service{ObjectMeta: metav1.ObjectMeta{UID: uid}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1"}})
		if s, err := p.With(nil); err != nil || p.UID() != uid || s.UID != uid {
			t.Errorf("UID %q is %q, in the model %q (%v)", uid, p.UID(), s.UID, err)
		}
	}
}
