package manifest

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// delivery passes the difference between delivered and desired objects to a sink.
type delivery struct {
	sink source.Sink
	have map[key]metav1.Object
}

// deliver sets new and changed objects, then deletes the others, so that a moved object
// is never missing.
func (d *delivery) deliver(want map[key]metav1.Object) {
	for _, k := range sorted(want) {
		if old, ok := d.have[k]; !ok || old != want[k] && !equality.Semantic.DeepEqual(old, want[k]) {
			d.set(want[k])
		}
	}
	for _, k := range sorted(d.have) {
		if _, ok := want[k]; !ok {
			d.delete(k)
		}
	}
	d.have = want
}

func (d *delivery) set(object metav1.Object) {
	switch o := object.(type) {
	case *corev1.Service:
		d.sink.SetService(o)
	case *discoveryv1.EndpointSlice:
		d.sink.SetEndpointSlice(o)
	case *corev1.Node:
		d.sink.SetNode(o)
	}
}

func (d *delivery) delete(k key) {
	switch k.kind {
	case kindService:
		d.sink.DeleteService(k.name)
	case kindSlice:
		d.sink.DeleteEndpointSlice(k.name)
	case kindNode:
		d.sink.DeleteNode()
	}
}

// sorted returns keys in a stable order: the Node first, because it defines what is
// local, then slices, then the Services that use them.
func sorted(objects map[key]metav1.Object) []key {
	order := []string{kindNode, kindSlice, kindService}
	return slices.SortedFunc(maps.Keys(objects), func(a, b key) int {
		return cmp.Or(
			cmp.Compare(slices.Index(order, a.kind), slices.Index(order, b.kind)),
			cmp.Compare(a.name.String(), b.name.String()))
	})
}
