//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

var comparisons = regexp.MustCompile(`(?m)^kube_ipvs_compare_duration_seconds_count (\d+)`)

// hasCompared returns an error until a proxy has completed a number of comparisons.
func hasCompared(node *lab.Node, times int) error {
	out, err := node.TryExec("curl", "-s", "--max-time", "5", "http://127.0.0.1:10249/metrics")
	if err != nil {
		return err
	}
	found := comparisons.FindStringSubmatch(out)
	if found == nil {
		return errors.New("no comparison is counted")
	}
	if n, err := strconv.Atoi(found[1]); err != nil || n < times {
		return fmt.Errorf("%d comparisons, %v", n, err)
	}
	return nil
}

// TestENIWarnings lets another program use our bits and our priority, and sets parameters
// that reply routing cannot work with. Each conflict is reported once, however often it
// is detected. Bit 0x40 is no conflict: no value of reply routing has it while that rule exists.
func TestENIWarnings(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{})
	programENI(t, c) // sets all parameters but the one below
	for _, link := range []string{"all", "eth0", "eth1"} {
		c.Node.Sysctl("net.ipv4.conf."+link+".src_valid_mark", "0")
	}
	c.Node.ReadOnlySysctls()
	c.Node.Rule("pref 300 fwmark 0x40/0x40 lookup 7", "pref 480 from 10.9.9.9 lookup 7", "pref 301 fwmark 0x80/0x80 lookup 7")
	c.Node.Exec("iptables", "-w", "-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "CONNMARK", "--set-xmark", "0x20/0x20")
	c.Node.Exec("iptables", "-w", "-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "CONNMARK", "--set-xmark", "0x80/0x80")
	p := c.Node.StartProxy(func(*lab.Process) error { return hasCompared(c.Node, 3) },
		"--manifests", eniManifests(t, c), "--hostname-override", "node", "--ipvs-sync-period", "1s")
	const head = "Node configuration conflicts with Service traffic"
	log := p.Log()
	if n := strings.Count(log, head); n != 4 {
		t.Errorf("said %d things, want 4", n)
	}
	for _, want := range []string{
		`IPv4 rule 480: from 10.9.9.9/32 lookup 7`,
		`the rule \"-i eth0 -j CONNMARK --set-xmark 0x20/0x20\" in IPv4 mangle/PREROUTING`,
		`the reverse-path check of eth0 ignores marks and drops packets under reply routing: net/ipv4/conf/eth0/rp_filter is 1, and net/ipv4/conf/all/src_valid_mark is 0`,
		`the reverse-path check of eth1 ignores marks and drops packets under reply routing: net/ipv4/conf/eth1/rp_filter is 1, and net/ipv4/conf/all/src_valid_mark is 0`,
	} {
		if n := strings.Count(log, want); n != 1 {
			t.Errorf("%q is said %d times", want, n)
		}
	}
	if t.Failed() {
		t.Log(log)
	}
	// The warning is correct.
	if answer := c.Pod.DialWithin(time.Second, lab.TCP, c.VIP); answer.Outcome() != lab.TimedOut {
		t.Errorf("the pod, whose replies are dropped: %s", answer)
	}
}

// TestENINativeMark has a program that marks a pod's packets in nftables, as traffic shaping does,
// with the first value of --reply-mark. Packets that are for no Service keep their path, and so do
// those of Services.
func TestENINativeMark(t *testing.T) {
	c := lab.NewENICluster(t, lab.ENIOptions{CheckSources: true})
	endpoint := netip.MustParseAddrPort(c.Endpoints[0])
	c.Node.Feed(fmt.Sprintf("table inet shaping {\nchain before {\ntype filter hook prerouting priority -140\nip daddr %s meta mark set 0x20\n}\n}\n", endpoint.Addr()), "nft", "-f", "-")
	programENI(t, c)
	if answer := c.Pod.Dial(lab.TCP, endpoint.String()); answer.Err != nil {
		t.Errorf("the pod to an endpoint, without a Service: %s\n%s", answer, c.Node.Exec("ip", "rule"))
	}
	if n := c.Eth0.Spoofed() + c.Eth1.Spoofed(); n != 0 {
		t.Errorf("the fabric dropped %d packets for their source", n)
	}
	checkENI(t, c, eniPath{"eth0", c.NodeAddress})
}

// TestScenario3WithoutBridgeNetfilter is scenario 3 with a proxy that cannot enable
// br_netfilter: Service traffic between pods of one bridge is masqueraded, so that the
// replies return to the node.
func TestScenario3WithoutBridgeNetfilter(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node := c.Nodes[0]
	client, server := node.AddPod("caller"), node.AddPod("server")
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		server.Serve("server", protocol, 53)
	}
	svc := newService("dns", corev1.ProtocolUDP, 53, "10.32.0.10", "fd00:10:32::10")
	svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 53})
	dir := writeManifests(t, svc,
		newSlice(svc, "IPv4", 53, endpoint{address: server.Addresses[0].String(), node: node.Name}),
		newSlice(svc, "IPv6", 53, endpoint{address: server.Addresses[1].String(), node: node.Name}))
	args := []string{"--manifests", dir, "--hostname-override", node.Name, "--cluster-cidr", podCIDRs}
	runOnce(t, node.Node, dir, "--cluster-cidr", podCIDRs) // sets all parameters but those below
	for _, name := range []string{"net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"} {
		node.Sysctl(name, "0")
	}
	if answer := client.DialWithin(time.Second, lab.TCP, "10.32.0.10:53"); answer.Outcome() != lab.TimedOut {
		t.Errorf("neither shown nor masqueraded: %s, want a time-out", answer)
	}

	node.ReadOnlySysctls()
	p := node.StartProxy(func(*lab.Process) error { return hasCompared(node.Node, 3) }, append(args, "--ipvs-sync-period", "1s")...)
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		for _, vip := range []string{"10.32.0.10:53", "[fd00:10:32::10]:53"} {
			answer := client.Dial(protocol, vip)
			if answer.Server != "server" || answer.SeenSource.Addr() == client.Addresses[0] || answer.SeenSource.Addr() == client.Addresses[1] {
				t.Errorf("%s to %s: %s, want it masqueraded", protocol, vip, answer)
			}
		}
	}
	if n := strings.Count(p.Log(), "Service traffic between pods of cni0 is masqueraded"); n != 1 {
		t.Errorf("logged %d times, want once:\n%s", n, p.Log())
	}
	// Another program passes switched packets of one family to the rules. They keep their source.
	node.Sysctl("net.bridge.bridge-nf-call-iptables", "1")
	for i, family := range []string{"IPv4", "IPv6"} {
		if answer := client.Dial(lab.TCP, at(server.Addresses[i].String(), 53)); answer.Server != "server" || answer.SeenSource.Addr() != client.Addresses[i] {
			t.Errorf("from pod to pod, %s: %s, want the source %s", family, answer, client.Addresses[i])
		}
	}
}

