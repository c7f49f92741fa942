package deploy

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	componentmetrics "k8s.io/component-base/metrics"

	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
)

const (
	rulesFile     = "chart/files/prometheus-rules.yaml"
	dashboardFile = "chart/files/grafana-dashboard.json"
	runbook       = "https://github.com/kube-ipvs/kube-ipvs/blob/main/docs/guides/alerts.md#"
)

func alerts(t *testing.T) []Alert {
	t.Helper()
	out, err := Alerts()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestAlerts checks that each alert has a severity, a summary and a section of its own
// in the runbook.
func TestAlerts(t *testing.T) {
	page := read(t, "../docs/guides/alerts.md")
	for _, a := range alerts(t) {
		if !slices.Contains([]string{"critical", "warning", "info"}, a.Labels["severity"]) || a.Annotations["summary"] == "" {
			t.Errorf("%s: severity %q, summary %q", a.Alert, a.Labels["severity"], a.Annotations["summary"])
		}
		if want := runbook + strings.ToLower(a.Alert); a.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url %q, want %q", a.Alert, a.Annotations["runbook_url"], want)
		}
		if !strings.Contains(page, "\n## "+a.Alert+"\n") {
			t.Errorf("docs/guides/alerts.md has no section %s", a.Alert)
		}
	}
}

func panels(t *testing.T) []Panel {
	t.Helper()
	out, err := Panels()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestPanels checks that no two panels share an ID or a place.
func TestPanels(t *testing.T) {
	ids, places := map[int]string{}, map[[2]int]string{}
	for _, p := range panels(t) {
		place := [2]int{p.GridPos.X, p.GridPos.Y}
		if other := ids[p.ID] + places[place]; other != "" {
			t.Errorf("%s: same ID or place as %s", p.Title, other)
		}
		ids[p.ID], places[place] = p.Title, p.Title
		if len(p.Targets) == 0 {
			t.Errorf("%s: no query", p.Title)
		}
	}
}

var (
	metricName = regexp.MustCompile(`\b(kube_ipvs|kubeproxy)_[a-z_]+`)
	// In PromQL, "or" ignores the metric's name: of two metrics with equal labels it
	// only ever returns the first.
	orOfMetrics = regexp.MustCompile(`\} or (kube_ipvs|kubeproxy)_`)
)

// TestQueries checks that alerts and dashboard ask for metrics that exist.
func TestQueries(t *testing.T) {
	known := map[string]bool{}
	if _, err := metrics.New(func(m componentmetrics.Registerable) error { known[m.FQName()] = true; return nil }); err != nil {
		t.Fatal(err)
	}
	check := func(where, expr string) {
		for _, name := range metricName.FindAllString(expr, -1) {
			base := name
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				base = strings.TrimSuffix(base, suffix)
			}
			if !known[name] && !known[base] {
				t.Errorf("%s: no metric %s", where, name)
			}
		}
		if orOfMetrics.MatchString(expr) {
			t.Errorf("%s: two metrics joined by or: %s", where, expr)
		}
	}
	for _, a := range alerts(t) {
		check(a.Alert, a.Expr)
	}
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			check(p.Title, target.Expr)
		}
	}
}
