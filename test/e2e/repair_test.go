//go:build e2e

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// loneNode returns a node with a folder of manifests, without API server and other hosts.
// Only the kernel state matters.
func loneNode(t *testing.T) (node *lab.Node, flags []string) {
	t.Helper()
	node = lab.New(t).Node("node")
	node.Bridge("eth0", "192.168.50.11/24", "fd00:50::11/64")
	svc := newExposed("web", 1)
	objects := []runtime.Object{svc}
	for i, family := range []string{"IPv4", "IPv6"} {
		a := []string{"10.244.1.2", "fd00:244:1::2"}[i]
		objects = append(objects, newSlice(svc, family, webPort, endpoint{address: a, node: "node"}))
	}
	return node, []string{"--manifests", writeManifests(t, objects...), "--hostname-override", "node", "--cluster-cidr", podCIDRs}
}

// othersServer creates a foreign virtual server.
const othersServer = "printf '%s\\n' '-A -t 10.12.0.1:80 -s wrr' '-a -t 10.12.0.1:80 -r 10.12.0.2:80 -m -w 3' | ipvsadm -R"

// makeForeign adds foreign state to the kernel.
func makeForeign(node *lab.Node) {
	node.Exec("sh", "-c", othersServer)
	for _, program := range []string{"iptables", "ip6tables"} {
		node.Exec(program, "-w", "-t", "nat", "-N", "OTHERS")
		node.Exec(program, "-w", "-t", "nat", "-A", "OTHERS", "-j", "RETURN")
		node.Exec(program, "-w", "-t", "nat", "-A", "PREROUTING", "-j", "OTHERS")
		node.Exec(program, "-w", "-A", "INPUT", "-p", "tcp", "--dport", "6666", "-j", "DROP")
	}
	node.Exec("ipset", "create", "OTHERS", "hash:ip")
	node.Exec("ipset", "add", "OTHERS", "10.12.0.3")
	node.Exec("ip", "rule", "add", "pref", "77", "from", "10.12.0.4", "lookup", "main")
	node.Exec("ip", "link", "add", "others0", "type", "dummy")
}

// addENI adds the minimum for reply routing: an interface to which a rule by source
// leads.
func addENI(node *lab.Node) {
	node.Route("default via 192.168.50.1 dev eth0")
	node.Bridge("eth1")
	node.Route("10.12.0.1 dev eth1 table 1003", "default via 10.12.0.1 dev eth1 table 1003")
	node.Rule("pref 2000 from 10.12.0.44 lookup 1003")
}

// otherRouting are settings of policy rules and routes with values that differ from the
// defaults.
var otherRouting = []string{
	"--claim-mark", "0x80000", "--claim-table", "80090", "--claim-rule-priority", "90",
	"--reply-mark", "0x60000", "--reply-rule-priority", "500",
}

// TestCleanup checks that --cleanup removes everything that was programmed, and nothing
// else. Three processes have programmed the node, the second one with other marks, tables
// and priorities, which the third one has removed. Kernel parameters get their values
// from before the first process, except one that another program has set since.
func TestCleanup(t *testing.T) {
	node, flags := loneNode(t)
	makeForeign(node)
	addENI(node)
	before := withoutEmpty(kernelState(node))
	var routes []string
	once := func(more ...string) {
		t.Helper()
		if code, output := node.RunProxy(slices.Concat(flags, []string{"--once", "--ipvs-strict-arp"}, more)...); code != 0 {
			t.Fatalf("kube-ipvs --once ended with %d:\n%s", code, output)
		}
		routes = append(routes, node.Exec("ip", "rule")+node.Exec("ip", "-6", "rule")+
			node.Exec("ip", "route", "show", "table", "all", "proto", "81")+node.Exec("ip", "-6", "route", "show", "table", "all", "proto", "81"))
	}
	once()
	once(otherRouting...)
	once()
	if routes[0] == routes[1] || routes[0] != routes[2] {
		t.Errorf("rules and routes, with other settings (-) and with the default ones again (+):\n%s%s", routes[1], cmp.Diff(routes[0], routes[2]))
	}
	programmed := kernelState(node)
	for _, want := range []string{
		clusterIPs(1)[0], clusterIPs(1)[1], "KUBE-SERVICES", "kube-ipvs0",
		"ip saddr set 192.168.50.11", "src_valid_mark\n1\n", "arp_ignore\n1\n", "arp_announce\n2\n", "close_wait\n3600\n",
	} {
		if !strings.Contains(programmed, want) {
			t.Errorf("%q was not programmed:\n%s", want, programmed)
		}
	}
	once(otherRouting...)
	const others = "net.ipv4.conf.all.arp_announce"
	node.Sysctl(others, "1")
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	if got := node.ReadSysctl(others); got != "1" {
		t.Errorf("%s, which another program had set to 1, is %s", others, got)
	}
	node.Sysctl(others, "0")
	if diff := cmp.Diff(before, withoutEmpty(kernelState(node))); diff != "" {
		t.Errorf("before (-), after (+):\n%s", diff)
	}
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("a second time, it ended with %d:\n%s", code, output)
	}
}

