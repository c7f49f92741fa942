//go:build e2e

package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestBehaviourTakeOverFromBothBackEnds starts with rules of kube-proxy, of both of its
// iptables modes, in iptables-legacy and then in iptables-nft, on a node whose kubelet
// uses one of them. kube-ipvs writes its rules to kubelet's back end and removes
// kube-proxy's from both. The endpoints have changed since kube-proxy wrote its rules, so
// a remaining rule would lead to a removed endpoint.
func TestBehaviourTakeOverFromBothBackEnds(t *testing.T) {
	type situation struct{ kubelet, left string }
	for mode, cases := range map[string][]situation{
		"iptables": {{"nft", "legacy"}, {"legacy", "nft"}},
		"ipvs":     {{"nft", "legacy"}},
	} {
		t.Run(mode, func(t *testing.T) {
			c := newServed(t, mode)
			node := c.Nodes[0]
			c.startKubeProxy(t, node)
			c.old[node].Stop()
			rules := map[string]string{}
			for _, program := range []string{"iptables", "ip6tables"} {
				rules[program] = node.Exec(program + "-nft-save")
				if !strings.Contains(rules[program], "KUBE-SERVICES") {
					t.Fatalf("kube-proxy has written no rules:\n%s", rules[program])
				}
			}
			for _, slice := range dualStackSlices(newExposed("web", 1), webPort, ready(c.web2)) {
				c.api.setSlice(slice)
			}
			for _, a := range cases {
				for program, text := range rules {
					node.Exec("sh", "-c", fmt.Sprintf("for t in nat filter mangle; do for v in nft legacy; do %[1]s-$v -w -t $t -F; %[1]s-$v -w -t $t -X; done; done", program))
					node.Feed(text, program+"-"+a.left+"-restore")
					node.Exec("sh", "-c", fmt.Sprintf("%s-%s -w -t mangle -N KUBE-KUBELET-CANARY || true", program, a.kubelet))
				}
				c.takesOver(t, node, a.kubelet, a.left)
			}
		})
	}
}

// takesOver starts kube-ipvs and checks that kube-proxy's rules are gone, that
// kube-ipvs's are in kubelet's back end, and that all clients reach the current endpoint.
func (c *takeOver) takesOver(t *testing.T, node *lab.BridgeNode, kubelet, left string) {
	t.Helper()
	name := fmt.Sprintf("kubelet uses %s, kube-proxy has left rules in %s", kubelet, left)
	c.startKubeIPVS(node)
	defer c.young[node].Stop()
	others := map[string]string{"nft": "legacy", "legacy": "nft"}
	lab.Eventually(t, 2*syncLimit, name, func() error {
		for _, family := range []string{"iptables", "ip6tables"} {
			used, other := node.Exec(family+"-"+kubelet+"-save"), node.Exec(family+"-"+others[kubelet]+"-save")
			other = strings.ReplaceAll(other, "KUBE-FIREWALL", "") // stays, because kubelet's chain has the same name
			if !strings.Contains(used, "KUBE-IPVS-") || strings.Contains(other, "KUBE-") {
				return fmt.Errorf("in use:\n%s\nthe other:\n%s", used, other)
			}
			for _, l := range leftovers {
				if strings.Contains(used, l) {
					return fmt.Errorf("there is still %s in\n%s", l, used)
				}
			}
		}
		return nil
	})
	for _, ask := range c.asks(node) {
		if strings.Contains(ask.name, "Local") {
			continue
		}
		if answer := ask.from.Dial(lab.TCP, ask.address); answer.Err != nil || answer.Server != c.web2.Name {
			t.Errorf("%s: %s: %s, want %s", name, ask.name, answer, c.web2.Name)
		}
	}
}

// TestBehaviourUnreadableRules starts with a rule of another program that makes
// iptables-save omit a table. Existing Services continue to work, state is repaired,
// nothing is removed, and the log names the cause.
func TestBehaviourUnreadableRules(t *testing.T) {
	node, flags := loneNode(t)
	flags = append(flags, "--ipvs-sync-period", "1s")
	if code, output := node.RunProxy(append(flags, "--once")...); code != 0 {
		t.Fatalf("kube-ipvs --once ended with %d:\n%s", code, output)
	}
	// While the table cannot be read, kube-ipvs assumes that INPUT may drop packets and
	// adds its accepting rules. A process that keeps running also masquerades the node's
	// packets to shared VIPs on lo (plan.Demands).
	differs := regexp.MustCompile(`(?m)^-A (INPUT .*-j KUBE-IPVS-ACCEPT|KUBE-POSTROUTING -o lo .*-j MASQUERADE --random-fully)\n`)
	whole := differs.ReplaceAllString(kernelState(node), "")
	foreign := func(op string) {
		for _, family := range []string{"ip", "ip6"} {
			node.Exec("sh", "-c", fmt.Sprintf(map[string]string{
				"add":    "nft add rule %[1]s filter INPUT ct mark 77 counter accept",
				"delete": "nft delete rule %[1]s filter INPUT handle $(nft -a list chain %[1]s filter INPUT | sed -n 's/.*ct mark 0x0000004d.*# handle //p')",
			}[op], family))
		}
	}
	foreign("add")
	if out := node.Exec("sh", "-c", "iptables-save 2>&1 || true"); !strings.Contains(out, "`filter' is incompatible") {
		t.Fatalf("iptables-save can list it:\n%s", out)
	}
	node.Exec("sh", "-c", "iptables -w -t filter -F KUBE-FORWARD; iptables -w -t nat -F KUBE-SERVICES; ipvsadm -C")
	p := node.StartProxy(func(*lab.Process) error { return hasCompared(node, 2) }, flags...)
	const said = "table filter of IPv4 has a rule, written by nft, that iptables cannot read"
	if n := strings.Count(p.Log(), said); n != 1 {
		t.Errorf("%q is said %d times in\n%s", said, n, p.Log())
	}
	p.Stop()
	foreign("delete")
	if now := differs.ReplaceAllString(kernelState(node), ""); now != whole {
		t.Errorf("there was\n%s\nand is\n%s", whole, now)
	}
	foreign("add")
	if code, output := node.RunProxy("--cleanup"); code != 0 {
		t.Errorf("kube-ipvs --cleanup ended with %d:\n%s", code, output)
	}
	foreign("delete")
	if left := kernelState(node); strings.Contains(left, "KUBE-") {
		t.Errorf("left:\n%s", left)
	}
}

