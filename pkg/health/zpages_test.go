package health

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

const asFlagz = "application/json;v=v1beta1;g=config.k8s.io;as=Flagz"

func askPage(t *testing.T, path, accept string) *httptest.ResponseRecorder {
	t.Helper()
	server := NewMetricsServer(Pages{Flags: map[string]string{"v": "2", "cluster-cidr": "10.244.0.0/16"}, Status: true})
	r := httptest.NewRequest(http.MethodGet, path, nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	server.Handler().ServeHTTP(w, r)
	return w
}

func TestTextPages(t *testing.T) {
	for path, want := range map[string][]string{
		"/flagz":   {"kube-ipvs flagz\n", "\ncluster-cidr=10.244.0.0/16\nv=2\n"},
		"/statusz": {"kube-ipvs statusz\n", "\nStarted: ", "\nUp: ", "\nGo version: go1.", "\nBinary version: v", "\nPaths: /configz /flagz /healthz /metrics /proxyMode\n"},
	} {
		for _, accept := range []string{"", "*/*", "text/html, text/plain"} {
			w := askPage(t, path, accept)
			for _, part := range want {
				if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), part) {
					t.Errorf("%s, Accept %q: %d, no %q in\n%s", path, accept, w.Code, part, w.Body)
				}
			}
		}
	}
}

// Programs rely on the objects' fields.
func TestObjectPages(t *testing.T) {
	w := askPage(t, "/flagz", asFlagz)
	const want = `{"kind":"Flagz","apiVersion":"config.k8s.io/v1beta1","metadata":{"name":"kube-ipvs"},"flags":{"cluster-cidr":"10.244.0.0/16","v":"2"}}`
	if got := strings.TrimSpace(w.Body.String()); got != want || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%v\n%s", w.Header(), got)
	}
	w = askPage(t, "/statusz", "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz")
	var status map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &status); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"startTime", "uptimeSeconds", "goVersion", "binaryVersion", "paths"} {
		if _, ok := status[key]; !ok {
			t.Errorf("no %s in %s", key, w.Body)
		}
	}
	if status["apiVersion"] != "config.k8s.io/v1alpha1" || status["kind"] != "Statusz" {
		t.Error(w.Body)
	}
}

func TestPageNotAcceptable(t *testing.T) {
	for _, accept := range []string{"application/json", "application/yaml", strings.Replace(asFlagz, "Flagz", "Statusz", 1), strings.Replace(asFlagz, "v1beta1", "v9", 1)} {
		if w := askPage(t, "/flagz", accept); w.Code != http.StatusNotAcceptable || !strings.Contains(w.Body.String(), asFlagz) {
			t.Errorf("%s: %d, %s", accept, w.Code, w.Body)
		}
	}
}
