//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// Reachability issues of users that kube-proxy's IPVS mode has not fixed.
// docs/reports/wants.md lists them.

// denyByPolicy sets the policies of INPUT and FORWARD to DROP. Rules accept only what
// every such node needs: its own network, neighbor discovery and, as a CNI writes,
// traffic from and to its pods.
func denyByPolicy(node *lab.BridgeNode) {
	for i, program := range []string{"iptables", "ip6tables"} {
		node.Exec(program, "-w", "-A", "INPUT", "-i", "lo", "-j", "ACCEPT")
		if program == "ip6tables" {
			// Bridged packets pass FORWARD.
			node.Exec(program, "-w", "-A", "INPUT", "-p", "icmpv6", "-j", "ACCEPT")
			node.Exec(program, "-w", "-A", "FORWARD", "-p", "icmpv6", "-j", "ACCEPT")
		}
		for _, direction := range []string{"-s", "-d"} {
			node.Exec(program, "-w", "-A", "FORWARD", direction, node.PodSubnets()[i], "-j", "ACCEPT")
		}
		for _, chain := range []string{"INPUT", "FORWARD"} {
			node.Exec(program, "-w", "-P", chain, "DROP")
		}
	}
}

// TestIssue98465PolicyOfDrop sets the policies of INPUT and FORWARD to DROP. Every path
// to a Service works, also its health check, and nothing else is allowed. (Also
// kubernetes#132689.) Then node 1 changes its policy to ACCEPT and back while the proxy
// runs. At last the policy decides, as under kube-proxy.
func TestIssue98465PolicyOfDrop(t *testing.T) {
	c := newOfflineCluster(t)
	node1, node3 := c.Nodes[0], c.Nodes[2]
	denyByPolicy(node1)
	denyByPolicy(node3)
	node1.Serve("host", lab.TCP, 9000)
	kept := newLoadBalancer(newService("kept", corev1.ProtocolTCP, 80, clusterIPs(2)[0]), balancerIPs(2)[0])
	kept.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	kept.Spec.HealthCheckNodePort = 30200
	objects := append(withSlices(newExposed("web", 1), ready(c.web1), ready(c.web2)), kept,
		newSlice(kept, "IPv4", webPort, endpoint{address: c.web1.Addresses[0].String(), node: node1.Name}))
	hosted := newService("hosted", corev1.ProtocolTCP, 80, clusterIPs(3)[0])
	hosted.Spec.Type, hosted.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30003
	objects = append(objects, hosted, newSlice(hosted, "IPv4", 9000, endpoint{address: node1.IPv4.String(), node: node1.Name}))
	c.program(t, []*lab.BridgeNode{node3}, objects)
	proxy := node1.StartProxy(func(*lab.Process) error { return hasPassed(node1.Node) },
		"--manifests", writeManifests(t, objects...), "--hostname-override", node1.Name, "--cluster-cidr", podCIDRs)

	c.checkEveryWay(t, 1)
	checkSources(t, "externalTrafficPolicy Local", c.Client, lab.TCP, at(balancerIPs(2)[0], 80), map[string]string{"web1": "198.51.100.9"})
	if out, err := c.Client.TryExec("curl", "-sS", "--max-time", "10", fmt.Sprintf("http://%s:30200/", node1.IPv4)); err != nil {
		t.Errorf("the health check node port: %v\n%s", err, out)
	}
	var nobody sync.WaitGroup
	for _, closed := range []struct {
		from    *lab.Namespace
		address string
	}{
		{c.Client, at(node1.IPv4.String(), 9000)},
		{c.Client, at(node1.IPv6.String(), 9000)},
		{c.caller1.Namespace, at(node1.IPv4.String(), 9000)},
	} {
		nobody.Go(func() { checkNoAnswer(t, closed.from.Name+" to "+closed.address, closed.from, lab.TCP, closed.address) })
	}
	nobody.Wait()
	c.checkPolicyFollowed(t, map[string]string{
		at(clusterIPs(3)[0], 80): "host", at(node1.IPv4.String(), 30003): "host", at(balancerIPs(2)[0], 80): "web1",
	})
	proxy.Stop()
	c.program(t, []*lab.BridgeNode{node1}, objects, "--accept-service-traffic=false")
	checkNoAnswer(t, "--accept-service-traffic=false", c.Client, lab.TCP, at(node1.IPv4.String(), 30003))
	node1.Exec("iptables", "-w", "-P", "INPUT", "ACCEPT")
	if answer := c.Client.Dial(lab.TCP, at(node1.IPv4.String(), 30003)); answer.Server != "host" {
		t.Errorf("the policy is ACCEPT: %s", answer)
	}
}

