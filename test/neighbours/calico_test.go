//go:build e2e

package neighbours

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// calicoPod is a workload endpoint: the node's end of its link, and the mark that
// Felix gives it, under 0xfff00000.
type calicoPod struct{ name, link, mark string }

// policy reports whether the policy applies to the pod.
func (p calicoPod) policy() bool { return strings.HasPrefix(p.name, here) }

// calico is a configuration of Felix.
type calico struct {
	prefix string // of the workloads' links
	pods   []calicoPod
	denied [2]string // the addresses of the pod that the policy of the endpoint "here" denies
	// other is Felix beside a CNI that is not Calico's: no pools are masqueraded, and chains of
	// table mangle return what they allow (IptablesMangleAllowAction).
	other bool
}

var ownCalico = calico{
	prefix: "cali", denied: [2]string{"10.244.1.4", "fd00:244:1::4"},
	pods: []calicoPod{
		{"pod", "calipod", "0x21200000"},
		{here, "calihere", "0x31300000"},
		{"denied", "calidenied", "0x41400000"},
	},
}

const calicoWhat = "Rules from the source of Felix (felix/rules/static.go, dispatch.go, endpoints.go, v3.31), as its %s data plane writes them with " +
	"IPVS support: `cali-` chains in raw, mangle, nat and filter, endpoint marks under 0xfff00000, `cali-forward-check`, workload policy by `cali-tw-` " +
	"and `cali-fw-` chains. A policy denies the pod “denied” at the endpoint “here”. %s"

// TestNeighbourCalico tests Calico's Felix, which inserts its rules first or appends
// them.
func TestNeighbourCalico(t *testing.T) {
	modes := []struct{ name, title, plane, rewrites string }{
		{"insert", "iptables, insert mode", "iptables", "Its jumps come first in each chain; a loop looks every second and puts them there again, as Felix does every 180 s."},
		{"append", "iptables, append mode", "iptables", "Its jumps come last in each chain."},
		{"nftables", "nftables", "nftables", "They are in a table `calico` for each family, with base chains of its own (felix/nftables/table.go); " +
			"Felix renders both data planes from the same rules, and so they are translated from those of iptables."},
	}
	for i, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			if mode.name != "insert" {
				onlyLong(t)
			}
			started := func(*side) {}
			if mode.name == "insert" {
				started = giveWay
			}
			setup{
				key: "calico-" + mode.name, plan: ordinaryPlan,
				Result: Result{Order: 20 + i, Title: "Calico (Felix), " + mode.title,
					What:    fmt.Sprintf(calicoWhat, mode.plane, mode.rewrites),
					Missing: "Felix itself, whose module is not served (its restart is a rewriting of all its chains); host endpoints; overlays; the eBPF data plane."},
				build: func(s *side) { buildCalico(s, mode.name) }, restart: func(s *side) { ownCalico.write(s, mode.name) },
				started: started,
				checks:  []check{policyHolds(0), policyHolds(1)},
			}.run(t)
		})
	}
}

func buildCalico(s *side, mode string) {
	links := map[string]string{}
	for _, p := range ownCalico.pods {
		links[p.name] = p.link
	}
	pod := func(name string, addresses ...string) *lab.Pod { return s.Node.Pod(name, links[name], addresses...) }
	s.addPods(s.plan, pod)
	denied := pod("denied", ownCalico.denied[:]...)
	s.extra = append(s.extra, &client{name: "denied", hosts: [2]*lab.Namespace{denied.Namespace, denied.Namespace}, inside: true})
	ownCalico.start(s, mode)
}

// start writes everything, and keeps the jumps first in insert mode.
func (c calico) start(s *side, mode string) {
	c.write(s, mode)
	switch mode {
	case "insert":
		s.Node.Start("sh", "-c", calicoLoop)
	case "append":
		s.commands(calicoJumps("-A"))
	}
}

// write writes all chains as Felix does when it starts: one transaction for each
// table replaces their content. Existing jumps stay.
func (c calico) write(s *side, mode string) {
	s.t.Helper()
	for family, restore := range []string{"iptables-restore", "ip6tables-restore"} {
		if mode == "nftables" {
			s.Node.Feed(c.nft(s.plan, family), "nft", "-f", "-")
			continue
		}
		s.Node.Feed(c.sets(s.plan, family), "ipset", "restore", "-exist")
		s.Node.Feed(c.rules(family), restore, "-w", "--noflush")
	}
}

