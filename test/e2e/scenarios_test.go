//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestScenario2DirectlyAttachedPods: the pod has an interface of its own on the clients'
// network. Under externalTrafficPolicy Local it sees the client's address and replies by
// that interface, not through the node that the client connected to. The Service's
// annotation requests masquerading.
func TestScenario2DirectlyAttachedPods(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node := c.Nodes[0]
	pod := node.AddPod("pod")
	c.Segment.Attach(pod.Namespace, "net1", "192.168.50.77/24")
	pod.Serve("pod", lab.TCP, 8000)
	client := c.Segment.Client("lan", "192.168.50.99/24")
	const vip = "192.168.50.200"
	// MetalLB's speaker answers for the VIP, with the node's own address.
	client.Neighbour("eth0", netip.MustParseAddr(vip), node.MAC("eth0"))
	svc := newLoadBalancer(newService("web", corev1.ProtocolTCP, 80, "10.96.0.80"), vip)
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	slice := newSlice(svc, "IPv4", 8000, endpoint{address: pod.Addresses[0].String(), node: node.Name})

	for _, tc := range []struct {
		name       string
		annotation string
		args       []string
		want       lab.Outcome
	}{
		{"as kube-proxy has it", "", nil, lab.TimedOut},
		{"by annotation", "true", nil, lab.OK},
		{"as kube-proxy has it, again", "false", nil, lab.TimedOut},
		{"by configuration", "", []string{"--masquerade-external-local"}, lab.OK},
	} {
		svc.Annotations = map[string]string{}
		if tc.annotation != "" {
			svc.Annotations["kube-ipvs.io/masquerade"] = tc.annotation
		}
		dir := writeManifests(t, svc, slice)
		runOnce(t, node.Node, dir, append(tc.args, "--cluster-cidr", podCIDRs)...)
		if answer := client.Dial(lab.TCP, vip+":80"); answer.Outcome() != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, answer, tc.want)
		}
	}
	explain(t, node.Node, writeManifests(t, svc, slice), "192.168.50.99", vip+":80", trace.Answered)
	// The node sees only the request.
	if output, err := client.TryExec("ping", "-c", "1", "-W", "3", pod.Addresses[0].String()); err != nil {
		t.Errorf("ping of the pod: %v\n%s", err, output)
	}
}

// TestScenario3PodsOnABridge is "Kubernetes the Hard Way": a pod connects to a cluster IP
// whose endpoint is on its own bridge. Switched packets bypass the node's netfilter
// unless br_netfilter is on; the pod then gets a reply from an address that it did not
// connect to.
func TestScenario3PodsOnABridge(t *testing.T) {
	c := lab.NewThreeNodes(t)
	node := c.Nodes[0]
	client, server := node.AddPod("caller"), node.AddPod("server")
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		server.Serve("server", protocol, 53)
	}
	svc := newService("dns", corev1.ProtocolUDP, 53, "10.32.0.10")
	svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 53})
	dir := writeManifests(t, svc, newSlice(svc, "IPv4", 53, endpoint{address: server.Addresses[0].String(), node: node.Name}))

	const bridged = "net.bridge.bridge-nf-call-iptables"
	node.Sysctl(bridged, "0")
	// As under kube-proxy: nothing is masqueraded between pods.
	node.Exec("ip", "link", "add", "kube-ipvs0", "type", "dummy")
	node.Exec("ip", "address", "add", "10.32.0.10/32", "dev", "kube-ipvs0")
	node.Exec("ipvsadm", "-A", "-t", "10.32.0.10:53", "-s", "rr")
	node.Exec("ipvsadm", "-a", "-t", "10.32.0.10:53", "-r", server.Addresses[0].String()+":53", "-m")
	node.Sysctl("net.ipv4.vs.conntrack", "1")
	if answer := client.Dial(lab.TCP, "10.32.0.10:53"); answer.Outcome() != lab.TimedOut {
		t.Errorf("without br_netfilter, under kube-proxy's rules: %s, want a time-out", answer)
	}
	explain(t, node.Node, dir, client.Addresses[0].String(), "10.32.0.10:53", trace.Dropped)

	runOnce(t, node.Node, dir, "--cluster-cidr", podCIDRs)
	if got := node.ReadSysctl(bridged); got != "1" {
		t.Errorf("%s is %s, want 1", bridged, got)
	}
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		for range 3 {
			answer := client.Dial(protocol, "10.32.0.10:53")
			if answer.Server != "server" || answer.SeenSource.Addr() != client.Addresses[0] {
				t.Errorf("%s: %s, want the server to see the pod", protocol, answer)
			}
		}
	}
	explain(t, node.Node, dir, client.Addresses[0].String(), "10.32.0.10:53/udp", trace.Answered)

	askItself(t, node, server, "10.32.0.10:53", dir)

	// A bridge of virtual machines: the administrator's setting must stay.
	node.Exec("ip", "link", "add", "virbr0", "type", "bridge")
	node.Exec("ip", "link", "add", "vnet0", "type", "dummy")
	node.Exec("ip", "link", "set", "vnet0", "master", "virbr0")
	node.Sysctl(bridged, "0")
	runOnce(t, node.Node, dir, "--cluster-cidr", podCIDRs)
	if got := node.ReadSysctl(bridged); got != "0" {
		t.Errorf("beside a bridge of virtual machines %s is %s, want 0", bridged, got)
	}
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		if answer := client.Dial(protocol, "10.32.0.10:53"); answer.Server != "server" || answer.SeenSource.Addr() == client.Addresses[0] {
			t.Errorf("%s, beside a bridge of virtual machines: %s, want it masqueraded", protocol, answer)
		}
	}
	explain(t, node.Node, dir, client.Addresses[0].String(), "10.32.0.10:53/udp", trace.Answered)
	// Packets of the node itself keep their port.
	if answer := node.DialFrom(40123, lab.DialTimeout, lab.TCP, at(server.Addresses[0].String(), 53)); answer.SeenSource.Port() != 40123 {
		t.Errorf("a process of the node: %s, want its port kept", answer)
	}
}

