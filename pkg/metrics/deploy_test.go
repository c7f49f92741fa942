package metrics

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/component-base/metrics"
)

var nameInQuery = regexp.MustCompile(`\b(?:kubeproxy|kube_ipvs)_[a-z_]+\b`)

// An alert on a metric that is not there never fires, and nobody is told.
func TestDeployedQueriesNameMetrics(t *testing.T) {
	known := map[string]bool{}
	if _, err := New(func(m metrics.Registerable) error {
		known[m.FQName()] = true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"prometheus-rules.yaml", "grafana-dashboard.json"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "deploy", file))
		if err != nil {
			t.Fatal(err)
		}
		names := nameInQuery.FindAllString(string(text), -1)
		if len(names) == 0 {
			t.Errorf("%s asks for no metric", file)
		}
		for _, name := range names {
			for _, ofHistogram := range []string{"_bucket", "_sum", "_count"} {
				name = strings.TrimSuffix(name, ofHistogram)
			}
			if !known[name] {
				t.Errorf("%s asks for %s, of which there is none", file, name)
			}
		}
	}
}
