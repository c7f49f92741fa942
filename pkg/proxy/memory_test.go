package proxy

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/test/heap"
	"github.com/kube-ipvs/kube-ipvs/test/metadata"
)

// mostOfObjects is how many bytes may be kept of the objects of a Service with two
// endpoints.
const mostOfObjects = 630

// BenchmarkObjects shows how much memory is kept of the objects of a Service with two
// endpoints, as a cluster has them.
func BenchmarkObjects(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(keptOfObjects(b), "B/Service")
	}
}

func TestObjectsAreKeptInFewBytes(t *testing.T) {
	if kept := keptOfObjects(t); kept > mostOfObjects {
		t.Errorf("%.0f B are kept of the objects of a Service with two endpoints, want at most %d", kept, mostOfObjects)
	}
}

func keptOfObjects(t testing.TB) float64 {
	t.Helper()
	const count = 10_000
	i := newInbox()
	before := heap.InUse()
	for n := range count {
		svc, slice := decoded(t, clusterService(n), new(corev1.Service)), decoded(t, clusterSlice(n), new(discoveryv1.EndpointSlice))
		source.Trim(svc)
		source.Trim(slice)
		i.SetService(svc)
		i.SetEndpointSlice(slice)
		if n%1000 == 0 {
			i.take()
		}
	}
	i.take()
	kept := float64(heap.InUse()-before) / count
	runtime.KeepAlive(i)
	return kept
}

// decoded returns an object as it comes from the API server.
func decoded[T interface{ Unmarshal([]byte) error }](t testing.TB, object interface{ Marshal() ([]byte, error) }, into T) T {
	t.Helper()
	data, err := object.Marshal()
	if err == nil {
		err = into.Unmarshal(data)
	}
	if err != nil {
		t.Fatal(err)
	}
	return into
}

// clusterMeta is the metadata of an object that Helm installed and a controller manages.
func clusterMeta(n int, name, manager string) metav1.ObjectMeta {
	at := metav1.NewTime(time.Date(2026, 11, 1, 12, 0, n%60, 0, time.UTC))
	return metav1.ObjectMeta{
		Namespace: fmt.Sprintf("team-%d", n%100), Name: name, UID: "0b9b8b6e-6c0e-4a53-9d0a-0f8f5d1f0d5e",
		ResourceVersion: fmt.Sprint(1_000_000 + n), CreationTimestamp: at,
		Labels: metadata.HelmLabels(name), Annotations: metadata.HelmAnnotations(name), ManagedFields: metadata.ManagedFields(manager, "v1", at),
	}
}

func clusterService(n int) *corev1.Service {
	address := fmt.Sprintf("10.96.%d.%d", n>>8, n&255)
	policy := corev1.ServiceInternalTrafficPolicyCluster
	return &corev1.Service{
		ObjectMeta: clusterMeta(n, fmt.Sprintf("backend-%d", n), "helm"),
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: address, ClusterIPs: []string{address}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack), SessionAffinity: corev1.ServiceAffinityNone, InternalTrafficPolicy: &policy,
			Selector: map[string]string{"app.kubernetes.io/name": "backend", "app.kubernetes.io/instance": fmt.Sprintf("backend-%d", n)},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromString("http")}},
		},
	}
}

func clusterSlice(n int) *discoveryv1.EndpointSlice {
	service := fmt.Sprintf("backend-%d", n)
	meta := clusterMeta(n, service+"-x7k2p", "kube-controller-manager")
	meta.GenerateName = service + "-"
	meta.Labels[discoveryv1.LabelServiceName] = service
	meta.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"
	meta.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-11-01T12:00:00Z"}
	meta.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: service, UID: meta.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8080)}},
	}
	for i := range 2 {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+i, n>>8, n&255)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To(fmt.Sprintf("worker-%d", (n+i)%500)), Zone: ptr.To(fmt.Sprintf("zone-%d", (n+i)%3)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: meta.Namespace, Name: fmt.Sprintf("%s-%d", service, i), UID: meta.UID},
		})
	}
	return slice
}
