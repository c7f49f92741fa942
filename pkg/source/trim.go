package source

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AnnotationPrefix is that of the annotations that are ours.
const AnnotationPrefix = "kube-ipvs.io/"

// Trim takes from an object what the proxy never looks at. What it leaves is
// often a tenth, and on a large cluster there are a hundred thousand. Sources
// call it before they deliver, so that all of them deliver the same.
func Trim(object metav1.Object) {
	object.SetManagedFields(nil)
	object.SetAnnotations(ours(object.GetAnnotations()))
	switch o := object.(type) {
	case *corev1.Node:
		o.Status = corev1.NodeStatus{Addresses: o.Status.Addresses}
	case *discoveryv1.EndpointSlice:
		for i := range o.Endpoints {
			o.Endpoints[i].TargetRef = nil
			o.Endpoints[i].DeprecatedTopology = nil
		}
	}
}

// ours gives the annotations that mean something here; nil for none.
func ours(annotations map[string]string) map[string]string {
	var kept map[string]string
	for key, value := range annotations {
		// From the time of the last change it is measured how long programming
		// takes.
		if key != corev1.EndpointsLastChangeTriggerTime && !strings.HasPrefix(key, AnnotationPrefix) {
			continue
		}
		if kept == nil {
			kept = map[string]string{}
		}
		kept[key] = value
	}
	return kept
}
