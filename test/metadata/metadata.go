// Package metadata has the metadata that Helm and controllers write to the objects of a cluster, for
// benchmarks that read such objects.
package metadata

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// fields are the managed fields of a typical Service. They take more bytes than the rest of it.
const fields = `{"f:metadata":{"f:annotations":{".":{},"f:meta.helm.sh/release-name":{}},"f:labels":{".":{},"f:app.kubernetes.io/name":{},` +
	`"f:helm.sh/chart":{}}},"f:spec":{"f:internalTrafficPolicy":{},"f:ports":{".":{},"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:name":{},` +
	`"f:port":{},"f:protocol":{},"f:targetPort":{}}},"f:selector":{},"f:sessionAffinity":{},"f:type":{}}}`

// ManagedFields returns the managed fields of an object that a manager updated.
func ManagedFields(manager, apiVersion string, at metav1.Time) []metav1.ManagedFieldsEntry {
	return []metav1.ManagedFieldsEntry{{
		Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: apiVersion, Time: &at,
		FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
	}}
}

// HelmLabels returns the labels of an object that Helm installed.
func HelmLabels(instance string) map[string]string {
	return map[string]string{
		"app.kubernetes.io/name": "backend", "app.kubernetes.io/instance": instance, "app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "backend-1.2.3",
	}
}

// HelmAnnotations returns the annotations of such an object.
func HelmAnnotations(release string) map[string]string {
	return map[string]string{"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": "default"}
}