// calicoHooks are the chains that Felix jumps from, by table.
const calicoHooks = "raw:PREROUTING raw:OUTPUT mangle:PREROUTING mangle:POSTROUTING nat:PREROUTING nat:POSTROUTING nat:OUTPUT filter:INPUT filter:FORWARD filter:OUTPUT"

func calicoJumps(how string) string {
	return `for i in iptables ip6tables; do for hook in ` + calicoHooks + `; do table=${hook%:*} chain=${hook#*:}
$i -w -t $table ` + how + ` $chain -m comment --comment cali:jump -j cali-$chain
done; done
for i in iptables ip6tables; do
$i -w -t filter -A FORWARD -m comment --comment cali:accepted -m mark --mark 0x10000/0x10000 -j ACCEPT
$i -w -t filter -A FORWARD -m comment --comment cali:mark -j MARK --set-xmark 0x10000/0x10000
done`
}

// calicoLoop moves jumps to the first place.
var calicoLoop = calicoJumps("-I") + `
while sleep 1; do for i in iptables ip6tables; do for hook in ` + calicoHooks + `; do table=${hook%:*} chain=${hook#*:}
case $($i -w -t $table -S $chain 1) in *cali:jump*) ;; *)
$i -w -t $table -D $chain -m comment --comment cali:jump -j cali-$chain; $i -w -t $table -I $chain -m comment --comment cali:jump -j cali-$chain;; esac
done; done; done`

// giveWay waits until kube-ipvs stays behind Calico's jumps in mangle PREROUTING, which accept
// packets of established connections. That is the state that lasts.
func giveWay(s *side) {
	if s.program != kubeIPVS {
		return
	}
	// The jumps of mangle PREROUTING are written once a packet needs them. This is what the
	// rules do with such a packet.
	s.Node.Exec("ipset", "add", "-exist", "KUBE-IPVS-DEMAND-IPS", "192.0.2.1")
	s.Node.Exec("ipset", "add", "-exist", "KUBE-6-IPVS-DEMAND-IPS", "2001:db8::1")
	lab.Eventually(s.t, 3*time.Minute, "kube-ipvs leaves the head of mangle PREROUTING to Calico", func() error {
		for _, family := range ip.Families {
			if chain := family.String() + " mangle/PREROUTING"; !strings.Contains(s.process.Log(), "before ours in "+chain) {
				return fmt.Errorf("not in %s yet", chain)
			}
		}
		return nil
	})
}

// sets are the node's own addresses and the pools.
func (c calico) sets(p plan, family int) string {
	version, inet := []string{"4", "6"}[family], []string{"inet", "inet6"}[family]
	var text strings.Builder
	fmt.Fprintf(&text, "create cali%s0this-host hash:ip family %s\n", version, inet)
	own := [][]string{{p.nodeIPs()[0], "127.0.0.1"}, {p.nodeIPs()[1], "::1"}}[family]
	for _, ip := range own {
		fmt.Fprintf(&text, "add cali%s0this-host %s\n", version, ip)
	}
	if c.other {
		return text.String()
	}
	for _, name := range []string{"all-ipam-pools", "masq-ipam-pools"} {
		fmt.Fprintf(&text, "create cali%s0%s hash:net family %s\nadd cali%s0%s %s\n",
			version, name, inet, version, name, strings.Split(p.clusterCIDR, ",")[family])
	}
	return text.String()
}

