//go:build e2e

package e2e

import (
	"strings"
	"syscall"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// foreignServers are virtual servers like those of keepalived and Docker swarm, in
// ipvsadm's syntax: on an address of their own, with a fwmark, and on addresses that a
// Service also has, with other ports and protocols. The last one is in an excluded range.
const foreignServers = `-A -t 10.12.0.1:80 -s wrr -p 300
-a -t 10.12.0.1:80 -r 10.12.0.2:80 -m -w 3
-A -f 258 -s rr
-a -f 258 -r 10.12.0.2:0 -m -w 1
-A -t 10.96.1.1:8080 -s lc
-a -t 10.96.1.1:8080 -r 10.12.0.2:80 -g -w 1
-A -u 203.0.113.1:443 -s rr
-a -u 203.0.113.1:443 -r 10.12.0.2:443 -m -w 0
-A -t [fd00:10:96::1]:8080 -s rr
-A -t 203.0.113.129:8080 -s sh
-a -t 203.0.113.129:8080 -r 10.12.0.2:80 -m -w 1
`

// TestIssue59507ForeignVirtualServers checks that foreign virtual servers do not change
// while a proxy compares, is killed and restarted, loses a Service, and cleans up
// (kubernetes#55857, kube-vip#745).
func TestIssue59507ForeignVirtualServers(t *testing.T) {
	node, flags := loneNode(t)
	flags = append(flags, "--ipvs-sync-period", "1s", "--ipvs-exclude-cidrs", "203.0.113.128/25")
	node.Feed(foreignServers, "ipvsadm", "-R")
	theirs := linesOf(node.Exec("ipvsadm", "-Sn"))
	if len(theirs) != strings.Count(foreignServers, "\n") {
		t.Fatalf("the kernel has %q", theirs)
	}
	check := func(when string) {
		t.Helper()
		now := node.Exec("ipvsadm", "-Sn")
		for _, line := range theirs {
			if !strings.Contains(now, line+"\n") {
				t.Errorf("%s, %q is not there:\n%s", when, line, now)
			}
		}
	}
	compared := func(*lab.Process) error { return hasCompared(node, 3) }
	p := node.StartProxy(compared, flags...)
	check("after three comparisons")
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.ExitCode()
	p = node.StartProxy(compared, flags...)
	check("after a restart")
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.ExitCode()
	runOnce(t, node, t.TempDir(), "--ipvs-exclude-cidrs", "203.0.113.128/25") // without Services
	check("after the Service went")
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	check("after --cleanup")
	if left := linesOf(node.Exec("ipvsadm", "-Sn")); len(left) != len(theirs) {
		t.Errorf("left are %q", left)
	}
}

func linesOf(saved string) []string { return strings.Split(strings.TrimSpace(saved), "\n") }