// TestRepliesAreRoutedOnce adds state that may route replies by their source while the
// proxy runs. From then on, and after the proxy has ended, replies are routed a second
// time. Services answer in every step.
func TestRepliesAreRoutedOnce(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	s := newService("web", corev1.ProtocolTCP, 80, clusterIPs(1)[0])
	s = newLoadBalancer(s, balancerIPs(1)[0])
	s.Spec.Ports[0].NodePort = 30001
	proxy := node1.StartProxy(func(*lab.Process) error { return hasPassed(node1.Node) },
		"--manifests", writeManifests(t, withSlices(s, ready(c.web1), ready(c.web2))...), "--hostname-override", node1.Name, "--cluster-cidr", podCIDRs)
	for _, step := range []struct{ what, command, want string }{
		{"no policy routing", "true", "0"},
		{"a policy rule", "ip rule add pref 1000 from 192.0.2.1 lookup 100", "1"},
		{"the rule is deleted", "ip rule del pref 1000", "0"},
		{"an IPsec policy", "ip xfrm policy add src 192.0.2.1 dst 192.0.2.2 dir out", "1"},
		{"the policy is deleted", "ip xfrm policy flush", "0"},
		{"the proxy has ended", "", "1"},
	} {
		if step.command == "" {
			proxy.Terminate()
		} else {
			node1.Exec("sh", "-c", step.command)
		}
		lab.Eventually(t, syncLimit/2, step.what, func() error {
			if now := node1.ReadSysctl("net.ipv4.vs.snat_reroute"); now != step.want {
				return fmt.Errorf("snat_reroute is %s", now)
			}
			return nil
		})
		for address, from := range map[string]*lab.Namespace{at(clusterIPs(1)[0], 80): c.caller1.Namespace, at(node1.IPv4.String(), 30001): c.Client, at(balancerIPs(1)[0], 80): c.caller1.Namespace} {
			if answer := from.Dial(lab.TCP, address); answer.Server == "" {
				t.Errorf("%s, %s from %s: %s", step.what, address, from.Name, answer)
			}
		}
	}
}

// checkPolicyFollowed changes node 1's INPUT while its proxy runs. INPUT jumps to the
// accepting chain only while its policy or another program's rule may drop packets. The
// proxy must react to the kernel's notification, since no periodic read is due.
func (c *cluster) checkPolicyFollowed(t *testing.T, services map[string]string) {
	t.Helper()
	node1 := c.Nodes[0]
	const ours = "-j KUBE-IPVS-ACCEPT"
	for _, step := range []struct {
		what, command string
		jumps         bool
	}{
		{"the policy is ACCEPT, and rules decide", "iptables -w -P INPUT ACCEPT", true},
		{"nothing is dropped", "iptables -w -D INPUT -i lo -j ACCEPT", false},
		{"the policy is DROP", "iptables -w -P INPUT DROP", true},
		{"the policy is ACCEPT again", "iptables -w -P INPUT ACCEPT", false},
		{"a rule drops a port", "iptables -w -A INPUT -p tcp --dport 9001 -j DROP", true},
		{"the policy is DROP, too", "iptables -w -P INPUT DROP", true},
		{"another rule drops a port, behind ours", "iptables -w -A INPUT -p tcp --dport 9002 -j DROP", true},
	} {
		node1.Exec("sh", "-c", step.command)
		lab.Eventually(t, syncLimit/2, step.what, func() error {
			rules := node1.Exec("iptables", "-w", "-S", "INPUT")
			if strings.Contains(rules, ours) != step.jumps {
				return fmt.Errorf("want the jump: %t\n%s", step.jumps, rules)
			}
			lines := strings.Split(strings.TrimSpace(rules), "\n")
			if step.jumps && !strings.Contains(lines[len(lines)-1], ours) {
				return fmt.Errorf("the jump is not last\n%s", rules)
			}
			return nil
		})
		for address, server := range services {
			for _, from := range []*lab.Namespace{c.Client, c.caller1.Namespace} {
				if answer := from.Dial(lab.TCP, address); answer.Server != server {
					t.Errorf("%s, %s from %s: %s, want %s", step.what, address, from.Name, answer, server)
				}
			}
		}
	}
}