// askItself connects a pod on a bridge to itself through a VIP, with and without hairpin
// mode; trace must predict the result.
func askItself(t *testing.T, node *lab.BridgeNode, pod *lab.Pod, vip, dir string) {
	t.Helper()
	for _, c := range []struct {
		hairpin, shown string
		want           trace.Outcome
	}{{"on", "1", trace.Answered}, {"off", "1", trace.Dropped}, {"off", "0", trace.Answered}} {
		for _, l := range strings.Fields(node.Exec("sh", "-c", `ip -o link show master cni0 | sed 's/^[0-9]*: \([^:@]*\).*/\1/'`)) {
			node.Exec("ip", "link", "set", l, "type", "bridge_slave", "hairpin", c.hairpin)
		}
		node.Sysctl("net.bridge.bridge-nf-call-iptables", c.shown)
		answer := pod.DialWithin(time.Second, lab.TCP, vip)
		if answered := answer.Err == nil; answered != (c.want == trace.Answered) {
			t.Errorf("hairpin %s, shown %s: %s, want it %s", c.hairpin, c.shown, answer, c.want)
		}
		explain(t, node.Node, dir, pod.Addresses[0].String(), vip, c.want)
	}
}

// TestScenario4OneLoadBalancer is a report from Alibaba Cloud: port 80 of a LoadBalancer
// IP belongs to a Service, and the load balancer serves port 443 of the same IP for
// another owner. The endpoint is beyond the fabric.
func TestScenario4OneLoadBalancer(t *testing.T) {
	c := lab.NewThreeNodes(t)
	vips := []string{"192.168.1.200", "fd00:1::200"}
	endpoints := []string{"10.253.3.5", "fd00:253:3::5"}
	balancer := c.Fabric.Segment("192.168.1.1/24", "fd00:1::1/64").Client("balancer", vips[0]+"/24", vips[1]+"/64")
	backend := c.Fabric.Segment("10.253.3.1/24", "fd00:253:3::1/64").Client("backend", endpoints[0]+"/24", endpoints[1]+"/64")
	for _, protocol := range lab.Protocols {
		for _, port := range []uint16{80, 81, 443} { // all ports
			balancer.Serve("balancer", protocol, port)
		}
		backend.Serve("backend", protocol, 8000)
	}
	// Under kube-proxy: the VIP is an address of the node, and any process that listens
	// there answers.
	for i, vip := range vips {
		node := c.Nodes[1+i]
		pod := node.AddPod(fmt.Sprintf("caller%d", 1+i))
		lab.KubeProxyRules(node.Node, at(vip, 80), at(endpoints[i], 8000))
		for _, from := range []*lab.Namespace{node.Namespace, pod.Namespace} {
			if answer := from.Dial(lab.TCP, at(vip, 443)); answer.Outcome() != lab.Refused {
				t.Errorf("under kube-proxy's rules, from %s: %s, want it refused", from.Name, answer)
			}
		}
		node.Serve("host", lab.TCP, 443)
		if answer := pod.Dial(lab.TCP, at(vip, 443)); answer.Server != "host" {
			t.Errorf("under kube-proxy's rules, with a host process, from %s: %s, want the wrong one to answer", pod.Name, answer)
		}
	}

	node := c.Nodes[0]
	s := &sharedBalancer{ThreeNodes: c, node: node, pod: node.AddPod("caller"), backend: backend, vips: vips}
	for _, protocol := range lab.Protocols {
		node.Serve("host", protocol, 443)
	}
	// The load balancer sends the client's packets to the node, whatever the port.
	c.Fabric.Route("default via "+node.IPv4.String()+" table 300", "default via "+node.IPv6.String()+" table 300")
	c.Fabric.Rule("pref 300 from 198.51.100.0/24 to 192.168.1.200 lookup 300", "pref 300 from fd00:51::/64 to fd00:1::200 lookup 300")
	node.Sysctl("net.ipv4.conf.all.src_valid_mark", "1") // as on nodes with ENIs
	node.Sysctl("net.ipv4.icmp_ratelimit", "0")
	node.Sysctl("net.ipv6.icmp.ratelimit", "0")

	svc := newLoadBalancer(newDualStack("web", 80), vips...)
	empty := newLoadBalancer(newService("empty", corev1.ProtocolTCP, 81, "10.96.0.81", "fd00:10:96::81"), vips...)
	objects := []runtime.Object{svc, empty}
	for i, family := range []string{"IPv4", "IPv6"} {
		objects = append(objects, newSlice(svc, family, 8000, endpoint{address: endpoints[i]}))
	}
	s.manifests = writeManifests(t, objects...)
	runOnce(t, node.Node, s.manifests, "--cluster-cidr", podCIDRs)
	t.Run("the Service's port", s.testClaimed)
	t.Run("the load balancer's port", s.testUnclaimed)
	t.Run("a port without an endpoint", s.testNoEndpoint)
	t.Run("on demand", func(t *testing.T) { s.testOnDemand(t, balancer) })
	s.node.RunProxy("--cleanup")
	runOnce(t, node.Node, s.manifests, "--cluster-cidr", podCIDRs)
	t.Run("ICMP", s.testICMP)
	t.Run("explained", s.testExplained)

	svc.Annotations = map[string]string{"kube-ipvs.io/ip-mode": "Proxy"}
	runOnce(t, node.Node, writeManifests(t, objects...), "--cluster-cidr", podCIDRs)
	for _, vip := range vips {
		if answer := s.pod.Dial(lab.TCP, at(vip, 80)); answer.Server != "balancer" {
			t.Errorf("%s, left to the cloud: %s", vip, answer)
		}
	}
}

