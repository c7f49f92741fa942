package deploy

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"
)

//go:embed chart/files/grafana-dashboard.json
var dashboard []byte

//go:embed chart/files/prometheus-rules.yaml
var rules []byte

// Panel is a panel of the Grafana dashboard.
type Panel struct {
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

// Panels returns the panels of the dashboard in the file's order. It fails if the file has none.
func Panels() ([]Panel, error) {
	var file struct {
		Panels []Panel `json:"panels"`
	}
	if err := json.Unmarshal(dashboard, &file); err != nil {
		return nil, fmt.Errorf("read the dashboard: %w", err)
	}
	if len(file.Panels) == 0 {
		return nil, fmt.Errorf("the dashboard has no panels")
	}
	return file.Panels, nil
}

// Queries returns the panel's queries, for all nodes of the chart's job.
func (p *Panel) Queries() []string {
	variables := strings.NewReplacer("$job", "kube-ipvs", "$instance", ".*")
	queries := make([]string, len(p.Targets))
	for i, t := range p.Targets {
		queries[i] = variables.Replace(t.Expr)
	}
	return queries
}

// Alert is an alerting rule of Prometheus.
type Alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// Alerts returns the alerts of the chart in the file's order. It fails if the file has none, or
// fields that Alert does not have.
func Alerts() ([]Alert, error) {
	var file struct {
		Groups []struct {
			Name  string  `json:"name"`
			Rules []Alert `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict(rules, &file); err != nil {
		return nil, fmt.Errorf("read the alerts: %w", err)
	}
	var out []Alert
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no alerts")
	}
	return out, nil
}