// withoutEmpty removes traces of merely listing a table: its name, its chains without
// rules, and the line of a missing table.
func withoutEmpty(state string) string {
	var kept []string
	for _, line := range strings.Split(state, "\n") {
		switch {
		case line == "", line == "COMMIT", strings.HasPrefix(line, "*"):
		case strings.HasPrefix(line, ":") && !strings.Contains(line, " - "):
		default:
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "\n")
}

// damage is a change of programmed state by another program.
type damage struct{ name, command string }

// insertion matches a command that inserts a rule before ours.
var insertion = regexp.MustCompile(`^(ip6?tables) -w -t (\S+) -I (\S+) \d+ (.+)$`)

// leaves returns the node's expected state after the repair: the state before, with the
// other program's rule after our jumps at the head of its chain, and the command that
// deletes that rule.
func (d damage) leaves(whole string) (state, undo string) {
	m := insertion.FindStringSubmatch(d.command)
	if m == nil {
		return whole, "true"
	}
	program, table, chain, rule := m[1], m[2], m[3], m[4]
	jumps := fmt.Sprintf(`(?s)### %s-save\n.*?\*%s\n.*?\n(-A %s [^\n]* -j KUBE-[^\n]*\n)+`, program, table, chain)
	at := regexp.MustCompile(jumps).FindStringIndex(whole)[1]
	return whole[:at] + fmt.Sprintf("-A %s %s\n", chain, rule) + whole[at:], fmt.Sprintf("%s -w -t %s -D %s %s", program, table, chain, rule)
}

// seen are kinds of damage that the check of every second detects: by counts, or by the
// real servers of a few virtual servers.
var seen = []damage{
	{"a virtual server", "ipvsadm -D -t " + at(clusterIPs(1)[0], 80)},
	{"a virtual server of IPv6", "ipvsadm -D -u " + at(clusterIPs(1)[1], 80)},
	{"all virtual servers", "ipvsadm -C; " + othersServer},
	{"a real server", "ipvsadm -d -t " + at(clusterIPs(1)[0], 80) + " -r 10.244.1.2:8000"},
	{"a real server of IPv6", "ipvsadm -d -t " + at(clusterIPs(1)[1], 80) + " -r [fd00:244:1::2]:8000"},
	{"a weight", "ipvsadm -e -t " + at(clusterIPs(1)[0], 80) + " -r 10.244.1.2:8000 -m -w 7"},
	{"a real server too many", "ipvsadm -a -u " + at(clusterIPs(1)[0], 80) + " -r 10.244.1.9:8000 -m"},
	{"a set's member", "ipset del KUBE-CLUSTER-IP 10.96.1.1,tcp:80"},
	{"a member too many", "ipset add KUBE-CLUSTER-IP 10.96.1.200,tcp:80"},
	{"all members", "ipset flush KUBE-6-LOAD-BALANCER"},
	{"all members of all sets", "for set in $(ipset list -n | grep ^KUBE); do ipset flush $set; done"},
}

// found are kinds of damage that only the periodic comparison detects: the kernel does
// not announce changes of IPVS, ipset and parameters, and the counts do not change.
var found = []damage{
	{"the scheduler", "ipvsadm -E -t " + at(balancerIPs(1)[0], 80) + " -s wlc"},
	{"affinity that nobody wants", "ipvsadm -E -t " + at(balancerIPs(1)[1], 80) + " -s rr -p 60"},
	{"another member of a set", "ipset del KUBE-CLUSTER-IP 10.96.1.1,tcp:80; ipset add KUBE-CLUSTER-IP 10.96.1.200,tcp:80"},
	{"a parameter", "sysctl -w net.ipv4.vs.conntrack=0"},
	{"forwarding", "sysctl -w net.ipv4.ip_forward=0"},
}

// announced are kinds of damage that netlink announces.
var announced = []damage{
	{"an address", "ip address del 10.96.1.1/32 dev kube-ipvs0"},
	{"an address of IPv6", "ip address del fd00:10:96::1/128 dev kube-ipvs0"},
	{"all addresses", "ip address flush dev kube-ipvs0"},
	{"a load balancer's IP", "ip route del local 203.0.113.1 dev lo table local"},
	{"a load balancer's IP of IPv6", "ip -6 route del local fd00:203:1::1 dev lo table local"},
	{"the rule for ports of other devices", "ip rule del pref 0 iif lo fwmark 0x5/0xf0d goto 1"},
	{"its target, of IPv6", "ip -6 rule del pref 1"},
	{"the interface", "ip link del kube-ipvs0"},
	{"a chain's rules", "iptables -w -t nat -F KUBE-SERVICES"},
	{"a chain's rules of IPv6", "ip6tables -w -t filter -F KUBE-IPVS-FILTER"},
	{"a rule too many", "iptables -w -t nat -A KUBE-POSTROUTING -j ACCEPT"},
	{"a jump", "iptables -w -t nat -D POSTROUTING 1"},
	{"a jump of IPv6", "ip6tables -w -t nat -D PREROUTING 1"},
	{"all rules of tables", "ip6tables -w -t nat -F; ip6tables -w -t nat -N OTHERS 2>/dev/null; ip6tables -w -t nat -A OTHERS -j RETURN; ip6tables -w -t nat -A PREROUTING -j OTHERS"},
	{"the rules for the loopback address", "nft delete table ip kube-ipvs"},
	{"a rule of nftables", "nft flush chain ip kube-ipvs request"},
	{"a rule of another tool between ours", "ip6tables -w -t mangle -I PREROUTING 2 -s 2001:db8::1/128 -j RETURN"},
	{"a rule of another tool before ours", "iptables -w -t mangle -I PREROUTING 1 -s 192.0.2.1/32 -j ACCEPT"},
	{"a refusal of another tool before ours", "iptables -w -t mangle -I PREROUTING 1 -s 192.0.2.1/32 -j DROP"},
}

const toldName, seenName = "announced by netlink", "found by the checks every second"

// seenLimit is the time in which damage that is announced or counted must be repaired. It takes 3 s
// at most on a small node; reading the state takes as long again several times on an emulated one.
const seenLimit = 12 * time.Second

// TestReliabilityDrift damages programmed state piece by piece while the proxy runs.
// Announced or counted damage is repaired within seconds, although the comparison runs
// once an hour; other damage within one or two sync periods. Each repair is counted.
// Foreign state does not change. Of the damage that only the comparison finds, every
// second kind is tested, and all kinds in `make reliability`.
func TestReliabilityDrift(t *testing.T) {
	record := reliability.Begin(t, reliability.Drift, "lab")
	node, flags := loneNode(t)
	makeForeign(node)
	// This writes the rules on demand too. A process that finds them keeps them.
	if code, output := node.RunProxy(append(flags, "--once")...); code != 0 {
		t.Fatalf("kube-ipvs --once ended with %d:\n%s", code, output)
	}
	var figures []reliability.Figure
	for _, kind := range []struct {
		period, name string
		damages      []damage
	}{
		{"1h", toldName, announced},
		{"1h", seenName, seen},
		{"2s", "found by the periodic comparison every 2 s", found},
	} {
		process := node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, append(flags, "--ipvs-sync-period", kind.period)...)
		if kind.period != "1h" {
			staysQuiet(t, node, process)
		}
		whole := kernelState(node)
		counted, longest := driftCounted(t, node), time.Duration(0)
		done := 0
		for i, d := range kind.damages {
			if kind.name != toldName && i%reliability.Times(2, 1) > 0 {
				continue
			}
			done++
			limit := seenLimit
			if kind.period != "1h" {
				limit = syncLimit
			}
			t.Run(d.name, func(t *testing.T) { longest = max(longest, repaired(t, node, d, whole, limit)) })
			before := counted
			lab.Eventually(t, syncLimit, d.name+" is counted", func() error {
				if counted = driftCounted(t, node); counted <= before {
					return fmt.Errorf("%v", counted)
				}
				return nil
			})
		}
		process.Terminate()
		figures = append(figures,
			reliability.Figure{Name: "kinds of damage " + kind.name, Value: float64(done), Shows: "each repaired and counted, foreign state unchanged"},
			reliability.Figure{Name: "longest time until it was repaired", Value: longest.Seconds(), Unit: "s", Shows: "on an emulated node"})
	}
	record(figures...)
}

