package source

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Trim removes from an object everything that the proxy does not read. Often a tenth
// remains, which matters with a hundred thousand objects. Every source calls it, so
// that all deliver the same.
func Trim(object metav1.Object) {
	object.SetManagedFields(nil)
	object.SetOwnerReferences(nil)
	object.SetFinalizers(nil)
	object.SetGenerateName("")
	object.SetAnnotations(only(HasAnnotation, object.GetAnnotations()))
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

// HasAnnotation reports whether an annotation is read. The time of the last change is needed for
// the programming latency.
func HasAnnotation(annotation string) bool {
	return annotation == corev1.EndpointsLastChangeTriggerTime || strings.HasPrefix(annotation, service.AnnotationPrefix)
}

// only returns the wanted entries of a map, or nil. It returns the map itself if all are wanted,
// as in objects that package apiclient has trimmed.
func only(wanted func(string) bool, of map[string]string) map[string]string {
	dropped := 0
	for key := range of {
		if !wanted(key) {
			dropped++
		}
	}
	switch dropped {
	case len(of):
		return nil
	case 0:
		return of
	}
	kept := make(map[string]string, len(of)-dropped)
	for key, value := range of {
		if wanted(key) {
			kept[key] = value
		}
	}
	return kept
}
