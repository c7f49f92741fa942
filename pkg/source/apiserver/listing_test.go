package apiserver

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

// whole is a sink that keeps slices.
type whole struct {
	recorder
	slices []*discoveryv1.EndpointSlice
}

func (w *whole) SetEndpointSlice(s *discoveryv1.EndpointSlice) {
	w.slices = append(w.slices, s)
	w.recorder.SetEndpointSlice(s)
}

// TestListing delivers everything once, with the names of pods, and watches nothing.
func TestListing(t *testing.T) {
	slice := &discoveryv1.EndpointSlice{ObjectMeta: meta("web-1"), Endpoints: []discoveryv1.Endpoint{{
		Addresses: []string{"10.244.1.5"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "web-0"},
	}}}
	client := fake.NewClientset(&corev1.Service{ObjectMeta: meta("web")}, slice, &corev1.Node{ObjectMeta: meta("node1")})
	client.PrependWatchReactor("*", func(a k8stesting.Action) (bool, watch.Interface, error) {
		t.Errorf("%s are watched", a.GetResource().Resource)
		return false, nil, nil
	})
	sink := &whole{recorder: make(recorder, 100)}
	if err := NewListing(fakeClient{client}, "").Load(t.Context(), sink); err != nil {
		t.Fatal(err)
	}
	before := sink.await(t, "synced")
	if len(before) != 2 || before[0] != "set slice web-1" || before[1] != "set service web" {
		t.Errorf("delivered %q", before)
	}
	if ref := sink.slices[0].Endpoints[0].TargetRef; ref == nil || ref.Name != "web-0" {
		t.Errorf("the pod is %v", ref)
	}
}

// TestListingFails: a list that cannot be read does not count as empty.
func TestListingFails(t *testing.T) {
	for _, resource := range []string{"nodes", "services", "endpointslices"} {
		client := fake.NewClientset()
		client.PrependReactor("list", resource, func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("no")
		})
		sink := make(recorder, 100)
		if err := NewListing(fakeClient{client}, "node1").Load(t.Context(), sink); err == nil {
			t.Errorf("%s cannot be listed, but Load succeeds", resource)
		}
		close(sink)
		for told := range sink {
			if told == "synced" {
				t.Errorf("%s cannot be listed, but Synced was called", resource)
			}
		}
	}
}
