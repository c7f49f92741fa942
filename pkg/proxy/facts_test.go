package proxy

import (
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// thief adds a Service with an external IP, on port 6443.
func (w *world) thief(external string) {
	w.sink.SetService(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "thief"},
		Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.66", ClusterIPs: []string{"10.96.0.66"}, ExternalIPs: []string{external},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 6443}},
		},
	})
	w.slice("thief", "10.244.6.6")
}

// has reports whether there is a virtual server for TCP port 6443.
func (w *world) has(address string) bool {
	s, err := w.node.IPVS.Observe()
	if err != nil {
		w.t.Fatal(err)
	}
	_, there := s[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(address), Port: 6443}]
	return there
}

// A process of the node keeps its port from when it is seen to listen until it is seen to
// have stopped. A failure to read the ports changes nothing.
func TestLocalProgramKeepsItsPort(t *testing.T) {
	const node = "192.168.0.11"
	program := routing.Listener{Protocol: ip.TCP, Addr: netip.IPv4Unspecified(), Port: 6443}
	var fails atomic.Bool
	unreadable := func(o *Options) {
		o.Network.(*routing.Fake).FailObserve = func() error {
			if fails.Load() {
				return errors.New("no memory")
			}
			return nil
		}
	}
	run(t, unreadable, func(w *world) {
		w.node.Routing.SetInventory(fuzzInventory())
		w.node.Routing.SetListeners(program)
		w.thief(node)
		w.synced()
		if w.has(node) {
			t.Error("the Service got a port that a process of the node has")
		}
		if len(w.events) != 1 || !strings.Contains(w.events[0].Note, "Service default/thief: spec.externalIPs: TCP 192.168.0.11:6443: a program on node node1 listens on this port") {
			t.Errorf("events %+v", w.events)
		}
		w.node.Routing.SetListeners()
		w.sleep(time.Minute)
		if !w.has(node) {
			t.Error("the Service did not get a free port")
		}
		w.node.Routing.SetListeners(program)
		w.sleep(time.Minute)
		if w.has(node) {
			t.Error("the Service kept a port on which a process of the node listens now")
		}
		w.node.Routing.SetListeners()
		fails.Store(true)
		w.sleep(time.Minute)
		if w.has(node) {
			t.Error("an unreadable list was treated as empty")
		}
	})
}

// No Service may use the API server's endpoints once they are known, or the address at
// which this process reaches it.
func TestAPIServerCannotBeNamed(t *testing.T) {
	own := func(o *Options) { o.APIServer = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443")} }
	run(t, own, func(w *world) {
		w.thief("192.168.0.1")
		w.synced()
		if !w.has("192.168.0.1") {
			t.Error("an unused address is not served")
		}
		w.sink.SetService(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
			Spec: corev1.ServiceSpec{
				ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 443}},
			},
		})
		slice := newSlice("kubernetes", "192.168.0.1")
		*slice.Ports[0].Port = 6443
		w.sink.SetEndpointSlice(slice)
		w.sleep(time.Minute)
		if w.has("192.168.0.1") {
			t.Error("the Service got traffic to the API server")
		}
		w.thief("192.0.2.1")
		w.sleep(time.Minute)
		if w.has("192.0.2.1") {
			t.Error("the Service got this process's traffic to the API server")
		}
	})
}