// TestBehaviourInsistence runs a program that inserts its rule before ours in mangle PREROUTING again and
// again, as Calico's Felix does. The jump there makes VIPs local that are claimed by port, so it is
// moved. After a few moves it stays behind. This is logged once.
func TestBehaviourInsistence(t *testing.T) {
	node, flags := loneNode(t)
	flags = append(flags, "--ipvs-sync-period", "1s", "--claim-load-balancers", "port", "--claim-external-ips", "port")
	p := node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, flags...)
	const rule = "PREROUTING -s 192.0.2.0/24 -m comment --comment insists -j ACCEPT"
	moves := 0
	const said = "another program keeps inserting its rules before ours in IPv4 mangle/PREROUTING"
	list := func() string { return node.Exec("iptables", "-w", "-t", "mangle", "-S", "PREROUTING") }
	insert := func() {
		node.Exec("sh", "-c", "iptables -w -t mangle -D "+rule+" 2>/dev/null; iptables -w -t mangle -I "+rule)
	}
	lab.Eventually(t, 2*syncLimit, "kube-ipvs gives way", func() error {
		if !strings.HasPrefix(list(), "-P PREROUTING ACCEPT\n-A PREROUTING -s 192.0.2.0/24 ") {
			moves++
			insert()
		}
		if !strings.Contains(p.Log(), said) {
			return fmt.Errorf("moved %d times", moves)
		}
		return nil
	})
	if moves > 5 {
		t.Errorf("moved %d times", moves)
	}
	if rules := list(); strings.Count(rules, "-j KUBE-IPVS-CLAIM") != 1 {
		t.Errorf("want one jump:\n%s", rules)
	}
	insert()
	staysQuiet(t, node, p)
	if n := strings.Count(p.Log(), said); n != 1 {
		t.Errorf("%q is said %d times", said, n)
	}
}

// TestBehaviourInsertedRules inserts rules before the jumps that kube-proxy has too. As under kube-proxy,
// they stay first, also when kube-ipvs starts again.
func TestBehaviourInsertedRules(t *testing.T) {
	node, flags := loneNode(t)
	flags = append(flags, "--ipvs-sync-period", "1s")
	p := node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, flags...)
	inserted := [][3]string{
		{"filter", "FORWARD", "-s 192.0.2.1/32 -j DROP"},
		{"filter", "INPUT", "-s 192.0.2.1/32 -j DROP"},
		{"nat", "PREROUTING", "-d 192.0.2.2/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.3:8080"},
		{"nat", "OUTPUT", "-d 192.0.2.2/32 -j ACCEPT"},
		{"nat", "POSTROUTING", "-m mark --mark 0x4000/0x4000 -j SNAT --to-source 192.168.50.11"},
	}
	for _, r := range inserted {
		node.Exec("sh", "-c", fmt.Sprintf("iptables -w -t %s -I %s %s", r[0], r[1], r[2]))
	}
	stay := func() {
		t.Helper()
		for _, r := range inserted {
			rules := node.Exec("iptables", "-w", "-t", r[0], "-S", r[1])
			first := fmt.Sprintf("-P %s ACCEPT\n-A %s %s\n", r[1], r[1], r[2])
			if !strings.HasPrefix(rules, first) || !strings.Contains(rules, "-j KUBE-") {
				t.Errorf("table %s:\n%s", r[0], rules)
			}
		}
	}
	const comparisons = "kube_ipvs_compare_duration_seconds_count"
	before := counted(t, node, comparisons)
	lab.Eventually(t, syncLimit, "jumps are written because INPUT may drop packets", func() error {
		rules, n := node.Exec("iptables", "-w", "-S", "INPUT"), counted(t, node, comparisons)-before
		if n < 2 || !strings.Contains(rules, "-j KUBE-IPVS-ACCEPT") {
			return fmt.Errorf("after %v comparisons:\n%s", n, rules)
		}
		return nil
	})
	staysQuiet(t, node, p)
	stay()
	p.Terminate()
	p = node.StartProxy(func(*lab.Process) error { return hasPassed(node) }, flags...)
	staysQuiet(t, node, p)
	stay()
}