// rules are Felix's chains, without the jumps to them.
func (c calico) rules(family int) string {
	version := []string{"4", "6"}[family]
	var text strings.Builder
	line := func(format string, args ...any) {
		fmt.Fprintf(&text, strings.ReplaceAll(format, "cali+", c.prefix+"+")+"\n", args...)
	}
	allow := "ACCEPT"
	if c.other {
		allow = "RETURN"
	}
	line("*raw\n:cali-PREROUTING - -\n:cali-OUTPUT - -\n:cali-from-host-endpoint - -\n:cali-to-host-endpoint - -\n:cali-rpf-skip - -")
	line("-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000")
	line("-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x40000/0x40000")
	line("-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -j cali-rpf-skip")
	line("-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP")
	line("-A cali-PREROUTING -m mark --mark 0x0/0x40000 -j cali-from-host-endpoint")
	line("-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT")
	line("-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000\n-A cali-OUTPUT -j cali-to-host-endpoint")
	line("-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT\nCOMMIT")

	line("*mangle\n:cali-PREROUTING - -\n:cali-POSTROUTING - -\n:cali-from-host-endpoint - -\n:cali-to-host-endpoint - -")
	line("-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j %s", allow)
	line("-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j %s", allow)
	line("-A cali-PREROUTING -j cali-from-host-endpoint\n-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j %s", allow)
	line("-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN\n-A cali-POSTROUTING -j MARK --set-xmark 0x0/0xf0000")
	line("-A cali-POSTROUTING -m conntrack --ctstate DNAT -j cali-to-host-endpoint\n-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN\nCOMMIT")

	line("*nat\n:cali-PREROUTING - -\n:cali-POSTROUTING - -\n:cali-OUTPUT - -\n:cali-fip-dnat - -\n:cali-fip-snat - -\n:cali-nat-outgoing - -")
	line("-A cali-PREROUTING -j cali-fip-dnat\n-A cali-OUTPUT -j cali-fip-dnat")
	line("-A cali-POSTROUTING -j cali-fip-snat\n-A cali-POSTROUTING -j cali-nat-outgoing")
	if !c.other {
		line("-A cali-nat-outgoing -m set --match-set cali%[1]s0masq-ipam-pools src -m set ! --match-set cali%[1]s0all-ipam-pools dst -j MASQUERADE --random-fully", version)
	}
	line("COMMIT")

	line("*filter")
	for _, chain := range strings.Fields("INPUT FORWARD OUTPUT forward-check forward-endpoint-mark set-endpoint-mark from-endpoint-mark wl-to-host " +
		"from-wl-dispatch to-wl-dispatch from-host-endpoint to-host-endpoint from-hep-forward to-hep-forward cidr-block pi-deny") {
		line(":cali-%s - -", chain)
	}
	for _, p := range c.pods {
		line(":cali-tw-%[1]s - -\n:cali-fw-%[1]s - -\n:cali-sm-%[1]s - -", p.link)
	}
	line("-A cali-INPUT -j MARK --set-xmark 0x0/0xfff00000\n-A cali-INPUT -j cali-forward-check\n-A cali-INPUT -m mark ! --mark 0x0/0xfff00000 -j RETURN")
	line("-A cali-INPUT -i cali+ -g cali-wl-to-host\n-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT")
	line("-A cali-INPUT -j MARK --set-xmark 0x0/0xf0000\n-A cali-INPUT -j cali-from-host-endpoint\n-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT")
	line("-A cali-forward-check -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN")
	for _, protocol := range []string{"tcp", "udp"} {
		line("-A cali-forward-check -p %s -m multiport --dports 30000:32767 -m set --match-set cali%s0this-host dst -g cali-set-endpoint-mark", protocol, version)
	}
	line("-A cali-forward-check -m set ! --match-set cali%s0this-host dst -j cali-set-endpoint-mark", version)
	for _, p := range c.pods {
		line("-A cali-set-endpoint-mark -i %[1]s -g cali-sm-%[1]s\n-A cali-sm-%[1]s -j MARK --set-xmark %[2]s/0xfff00000", p.link, p.mark)
		line("-A cali-from-endpoint-mark -m mark --mark %s/0xfff00000 -g cali-fw-%s", p.mark, p.link)
		line("-A cali-from-wl-dispatch -i %[1]s -g cali-fw-%[1]s\n-A cali-to-wl-dispatch -o %[1]s -g cali-tw-%[1]s", p.link)
		for _, direction := range []string{"tw", "fw"} {
			line("-A cali-%s-%s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A cali-%[1]s-%[2]s -m conntrack --ctstate INVALID -j DROP", direction, p.link)
			line("-A cali-%s-%s -j MARK --set-xmark 0x0/0x30000", direction, p.link)
			if direction == "tw" && p.policy() {
				line("-A cali-tw-%s -j cali-pi-deny", p.link)
			} else {
				line("-A cali-%s-%s -j MARK --set-xmark 0x10000/0x10000", direction, p.link)
			}
			line("-A cali-%s-%s -m mark --mark 0x10000/0x10000 -j RETURN\n-A cali-%[1]s-%[2]s -j DROP", direction, p.link)
		}
	}
	line("-A cali-pi-deny -s %s -j DROP\n-A cali-pi-deny -j MARK --set-xmark 0x10000/0x10000", c.denied[family])
	line("-A cali-set-endpoint-mark -i cali+ -j DROP\n-A cali-set-endpoint-mark -j MARK --set-xmark 0x100000/0xfff00000")
	line("-A cali-from-endpoint-mark -j DROP\n-A cali-from-wl-dispatch -j DROP\n-A cali-to-wl-dispatch -j DROP")
	line("-A cali-forward-endpoint-mark -m mark ! --mark 0x100000/0xfff00000 -j cali-from-endpoint-mark")
	line("-A cali-forward-endpoint-mark -o cali+ -j cali-to-wl-dispatch\n-A cali-forward-endpoint-mark -j cali-to-hep-forward")
	line("-A cali-forward-endpoint-mark -j MARK --set-xmark 0x0/0xfff00000\n-A cali-forward-endpoint-mark -m mark --mark 0x10000/0x10000 -j ACCEPT")
	if family == 1 {
		for _, kind := range []int{130, 131, 132, 133, 135, 136} {
			line("-A cali-wl-to-host -p ipv6-icmp -m icmp6 --icmpv6-type %d -j ACCEPT", kind)
		}
	}
	line("-A cali-wl-to-host -j cali-from-wl-dispatch\n-A cali-wl-to-host -j ACCEPT")
	line("-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000\n-A cali-FORWARD -m mark --mark 0x0/0x10000 -j cali-from-hep-forward")
	line("-A cali-FORWARD -i cali+ -j cali-from-wl-dispatch\n-A cali-FORWARD -o cali+ -j cali-to-wl-dispatch")
	line("-A cali-FORWARD -j cali-to-hep-forward\n-A cali-FORWARD -j cali-cidr-block")
	line("-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT\n-A cali-OUTPUT -m mark ! --mark 0x0/0xfff00000 -g cali-forward-endpoint-mark")
	line("-A cali-OUTPUT -o cali+ -j RETURN\n-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000")
	line("-A cali-OUTPUT -m conntrack ! --ctstate DNAT -j cali-to-host-endpoint\n-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT\nCOMMIT")
	return text.String()
}

