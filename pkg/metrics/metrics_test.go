package metrics

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/prometheus/slis"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
)

func newRecorderFor(t *testing.T) (*Recorder, metrics.KubeRegistry) {
	t.Helper()
	registry := metrics.NewKubeRegistry()
	r, err := New(registry.Register)
	if err != nil {
		t.Fatal(err)
	}
	return r, registry
}

func TestRecorder(t *testing.T) {
	r, registry := newRecorderFor(t)
	r.Passed(20*time.Millisecond, 3, 2)
	r.Passed(10*time.Millisecond, 4, 0)
	r.Compared(time.Second, 5)
	r.Compared(time.Second, 1)
	r.Held(9, 9, 9)
	r.Held(7, 21, 2)
	r.Conflicts(3)
	r.Failing(true, 4, 9)
	r.Failing(false, 2, 9)
	r.Healthz(t.Context(), http.StatusOK)
	r.Healthz(t.Context(), http.StatusServiceUnavailable)
	r.Healthz(t.Context(), http.StatusOK)
	r.Livez(t.Context(), http.StatusOK)
	r.Changes(3, 5)
	r.Planned(time.Second)
	r.Programmed(2 * time.Second)
	r.NoLocalEndpoints(1, 4)
	r.Interfaces([]plan.InterfaceMode{{Family: ip.IPv4, Link: "eth9", Mode: plan.SNATFWMark}}) // no longer exists
	r.Interfaces([]plan.InterfaceMode{
		{Family: ip.IPv4, Link: "eth1", Mode: plan.SNATSource, Source: netip.MustParseAddr("10.12.192.10")},
		{Family: ip.IPv6, Link: "eth1", Mode: plan.SNATFWMark},
	})
	r.Wrote("iptables", time.Second, 2)
	r.Wrote("iptables", time.Second, 0)
	r.Wrote("conntrack", time.Second, 0)
	r.Refused("ipvs", "add real server")
	r.Forgot(7)

	samples := map[string]string{
		"kube_ipvs_planned_services_total":                  "7",
		"kube_ipvs_problems_total":                          "2",
		"kube_ipvs_drift_repaired_total":                    "6",
		"kube_ipvs_virtual_servers":                         "7",
		"kube_ipvs_real_servers":                            "21",
		"kube_ipvs_draining_real_servers":                   "2",
		"kube_ipvs_conflicts":                               "3",
		"kube_ipvs_node_refused":                            "0",
		"kube_ipvs_services_refused":                        "2",
		"kube_ipvs_compare_duration_seconds_sum":            "2",
		"kube_ipvs_compare_duration_seconds_count":          "2",
		"kubeproxy_sync_proxy_rules_duration_seconds_sum":   "0.03",
		"kubeproxy_sync_proxy_rules_duration_seconds_count": "2",
		`kubeproxy_proxy_healthz_total{code="200"}`:         "2",
		`kubeproxy_proxy_healthz_total{code="503"}`:         "1",
		`kubeproxy_proxy_livez_total{code="200"}`:           "1",

		"kubeproxy_sync_proxy_rules_service_changes_total":                               "3",
		"kubeproxy_sync_proxy_rules_service_changes_pending":                             "3",
		"kubeproxy_sync_proxy_rules_endpoint_changes_total":                              "5",
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending":                            "5",
		"kubeproxy_network_programming_duration_seconds_sum":                             "2",
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="internal"}`: "1",
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="external"}`: "4",
		"kubeproxy_sync_proxy_rules_iptables_restore_failures_total":                     "1",
		"kubeproxy_conntrack_reconciler_sync_duration_seconds_sum":                       "1",
		"kubeproxy_conntrack_reconciler_deleted_entries_total":                           "7",

		`kube_ipvs_stage_duration_seconds_sum{stage="plan"}`:                                                      "1",
		`kube_ipvs_stage_duration_seconds_sum{stage="iptables"}`:                                                  "2",
		`kube_ipvs_kernel_errors_total{operation="add real server",part="ipvs"}`:                                  "1",
		`kube_ipvs_interface_info{interface="eth1",ip_family="IPv4",snat_mode="snat",snat_source="10.12.192.10"}`: "1",
		`kube_ipvs_interface_info{interface="eth1",ip_family="IPv6",snat_mode="fwmark",snat_source=""}`:           "1",
	}
	text := scrape(t, registry)
	for name, value := range samples {
		if !strings.Contains(text, "\n"+name+" "+value+"\n") {
			t.Errorf("%s is not %s in\n%s", name, value, text)
		}
	}
	if strings.Contains(text, "eth9") {
		t.Error("a removed interface is shown")
	}
	r.Passed(0, 0, 0)
	for _, name := range []string{"service", "endpoint"} {
		if sample := "\nkubeproxy_sync_proxy_rules_" + name + "_changes_pending 0\n"; !strings.Contains(scrape(t, registry), sample) {
			t.Errorf("changes of a %s are pending after the sync", name)
		}
	}
}

