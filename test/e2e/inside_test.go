//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourInside runs the commands on the node of the original problem, in a mode
// that fails and in one that works. TestENIMatrixOneENI compares trace with packets, cell
// by cell.
func TestBehaviourInside(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	for _, mode := range []string{"off", "auto"} {
		programENI(t, c, "--snat-mode", mode)
		t.Run("trace, --snat-mode "+mode, func(t *testing.T) { checkTraceCommand(t, c, mode) })
		t.Run("doctor, --snat-mode "+mode, func(t *testing.T) { checkDoctor(t, c, mode) })
	}
	t.Run("trace, chains in nftables", func(t *testing.T) { checkTraceNative(t, c) })
	if !testing.Short() {
		t.Run("trace, other tables of iptables", func(t *testing.T) { checkTraceTables(t, c) })
	}
	t.Run("trace --live", func(t *testing.T) { checkLive(t, c) })
	t.Run("trace, called with mistakes", func(t *testing.T) { checkTraceErrors(t, c) })
	t.Run("get", func(t *testing.T) { checkGet(t, c) })
	t.Run("of a running proxy", func(t *testing.T) { checkOperate(t, c) })
	t.Run("doctor, something is broken", func(t *testing.T) { checkDoctorErrors(t, c) })
}

func checkTraceCommand(t *testing.T, c *lab.ENICluster, mode string) {
	want := map[string]trace.Outcome{"off": trace.Asymmetric, "auto": trace.Answered}[mode]
	from := c.Pod.Addresses[0].String()
	manifests := eniManifests(t, c)
	explain(t, c.Node, manifests, from, c.VIP, want)
	var x trace.Explanation
	decode(t, c.Node, &x, "trace", "--from", from, "--to", c.VIP+"/tcp", "-o", "json", "--manifests", manifests)
	if x.Verdict.Outcome != want || x.Service != "default/web:tcp" || len(x.RealServers) != len(c.Endpoints) || x.EntersBy != c.Pod.HostInterface {
		t.Errorf("-o json: %+v", x)
	}
	if answer := c.Pod.DialWithin(briefly, lab.TCP, c.VIP); (answer.Err == nil) != (want == trace.Answered) {
		t.Errorf("traced as %s, but: %s", want, answer)
	}
}

// explain runs trace on a connection, which must end in want, and compares the output
// with the docs where they show it. The names of Services come from manifests.
func explain(t *testing.T, n *lab.Node, manifests, from, to string, want trace.Outcome) {
	t.Helper()
	command := fmt.Sprintf("kube-ipvs trace --from %s --to %s", from, to)
	code, text := n.RunProxy("trace", "--from", from, "--to", to, "--manifests", manifests)
	t.Logf("on %s, %s\n%s", n.Name, command, text)
	lines := strings.Split(strings.TrimSpace(text), "\n")
	wantCode := 1
	if want == trace.Answered {
		wantCode = 0
	}
	if verdict := lines[len(lines)-1]; code != wantCode || !strings.HasPrefix(verdict, string(want)) {
		t.Errorf("from %s to %s: ended with %d and %q, want %q", from, to, code, verdict, want)
	}
	documented(t, command, string(want), text)
}

// decode runs the program and decodes its JSON output.
func decode(t *testing.T, n *lab.Node, out any, args ...string) (exitCode int) {
	t.Helper()
	code, text := n.RunProxy(args...)
	if err := json.NewDecoder(strings.NewReader(text)).Decode(out); err != nil {
		t.Fatalf("%q: ended with %d, %v:\n%s", args, code, err, text)
	}
	return code
}

