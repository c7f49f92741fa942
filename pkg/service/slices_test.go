package service

import (
	"fmt"
	"maps"
	"math/rand"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

func TestConditions(t *testing.T) {
	yes, no := ptr(true), ptr(false)
	for _, tc := range []struct {
		ready, serving, terminating *bool
		want                        Endpoint
	}{
		{nil, nil, nil, Endpoint{Ready: true, Serving: true}},
		{yes, yes, no, Endpoint{Ready: true, Serving: true}},
		{yes, nil, nil, Endpoint{Ready: true, Serving: true}},
		{no, nil, nil, Endpoint{Serving: true}},
		{no, no, nil, Endpoint{}},
		{no, yes, yes, Endpoint{Serving: true, Terminating: true}},
		{no, nil, yes, Endpoint{Serving: true, Terminating: true}},
		{no, no, yes, Endpoint{Terminating: true}},
		{yes, no, no, Endpoint{Ready: true}}, // publishNotReadyAddresses
		{nil, no, yes, Endpoint{Ready: true, Terminating: true}},
	} {
		parsed := newSliceEndpoint(&discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{
			Ready: tc.ready, Serving: tc.serving, Terminating: tc.terminating,
		}}, netip.MustParseAddr("10.244.1.5"))
		got := parsed.endpoint(8080)
		tc.want.Addr = netip.MustParseAddrPort("10.244.1.5:8080")
		if diff := cmp.Diff(tc.want, got, byValue); diff != "" {
			t.Errorf("ready %s, serving %s, terminating %s (-want +got)\n%s",
				show(tc.ready), show(tc.serving), show(tc.terminating), diff)
		}
	}
}

func show(b *bool) string {
	if b == nil {
		return "nil"
	}
	return fmt.Sprint(*b)
}

// endpointsOf formats the endpoints of one port.
func endpointsOf(p Port) []string {
	var out []string
	for _, e := range p.Endpoints {
		s := e.Addr.String()
		if e.Node != "" {
			s += " on " + e.Node
		}
		if e.Terminating {
			s += " terminating"
		}
		out = append(out, s)
	}
	return out
}