// TestNeighbourCalicoPorts tests VIPs claimed by port beside Felix in insert mode, whose rules
// accept packets of established connections before ours mark them.
func TestNeighbourCalicoPorts(t *testing.T) {
	onlyLong(t)
	p := ordinaryPlan
	p.flags = []string{"--claim-load-balancers", "port", "--claim-external-ips", "port"}
	setup{
		key: "calico-insert-ports", plan: p,
		Result: Result{Order: 29, Title: "Calico (Felix), iptables, insert mode, claims by port",
			What: fmt.Sprintf(calicoWhat, "iptables", "As in insert mode. kube-ipvs runs with --claim-load-balancers port and --claim-external-ips port.")},
		build: func(s *side) { buildCalico(s, "insert") }, restart: func(s *side) { ownCalico.write(s, "insert") },
		started: giveWay,
	}.run(t)
}

// policyHolds connects to ClusterIPs as the denied pod: the endpoint "here" must not
// answer.
func policyHolds(family int) check {
	return check{name: fmt.Sprintf("a policy denies a pod at “here”, which it asks by ClusterIP, IPv%d", 4+2*family),
		good: []string{"denied there, answered elsewhere"}, ask: func(s *side) string {
			by := map[string]int{}
			for range 6 {
				answer := s.client("denied").hosts[family].DialFrom(s.ports.next(), briefly, lab.TCP, at(clusterIPs(clusterService)[family], servicePort(clusterService)))
				by[answer.Server]++
			}
			switch {
			case by[here] > 0:
				return "answered by here"
			case by[there] == 0:
				return "answered by nobody"
			}
			return "denied there, answered elsewhere"
		}}
}