// checkTraceNative writes chains in nftables, as other programs do, and compares the results of
// trace with packets.
func checkTraceNative(t *testing.T, c *lab.ENICluster) {
	from, port := c.Pod.Addresses[0].String(), c.Endpoints[0]
	_, endpointPort, _ := strings.Cut(port, ":")
	for _, s := range []struct {
		name, chain string
		want        trace.Outcome
		answered    bool
	}{
		{"an open chain", "type filter hook prerouting priority -10; policy accept; ct state established,related accept; tcp dport 1 drop", trace.Answered, true},
		{"a mark of type nat that is overwritten, as AWS VPC CNI does", "type nat hook prerouting priority -90; policy accept; " +
			"iifname != \"lo\" fib daddr type != local meta mark set ct mark and 0x80", trace.Answered, true},
		{"a drop before the rules", "type filter hook prerouting priority -310; policy accept; tcp dport 80 counter drop", trace.Dropped, false},
		{"a set", "type filter hook input priority filter; policy accept; ip saddr { " + from + ", 192.0.2.0/24 } tcp dport != { 22, 53 } drop", trace.Dropped, false},
		{"a policy", "type filter hook input priority filter; policy drop; tcp dport 22 accept; icmp type echo-request accept", trace.Dropped, false},
		{"a verdict map", "type filter hook input priority filter; policy drop; ct state vmap { established : accept, new : accept, invalid : drop }", trace.Answered, true},
		{"after IPVS", "type filter hook output priority 10; policy accept; tcp dport " + endpointPort + " reject with tcp reset", trace.Refused, false},
		{"behind the last table", "type filter hook postrouting priority 200; policy accept; ct state new tcp flags & (syn | ack) == syn tcp dport " + endpointPort + " drop",
			trace.Dropped, false},
		{"the reply", "type filter hook forward priority filter; policy accept; ct state established ct direction reply drop", trace.Dropped, false},
		{"behind IPVS, which does not see the request", "type filter hook input priority 110; policy accept; tcp dport 80 drop", trace.Answered, true},
		{"where the request enters", "type filter hook ingress device " + c.Pod.HostInterface + " priority 0; policy accept; tcp dport 80 drop", trace.Dropped, false},
		{"where the request enters, connections do not exist yet", "type filter hook ingress device " + c.Pod.HostInterface +
			" priority 0; policy accept; ct state new tcp dport 80 drop", trace.Answered, true},
		{"where the request leaves", "type filter hook egress device eth0 priority 0; policy accept; tcp dport " + endpointPort + " drop", trace.Dropped, false},
		{"where another request enters", "type filter hook ingress device lo priority 0; policy accept; tcp dport 80 drop", trace.Answered, true},
		{"a limit that is not reached", "type filter hook input priority filter; policy accept; limit rate over 100/second drop", trace.Undecided, true},
		{"a limit that is always reached", "type filter hook input priority filter; policy drop; limit rate 1/day burst 1 packets accept", trace.Undecided, false},
	} {
		t.Run(s.name, func(t *testing.T) {
			family := "inet"
			if strings.Contains(s.chain, "hook egress") {
				family = "netdev"
			}
			c.Node.Exec("nft", "add", "table", family, "theirs")
			defer c.Node.Exec("nft", "delete", "table", family, "theirs")
			c.Node.Feed("table "+family+" theirs {\nchain base {\n"+s.chain+"\n}\n}\n", "nft", "-f", "-")
			if s.want == trace.Undecided && !s.answered {
				c.Pod.DialWithin(briefly, lab.TCP, c.VIP) // uses the limit up
			}
			checkTraced(t, c, s.want, s.answered)
		})
	}
}

// checkTraced compares the verdict of trace on a request to the VIP with what the pod gets.
func checkTraced(t *testing.T, c *lab.ENICluster, want trace.Outcome, answered bool) {
	t.Helper()
	var x trace.Explanation
	decode(t, c.Node, &x, "trace", "--from", c.Pod.Addresses[0].String(), "--to", c.VIP+"/tcp", "-o", "json")
	answer := c.Pod.DialWithin(briefly, lab.TCP, c.VIP)
	if x.Verdict.Outcome != want || (answer.Err == nil) != answered {
		t.Errorf("traced as %s, want %s; %s", x.Verdict, want, answer)
	}
}

