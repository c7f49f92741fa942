//go:build e2e

package e2e

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourCapabilities runs as the DaemonSet does: a privileged process sets
// kernel parameters, and the one that stays has two capabilities and finds
// /proc/sys read-only. Each of the two is needed, and it says so.
func TestBehaviourCapabilities(t *testing.T) {
	node, flags := loneNode(t)
	if code, output := node.RunProxy(append(flags, "--init-only")...); code != 0 {
		t.Fatalf("kube-ipvs --init-only ended with %d:\n%s", code, output)
	}
	node.ReadOnlySysctls()
	for _, missing := range []struct {
		name string
		kept int
		want string
	}{
		{"CAP_NET_ADMIN", unix.CAP_NET_RAW, "see that the process has NET_ADMIN"},
		{"CAP_NET_RAW", unix.CAP_NET_ADMIN, "ipset"}, // iptables asks for its sets through a raw socket
	} {
		node.Capabilities(missing.kept)
		if code, output := node.RunProxy(append(flags, "--once")...); code == 0 || !strings.Contains(output, missing.want) {
			t.Errorf("without %s it ended with %d, and has not said %q:\n%s", missing.name, code, missing.want, output)
		}
	}
	node.Capabilities(unix.CAP_NET_ADMIN, unix.CAP_NET_RAW)
	node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, flags...)
	for _, want := range []string{clusterIPs(1)[0], clusterIPs(1)[1], "KUBE-SERVICES", "kube-ipvs0"} {
		if state := kernelState(node); !strings.Contains(state, want) {
			t.Errorf("%q was not programmed:\n%s", want, state)
		}
	}
	out := node.Exec("curl", "-s", "http://127.0.0.1:10249/metrics")
	if strings.Contains(out, "\nkube_ipvs_kernel_errors_total") {
		t.Errorf("something was refused:\n%s", out)
	}
}
