package proxy

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// A traffic policy that changes to Cluster and back leaves virtual servers and sets as they
// were, with open connections at every real server.
func TestPolicyThereAndBack(t *testing.T) {
	run(t, nil, func(w *world) {
		set := func(policy corev1.ServiceExternalTrafficPolicy, pause time.Duration) {
			w.sink.SetService(&corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
				Spec: corev1.ServiceSpec{
					Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: policy,
					ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00:96::1"}, ExternalIPs: []string{"192.0.2.1"},
					Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
				},
				Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8::1"}}}},
			})
			w.sleep(pause)
			four := newSlice("a", "10.244.0.2", "10.244.9.9")
			four.Endpoints[0].NodeName = ptr.To("node1")
			w.sink.SetEndpointSlice(four)
			six := newSlice("a", "fd00:244::2", "fd00:244::9:9")
			six.Name, six.AddressType = "a-v6", discoveryv1.AddressTypeIPv6
			six.Endpoints[0].NodeName = ptr.To("node1")
			w.sink.SetEndpointSlice(six)
			w.sleep(pause)
		}
		connect := func(n int) {
			state, err := w.node.IPVS.Observe()
			if err != nil {
				t.Fatal(err)
			}
			for key, s := range state {
				for dest := range s.RealServers {
					w.node.IPVS.SetConnections(key, dest, ipvs.Connections{Active: n})
				}
			}
		}
		set(corev1.ServiceExternalTrafficPolicyLocal, time.Second)
		w.synced()
		w.sleep(time.Minute)
		before := w.node.IPVS.Dump()
		for _, pause := range []time.Duration{0, time.Millisecond, time.Second, 40 * time.Second} {
			for _, open := range []int{0, 1} {
				connect(open)
				set(corev1.ServiceExternalTrafficPolicyCluster, pause)
				connect(open)
				set(corev1.ServiceExternalTrafficPolicyLocal, pause)
				connect(0)
				w.sleep(time.Minute)
				if after := w.node.IPVS.Dump(); after != before {
					t.Fatalf("pause %s, %d open: before\n%s\nafter\n%s", pause, open, before, after)
				}
			}
		}
	})
}
