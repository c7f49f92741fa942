package source

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// AnnotationPrefix is that of the annotations that are ours.
const AnnotationPrefix = "kube-ipvs.io/"

// Trim takes from an object what the proxy never looks at. What it leaves is
// often a tenth, and on a large cluster there are a hundred thousand. Sources
// call it before they deliver, so that all of them deliver the same.
func Trim(object metav1.Object) {
	object.SetManagedFields(nil)
	object.SetOwnerReferences(nil)
	object.SetFinalizers(nil)
	object.SetGenerateName("")
	object.SetAnnotations(only(ours, object.GetAnnotations()))
	switch o := object.(type) {
	case *corev1.Service:
		o.Labels = only(service.HasLabel, o.Labels)
		o.Spec.Selector = nil
		o.Status.Conditions = nil
	case *corev1.Node:
		o.Status = corev1.NodeStatus{Addresses: o.Status.Addresses}
	case *discoveryv1.EndpointSlice:
		o.Labels = only(service.HasLabel, o.Labels)
		for i := range o.Endpoints {
			o.Endpoints[i].TargetRef = nil
			o.Endpoints[i].DeprecatedTopology = nil
		}
	}
}

// ours tells whether an annotation means something here. From the time of the last
// change it is measured how long programming takes.
func ours(annotation string) bool {
	return annotation == corev1.EndpointsLastChangeTriggerTime || strings.HasPrefix(annotation, AnnotationPrefix)
}

// only gives what is wanted of a map; nil for nothing.
func only(wanted func(string) bool, of map[string]string) map[string]string {
	var kept map[string]string
	for key, value := range of {
		if !wanted(key) {
			continue
		}
		if kept == nil {
			kept = map[string]string{}
		}
		kept[key] = value
	}
	return kept
}
