package source

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestTrim(t *testing.T) {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:          "n",
			Labels:        map[string]string{"zone": "z"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet"}},
			Annotations: map[string]string{
				"kubectl.kubernetes.io/last-applied-configuration": "{}",
				"endpoints.kubernetes.io/last-change-trigger-time": "2020-01-01T00:00:00Z",
				"kube-ipvs.io/scheduler":                           "lc",
			},
		},
		Spec: corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/24"}},
		Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}},
			Images:     []corev1.ContainerImage{{Names: []string{"a"}}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady}},
		},
	}
	want := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   "n",
			Labels: map[string]string{"zone": "z"},
			Annotations: map[string]string{
				"endpoints.kubernetes.io/last-change-trigger-time": "2020-01-01T00:00:00Z",
				"kube-ipvs.io/scheduler":                           "lc",
			},
		},
		Spec:   corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/24"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}},
	}
	Trim(node)
	if diff := cmp.Diff(want, node); diff != "" {
		t.Error(diff)
	}
	slice := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{
		Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{Name: "pod"}, DeprecatedTopology: map[string]string{"a": "b"},
	}}}
	Trim(slice)
	if diff := cmp.Diff([]discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}}, slice.Endpoints); diff != "" {
		t.Error(diff)
	}
}

func TestTrimService(t *testing.T) {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: "web", GenerateName: "web-", Annotations: map[string]string{"a": "b"}, Finalizers: []string{"f"},
			OwnerReferences: []metav1.OwnerReference{{Name: "o"}},
			Labels:          map[string]string{"app": "web", "service.kubernetes.io/service-proxy-name": "other"},
		},
		Spec:   corev1.ServiceSpec{ClusterIP: "10.96.0.1", Selector: map[string]string{"app": "web"}},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}, Conditions: []metav1.Condition{{Type: "c"}}},
	}
	want := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"service.kubernetes.io/service-proxy-name": "other"}},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.1"},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}},
	}
	Trim(svc)
	if diff := cmp.Diff(want, svc); diff != "" {
		t.Error(diff)
	}
}
