package manifest

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// recorder is a sink that records each call.
type recorder struct {
	calls   chan string
	objects chan metav1.Object // of the set calls, in their order
}

func newRecorder() *recorder {
	return &recorder{calls: make(chan string, 1000), objects: make(chan metav1.Object, 1000)}
}

func (r *recorder) set(kind string, o metav1.Object) {
	r.objects <- o // first, so that it is available when the call is seen
	r.calls <- "set " + key{kind, types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}}.String()
}

func (r *recorder) SetService(s *corev1.Service)                  { r.set(kindService, s) }
func (r *recorder) SetEndpointSlice(s *discoveryv1.EndpointSlice) { r.set(kindSlice, s) }
func (r *recorder) SetNode(n *corev1.Node)                        { r.set(kindNode, n) }
func (r *recorder) DeleteService(n types.NamespacedName) {
	r.calls <- "delete " + key{kindService, n}.String()
}
func (r *recorder) DeleteEndpointSlice(n types.NamespacedName) {
	r.calls <- "delete " + key{kindSlice, n}.String()
}
func (r *recorder) DeleteNode() { r.calls <- "delete Node" }

func (r *recorder) SetUnreachableNodes([]string) {}
func (r *recorder) Begun()                       {}
func (r *recorder) Synced()                      { r.calls <- "synced" }

// soFar returns the calls until now.
func (r *recorder) soFar() []string {
	var calls []string
	for len(r.calls) > 0 {
		calls = append(calls, <-r.calls)
	}
	return calls
}

// expect waits for calls, these and in this order.
func (r *recorder) expect(t *testing.T, want ...string) {
	t.Helper()
	for _, w := range want {
		select {
		case got := <-r.calls:
			if got != w {
				t.Fatalf("call %q, want %q", got, w)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no call, want %q", w)
		}
	}
}

// last returns the object of the last set call.
func (r *recorder) last(t *testing.T) metav1.Object {
	t.Helper()
	var last metav1.Object
	for len(r.objects) > 0 {
		last = <-r.objects
	}
	if last == nil {
		t.Fatal("nothing has been set")
	}
	return last
}
