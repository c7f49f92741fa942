package proxy

import (
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

func TestNodeOf(t *testing.T) {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        "node1",
			Labels:      map[string]string{corev1.LabelTopologyZone: "a"},
			Annotations: map[string]string{service.AnnotationSNATSources: "eth1=10.12.192.10, eth1=fd00:12:192::10,eth2,0A:58:00:00:00:01=10.12.193.10"},
		},
		Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.1.7/24", "nonsense"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeExternalIP, Address: "203.0.113.1"},
			{Type: corev1.NodeHostName, Address: "node1"},
			{Type: corev1.NodeInternalIP, Address: "192.168.000.001"},
			{Type: corev1.NodeInternalIP, Address: "192.168.0"},
			{Type: corev1.NodeInternalIP, Address: "fe80::1%eth0"},
		}},
	}
	got, err := nodeOf(n)
	want := plan.Node{
		Zone:      "a",
		PodCIDRs:  []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("203.0.113.1")},
		SNATSources: map[string][]netip.Addr{
			"eth1":              {netip.MustParseAddr("10.12.192.10"), netip.MustParseAddr("fd00:12:192::10")},
			"0a:58:00:00:00:01": {netip.MustParseAddr("10.12.193.10")},
		},
	}
	compare := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	comparePrefix := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	if diff := cmp.Diff(want, got, compare, comparePrefix); diff != "" {
		t.Error(diff)
	}
	for _, field := range []string{"spec.podCIDRs", "status.addresses", service.AnnotationSNATSources} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("the error does not name %s: %v", field, err)
		}
	}
}

// nodeStates records whether load balancers may use the node.
type nodeStates struct {
	*world
	eligible atomic.Bool
}

func (n *nodeStates) Node(exists, deleting, excluded bool) {
	n.eligible.Store(exists && !deleting && !excluded)
}

// As in kube-proxy, a Node object that is deleted while the node serves changes nothing: the
// zone stays, and load balancers keep using the node.
func TestDeletedNodeServesOn(t *testing.T) {
	observer := &nodeStates{}
	run(t, func(o *Options) {
		observer.world = o.Observer.(*world)
		o.Observer = observer
	}, func(w *world) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{corev1.LabelTopologyZone: "a"}}}
		w.sink.SetNode(node)
		w.service("web", "10.96.0.10")
		slice := newSlice("web", "10.244.0.2", "10.244.0.3")
		for i, zone := range []string{"a", "b"} {
			slice.Endpoints[i].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
		}
		w.sink.SetEndpointSlice(slice)
		w.synced()
		check := func(when string, eligible bool) {
			t.Helper()
			w.sleep(time.Minute)
			if n := w.realServers("10.96.0.10"); n != 1 || observer.eligible.Load() != eligible {
				t.Errorf("%s: %d real servers, want the one of zone a; eligible: %t, want %t", when, n, observer.eligible.Load(), eligible)
			}
		}
		check("with a Node", true)
		w.sink.DeleteNode()
		check("deleted", true)
		w.sink.SetNode(node)
		check("registered again", true)
		tainted := node.DeepCopy()
		tainted.Spec.Taints = []corev1.Taint{{Key: deletionCandidateTaint}}
		w.sink.SetNode(tainted)
		check("about to be removed", false)
		w.sink.DeleteNode()
		check("removed", false)
	})
}

// Load balancers must avoid a node that is about to be removed, even if its network cannot be
// read.
func TestUnreadableNodeIsReported(t *testing.T) {
	observer := &nodeStates{}
	var fails atomic.Bool
	run(t, func(o *Options) {
		observer.world = o.Observer.(*world)
		o.Observer = observer
		o.Network.(*routing.Fake).FailObserve = func() error {
			if fails.Load() {
				return errors.New("no memory")
			}
			return nil
		}
	}, func(w *world) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
		w.sink.SetNode(node)
		w.synced()
		fails.Store(true)
		tainted := node.DeepCopy()
		tainted.Spec.Taints = []corev1.Taint{{Key: deletionCandidateTaint}}
		w.sink.SetNode(tainted)
		w.sleep(time.Minute)
		if observer.eligible.Load() {
			t.Error("load balancers may still use the node")
		}
	})
}