// TestIssue72236HostPorts starts processes that listen on all of the node's addresses. No
// VIP leads to them, whichever way it is claimed. The health check node port is the exception,
// because some load balancers probe it on their own address (kubernetes#117621): it is answered
// on each VIP that is local as a whole, as under kube-proxy.
func TestIssue72236HostPorts(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	const hostPort = 9000
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		node1.Serve("host", protocol, hostPort)
	}
	node1.Serve("health", lab.TCP, 30200)
	svc := newExposed("web", 1)
	svc.Spec.ExternalTrafficPolicy, svc.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 30200
	objects := withSlices(svc, ready(c.web1))
	c.Fabric.Route(externalIPs(1)[0]+" via "+node1.IPv4.String(), externalIPs(1)[1]+" via "+node1.IPv6.String())
	for _, claim := range []string{"port", "address", "route"} {
		c.program(t, []*lab.BridgeNode{node1}, objects, "--claim-load-balancers", claim, "--claim-external-ips", claim)
		var requests sync.WaitGroup
		for _, vips := range [][]string{clusterIPs(1), balancerIPs(1), externalIPs(1)} {
			for _, ip := range vips {
				for _, from := range []*lab.Namespace{c.Client, c.caller1.Namespace, node1.Namespace} {
					requests.Go(func() { checkOnlyService(t, claim, from, ip, hostPort) })
				}
			}
		}
		requests.Wait()
	}
}

// checkOnlyService connects to a VIP on its Service's port and on the host's ports.
func checkOnlyService(t *testing.T, claim string, from *lab.Namespace, ip string, hostPort uint16) {
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		if answer := from.Dial(protocol, at(ip, 80)); answer.Server != "web1" {
			t.Errorf("claimed by %s, %s %s from %s: %s", claim, protocol, ip, from.Name, answer)
		}
		whole := claim != "port" || slices.Contains(clusterIPs(1), ip)
		for port, server := range map[uint16]string{hostPort: "", 30200: map[bool]string{true: "health"}[whole && protocol == lab.TCP]} {
			if answer := from.DialWithin(refusalLimit, protocol, at(ip, port)); answer.Server != server || (answer.Err == nil) != (server != "") {
				t.Errorf("claimed by %s, %s %s from %s: %s, want server %q", claim, protocol, at(ip, port), from.Name, answer, server)
			}
		}
	}
}

// TestBehaviourPing (website#41002) tests that VIPs answer ping, or refuse it.
func TestBehaviourPing(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	objects := withSlices(newExposed("web", 1), ready(c.web1))
	for _, tc := range []struct {
		claim string
		ping  bool
	}{{"port", true}, {"address", true}, {"port", false}, {"address", false}} {
		c.program(t, []*lab.BridgeNode{node1}, objects,
			"--claim-load-balancers", tc.claim, "--claim-external-ips", tc.claim, fmt.Sprintf("--vip-ping=%t", tc.ping))
		var pings sync.WaitGroup
		for _, ip := range append(clusterIPs(1), balancerIPs(1)...) {
			pings.Go(func() {
				if _, err := c.Client.TryExec("ping", "-c", "1", "-W", "3", ip); err == nil != tc.ping {
					t.Errorf("claimed by %s: ping of %s: %v, want an answer: %t", tc.claim, ip, err, tc.ping)
				}
			})
		}
		pings.Wait()
		if _, err := c.Client.TryExec("ping", "-c", "1", "-W", "3", node1.IPv4.String()); err != nil {
			t.Errorf("ping of the node itself: %v", err)
		}
	}
}