// TestScenario3BesideAFirewall is scenario 3 on a node whose firewall drops what it forwards. The
// rules must not see packets between pods of a bridge, which kube-proxy does not show them either. So
// Service traffic between these pods is masqueraded.
func TestScenario3BesideAFirewall(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node := c.Nodes[0]
	client, server := node.AddPod("caller"), node.AddPod("server")
	server.Serve("server", lab.TCP, 53)
	svc := newService("dns", corev1.ProtocolTCP, 53, "10.32.0.10")
	dir := writeManifests(t, svc, newSlice(svc, "IPv4", 53, endpoint{address: server.Addresses[0].String(), node: node.Name}))
	const bridged = "net.bridge.bridge-nf-call-iptables"
	for name, commands := range map[string]struct{ drop, undo string }{
		"policy":   {"iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT"},
		"rule":     {"iptables -A FORWARD -i cni0 -j DROP", "iptables -D FORWARD -i cni0 -j DROP"},
		"nftables": {"nft 'add table inet wall; add chain inet wall forward { type filter hook forward priority 10; policy drop; }'", "nft delete table inet wall"},
	} {
		t.Run(name, func(t *testing.T) {
			node.Sysctl(bridged, "0")
			node.Exec("sh", "-c", commands.drop)
			defer node.Exec("sh", "-c", commands.undo)
			p := node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) },
				"--manifests", dir, "--hostname-override", node.Name, "--cluster-cidr", podCIDRs)
			defer p.Stop()
			if got := node.ReadSysctl(bridged); got != "0" {
				t.Errorf("%s is %s, want 0", bridged, got)
			}
			if answer := client.DialWithin(lostAfter, lab.TCP, at(server.Addresses[0].String(), 53)); answer.Server != "server" {
				t.Errorf("from pod to pod: %s", answer)
			}
			if name != "policy" {
				return // the firewall drops the replies too, which the node forwards
			}
			if answer := client.DialWithin(lostAfter, lab.TCP, "10.32.0.10:53"); answer.Server != "server" || answer.SeenSource.Addr() == client.Addresses[0] {
				t.Errorf("%s, want it masqueraded", answer)
			}
		})
	}
}