// checkTraceTables writes rules to the back end of iptables that kube-ipvs does not use on this
// node, and to a table that it does not use.
func checkTraceTables(t *testing.T, c *lab.ENICluster) {
	_, endpointPort, _ := strings.Cut(c.Endpoints[0], ":")
	for _, s := range []struct {
		program, table, rule string
		want                 trace.Outcome
		answered             bool
	}{
		{"iptables-legacy", "filter", "INPUT -p tcp --dport 80 -j DROP", trace.Dropped, false},
		{"iptables-legacy", "filter", "INPUT -p tcp --dport 81 -j DROP", trace.Answered, true},
		{"iptables-legacy", "mangle", "POSTROUTING -p tcp --dport " + endpointPort + " -j DROP", trace.Dropped, false},
		{"iptables-legacy", "filter", "INPUT -m statistic --mode nth --every 1 --packet 0 -j DROP", trace.Undecided, false},
		{"iptables-legacy", "security", "INPUT -p tcp --dport 80 -j DROP", trace.Dropped, false},
		{"iptables-legacy", "security", "FORWARD -p tcp --sport " + endpointPort + " -j DROP", trace.Dropped, false},
		// iptables-nft has this table behind IPVS.
		{"iptables-nft", "security", "INPUT -p tcp --dport 80 -j DROP", trace.Answered, true},
		{"iptables-nft", "security", "FORWARD -p tcp --sport " + endpointPort + " -j DROP", trace.Answered, true},
		{"iptables-nft", "security", "FORWARD -p tcp --sport 80 -j DROP", trace.Dropped, false},
		{"iptables-nft", "security", "OUTPUT -p tcp --dport " + endpointPort + " -j DROP", trace.Dropped, false},
		{"iptables-nft", "security", "OUTPUT -p udp -j DROP", trace.Answered, true},
	} {
		t.Run(s.program+" "+s.table+" "+s.rule, func(t *testing.T) {
			change := func(operation string) {
				c.Node.Exec(s.program, append([]string{"-w", "-t", s.table, operation}, strings.Fields(s.rule)...)...)
			}
			change("-A")
			defer change("-D")
			checkTraced(t, c, s.want, s.answered)
		})
	}
}

// checkLive connects from the pod during trace --live: packets on both sides of IPVS are
// printed.
func checkLive(t *testing.T, c *lab.ENICluster) {
	from := c.Pod.Addresses[0].String()
	p := c.Node.StartProxy(func(p *lab.Process) error {
		if !strings.Contains(p.Log(), "\nanswered\n") {
			return errors.New("nothing explained yet")
		}
		return nil
	}, "trace", "--from", from, "--to", c.VIP, "--live")
	answer := c.Pod.Dial(lab.TCP, c.VIP)
	if answer.Err != nil {
		t.Fatal(answer)
	}
	number, err := strconv.Atoi(strings.TrimPrefix(answer.Server, "backend"))
	if err != nil {
		t.Fatal(err)
	}
	endpoint := c.Endpoints[number-1]
	want := []string{
		"in  " + pad(c.Pod.HostInterface) + " TCP " + answer.Local.String() + " > " + c.VIP + " SYN",
		"out " + pad("eth0") + " TCP " + answer.SeenSource.String() + " > " + endpoint + " SYN",
		"in  " + pad("eth0") + " TCP " + endpoint + " > " + answer.SeenSource.String() + " SYN,ACK",
		"out " + pad(c.Pod.HostInterface) + " TCP " + c.VIP + " > " + answer.Local.String() + " SYN,ACK",
	}
	lab.Eventually(t, printLimit, "the packets to be printed", func() error {
		for _, line := range want {
			if !strings.Contains(p.Log(), line) {
				return fmt.Errorf("%q is not in\n%s", line, p.Log())
			}
		}
		return nil
	})
	if code := p.Terminate(); code != 0 {
		t.Errorf("ended with %d:\n%s", code, p.Log())
	}
}

// printLimit is the timeout on a busy machine.
const printLimit = 30 * time.Second

func pad(link string) string { return fmt.Sprintf("%-15s", link) }

func checkTraceErrors(t *testing.T, c *lab.ENICluster) {
	for arg, part := range map[string]string{
		"--to=10.0.0.1": `--to "10.0.0.1"`, "--from=nobody": "want an IP address, or a pod", "--from=fd00::1": "family differs",
		"--in=eth9": "no such interface", "--output=xml": "must be one of text, json",
		"--in=eth0 --from=" + c.NodeAddress.String(): "is an address of the node",
	} {
		code, text := c.Node.RunProxy(append([]string{"trace", "--from", "10.0.0.1", "--to", c.VIP}, strings.Fields(arg)...)...)
		if code == 0 || !strings.Contains(strings.ReplaceAll(text, `\"`, `"`), part) {
			t.Errorf("%s: ended with %d, want an error with %q:\n%s", arg, code, part, text)
		}
	}
}

