package apiserver

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
)

// TestPages lists Services in pages, as from an API server without a watch cache. The second
// page has expired the first time, and an object of the first page is deleted by then.
func TestPages(t *testing.T) {
	var lists atomic.Int64
	service := func(name, version string) corev1.Service {
		s := corev1.Service{ObjectMeta: meta(name)}
		s.ResourceVersion = version
		return s
	}
	page := func(next string, items ...corev1.Service) any {
		return corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: next}, Items: items}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := func(code int, body any) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(body)
		}
		query := r.URL.Query()
		switch {
		case query.Get("watch") != "":
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case r.URL.Path == "/api/v1/nodes":
			answer(200, corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}})
		case r.URL.Path == "/apis/discovery.k8s.io/v1/endpointslices":
			answer(200, discoveryv1.EndpointSliceList{TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"}})
		case r.URL.Path != "/api/v1/services":
			answer(404, apierrors.NewNotFound(corev1.Resource("x"), "x").Status())
		case query.Get("continue") != "":
			status := apierrors.NewResourceExpired("expired").Status()
			status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
			answer(410, status)
		case lists.Add(1) == 1:
			answer(200, page("more", service("a", "1"), service("gone", "1")))
		default:
			answer(200, page("", service("a", "2"), service("b", "1")))
		}
	}))
	t.Cleanup(server.Close)
	client, err := apiclient.New(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	sink := make(recorder, 100)
	go func() { _ = New(client, Options{Node: "node1"}).Run(t.Context(), sink) }()
	got := sink.await(t, "synced")
	if want := []string{"begun", "set service a", "set service gone", "set service a", "set service b", "delete service default/gone"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
