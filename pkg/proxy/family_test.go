package proxy

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
)

// TestOneFamily: a node that serves one family, whichever it is, programs nothing of the other and
// misses nothing.
func TestOneFamily(t *testing.T) {
	for _, family := range ip.Families {
		t.Run(family.String(), func(t *testing.T) {
			run(t, func(o *Options) {
				o.Config.Families = []ip.Family{family}
				o.Kernel.NAT = map[ip.Family]reconcile.NAT{family: o.Kernel.NAT[family]}
			}, func(w *world) {
				w.sink.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}})
				w.sink.SetService(&corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
					Spec: corev1.ServiceSpec{
						Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10", "fd00:96::10"},
						ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
						Ports:                 []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
					},
					Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.5"}, {IP: "2001:db8:113::5"}}}},
				})
				w.synced()
				w.sleep(time.Minute)
				servers, err := w.node.IPVS.Observe()
				if err != nil || len(servers) == 0 {
					t.Fatalf("%v, %v", servers, err)
				}
				for key := range servers {
					if key.Family() != family {
						t.Errorf("%s is served", key)
					}
				}
				if want := "node false, 0 of 1 Services"; w.failing != want {
					t.Errorf("failing: %s, want %s", w.failing, want)
				}
				for _, f := range ip.Families {
					services := nat.Chain{Family: f, Table: nat.NAT, Name: "KUBE-SERVICES"}
					rules, err := w.node.NAT[f].Observe(nat.Owned{Chains: []nat.Chain{services}})
					_, have := rules.Chains[services]
					if err != nil || have != (f == family) {
						t.Errorf("rules of %s: %t, %v", f, have, err)
					}
				}
			})
		})
	}
}