func checkGet(t *testing.T, c *lab.ENICluster) {
	manifests := eniManifests(t, c)
	for what, want := range map[string][]string{
		"virtualservers":          {"default/web", "TCP", c.VIP, "rr"},
		"endpoints":               {"default/web", c.VIP, c.Endpoints[0], "1"},
		"sets KUBE-LOAD-BALANCER": {strings.Replace(c.VIP, ":", ",tcp:", 1), "-", "default/web"},
		"snat":                    {"eth1", "IPv4", c.NodeAddress.String(), "MASQUERADE, with eth0's address"},
	} {
		code, text := c.Node.RunProxy(append(append([]string{"get"}, strings.Fields(what)...), "--manifests", manifests)...)
		t.Logf("get %s:\n%s", what, text)
		if documented(t, "kube-ipvs get "+what, "", text) == 0 {
			t.Errorf("the docs do not show kube-ipvs get %s", what)
		}
		if code != 0 || !hasLine(text, want) {
			t.Errorf("get %s: ended with %d, want a line with %q", what, code, want)
		}
	}
}

// hasLine reports whether a table has a line with all cells.
func hasLine(text string, cells []string) bool {
	for line := range strings.Lines(text) {
		all := true
		for _, cell := range cells {
			all = all && strings.Contains(line, cell)
		}
		if all {
			return true
		}
	}
	return false
}

// checkDoctor: under plain masquerading, doctor reports the ENI; otherwise it reports
// only that no proxy runs.
func checkDoctor(t *testing.T, c *lab.ENICluster, mode string) {
	want := []string{"kube-ipvs"}
	if mode == "off" {
		want = []string{"eth1", "eth1", "kube-ipvs"}
	}
	code, findings := diagnose(t, c)
	var text strings.Builder
	_ = doctor.Write(&text, findings)
	t.Logf("%s", text.String())
	if mode == "off" && documented(t, "kube-ipvs doctor", "", text.String()) == 0 {
		t.Error("the docs do not show kube-ipvs doctor")
	}
	var about []string
	for _, f := range findings {
		if f.Severity == doctor.OK {
			continue
		}
		if f.Severity == doctor.Warning {
			about = append(about, f.About)
		} else {
			t.Errorf("found %+v", f)
		}
	}
	if code != 0 || !slices.Equal(slices.Sorted(slices.Values(about)), want) {
		t.Errorf("ended with %d and found %+v, want warnings about %q", code, findings, want)
	}
}

func diagnose(t *testing.T, c *lab.ENICluster) (code int, findings []doctor.Finding) {
	t.Helper()
	code = decode(t, c.Node, &findings, "doctor", "-o", "json")
	return code, findings
}

func checkDoctorErrors(t *testing.T, c *lab.ENICluster) {
	svc := strings.Fields(c.Node.Exec("ipset", "list", "KUBE-CLUSTER-IP", "-o", "save"))
	member := strings.Replace(svc[len(svc)-1], ",tcp:", ":", 1)
	c.Node.Exec("ipvsadm", "-D", "-t", member)
	c.Node.Exec("iptables", "-t", "nat", "-N", "KUBE-SVC-TEST")
	c.Node.Exec("iptables", "-I", "INPUT", "-s", "192.0.2.0/24", "-j", "ACCEPT")
	c.Node.Exec("nft", "add", "table", "ip", "kube-proxy")
	code, findings := diagnose(t, c)
	for _, part := range []string{
		member + " has no virtual server", "KUBE-SVC-TEST", "-A INPUT -s 192.0.2.0/24 -j ACCEPT", "its nftables mode has left a table",
	} {
		found := false
		for _, f := range findings {
			found = found || strings.Contains(f.What, part)
		}
		if !found {
			t.Errorf("%q is not found in %+v", part, findings)
		}
	}
	if code == 0 {
		t.Error("no failure in spite of errors")
	}
}
