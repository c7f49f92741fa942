package deploy

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	componentmetrics "k8s.io/component-base/metrics"
	"sigs.k8s.io/yaml"

	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
)

const (
	rulesFile     = "chart/files/prometheus-rules.yaml"
	dashboardFile = "chart/files/grafana-dashboard.json"
	runbook       = "https://github.com/kube-ipvs/kube-ipvs/blob/main/docs/guides/alerts.md#"
)

type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func alerts(t *testing.T) (out []alert) {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string  `json:"name"`
			Rules []alert `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict([]byte(read(t, rulesFile)), &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	if len(out) == 0 {
		t.Fatal("no alerts")
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

type panel struct {
	ID      int    `json:"id"`
	Title   string `json:"title"`
	GridPos struct {
		H, W, X, Y int
	} `json:"gridPos"`
	Targets []struct {
		RefID string `json:"refId"`
		Expr  string `json:"expr"`
	} `json:"targets"`
}

func panels(t *testing.T) []panel {
	t.Helper()
	var dashboard struct {
		Panels []panel `json:"panels"`
	}
	if err := json.Unmarshal([]byte(read(t, dashboardFile)), &dashboard); err != nil {
		t.Fatal(err)
	}
	if len(dashboard.Panels) == 0 {
		t.Fatal("no panels")
	}
	return dashboard.Panels
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