// repaired causes damage and returns the time until it is repaired.
func repaired(t *testing.T, node *lab.Node, d damage, whole string, limit time.Duration) time.Duration {
	node.Exec("sh", "-c", d.command)
	whole, undo := d.leaves(whole)
	defer node.Exec("sh", "-c", undo)
	began := time.Now()
	lab.Eventually(t, limit, d.name+" is repaired", func() error {
		if diff := cmp.Diff(whole, kernelState(node)); diff != "" {
			return fmt.Errorf("wanted (-), there (+):\n%s", diff)
		}
		return nil
	})
	return time.Since(began)
}

// staysQuiet checks that several comparisons log nothing.
func staysQuiet(t *testing.T, node *lab.Node, process *lab.Process) {
	t.Helper()
	const comparisons = "kube_ipvs_compare_duration_seconds_count"
	said, before := process.Log(), counted(t, node, comparisons)
	lab.Eventually(t, syncLimit, "the kernel is compared a few times", func() error {
		if n := counted(t, node, comparisons) - before; n < 3 {
			return fmt.Errorf("%v times", n)
		}
		return nil
	})
	if now := process.Log(); now != said {
		t.Errorf("log lines without a change:\n%s", strings.TrimPrefix(now, said))
	}
}

// driftCounted returns the number of repaired differences that the proxy has counted.
func driftCounted(t *testing.T, node *lab.Node) float64 {
	t.Helper()
	return counted(t, node, "kube_ipvs_drift_repaired_total")
}

// counted returns the value of a metric of the proxy without labels.
func counted(t *testing.T, node *lab.Node, metric string) float64 {
	t.Helper()
	line := regexp.MustCompile(`(?m)^` + metric + ` (\S+)$`)
	m := line.FindStringSubmatch(node.Exec("curl", "-s", "--max-time", "10", "http://127.0.0.1:10249/metrics"))
	if m == nil {
		t.Fatalf("the metrics do not have %s", metric)
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
