//go:build prometheus

package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	componentmetrics "k8s.io/component-base/metrics"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/metrics"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// prometheusServer is a Prometheus that scrapes one kube-ipvs every second and has the
// alerts as rules.
type prometheusServer struct {
	t        *testing.T
	url      string
	recorder *metrics.Recorder
	down     atomic.Bool // the scraped process does not answer
}

// TestPrometheus loads the alerts into a real Prometheus, feeds it the metrics of this
// build, and asks every query of the dashboard and of the alerts. A panel shows
// something, a healthy node fires no alert, and each alert's condition is met when what
// it is about happens.
func TestPrometheus(t *testing.T) {
	p := startPrometheus(t)
	p.healthy()
	t.Run("panels", func(t *testing.T) {
		for _, panel := range panels(t) {
			for _, query := range panel.Queries() {
				p.eventually(t, panel.Title+" shows nothing: "+query, func() bool { return p.query(query) > 0 })
			}
		}
	})
	all := alerts(t)
	for _, a := range all {
		if n := p.query(a.Expr); n > 0 {
			t.Errorf("%s fires for a healthy node", a.Alert)
		}
	}
	p.broken()
	for _, a := range all {
		if strings.Contains(a.Expr, "up{") {
			continue
		}
		expr := strings.Replace(a.Expr, "> 120", "> 1", 1) // seconds that the test has waited
		p.eventually(t, a.Alert+" does not fire", func() bool { return p.query(expr) > 0 })
	}
	p.down.Store(true)
	for _, a := range all {
		if strings.Contains(a.Expr, "up{") {
			p.eventually(t, a.Alert+" does not fire", func() bool { return p.query(a.Expr) > 0 })
		}
	}
}

func startPrometheus(t *testing.T) *prometheusServer {
	p := &prometheusServer{t: t}
	registry := componentmetrics.NewKubeRegistry()
	recorder, err := metrics.New(registry.Register)
	if err != nil {
		t.Fatal(err)
	}
	p.recorder = recorder
	handler := componentmetrics.HandlerFor(registry, componentmetrics.HandlerOpts{})
	scraped := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.down.Load() {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(scraped.Close)

	dir := t.TempDir()
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n- job_name: kube-ipvs\n  static_configs: [{targets: [%q]}]\n",
		rules, strings.TrimPrefix(scraped.URL, "http://"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const address = "127.0.0.1:19090"
	p.url = "http://" + address
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "prometheus", "--config.file", config, "--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", address, "--log.level", "error")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatalf("prometheus is not installed: apt-get install prometheus: %v", err)
	}
	t.Cleanup(func() { cancel(); _ = cmd.Wait() })
	p.eventually(t, "Prometheus is not ready", func() bool {
		answer, err := http.Get(p.url + "/-/ready")
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	return p
}

// healthy is what a node reports that has something to do and no problem.
func (p *prometheusServer) healthy() {
	r := p.recorder
	r.Queued()
	r.Passed(20*time.Millisecond, 3, 0)
	r.Compared(time.Second, 0)
	r.Held(7, 21, 0)
	r.Conflicts(0)
	r.Failing(false, 0, 9)
	r.Changes(3, 5)
	r.Planned(time.Millisecond)
	r.Programmed(20 * time.Millisecond)
	r.NoLocalEndpoints(0, 0)
	r.Interfaces([]plan.InterfaceMode{{Family: ip.IPv4, Link: "eth1", Mode: plan.SNATSource, Source: netip.MustParseAddr("10.12.192.10")}})
	r.Wrote("ipvs", time.Millisecond, 0)
	// Without a first sample at 0 a counter would begin with what happens later.
	p.eventually(p.t, "the metrics are not scraped", func() bool { return p.query("count_over_time(kube_ipvs_virtual_servers[1m]) > 2") > 0 })
	r.Refused("ipvs", "add real server")
	r.Passed(20*time.Millisecond, 3, 0)
	r.Programmed(20 * time.Millisecond)
	p.eventually(p.t, "the errors are not scraped", func() bool { return p.query("count_over_time(kube_ipvs_kernel_errors_total[1m]) > 2") > 0 })
}

// broken is a node with every problem that an alert is about.
func (p *prometheusServer) broken() {
	r := p.recorder
	r.Failing(true, 4, 9)
	r.Conflicts(3)
	r.Restored(5)
	r.Cut(2)
	r.Refused("ipvs", "add real server")
	for range 100 {
		r.Programmed(time.Minute)
	}
	r.Queued() // more than a second after the last pass
}

func (p *prometheusServer) eventually(t *testing.T, failure string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !done(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Error(failure)
			return
		}
	}
}

// query returns the number of series of an instant query.
func (p *prometheusServer) query(expr string) int {
	p.t.Helper()
	answer, err := http.Get(p.url + "/api/v1/query?query=" + url.QueryEscape(expr))
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	var result struct {
		Status, Error string
		Data          struct{ Result []json.RawMessage }
	}
	if err := json.NewDecoder(answer.Body).Decode(&result); err != nil || result.Status != "success" {
		p.t.Fatalf("%s: %v %s", expr, err, result.Error)
	}
	return len(result.Data.Result)
}