// TestIssue56320Localhost connects to node ports on the node's loopback addresses, with
// endpoints in a pod on this node, on another node, and in the node's own network. No
// other host can connect there. (Also kubernetes#67730, #96879, #111840.)
func TestIssue56320Localhost(t *testing.T) {
	c := newOfflineCluster(t)
	node1 := c.Nodes[0]
	for _, protocol := range lab.Protocols {
		node1.Serve("host", protocol, webPort)
	}
	node1.ServeOn("own", lab.TCP, netip.MustParseAddrPort("127.0.0.1:9000"))
	host := &lab.Pod{Node: node1.Node, Addresses: []netip.Addr{node1.IPv4, node1.IPv6}}
	local := newExposed("local", 2)
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	objects := withSlices(newExposed("web", 1), ready(c.web1), ready(c.web2))
	objects = append(objects, withSlices(local, ready(c.web2))...)
	objects = append(objects, withSlices(newExposed("host", 3), ready(host))...)
	objects = append(objects, newExposed("empty", 4))
	c.program(t, []*lab.BridgeNode{node1}, objects)

	here, own := node1.Gateways(), []netip.Addr{node1.IPv4, node1.IPv6}
	for family, ip := range []string{"127.0.0.1", "::1"} {
		for _, protocol := range lab.Protocols {
			for port, want := range map[uint16]map[string]string{
				30001: {"web1": here[family].String(), "web2": own[family].String()},
				30002: {"web2": own[family].String()},
				30003: {"host": own[family].String()},
			} {
				checkSources(t, fmt.Sprintf("%s %s", protocol, at(ip, port)), node1.Namespace, protocol, at(ip, port), want)
			}
		}
		if answer := node1.Dial(lab.TCP, at(ip, 30004)); answer.Outcome() != lab.Refused {
			t.Errorf("%s, without an endpoint: %s, want it refused", at(ip, 30004), answer)
		}
	}
	// The node's own servers on these addresses still answer.
	if answer := node1.Dial(lab.TCP, "127.0.0.1:9000"); answer.Server != "own" || !answer.SeenSource.Addr().IsLoopback() {
		t.Errorf("a process on the loopback address: %s", answer)
	}
	checkHostPortKept(t, node1, at(c.web1.Addresses[0].String(), webPort))
	c.checkNeighbourKeptOut(t, node1, 30001, 9000)

	c.checkLocalhostOnDemand(t, node1, objects)
	c.checkClientPorts(t, node1, objects)

	c.program(t, []*lab.BridgeNode{node1}, objects, "--iptables-localhost-nodeports=false")
	if answer := node1.DialWithin(refusalLimit, lab.TCP, "127.0.0.1:30001"); answer.Err == nil {
		t.Errorf("turned off: %s", answer)
	}
	if out := node1.Exec("nft", "list", "tables"); strings.Contains(out, "kube-ipvs") {
		t.Errorf("turned off, there is\n%s", out)
	}
}

// checkLocalhostOnDemand runs the proxy, which writes the rules once a packet needs them. The
// first connection succeeds when its packet is sent again, whichever endpoint it has, and
// stays open.
func (c *cluster) checkLocalhostOnDemand(t *testing.T, node *lab.BridgeNode, objects []runtime.Object) {
	t.Helper()
	dir := writeManifests(t, objects...)
	for _, first := range []struct {
		port   uint16
		server string
	}{{30001, "web"}, {30002, "web2"}, {30003, "host"}} {
		if code, output := node.RunProxy("--cleanup"); code != 0 {
			t.Fatal(output)
		}
		proxy := node.StartProxy(func(*lab.Process) error { return hasPassed(node.Node) },
			"--manifests", dir, "--hostname-override", node.Name, "--cluster-cidr", podCIDRs)
		if out := node.Exec("nft", "list", "tables"); strings.Contains(out, "kube-ipvs") {
			t.Errorf("before any packet needs it, there is\n%s", out)
		}
		for i, ip := range []string{"127.0.0.1", "::1"} {
			connection, err := node.ConnectFrom(0, lostAfter, lab.TCP, at(ip, first.port))
			if err != nil {
				t.Errorf("the first connection to %s: %v", at(ip, first.port), err)
				continue
			}
			for range 3 {
				if answer := connection.Ask(lostAfter); !strings.HasPrefix(answer.Server, first.server) || answer.SeenSource.Addr().IsLoopback() {
					t.Errorf("the first connection to %s: %s, want %s", at(ip, first.port), answer, first.server)
				}
				time.Sleep(time.Second) // longer than a look
			}
			connection.Close()
			if answer := node.Dial(lab.UDP, at(ip, first.port)); !strings.HasPrefix(answer.Server, first.server) {
				t.Errorf("UDP %s: %s, want %s", at(ip, first.port), answer, first.server)
			}
			if tables := node.Exec("nft", "list", "tables"); !strings.Contains(tables, []string{"table ip kube-ipvs", "table ip6 kube-ipvs"}[i]) {
				t.Errorf("after a connection to %s, there is only\n%s", at(ip, first.port), tables)
			}
		}
		proxy.Stop()
	}
}