// sharedBalancer is a node that has claimed some ports of the LoadBalancer IPs, IPv4
// first.
type sharedBalancer struct {
	*lab.ThreeNodes
	node      *lab.BridgeNode
	pod       *lab.Pod
	backend   *lab.Namespace
	vips      []string
	manifests string
}

func (s *sharedBalancer) testClaimed(t *testing.T) {
	for i, vip := range s.vips {
		own := []netip.Addr{s.node.IPv4, s.node.IPv6}[i]
		for _, protocol := range lab.Protocols {
			for _, from := range []*lab.Namespace{s.node.Namespace, s.pod.Namespace, s.Client} {
				answer := from.Dial(protocol, at(vip, 80))
				if answer.Server != "backend" || answer.SeenSource.Addr() != own {
					t.Errorf("%s %s from %s: %s, want source %s", protocol, vip, from.Name, answer, own)
				}
			}
		}
	}
}

func (s *sharedBalancer) testExplained(t *testing.T) {
	pod, client := s.pod.Addresses[0].String(), "198.51.100.9"
	explain(t, s.node.Node, s.manifests, pod, at(s.vips[0], 80), trace.Answered)
	explain(t, s.node.Node, s.manifests, pod, at(s.vips[0], 443), trace.Unserved)
	explain(t, s.node.Node, s.manifests, client, at(s.vips[0], 443), trace.Refused)
	explain(t, s.node.Node, s.manifests, pod, at(s.vips[0], 81), trace.Refused)
}

