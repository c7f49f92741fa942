package main

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// sinkStub ignores most calls.
type sinkStub struct {
	source.Sink
	got int
}

func (s *sinkStub) SetService(*corev1.Service)         { s.got++ }
func (s *sinkStub) DeleteService(types.NamespacedName) { s.got++ }

// TestServiceNames follows Services, by their cluster IPs, node ports and marks.
func TestServiceNames(t *testing.T) {
	n := newServiceNames(nil)
	n.sets = func() (ipset.State, error) {
		return ipset.State{"KUBE-IPVS-LOCAL": {Entries: map[ipset.Entry]uint32{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 30080, Protocol: ip.TCP}: 0x9}}}, nil
	}
	inner := &sinkStub{}
	sink := namingSink{inner, n}
	svc := func(clusterIP string) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
			},
		}
	}
	key := func(at string) ipvs.Key {
		a := netip.MustParseAddrPort(at)
		return ipvs.Key{Protocol: ip.TCP, Addr: a.Addr(), Port: a.Port()}
	}
	marked := ipvs.Key{FWMark: 0x9, Addr: netip.IPv4Unspecified()}
	keys := []ipvs.Key{key("10.96.0.1:80"), key("10.96.0.2:80"), key("192.0.2.7:30080"), marked, key("10.9.9.9:25")}
	found := func() (out []bool) {
		names, err := n.find(keys)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			name, ok := names[k]
			if ok && (name.Namespace != "default" || name.Name != "web" || name.Port != "http" || name.Protocol != "TCP") {
				t.Errorf("%s is %+v", k, name)
			}
			out = append(out, ok)
		}
		return out
	}
	for _, step := range []struct {
		do   func()
		want [5]bool
	}{
		{func() {}, [5]bool{}},
		{func() { sink.SetService(svc("10.96.0.1")) }, [5]bool{true, false, true, true, false}},
		{func() { sink.SetService(svc("10.96.0.2")) }, [5]bool{false, true, true, true, false}},
		{func() { sink.DeleteService(types.NamespacedName{Namespace: "default", Name: "web"}) }, [5]bool{}},
	} {
		step.do()
		if got := [5]bool(found()); got != step.want {
			t.Errorf("found %v, want %v", got, step.want)
		}
	}
	if inner.got != 3 {
		t.Errorf("%d calls were forwarded, want 3", inner.got)
	}
	if len(n.names)+len(n.ports) != 0 {
		t.Errorf("something is left: %v %v", n.names, n.ports)
	}
}

// TestServiceNamesOfSuccessor: after a reconnection, a new Service is delivered before its
// predecessor with the same node port is deleted.
func TestServiceNamesOfSuccessor(t *testing.T) {
	n := newServiceNames(nil)
	sink := namingSink{&sinkStub{}, n}
	svc := func(name, clusterIP string) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
				Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
			},
		}
	}
	key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("192.0.2.7"), Port: 30080}
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() { sink.SetService(svc("web", "10.96.0.1")) }, "web"},
		{func() { sink.SetService(svc("web-2", "10.96.0.2")) }, "web"},
		{func() { sink.SetService(svc("web", "10.96.0.3")) }, "web"}, // an update does not lose the node port
		{func() { sink.DeleteService(types.NamespacedName{Namespace: "default", Name: "web"}) }, "web-2"},
	} {
		step.do()
		if names, err := n.find([]ipvs.Key{key}); err != nil || names[key].Name != step.want {
			t.Errorf("step %d: %v, the node port is of %q, want %q", i, err, names[key].Name, step.want)
		}
	}
}