// checkClientPorts connects to a local server from a port that is also a node port: IPVS must not
// take the server's SYN-ACK for a request to the node port.
func (c *cluster) checkClientPorts(t *testing.T, node *lab.BridgeNode, objects []runtime.Object) {
	t.Helper()
	set := func(parameter, value string) { node.Exec("sysctl", "-qw", "net.ipv4."+parameter+"="+value) }
	set("ip_local_port_range", "30000 32767")
	c.program(t, []*lab.BridgeNode{node}, objects)
	if answer := node.DialFrom(30001, lostAfter, lab.TCP, "127.0.0.1:9000"); answer.Server != "own" {
		t.Errorf("from port 30001 of a client: %s", answer)
	}
	if answer := node.Dial(lab.TCP, at(node.IPv4.String(), 30001)); answer.Err != nil {
		t.Errorf("the node port on the node's address: %s", answer)
	}
	set("ip_local_reserved_ports", "30001-30004")
	c.program(t, []*lab.BridgeNode{node}, objects)
	if answer := node.Dial(lab.TCP, "127.0.0.1:30001"); answer.Err != nil {
		t.Errorf("the node port is reserved: %s", answer)
	}
	set("ip_local_reserved_ports", "")
	set("ip_local_port_range", "32768 60999")
}

// checkHostPortKept connects from the node's other address to a host port on its loopback
// address, as a CNI plugin creates it. DNAT translates the reply; our rules must not
// change it.
func checkHostPortKept(t *testing.T, node *lab.BridgeNode, pod string) {
	t.Helper()
	node.Exec("iptables", "-t", "nat", "-A", "OUTPUT", "-d", "127.0.0.1", "-p", "tcp", "--dport", "9100", "-j", "DNAT", "--to-destination", pod)
	// The server does not speak HTTP. The time shows that it was reached.
	out, err := node.TryExec("curl", "--silent", "--max-time", "5", "--output", "/dev/null", "--write-out", "%{time_connect}",
		"--interface", node.IPv4.String(), "http://127.0.0.1:9100")
	if strings.Trim(out, "0.") == "" {
		t.Errorf("127.0.0.1:9100, a host port, from %s: not reached, %v", node.IPv4, err)
	}
}

// checkNeighbourKeptOut sends packets for 127.0.0.1 from a host on the node's subnet,
// which route_localnet would admit (CVE-2020-8558).
func (c *cluster) checkNeighbourKeptOut(t *testing.T, node *lab.BridgeNode, ports ...uint16) {
	attacker := c.Segment.Client("attacker", "192.168.50.66/24")
	attacker.Sysctl("net.ipv4.conf.all.route_localnet", "1")
	attacker.Exec("ip", "address", "delete", "127.0.0.1/8", "dev", "lo")
	attacker.Route("127.0.0.1 via " + node.IPv4.String() + " dev eth0")
	for _, port := range ports {
		capture := node.Watch(lab.TCP, at("127.0.0.1", port))
		if answer := attacker.DialWithin(refusalLimit, lab.TCP, at("127.0.0.1", port)); answer.Outcome() != lab.TimedOut {
			t.Errorf("127.0.0.1:%d from a neighbour: %s, want no answer", port, answer)
		}
		if _, came := capture.Await(syncLimit, func(p lab.Packet) bool { return p.Interface == "eth0" && !p.Out }); !came {
			t.Errorf("packets for 127.0.0.1:%d did not arrive at the node", port)
		}
	}
}