func TestMergeSlices(t *testing.T) {
	ipv6 := newSlice("c", endpoint("fd00::5"), endpoint("2001:db8::5"))
	ipv6.AddressType = discoveryv1.AddressTypeIPv6
	other := newSlice("d", endpoint("10.244.1.6"))
	other.Ports[0].Port = ptr[int32](9090)
	mapped := newSlice("e", endpoint("::ffff:10.244.1.7"))
	without := newSlice("f", discoveryv1.Endpoint{}, endpoint("10.244.1.8"))
	several := newSlice("g", discoveryv1.Endpoint{Addresses: []string{"10.244.1.9", "10.244.1.10"}})

	for _, tc := range []struct {
		name   string
		slices []*discoveryv1.EndpointSlice
		want   []string
	}{
		{"none", nil, nil},
		{"sorted over all slices",
			[]*discoveryv1.EndpointSlice{newSlice("a", endpoint("10.244.1.9")), newSlice("b", endpoint("10.244.1.10"), endpoint("10.244.1.5"))},
			[]string{"10.244.1.5:8080", "10.244.1.9:8080", "10.244.1.10:8080"}},
		{"both families, IPv4 first",
			[]*discoveryv1.EndpointSlice{ipv6, newSlice("a", endpoint("10.244.1.5"))},
			[]string{"10.244.1.5:8080", "[2001:db8::5]:8080", "[fd00::5]:8080"}},
		{"each slice has its own number for the port",
			[]*discoveryv1.EndpointSlice{newSlice("a", endpoint("10.244.1.6")), other},
			[]string{"10.244.1.6:8080", "10.244.1.6:9090"}},
		{"twice in one slice",
			[]*discoveryv1.EndpointSlice{newSlice("a", endpoint("10.244.1.5"), endpoint("10.244.1.5"))},
			[]string{"10.244.1.5:8080"}},
		{"the one that is not terminating wins, whichever is first",
			[]*discoveryv1.EndpointSlice{newSlice("a", endpoint("10.244.1.5", terminating)), newSlice("b", endpoint("10.244.1.5"))},
			[]string{"10.244.1.5:8080"}},
		{"and the other way round",
			[]*discoveryv1.EndpointSlice{newSlice("a", endpoint("10.244.1.5")), newSlice("b", endpoint("10.244.1.5", terminating))},
			[]string{"10.244.1.5:8080"}},
		{"of equal ones, that of the first slice by name",
			[]*discoveryv1.EndpointSlice{newSlice("b", endpoint("10.244.1.5", onNode("two"))), newSlice("a", endpoint("10.244.1.5", onNode("one")))},
			[]string{"10.244.1.5:8080 on one"}},
		{"and among others",
			[]*discoveryv1.EndpointSlice{newSlice("b", endpoint("10.244.1.5", onNode("two"))), newSlice("a", endpoint("10.244.1.5", onNode("one")), endpoint("10.244.1.9"))},
			[]string{"10.244.1.5:8080 on one", "10.244.1.9:8080"}},
		{"mapped IPv4", []*discoveryv1.EndpointSlice{mapped}, []string{"10.244.1.7:8080"}},
		{"no address", []*discoveryv1.EndpointSlice{without}, []string{"10.244.1.8:8080"}},
		{"only the first address counts", []*discoveryv1.EndpointSlice{several}, []string{"10.244.1.9:8080"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := mustBuild(t, newService(), tc.slices...)
			if diff := cmp.Diff(tc.want, endpointsOf(s.Ports[0])); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// A report of an endpoint as ready takes precedence.
func TestMergePrefersReady(t *testing.T) {
	unready := endpoint("10.244.1.5", func(e *discoveryv1.Endpoint) { e.Conditions.Ready = ptr(false) })
	for _, order := range [][]discoveryv1.Endpoint{{unready, endpoint("10.244.1.5")}, {endpoint("10.244.1.5"), unready}} {
		s := mustBuild(t, newService(), newSlice("a", order...))
		if got := s.Ports[0].Endpoints; len(got) != 1 || !got[0].Ready {
			t.Errorf("got %+v, want a ready one", got)
		}
	}
}

// Ports of Services and slices match by name and protocol.
func TestPortsJoin(t *testing.T) {
	svc := newService(func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53},
			{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53},
			{Name: "none", Protocol: corev1.ProtocolTCP, Port: 54},
			{Name: "zero", Protocol: corev1.ProtocolTCP, Port: 55},
			{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 56},
			{Name: "missing", Protocol: corev1.ProtocolTCP, Port: 57},
		}
	})
	slice := newSlice("a", endpoint("10.244.1.5"))
	slice.Ports = []discoveryv1.EndpointPort{
		{Name: ptr("dns"), Protocol: ptr(corev1.ProtocolUDP), Port: ptr[int32](5353)},
		{Name: ptr("dns-tcp"), Port: ptr[int32](5354)}, // TCP by default
		{Name: ptr("none"), Protocol: ptr(corev1.ProtocolTCP)},
		{Name: ptr("zero"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr[int32](0)},
		{Name: ptr("sctp"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr[int32](5656)}, // not SCTP
		{Name: ptr("stray"), Protocol: ptr(corev1.ProtocolTCP), Port: ptr[int32](1)},
	}
	s := mustBuild(t, svc, slice)
	want := map[string][]string{
		"dns": {"10.244.1.5:5353"}, "dns-tcp": {"10.244.1.5:5354"}, "none": nil, "zero": nil, "sctp": nil, "missing": nil,
	}
	got := map[string][]string{}
	for _, p := range s.Ports {
		got[p.Name] = endpointsOf(p)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// Slices come from a map, endpoints in the order of the controller.
func TestOrderDoesNotMatter(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	list := []*discoveryv1.EndpointSlice{
		newSlice("a", endpoint("10.244.1.5", onNode("one")), endpoint("10.244.1.6"), endpoint("x")),
		newSlice("b", endpoint("10.244.1.5", onNode("two")), endpoint("10.244.1.7", terminating)),
		newSlice("c", endpoint("10.244.1.7"), endpoint("10.244.1.8"), endpoint("y")),
	}
	want, wantErr := Build(newService(), list)
	for range 20 {
		random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		got, err := Build(newService(), list)
		if diff := cmp.Diff(want, got, byValue); diff != "" {
			t.Fatalf("slices in another order (-want +got)\n%s", diff)
		}
		if err.Error() != wantErr.Error() {
			t.Fatalf("slices in another order: errors\n%v\nwant\n%v", err, wantErr)
		}
	}
}

func TestManyEndpoints(t *testing.T) {
	const n, perSlice = 5000, 100 // the controller's size of slices
	var list []*discoveryv1.EndpointSlice
	for i := range n / perSlice {
		slice := newSlice(fmt.Sprintf("web-%02d", i))
		for j := range perSlice {
			k := i*perSlice + j
			slice.Endpoints = append(slice.Endpoints, endpoint(fmt.Sprintf("10.%d.%d.%d", 244+k/65536, k/256%256, k%256)))
		}
		list = append(list, slice)
	}
	list = append(list, list[0]) // one delivered twice
	endpoints := mustBuild(t, newService(), list...).Ports[0].Endpoints
	if len(endpoints) != n {
		t.Fatalf("%d endpoints, want %d", len(endpoints), n)
	}
	for i, e := range endpoints[1:] {
		if endpoints[i].Addr.Compare(e.Addr) >= 0 {
			t.Fatalf("%s precedes %s", endpoints[i].Addr, e.Addr)
		}
	}
}

// FuzzBuild fuzzes every field that is text or a number.
func FuzzBuild(f *testing.F) {
	f.Add("10.96.0.10", "192.0.2.1", "203.0.113.5", "10.0.0.0/8", "10.244.1.5", "10.244.1.6", "IPv4", "TCP", int32(80), int32(30080), int32(8080), int32(60), uint8(0xff))
	f.Add("::ffff:10.96.0.10", "fe80::1%eth0", "0.0.0.0", "::/0", "fd00::1", "::ffff:10.244.1.6", "IPv6", "SCTP", int32(65536), int32(-1), int32(0), int32(-1), uint8(0))
	f.Add("None", "", "127.0.0.1", " 010.0.0.0/8", "10.244.1.5", "10.244.1.5", "FQDN", "", int32(1), int32(65535), int32(65535), int32(86401), uint8(0x55))
	f.Fuzz(func(t *testing.T, cluster, external, ingress, sources, first, second, kind, protocol string, port, nodePort, target, seconds int32, flags uint8) {
		bit := func(n int) *bool { return ptr(flags&(1<<n) != 0) }
		svc := newService(loadBalancer, func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ExternalIPs = cluster, []string{external, cluster, external}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ingress}, {IP: external}}
			s.Spec.LoadBalancerSourceRanges = []string{sources}
			s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityClientIP, timeout(seconds)
			s.Spec.Ports = []corev1.ServicePort{
				{Protocol: corev1.Protocol(protocol), Port: port, NodePort: nodePort},
				{Protocol: corev1.Protocol(protocol), Port: nodePort, NodePort: port},
			}
		})
		a := endpoint(first)
		a.Conditions = discoveryv1.EndpointConditions{Ready: bit(0), Serving: bit(1), Terminating: bit(2)}
		slice := newSlice("a", a, endpoint(second), discoveryv1.Endpoint{})
		slice.AddressType = discoveryv1.AddressType(kind)
		slice.Ports[0] = discoveryv1.EndpointPort{Port: &target, Protocol: ptr(corev1.Protocol(protocol))}
		s, _ := Build(svc, []*discoveryv1.EndpointSlice{slice, newSlice("b", a, a), slice})
		checkModel(t, &s)
	})
}

// checkModel checks the properties of a Service that package plan relies on.
func checkModel(t *testing.T, s *Service) {
	for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancers} {
		seen := map[netip.Addr]bool{}
		for _, a := range list {
			checkAddr(t, a)
			if seen[a] {
				t.Errorf("%s appears twice", a)
			}
			seen[a] = true
		}
	}
	if len(s.SourceRanges) == 0 {
		t.Error("a list of source ranges became empty, which opens the Service")
	}
	for _, p := range s.SourceRanges {
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			t.Errorf("source range %s", p)
		}
	}
	if s.AffinitySeconds < 1 || s.AffinitySeconds > maxAffinitySeconds {
		t.Errorf("affinity of %d seconds", s.AffinitySeconds)
	}
	for _, p := range s.Ports {
		if p.Port == 0 || p.Protocol != ip.TCP && p.Protocol != ip.UDP && p.Protocol != ip.SCTP {
			t.Errorf("port %s %d", p.Protocol, p.Port)
		}
		seen := map[netip.AddrPort]bool{}
		for _, e := range p.Endpoints {
			checkAddr(t, e.Addr.Addr())
			if e.Addr.Port() == 0 || seen[e.Addr] {
				t.Errorf("endpoint %s has no port or appears twice", e.Addr)
			}
			seen[e.Addr] = true
		}
	}
}

