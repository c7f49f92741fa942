package health

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/configz"
	"k8s.io/component-base/logs"
	"k8s.io/klog/v2"
	"k8s.io/kube-proxy/config/v1alpha1"
)

func TestMetricsServer(t *testing.T) {
	config, err := configz.New("kubeproxy.config.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	defer configz.Delete("kubeproxy.config.k8s.io")
	shown := v1alpha1.KubeProxyConfiguration{ClusterCIDR: "10.244.0.0/16"}
	shown.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeproxy.config.k8s.io", Version: "v1alpha1", Kind: "KubeProxyConfiguration"})
	if err := config.Set(&shown); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path      string
		profiling bool
		code      int
		has       string
	}{
		{"/metrics", false, 200, "process_start_time_seconds"},
		{"/metrics/slis", false, 200, "process_start_time_seconds"},
		{"/healthz", false, 200, "ok"},
		{"/proxyMode", false, 200, "ipvs"},
		{"/configz", false, 200, `"clusterCIDR":"10.244.0.0/16"`},
		{"/debug/pprof/", false, 404, ""},
		{"/debug/pprof/goroutine", false, 404, ""},
		{"/debug/pprof/", true, 200, "goroutine"},
		{"/debug/pprof/goroutine?debug=1", true, 200, "goroutine profile"},
		{"/debug/pprof/cmdline", true, 200, ""},
		{"/", true, 404, ""},
		{"/flagz", false, 404, ""},
		{"/statusz", false, 404, ""},
	} {
		w := httptest.NewRecorder()
		NewMetricsServer(Pages{Profiling: c.profiling}).Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, c.path, nil))
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.has) {
			t.Errorf("%s, profiling %t: %d, want %d with %q, in\n%s", c.path, c.profiling, w.Code, c.code, c.has, w.Body)
		}
	}
}

// TestVerbosity sets the verbosity as it is set of kube-proxy: curl -X PUT -d 4 …/debug/flags/v.
func TestVerbosity(t *testing.T) {
	defer func() {
		if _, err := logs.GlogSetter("0"); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []struct {
		method, body string
		profiling    bool
		code         int
		has          string
	}{
		{http.MethodPut, "3", false, 404, ""},
		{http.MethodPut, "4", true, 200, "successfully set klog.logging.verbosity to 4"},
		{http.MethodPut, "high", true, 400, "invalid syntax"},
		{http.MethodPut, strings.Repeat("0", 100), true, 400, "too large"},
		{http.MethodGet, "", true, 406, "unsupported http method"},
	} {
		w := httptest.NewRecorder()
		NewMetricsServer(Pages{Profiling: c.profiling}).Handler().ServeHTTP(w, httptest.NewRequest(c.method, "/debug/flags/v", strings.NewReader(c.body)))
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.has) {
			t.Errorf("%s %q: %d, want %d with %q, in\n%s", c.method, c.body, w.Code, c.code, c.has, w.Body)
		}
	}
	if !klog.V(4).Enabled() || klog.V(5).Enabled() {
		t.Error("the verbosity is not 4")
	}
}

// Programs compare the whole body.
func TestProxyMode(t *testing.T) {
	w := httptest.NewRecorder()
	NewMetricsServer(Pages{}).Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/proxyMode", nil))
	if got := w.Body.String(); got != "ipvs" {
		t.Errorf("%q", got)
	}
}