// ofKubeProxy are the metrics that kube-proxy v1.36.3 registers in IPVS mode.
var ofKubeProxy = []string{
	"kubeproxy_conntrack_reconciler_deleted_entries_total",
	"kubeproxy_conntrack_reconciler_sync_duration_seconds",
	"kubeproxy_network_programming_duration_seconds",
	"kubeproxy_proxy_healthz_total",
	"kubeproxy_proxy_livez_total",
	"kubeproxy_sync_proxy_rules_duration_seconds",
	"kubeproxy_sync_proxy_rules_endpoint_changes_pending",
	"kubeproxy_sync_proxy_rules_endpoint_changes_total",
	"kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
	"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
	"kubeproxy_sync_proxy_rules_last_timestamp_seconds",
	"kubeproxy_sync_proxy_rules_no_local_endpoints_total",
	"kubeproxy_sync_proxy_rules_service_changes_pending",
	"kubeproxy_sync_proxy_rules_service_changes_total",
}

func TestKubeProxyNames(t *testing.T) {
	var names []string
	r, err := New(func(m metrics.Registerable) error {
		if strings.HasPrefix(m.FQName(), theirs+"_") {
			names = append(names, m.FQName())
		}
		return nil
	})
	if err != nil || r == nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	if diff := cmp.Diff(ofKubeProxy, names); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// scrape returns a registry's metrics as text.
func scrape(t *testing.T, registry metrics.KubeRegistry) string {
	t.Helper()
	w := httptest.NewRecorder()
	metrics.HandlerFor(registry, metrics.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatal(w.Body)
	}
	return w.Body.String()
}

// Alerts compare the two timestamps to detect pending changes. A failed sync must not
// look as if it had caught up.
func TestTimestamps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, registry := newRecorderFor(t)
		begin := time.Now()
		r.Queued()
		time.Sleep(time.Second)
		r.Passed(time.Second, 1, 0)
		wantTimes(t, registry, begin, begin.Add(time.Second))

		time.Sleep(time.Second)
		r.Queued()
		r.Passed(time.Second, 1, 1)
		wantTimes(t, registry, begin.Add(2*time.Second), begin.Add(time.Second))

		// kube-proxy syncs every 30 s, even if nothing changes.
		r.Failing(false, 1, 9)
		r.Compared(time.Second, 0)
		wantTimes(t, registry, begin.Add(2*time.Second), begin.Add(time.Second))
		r.Failing(false, 0, 9)
		time.Sleep(time.Minute)
		r.Compared(time.Second, 0)
		wantTimes(t, registry, begin.Add(2*time.Second), begin.Add(62*time.Second))
	})
}

func wantTimes(t *testing.T, registry metrics.KubeRegistry, queued, succeeded time.Time) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		if strings.HasSuffix(family.GetName(), "_timestamp_seconds") {
			got[family.GetName()] = family.GetMetric()[0].GetGauge().GetValue()
		}
	}
	want := map[string]float64{
		"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds": float64(queued.Unix()),
		"kubeproxy_sync_proxy_rules_last_timestamp_seconds":        float64(succeeded.Unix()),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestRegisteredTwice(t *testing.T) {
	_, registry := newRecorderFor(t)
	if _, err := New(registry.Register); err == nil || !strings.Contains(err.Error(), "kube_ipvs_problems_total") {
		t.Errorf("want an error that names the registered metric, got %v", err)
	}
}

func TestServiceLevelIndicators(t *testing.T) {
	slis.Register(slis.Registry)
	slis.ResetHealthMetrics() // shared by all tests
	r, _ := newRecorderFor(t)
	r.Healthz(t.Context(), http.StatusServiceUnavailable)
	r.Livez(t.Context(), http.StatusOK)
	text := scrape(t, slis.Registry)
	for _, want := range []string{
		`kubernetes_healthcheck{name="proxy",type="healthz"} 0`,
		`kubernetes_healthcheck{name="proxy",type="livez"} 1`,
		`kubernetes_healthchecks_total{name="proxy",status="error",type="healthz"} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

var (
	_ proxy.Observer = (*Recorder)(nil)
	_ proxy.Meter    = (*Recorder)(nil)
	_ interface {
		Healthz(context.Context, int)
		Livez(context.Context, int)
	} = (*Recorder)(nil)
)