// testUnclaimed: internal clients reach the load balancer. Packets that it sends to the
// node for its own ports are refused there and do not loop.
func (s *sharedBalancer) testUnclaimed(t *testing.T) {
	for _, vip := range s.vips {
		for _, protocol := range lab.Protocols {
			for _, from := range []*lab.Namespace{s.node.Namespace, s.pod.Namespace} {
				if answer := from.Dial(protocol, at(vip, 443)); answer.Server != "balancer" {
					t.Errorf("%s %s from %s: %s, want the load balancer", protocol, vip, from.Name, answer)
				}
			}
			// SCTP ignores the ICMP error that refuses it.
			answer := s.Client.Dial(protocol, at(vip, 443))
			if protocol != lab.SCTP && !refused(answer) || answer.Err == nil {
				t.Errorf("%s %s from outside: %s, want it refused", protocol, vip, answer)
			}
		}
	}
}

// testOnDemand runs the proxy, which writes the rules for the load balancer's ports once a
// packet needs them: the first connection of a pod, of the node, or of the load balancer to
// the node. The client's kernel sends its packet again, and the connection succeeds.
func (s *sharedBalancer) testOnDemand(t *testing.T, balancer *lab.Namespace) {
	own := []string{s.node.IPv4.String(), s.node.IPv6.String()}
	for _, ask := range []struct {
		from   *lab.Namespace
		to     []string
		server string
	}{
		{s.pod.Namespace, s.vips, "balancer"},
		{s.node.Namespace, s.vips, "balancer"},
		{balancer, own, "host"},
	} {
		s.node.RunProxy("--cleanup")
		proxy := s.node.StartProxy(func(*lab.Process) error { return hasPassed(s.node.Node) },
			"--manifests", s.manifests, "--hostname-override", s.node.Name, "--cluster-cidr", podCIDRs)
		for i, to := range ask.to {
			family := []string{"-4", "-6"}[i]
			if rules := s.node.Exec("ip", family, "rule"); strings.Contains(rules, "goto") {
				t.Errorf("from %s: before any packet needs them, there are\n%s", ask.from.Name, rules)
			}
			if answer := s.Client.Dial(lab.TCP, at(s.vips[i], 443)); !refused(answer) {
				t.Errorf("%s from outside: %s, want it refused", s.vips[i], answer)
			}
			began := time.Now()
			lab.Eventually(t, lostAfter, "an answer to "+ask.from.Name, func() error {
				answer := ask.from.DialWithin(lostAfter, lab.TCP, at(to, 443))
				if answer.Server != ask.server {
					return fmt.Errorf("%s from %s: %s, want %s", to, ask.from.Name, answer, ask.server)
				}
				return nil
			})
			t.Logf("%s from %s: answered after %s", to, ask.from.Name, time.Since(began))
			if rules := s.node.Exec("ip", family, "rule"); !strings.Contains(rules, "goto") {
				t.Errorf("from %s: the rules are missing:\n%s", ask.from.Name, rules)
			}
		}
		s.testUnclaimed(t)
		s.testClaimed(t)
		proxy.Stop()
		s.checkRestart(t)
	}
}

// checkRestart starts the proxy again: the rules that were demanded are there at once.
func (s *sharedBalancer) checkRestart(t *testing.T) {
	t.Helper()
	proxy := s.node.StartProxy(func(*lab.Process) error { return hasPassed(s.node.Node) },
		"--manifests", s.manifests, "--hostname-override", s.node.Name, "--cluster-cidr", podCIDRs)
	s.testUnclaimed(t)
	proxy.Stop()
}

func (s *sharedBalancer) testNoEndpoint(t *testing.T) {
	for _, vip := range s.vips {
		for _, from := range []*lab.Namespace{s.node.Namespace, s.pod.Namespace, s.Client} {
			if answer := from.Dial(lab.TCP, at(vip, 81)); !refused(answer) {
				t.Errorf("%s from %s: %s, want it refused", vip, from.Name, answer)
			}
		}
	}
}

