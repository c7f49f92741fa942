package apiclient

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

var ours = Trim{
	Label:      func(key string) bool { return key == "wanted" },
	Annotation: func(key string) bool { return strings.HasPrefix(key, "kube-ipvs.io/") },
}

// protobufOf returns the protobuf serializer.
func protobufOf(t testing.TB, trim *Trim) runtime.Serializer {
	t.Helper()
	negotiated := runtime.NegotiatedSerializer(rest.CodecFactoryForGeneratedClient(scheme, codecs).WithoutConversion())
	if trim != nil {
		negotiated = trimming{negotiated, trim.kinds()}
	}
	info, ok := runtime.SerializerInfoForMediaType(negotiated.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("no protocol buffers")
	}
	return info.Serializer
}

func encoded(t testing.TB, object runtime.Object) []byte {
	t.Helper()
	kinds, _, err := scheme.ObjectKinds(object)
	if err != nil {
		t.Fatal(err)
	}
	object.GetObjectKind().SetGroupVersionKind(kinds[0])
	var b bytes.Buffer
	if err := protobufOf(t, nil).Encode(object, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func wholeMeta() metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: "web", GenerateName: "web-", Namespace: "shop", UID: "uid", ResourceVersion: "17", Generation: 3,
		CreationTimestamp: metav1.Unix(1700000000, 0),
		Labels:            map[string]string{"wanted": "yes", "app": "web", "empty": ""},
		Annotations:       map[string]string{"kube-ipvs.io/scheduler": "mh", "helm.sh/chart": strings.Repeat("x", 300)},
		OwnerReferences:   []metav1.OwnerReference{{Kind: "Service", Name: "web"}},
		Finalizers:        []string{"service.kubernetes.io/load-balancer-cleanup"},
		ManagedFields:     []metav1.ManagedFieldsEntry{{Manager: "helm", FieldsV1: metav1.NewFieldsV1(`{"f:spec":{}}`)}},
	}
}

func trimmedMeta() metav1.ObjectMeta {
	m := wholeMeta()
	m.GenerateName, m.Generation, m.OwnerReferences, m.Finalizers, m.ManagedFields = "", 0, nil, nil, nil
	maps.DeleteFunc(m.Labels, func(key, _ string) bool { return !ours.Label(key) })
	maps.DeleteFunc(m.Annotations, func(key, _ string) bool { return !ours.Annotation(key) })
	return m
}

func wholeService() corev1.Service {
	return corev1.Service{
		ObjectMeta: wholeMeta(),
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Selector: map[string]string{"app": "web"},
			Ports:                    []corev1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080}, {Name: "dns", Protocol: "UDP", Port: 53}},
			LoadBalancerSourceRanges: []string{"192.0.2.0/24"}, SessionAffinity: corev1.ServiceAffinityClientIP,
			SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10)}},
		},
		Status: corev1.ServiceStatus{
			LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}},
			Conditions:   []metav1.Condition{{Type: "Ready", Reason: "x"}},
		},
	}
}

func trimmedService() corev1.Service {
	s := wholeService()
	s.ObjectMeta, s.Spec.Selector, s.Status.Conditions = trimmedMeta(), nil, nil
	return s
}

func wholeSlice(endpoints int) discoveryv1.EndpointSlice {
	s := discoveryv1.EndpointSlice{
		ObjectMeta: wholeMeta(), AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	for i := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.244.0.%d", i)}, Hostname: ptr.To("web-0"), NodeName: ptr.To("node1"), Zone: ptr.To("a"),
			Conditions:         discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			TargetRef:          &corev1.ObjectReference{Kind: "Pod", Name: "web-5d8f", UID: "0b9b8b6e-6c0e-4a53-9d0a-0f8f5d1f0d5e"},
			DeprecatedTopology: map[string]string{"kubernetes.io/hostname": "node1"},
			Hints:              &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}}},
		})
	}
	return s
}

func trimmedSlice(endpoints int) discoveryv1.EndpointSlice {
	s := wholeSlice(endpoints)
	s.ObjectMeta = trimmedMeta()
	for i := range s.Endpoints {
		s.Endpoints[i].Hostname, s.Endpoints[i].TargetRef, s.Endpoints[i].DeprecatedTopology = nil, nil, nil
	}
	return s
}

// TestTrim decodes complete objects and compares them with the trimmed ones.
func TestTrim(t *testing.T) {
	service, slice, large := wholeService(), wholeSlice(2), wholeSlice(100)
	shortService, shortSlice, shortLarge := trimmedService(), trimmedSlice(2), trimmedSlice(100)
	node := &corev1.Node{ObjectMeta: wholeMeta()}
	for name, tc := range map[string]struct{ in, want runtime.Object }{
		"a Service":                    {&service, &shortService},
		"an EndpointSlice":             {&slice, &shortSlice},
		"an empty Service":             {&corev1.Service{}, &corev1.Service{}},
		"a large EndpointSlice":        {&large, &shortLarge},
		"a Node, which is not trimmed": {node, node.DeepCopy()},
		"a Status":                     {&metav1.Status{Message: "gone", Code: 410}, &metav1.Status{Message: "gone", Code: 410}},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := protobufOf(t, &ours).Decode(encoded(t, tc.in), nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			// As decoded without trimming: nil and empty are the same then.
			want, _, err := protobufOf(t, nil).Decode(encoded(t, tc.want), nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
	// Other clients get all fields.
	got, _, err := protobufOf(t, nil).Decode(encoded(t, &service), nil, nil)
	if s, ok := got.(*corev1.Service); err != nil || !ok || s.Spec.Selector == nil {
		t.Errorf("a client that does not trim: %v, %v", got, err)
	}
}

// FuzzTrim decodes damaged objects. Trimming may accept objects that cannot be decoded
// without it, but must not panic.
func FuzzTrim(f *testing.F) {
	service, slice := wholeService(), wholeSlice(2)
	f.Add(encoded(f, &service))
	f.Add(encoded(f, &slice))
	f.Add([]byte("k8s\x00"))
	whole, trimmed := protobufOf(f, nil), protobufOf(f, &ours)
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _, err := whole.Decode(bytes.Clone(data), nil, nil)
		if _, _, errTrimmed := trimmed.Decode(bytes.Clone(data), nil, nil); err == nil && errTrimmed != nil {
			t.Errorf("trimmed: %v", errTrimmed)
		}
	})
}
