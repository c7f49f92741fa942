//go:build e2e

package e2e

import (
	"strings"
	"syscall"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// checkOperate runs the commands beside a proxy that serves. They use its configuration,
// and all report a healthy node.
func checkOperate(t *testing.T, c *lab.ENICluster) {
	n := c.Node
	ready := func(*lab.Process) error {
		_, err := n.TryExec("curl", "-sSf", "--max-time", "5", "http://127.0.0.1:10266/readyz")
		return err
	}
	p := n.StartProxy(ready, "--manifests", eniManifests(t, c), "--hostname-override", n.Name,
		"--cluster-cidr", lab.ENIPodCIDRs, "--ipvs-sync-period", "1h", "--service-metrics", "10")
	from := c.Pod.Addresses[0].String()
	run := func(want int, args ...string) string {
		t.Helper()
		code, text := n.RunProxy(args...)
		if code != want {
			t.Errorf("%q: ended with %d, want %d:\n%s", args, code, want, text)
		}
		return text
	}
	shows := func(text string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("%q is not in\n%s", part, text)
			}
		}
	}
	text := run(0, "status")
	t.Logf("%s", text)
	for _, component := range []string{"kube-ipvs", "sync", "node", "Services", "IPVS", "kernel", "conflicts", "source"} {
		if !hasLine(text, []string{"OK ", " " + component + " "}) {
			t.Errorf("no line with OK and %s", component)
		}
	}
	if strings.Contains(text, "error") || strings.Contains(text, "warning") {
		t.Errorf("something is wrong:\n%s", text)
	}
	var findings []doctor.Finding
	if code := decode(t, n, &findings, "doctor", "-o", "json"); code != 0 {
		t.Errorf("doctor ended with %d", code)
	}
	for _, f := range findings {
		if f.Severity != doctor.OK {
			t.Errorf("found %+v", f)
		}
	}
	shows(run(0, "diff"), "no difference")
	shows(run(0, "trace", "--from", from, "--to", "svc/web"), "Service            default/web:tcp", "\nanswered\n")
	shows(run(0, "trace", "--from", from, "--to", "svc/web:tcp", "-o", "mermaid"), "flowchart TD\n")
	shows(run(0, "trace", "--from", from, "--to", c.VIP, "-o", "svg"), "</svg>")
	shows(run(1, "trace", "--from", from, "--to", "203.0.113.77:80"), "not a Service")
	shows(run(2, "trace", "--from", from, "--to", "svc/nobody"), "no Service default/nobody")

	if answer := c.Pod.Dial(lab.TCP, c.VIP); answer.Err != nil {
		t.Error(answer)
	}
	served := n.Exec("curl", "-sS", "--max-time", "10", "http://127.0.0.1:10249/metrics")
	shows(served, `kube_ipvs_service_connections_total{namespace="default",port="tcp",protocol="TCP",service="web"} `, "kube_ipvs_service_metrics_left_out 0", "kube_ipvs_node_refused 0")
	text = run(0, "connectivity", "test", "--all", "--service", "default/web")
	shows(text, "OK ", "10.96.0.80:80", "1 answered, 0 failed")
	text = run(0, "preflight")
	t.Logf("%s", text)
	shows(text, "OK       plan: 1 Services; changes of the first sync: none", "eth1 (IPv4: reply routing)")
	if strings.Contains(text, "error ") {
		t.Errorf("something is wrong:\n%s", text)
	}
	n.Exec("sh", "-c", "rm -rf /tmp/sysdump && mkdir /tmp/sysdump")
	run(0, "sysdump", "-o", "/tmp/sysdump/all.tar.gz")
	list := n.Exec("tar", "tzf", "/tmp/sysdump/all.tar.gz")
	shows(list, "/version.txt", "/config/kubeproxy.yaml", "/proxy/status.json", "/proxy/metrics.txt", "/node/doctor.txt", "/node/diff.txt",
		"/node/virtualservers.txt", "/node/endpoints.txt", "/node/sets.json", "/kernel/IPv4.json", "/kernel/iptables-nft-save.txt", "/objects.json")
	n.Exec("tar", "xzf", "/tmp/sysdump/all.tar.gz", "-C", "/tmp/sysdump")
	t.Logf("not gathered:\n%s", n.Exec("sh", "-c", "cat /tmp/sysdump/*/errors.txt"))

	// A deleted object is a difference, which --once --dry-run does not repair.
	svc := strings.Fields(n.Exec("ipset", "list", "KUBE-CLUSTER-IP", "-o", "save"))
	member := strings.Replace(svc[len(svc)-1], ",tcp:", ":", 1)
	_ = syscall.Kill(p.PID(), syscall.SIGSTOP) // otherwise it would repair the difference
	n.Exec("ipvsadm", "-D", "-t", member)
	if documented(t, "kube-ipvs diff", "", run(1, "diff")) == 0 {
		t.Error("the docs do not show kube-ipvs diff")
	}
	var changes []inspect.Change
	if code := decode(t, n, &changes, "diff", "-o", "json"); code != 1 || len(changes) == 0 || changes[0].Part != "ipvs" || !strings.Contains(changes[0].What, member) {
		t.Errorf("diff ended with %d and %+v, want %s", code, changes, member)
	}
	text = run(0, "--once", "--dry-run", "--manifests", eniManifests(t, c), "--hostname-override", n.Name, "--cluster-cidr", lab.ENIPodCIDRs)
	shows(text, member)
	if out := n.Exec("ipvsadm", "-Ln"); strings.Contains(out, member) {
		t.Errorf("a dry run has written\n%s", out)
	}
	_ = syscall.Kill(p.PID(), syscall.SIGCONT)
	if code := p.Terminate(); code != 0 {
		t.Errorf("ended with %d:\n%s", code, p.Log())
	}
	shows(run(1, "status"), "error", "does not run")
	runOnce(t, n, eniManifests(t, c), "--cluster-cidr", lab.ENIPodCIDRs)
}