// testICMP pings the VIPs from an external client, and sends an ICMP error about a
// connection, which must reach the endpoint.
func (s *sharedBalancer) testICMP(t *testing.T) {
	for i, vip := range s.vips {
		ping, iptables := []string{"ping", "ping6"}[i], []string{"iptables", "ip6tables"}[i]
		if output, err := s.Client.TryExec(ping, "-c", "1", "-W", "3", vip); err != nil {
			t.Errorf("ping of %s: %v\n%s", vip, err, output)
		}
		statistics, counter := []string{"/proc/net/snmp", "/proc/net/snmp6"}[i], []string{"InDestUnreachs", "Icmp6InDestUnreachs"}[i]
		before := icmpErrors(s.backend, statistics, counter)
		s.Client.Exec(iptables, "-w", "-A", "INPUT", "-p", "udp", "-s", vip, "-j", "REJECT")
		s.Client.DialWithin(time.Second, lab.UDP, at(vip, 80))
		lab.Eventually(t, 5*time.Second, "the client's error about "+vip+" is at the endpoint", func() error {
			if now := icmpErrors(s.backend, statistics, counter); now <= before {
				return fmt.Errorf("%s is %d, as before", counter, now)
			}
			return nil
		})
	}
}

// icmpErrors reads a counter. In /proc/net/snmp the names are in the preceding line.
func icmpErrors(host *lab.Namespace, file, counter string) int {
	names := []string{}
	for _, line := range strings.Split(host.Exec("cat", file), "\n") {
		words := strings.Fields(line)
		if len(words) == 2 && words[0] == counter {
			n, _ := strconv.Atoi(words[1])
			return n
		}
		if at := slices.Index(names, counter); at > 0 && at < len(words) {
			n, _ := strconv.Atoi(words[at])
			return n
		}
		names = words
	}
	return -1
}

// TestScenario5ExternalTrafficPolicyLocal is a report from Alibaba Cloud: nodes with and
// without an endpoint, for external and internal clients.
func TestScenario5ExternalTrafficPolicyLocal(t *testing.T) {
	c := lab.NewThreeNodes(t)
	with, without, other := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	pod, remote := with.AddPod("backend"), other.AddPod("remote")
	pod.Serve("backend", lab.TCP, 8000)
	remote.Serve("remote", lab.TCP, 8000)
	beside, inside := with.AddPod("beside"), without.AddPod("inside")
	const vip = "192.168.1.200"
	svc := newLoadBalancer(newService("web", corev1.ProtocolTCP, 80, "10.96.0.80"), vip)
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	svc.Spec.Ports[0].NodePort = 30080
	svc.Spec.HealthCheckNodePort = 30081
	dir := writeManifests(t, svc, newSlice(svc, "IPv4", 8000,
		endpoint{address: pod.Addresses[0].String(), node: with.Name}, endpoint{address: remote.Addresses[0].String(), node: other.Name}))

	// As under kube-proxy: all endpoints if none is on the node, and no masquerading, so
	// that the endpoint sees the VIP.
	without.Exec("ip", "link", "add", "kube-ipvs0", "type", "dummy")
	without.Exec("ip", "address", "add", vip+"/32", "dev", "kube-ipvs0")
	without.Exec("ipvsadm", "-A", "-t", vip+":80", "-s", "rr")
	for _, p := range []*lab.Pod{pod, remote} {
		without.Exec("ipvsadm", "-a", "-t", vip+":80", "-r", p.Addresses[0].String()+":8000", "-m")
	}
	without.Sysctl("net.ipv4.vs.conntrack", "1")
	if answer := without.Dial(lab.TCP, vip+":80"); answer.Outcome() != lab.TimedOut {
		t.Errorf("the VIP from a node without an endpoint, under kube-proxy's rules: %s, want a time-out", answer)
	}
	explain(t, without.Node, dir, without.IPv4.String(), vip+":80", trace.Asymmetric)

	for _, n := range []*lab.BridgeNode{with, without} {
		runOnce(t, n.Node, dir, "--cluster-cidr", podCIDRs)
	}
	to := func(n *lab.BridgeNode) string { return fmt.Sprintf("%s:30080", n.IPv4) }

	if answer := c.Client.Dial(lab.TCP, to(without)); answer.Outcome() != lab.TimedOut {
		t.Errorf("NodePort of the node without an endpoint, from outside: %s, want no answer", answer)
	}
	if answer := c.Client.Dial(lab.TCP, to(with)); answer.SeenSource.Addr() != answer.Local.Addr() || answer.Err != nil {
		t.Errorf("NodePort of the node with one, from outside: %s, want the client's address kept", answer)
	}
	if answer := without.Dial(lab.TCP, to(without)); answer.Err != nil {
		t.Errorf("its own NodePort, from the node without an endpoint: %s", answer)
	}
	explain(t, without.Node, dir, "198.51.100.9", to(without), trace.Dropped)
	explain(t, without.Node, dir, without.IPv4.String(), vip+":80", trace.Answered)
	explain(t, with.Node, dir, "198.51.100.9", to(with), trace.Answered)
	here, there := with.Gateways()[0].String(), with.IPv4.String()
	own := func(p *lab.Pod) string { return p.Addresses[0].String() }
	for _, from := range []struct {
		host     *lab.Namespace
		address  string
		sees     string // the source that backend sees
		remoteBy string // the source that remote sees
	}{
		{without.Namespace, vip + ":80", without.IPv4.String(), without.IPv4.String()}, // not the VIP, which is local on this node
		{without.Namespace, to(without), without.IPv4.String(), without.IPv4.String()},
		{inside.Namespace, vip + ":80", own(inside), own(inside)},
		{inside.Namespace, to(without), without.IPv4.String(), without.IPv4.String()},
		{with.Namespace, vip + ":80", here, there},
		{with.Namespace, to(with), here, there},
		{beside.Namespace, vip + ":80", own(beside), own(beside)},
		{beside.Namespace, to(with), here, there},
		{pod.Namespace, vip + ":80", here, own(pod)}, // it would drop packets with its own source
		{pod.Namespace, to(with), here, there},
	} {
		checkSources(t, "from "+from.host.Name, from.host, lab.TCP, from.address, map[string]string{"backend": from.sees, "remote": from.remoteBy})
	}
	for range manyRequests {
		if answer := c.Client.Dial(lab.TCP, to(with)); answer.Server != "backend" {
			t.Errorf("NodePort of the node with an endpoint, from outside: %s, want its own", answer)
		}
	}
	// A policy engine hides the fwmark from IPVS. External clients do not need it, and
	// pods get the same endpoints as under kube-proxy.
	with.Exec("iptables", "-w", "-I", "INPUT", "-j", "MARK", "--or-mark", "0x100000")
	checkSources(t, "from outside, with another mark", c.Client, lab.TCP, to(with), map[string]string{"backend": "198.51.100.9"})
	checkSources(t, "from a pod, with another mark", beside.Namespace, lab.TCP, vip+":80", map[string]string{"backend": own(beside)})
}

