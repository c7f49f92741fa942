//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	chart "github.com/kube-ipvs/kube-ipvs/deploy"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestMonitoring lets a real Prometheus scrape kube-ipvs on a node with an ENI. While the node is
// healthy, no alert's condition is met. Then the kernel refuses a real server, two Services want
// one address, and another program deletes a virtual server: each panel of the dashboard shows
// something, and the conditions of the alerts for these problems are met.
func TestMonitoring(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	n, folder := c.Node, eniManifests(t, c)
	const broadcast = "192.0.2.255" // no valid real server: ip_vs_add_dest returns EINVAL
	n.Exec("ip", "address", "add", "192.0.2.1/24", "brd", broadcast, "dev", "lo")
	n.StartProxy(func(*lab.Process) error {
		_, err := n.TryExec("curl", "-sSf", "--max-time", "5", "http://127.0.0.1:10266/readyz")
		return err
	}, "--manifests", folder, "--hostname-override", n.Name, "--cluster-cidr", lab.ENIPodCIDRs)
	p := startPrometheus(t, n)
	alerts, err := chart.Alerts()
	if err != nil {
		t.Fatal(err)
	}
	p.shows("kube_ipvs_virtual_servers", "count_over_time(kube_ipvs_virtual_servers[1m]) > 2")
	for _, a := range alerts {
		if series := p.query(a.Expr); series != 0 {
			t.Errorf("%s fires for a healthy node", a.Alert)
		}
	}

	web := strings.Split(c.VIP, ":")[0]
	conflicting := newLoadBalancer(newService("conflicting", corev1.ProtocolTCP, 80, "10.96.0.81"), web)
	refused := newService("refused", corev1.ProtocolTCP, 80, "10.96.0.82")
	for i, object := range []runtime.Object{conflicting, refused, newSlice(refused, "IPv4", 80, endpoint{address: broadcast})} {
		writeManifest(t, filepath.Join(folder, fmt.Sprintf("broken-%d.yaml", i)), object)
	}
	n.Exec("ipvsadm", "-D", "-t", "10.96.0.80:80")
	panels, err := chart.Panels()
	if err != nil {
		t.Fatal(err)
	}
	for _, panel := range panels {
		for _, query := range panel.Queries() {
			p.shows("panel "+panel.Title, query)
		}
	}
	fired := 0
	for _, a := range alerts {
		switch {
		case strings.Contains(a.Expr, "kube_ipvs_services_refused"), strings.Contains(a.Expr, "kube_ipvs_kernel_errors_total"),
			strings.Contains(a.Expr, "kube_ipvs_drift_repaired_total"), strings.Contains(a.Expr, "kube_ipvs_conflicts"):
			fired++
			p.shows("alert "+a.Alert, a.Expr)
		}
	}
	if fired != 4 {
		t.Errorf("%d alerts are about these problems, want 4", fired)
	}
}

// prometheus is a Prometheus on a node, which scrapes its kube-ipvs every second.
type prometheus struct {
	t    *testing.T
	node *lab.Node
}

const prometheusAddress = "127.0.0.1:9099"

func startPrometheus(t *testing.T, n *lab.Node) *prometheus {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	text := "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: kube-ipvs\n  static_configs: [{targets: [\"127.0.0.1:10249\"]}]\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	n.StartProgram(func(*lab.Process) error {
		_, err := n.TryExec("curl", "-sSf", "--max-time", "5", "http://"+prometheusAddress+"/-/ready")
		return err
	}, lab.Peer("prometheus"), "--config.file", config, "--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", prometheusAddress)
	return &prometheus{t, n}
}

// query returns the number of series of an instant query.
func (p *prometheus) query(expr string) int {
	p.t.Helper()
	answer := p.node.Exec("curl", "-sS", "--max-time", "20", "-G", "--data-urlencode", "query="+expr, "http://"+prometheusAddress+"/api/v1/query")
	var result struct {
		Status, Error string
		Data          struct{ Result []json.RawMessage }
	}
	if err := json.Unmarshal([]byte(answer), &result); err != nil || result.Status != "success" {
		p.t.Fatalf("%s: %v %s", expr, err, answer)
	}
	return len(result.Data.Result)
}

// shows waits until a query has a result.
func (p *prometheus) shows(what, expr string) {
	p.t.Helper()
	lab.Eventually(p.t, time.Minute, what+" shows something", func() error {
		if p.query(expr) == 0 {
			return fmt.Errorf("no series: %s", expr)
		}
		return nil
	})
}