func checkAddr(t *testing.T, a netip.Addr) {
	if !a.IsValid() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
		t.Errorf("%s is in the model", a)
	}
}

// TestMergeManySlices: endpoints of many slices are merged in order, each once.
func TestMergeManySlices(t *testing.T) {
	for seed := range int64(200) {
		r := rand.New(rand.NewSource(seed))
		var list []*discoveryv1.EndpointSlice
		want := map[string]bool{}
		for i := range r.Intn(9) {
			var endpoints []discoveryv1.Endpoint
			for range r.Intn(6) {
				addr := fmt.Sprintf("10.244.1.%d", 1+r.Intn(30))
				endpoints, want[addr+":8080"] = append(endpoints, endpoint(addr)), true
			}
			list = append(list, newSlice(fmt.Sprint("web-", i), endpoints...))
		}
		s := mustBuild(t, newService(), list...)
		got := endpointsOf(s.Ports[0])
		for i, e := range s.Ports[0].Endpoints {
			if !want[got[i]] || i > 0 && s.Ports[0].Endpoints[i-1].Addr.Compare(e.Addr) >= 0 {
				t.Fatalf("seed %d: %v, want each of %v once, sorted", seed, got, want)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("seed %d: %v, want each of %v once", seed, got, want)
		}
	}
}

// TestMergeAfterChanges builds a Service with many endpoints again after changes of a few of its
// slices, in the memory of the earlier ones, and between other Services. The result is that of all
// slices.
func TestMergeAfterChanges(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	svc := newService(func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 81}}
	})
	random := func(i int) *discoveryv1.EndpointSlice {
		var endpoints []discoveryv1.Endpoint
		for range 50 + r.Intn(100) {
			e := endpoint(fmt.Sprintf("10.244.%d.%d", 1+r.Intn(8), 1+r.Intn(250)))
			e.NodeName = ptr(fmt.Sprint("node-", i))
			e.Conditions = discoveryv1.EndpointConditions{Ready: ptr(r.Intn(2) > 0), Terminating: ptr(r.Intn(2) > 0)}
			endpoints = append(endpoints, e)
		}
		s := newSlice(fmt.Sprint("web-", i), endpoints...)
		s.Ports = []discoveryv1.EndpointPort{{Name: ptr("a"), Port: ptr(int32(8000 + r.Intn(2)))}, {Name: ptr("b"), Port: ptr(int32(9000))}}
		return s
	}
	parse := func(slice *discoveryv1.EndpointSlice) *Slice {
		s := parseSlice(slice)
		s.Service = slice.Labels[discoveryv1.LabelServiceName]
		return s
	}
	parsed, scratch := Parse(svc), &Scratch{}
	current := map[int]*discoveryv1.EndpointSlice{}
	kept := map[int]*Slice{}
	for round := range 100 {
		for range 1 + r.Intn(3) {
			if i := r.Intn(40); r.Intn(4) == 0 {
				delete(current, i)
				delete(kept, i)
			} else {
				current[i] = random(i)
				kept[i] = parse(current[i])
			}
		}
		if round == 0 {
			for i := range 30 {
				current[i] = random(i)
				kept[i] = parse(current[i])
			}
		}
		want := mustBuild(t, svc, slices.Collect(maps.Values(current))...)
		got, err := parsed.In(scratch, slices.Collect(maps.Values(kept)))
		if err != nil {
			t.Fatal(err)
		}
		for i := range want.Ports {
			if !slices.Equal(want.Ports[i].Endpoints, got.Ports[i].Endpoints) {
				t.Fatalf("round %d, port %s:\n%v, want\n%v", round, want.Ports[i].Name, endpointsOf(got.Ports[i]), endpointsOf(want.Ports[i]))
			}
		}
		if round%10 == 0 {
			other := parse(random(100))
			other.Service = "other"
			if _, err := Parse(svc).In(scratch, []*Slice{other}); err != nil {
				t.Fatal(err)
			}
		}
	}
}
