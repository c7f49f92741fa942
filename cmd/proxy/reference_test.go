package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
)

// TestMetricsReference checks that docs/reference/metrics.md matches the metrics and
// Events.
func TestMetricsReference(t *testing.T) {
	page := filepath.Join("..", "..", "docs", "reference", "metrics.md")
	want := metricsReference(t)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("docs/reference/metrics.md is stale, make docs writes it (-want +got):\n%s", diff)
	}
}

func metricsReference(t *testing.T) string {
	t.Helper()
	all, err := metrics.Describe()
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	page.WriteString(`# Metrics and Events

Generated from the code by ` + "`make docs`" + `.

kube-ipvs serves metrics in Prometheus' format on ` + "`--metrics-bind-address`" + ` (default 127.0.0.1:10249),
path ` + "`/metrics`" + `, and service level indicators of the health checks on ` + "`/metrics/slis`" + `. Metrics
whose names begin with ` + "`kubeproxy_`" + ` have the same meaning as in kube-proxy's IPVS mode. They have no
label ` + "`ip_family`" + `, because one sync serves both families. All metrics are alpha: the upgrade notes of a
release list every changed metric. [Alerts](../guides/alerts.md) explains how to scrape them, and what to do when they
are out of range.
`)
	for _, section := range []struct{ title, prefix string }{{"Metrics that kube-proxy has", "kubeproxy_"}, {"kube-ipvs's own metrics", "kube_ipvs_"}} {
		fmt.Fprintf(&page, "\n## %s\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n", section.title)
		for _, m := range all {
			if !strings.HasPrefix(m.Name, section.prefix) {
				continue
			}
			var labels []string
			for _, l := range m.Labels {
				labels = append(labels, "`"+l+"`")
			}
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", m.Name, m.Type, strings.Join(labels, ", "), strings.ReplaceAll(m.Help, "|", `\|`))
		}
	}
	page.WriteString("\n## Metrics of libraries\n\n`rest_client_*` (requests to the API server), `kubernetes_build_info`, `process_*` and `go_*`, as\nevery Kubernetes component has them.\n")
	page.WriteString("\n## Events\n\nEvents are of type Warning, of the group events.k8s.io, with `" + event.Controller + "` as the\nreporting controller. A condition is reported once while it lasts, and by one node for all.\n[Troubleshooting](../guides/troubleshoot.md#events) says what to do.\n\n| reason | object | meaning |\n|---|---|---|\n")
	for _, e := range proxy.EventReasons {
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", e.Reason, e.Regarding, e.Meaning)
	}
	return page.String()
}
