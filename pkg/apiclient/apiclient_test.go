package apiclient

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// server answers requests by method and path, and records them with their queries. It
// answers unknown paths with a Status of not found.
func server(t *testing.T, answers map[string]any) (*Client, func() []string) {
	t.Helper()
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.RequestURI())
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[r.Method+" "+r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer = metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status:   metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
			}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	c, err := New(&rest.Config{Host: s.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	return c, func() []string { return asked }
}

func typed(kind, version string) metav1.TypeMeta {
	return metav1.TypeMeta{Kind: kind, APIVersion: version}
}

func TestEachKindHasItsPath(t *testing.T) {
	web := metav1.ObjectMeta{Namespace: "shop", Name: "web"}
	c, asked := server(t, map[string]any{
		"GET /api/v1/namespaces/shop/services": corev1.ServiceList{TypeMeta: typed("ServiceList", "v1"), Items: []corev1.Service{{ObjectMeta: web}}},
		"GET /api/v1/nodes":                    corev1.NodeList{TypeMeta: typed("NodeList", "v1"), Items: []corev1.Node{{ObjectMeta: web}}},
		"GET /apis/discovery.k8s.io/v1/endpointslices": discoveryv1.EndpointSliceList{
			TypeMeta: typed("EndpointSliceList", "discovery.k8s.io/v1"), Items: []discoveryv1.EndpointSlice{{ObjectMeta: web}},
		},
		"GET /api/v1/namespaces/shop/pods/web": corev1.Pod{TypeMeta: typed("Pod", "v1"), ObjectMeta: web},
		"POST /apis/events.k8s.io/v1/namespaces/shop/events": eventsv1.Event{
			TypeMeta: typed("Event", "events.k8s.io/v1"), ObjectMeta: web,
		},
	})
	ctx, options := t.Context(), metav1.ListOptions{LabelSelector: "a=b", ResourceVersion: "0"}
	services, err := All(ctx, c.Services("shop"), options)
	if err != nil || len(services) != 1 || services[0].Name != "web" {
		t.Errorf("Services: %v, %v", services, err)
	}
	endpointSlices, err := All(ctx, c.EndpointSlices(""), metav1.ListOptions{})
	if err != nil || len(endpointSlices) != 1 {
		t.Errorf("EndpointSlices: %v, %v", endpointSlices, err)
	}
	nodes, err := All(ctx, c.Nodes(), metav1.ListOptions{})
	if err != nil || len(nodes) != 1 {
		t.Errorf("Nodes: %v, %v", nodes, err)
	}
	pod, err := c.Pod(ctx, "shop", "web")
	if err != nil || pod.Name != "web" {
		t.Errorf("Pod: %v, %v", pod, err)
	}
	if err := c.CreateEvent(ctx, &eventsv1.Event{ObjectMeta: web}); err != nil {
		t.Errorf("Event: %v", err)
	}
	if _, err := c.Pod(ctx, "shop", "none"); !apierrors.IsNotFound(err) {
		t.Errorf("a Pod that is not there: %v", err)
	}
	if want := "GET /api/v1/namespaces/shop/services?labelSelector=a%3Db&resourceVersion=0"; asked()[0] != want {
		t.Errorf("asked %q, want %q", asked()[0], want)
	}
}

func TestWatch(t *testing.T) {
	web := &corev1.Service{TypeMeta: typed("Service", "v1"), ObjectMeta: metav1.ObjectMeta{Name: "web"}}
	c, _ := server(t, map[string]any{
		"GET /api/v1/services": metav1.WatchEvent{Type: "DELETED", Object: runtime.RawExtension{Object: web}},
	})
	w, err := c.Services("").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	event := <-w.ResultChan()
	if svc, ok := event.Object.(*corev1.Service); !ok || event.Type != watch.Deleted || svc.Name != "web" {
		t.Errorf("%+v", event)
	}
}

func TestBadConfiguration(t *testing.T) {
	for name, config := range map[string]*rest.Config{
		"a limit without a burst": {Host: "http://127.0.0.1", QPS: 5},
		"a CA that is not there":  {Host: "http://127.0.0.1", TLSClientConfig: rest.TLSClientConfig{CAFile: "/none"}},
	} {
		if _, err := New(config); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestProgramIsSmall keeps unrelated kinds of objects out of the program: some packages
// of client-go, or a metric, would link all of them.
func TestProgramIsSmall(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../../cmd/proxy").Output()
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, path := range strings.Fields(string(out)) {
		if strings.HasPrefix(path, "k8s.io/api/") {
			kinds = append(kinds, path)
		}
	}
	if want := []string{"k8s.io/api/core/v1", "k8s.io/api/discovery/v1", "k8s.io/api/events/v1"}; !slices.Equal(slices.Sorted(slices.Values(kinds)), want) {
		t.Errorf("the program has %q, want %q", kinds, want)
	}
}