// TestScenario6ClusterIP is a kind cluster with three nodes: only traffic from outside
// the pod range is masqueraded, and a pod can reach itself.
func TestScenario6ClusterIP(t *testing.T) {
	c := lab.NewThreeNodes(t)
	c.Nodes[0].AddPod("other")
	client := c.Nodes[0].AddPod("caller") // 10.244.1.3
	nginx := c.Nodes[1].AddPod("nginx")   // 10.244.2.2
	nginx.Serve("nginx", lab.TCP, 80)
	const vip = "10.96.34.82"
	svc := newService("nginx", corev1.ProtocolTCP, 80, vip)
	dir := writeManifests(t, svc, newSlice(svc, "IPv4", 80, endpoint{address: nginx.Addresses[0].String(), node: c.Nodes[1].Name}))
	for _, n := range c.Nodes {
		runOnce(t, n.Node, dir, "--cluster-cidr", podCIDRs)
	}
	c.Fabric.Route(vip + " via " + c.Nodes[2].IPv4.String())
	for _, from := range []struct {
		host   *lab.Namespace
		source string
	}{
		{client.Namespace, "10.244.1.3"},
		{c.Nodes[0].Namespace, c.Nodes[0].IPv4.String()},
		{nginx.Namespace, "10.244.2.1"},      // itself: the bridge's address
		{c.Client, c.Nodes[2].IPv4.String()}, // outside: the node that it came through
	} {
		answer := from.host.Dial(lab.TCP, vip+":80")
		if answer.Server != "nginx" || answer.SeenSource.Addr().String() != from.source {
			t.Errorf("from %s: %s, want source %s", from.host.Name, answer, from.source)
		}
	}
	explain(t, c.Nodes[0].Node, dir, "10.244.1.3", vip+":80", trace.Answered)
	explain(t, c.Nodes[1].Node, dir, "10.244.2.2", vip+":80", trace.Answered)
	explain(t, c.Nodes[2].Node, dir, "198.51.100.9", vip+":80", trace.Answered)
}
