//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// connections is a node with a client, two endpoints and a proxy that watches a folder.
// Its tests follow connections while endpoints are added and removed.
type connections struct {
	t      *testing.T
	node   *lab.BridgeNode
	caller *lab.Pod
	pods   map[string]*lab.Pod // by name
	folder string
}

// drainDeadline is checked every five seconds.
const drainDeadline = 3 * time.Second

func newConnections(t *testing.T) *connections {
	t.Helper()
	nodes := lab.NewThreeNodes(t)
	c := &connections{t: t, node: nodes.Nodes[0], pods: map[string]*lab.Pod{}, folder: t.TempDir()}
	c.caller = c.node.AddPod("caller")
	for _, name := range []string{"web1", "web2"} {
		pod := c.node.AddPod(name)
		pod.Serve(name, lab.TCP, webPort)
		pod.Serve(name, lab.UDP, webPort)
		c.pods[name] = pod
	}
	c.node.StartProxy(func(*lab.Process) error { return hasPassed(c.node.Node) },
		"--manifests", c.folder, "--hostname-override", c.node.Name, "--cluster-cidr", podCIDRs,
		"--ipvs-min-sync-period", "100ms", "--udp-drain", "--drain-deadline", drainDeadline.String(),
		"--ipvs-tcp-timeout", "1h", "--ipvs-tcpfin-timeout", "90s", "--ipvs-udp-timeout", "2m")
	return c
}

// with returns a copy that reports to another test.
func (c *connections) with(t *testing.T) *connections {
	other := *c
	other.t = t
	return &other
}

// add creates a Service with both endpoints.
func (c *connections) add(svc *corev1.Service) {
	c.t.Helper()
	writeManifest(c.t, filepath.Join(c.folder, svc.Name+".yaml"), svc)
	c.set(svc, endpointOf(c.pods["web1"]), endpointOf(c.pods["web2"]))
}

// write writes a Service to the folder.
func (c *connections) write(svc *corev1.Service, pods ...podEndpoint) {
	writeManifest(c.t, filepath.Join(c.folder, svc.Name+".yaml"), svc)
	for i, slice := range dualStackSlices(svc, webPort, pods...) {
		writeManifest(c.t, filepath.Join(c.folder, fmt.Sprintf("%s-%d.yaml", svc.Name, i)), slice)
	}
}

func endpointOf(pod *lab.Pod) endpoint {
	return endpoint{address: pod.Addresses[0].String(), node: pod.Node.Name}
}

// set replaces a Service's endpoints and waits until they are programmed: for each
// protocol the ready ones, and no others that get new connections. The VIP is written
// last.
func (c *connections) set(svc *corev1.Service, endpoints ...endpoint) {
	c.t.Helper()
	writeManifest(c.t, filepath.Join(c.folder, svc.Name+"-slice.yaml"), newSlice(svc, "IPv4", webPort, endpoints...))
	lab.Eventually(c.t, syncLimit, svc.Name+" has the endpoints", func() error {
		if !vips(c.node.Node)[netip.MustParseAddr(svc.Spec.ClusterIP)] {
			return fmt.Errorf("%s is not claimed", svc.Spec.ClusterIP)
		}
		table := readIPVS(c.node.Node)
		for _, port := range svc.Spec.Ports {
			entry := table[virtualServer{lab.Protocol(port.Protocol), netip.MustParseAddrPort(at(svc.Spec.ClusterIP, uint16(port.Port)))}]
			ready := 0
			for _, e := range endpoints {
				if e.terminating {
					continue
				}
				ready++
				to := netip.AddrPortFrom(netip.MustParseAddr(e.address), webPort)
				if options, there := entry.realServers[to]; !there || strings.HasSuffix(options, "-w 0") {
					return fmt.Errorf("%s %s lacks %s: %v", port.Protocol, svc.Spec.ClusterIP, to, entry)
				}
			}
			if entry.active() != ready {
				return fmt.Errorf("%s %s has %v", port.Protocol, svc.Spec.ClusterIP, entry)
			}
		}
		return nil
	})
}

// other returns the endpoint that is not the named one.
func (c *connections) other(name string) string {
	return map[string]string{"web1": "web2", "web2": "web1"}[name]
}

// asked sends a request on a connection and returns the name of the endpoint.
func (c *connections) asked(connection *lab.Connection) string {
	c.t.Helper()
	answer := connection.Ask(lab.DialTimeout)
	if c.pods[answer.Server] == nil {
		c.t.Fatalf("on a new connection: %s", answer)
	}
	return answer.Server
}

// newPair returns a Service with TCP and UDP port 80.
func newPair(name, ip string) *corev1.Service {
	svc := newService(name, corev1.ProtocolTCP, 80, ip)
	svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80})
	return svc
}

// TestIssue89358Connections follows single connections and flows. Subtests are named
// after their issues and share the node.
func TestIssue89358Connections(t *testing.T) {
	c := newConnections(t)
	for _, part := range []struct {
		name string
		test func(*connections)
	}{
		{"89358 71809 affinity", (*connections).testAffinity},
		{"70747 81775 93297 port reuse", (*connections).testPortReuse},
		{"134143 UDP drain", (*connections).testUDPDrain},
		{"84322 89392 77903 drain deadline", (*connections).testDrainDeadline},
		{"90042 107249 one source port", (*connections).testOneSourcePort},
		{"120076 80298 time-outs", (*connections).testTimeouts},
	} {
		t.Run(part.name, func(t *testing.T) {
			t.Parallel() // most of the time they wait
			part.test(c.with(t))
		})
	}
}

// testAffinity connects repeatedly. The client reaches one endpoint until the timeout
// after its last connection, and another one at once when that endpoint is removed.
func (c *connections) testAffinity() {
	const timeout = 15 * time.Second
	svc := newPair("affinity", "10.96.1.1")
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(timeout / time.Second))}}
	c.add(svc)
	vip := at(svc.Spec.ClusterIP, 80)
	// The lab's clients reset their connections, which IPVS forgets after 10 s.
	first := c.caller.Dial(lab.TCP, vip)
	for range 3 {
		time.Sleep(timeout * 2 / 5)
		if answer := c.caller.Dial(lab.TCP, vip); answer.Err != nil || answer.Server != first.Server {
			c.t.Errorf("first %s, and then %s", first, answer)
		}
	}
	time.Sleep(timeout + 3*time.Second)
	late := c.caller.Dial(lab.TCP, vip)
	if late.Server != c.other(first.Server) {
		c.t.Errorf("after the timeout: %s, want the round robin's next after %s", late, first.Server)
	}
	socket, err := c.caller.Connect(lab.DialTimeout, lab.UDP, vip)
	if err != nil {
		c.t.Fatal(err)
	}
	defer socket.Close()
	datagram := socket.Ask(lab.DialTimeout)
	for _, name := range []string{late.Server, c.other(late.Server)} {
		c.set(svc, endpointOf(c.pods[c.other(name)]))
		for range manyRequests {
			if answer := c.caller.Dial(lab.TCP, vip); answer.Server != c.other(name) {
				c.t.Errorf("%s was removed: %s", name, answer)
			}
		}
		if answer := socket.Ask(lab.DialTimeout); answer.Server != c.other(name) {
			c.t.Errorf("%s was removed; a socket, answered by %s first: %s", name, datagram.Server, answer)
		}
	}
}

// testPortReuse connects from one port again and again. No SYN is dropped, which would
// cost a second, and none reaches an endpoint that was removed in between.
func (c *connections) testPortReuse() {
	svc := newPair("reuse", "10.96.1.2")
	c.add(svc)
	// The port of an orderly closed connection may be reused after a second.
	c.caller.Sysctl("net.ipv4.tcp_tw_reuse", "1")
	vip := at(svc.Spec.ClusterIP, 80)
	sent := c.caller.Watch(lab.TCP, vip)
	const port, times = 40000, 3
	answered := ""
	for i := range times {
		for _, inOrder := range []bool{true, false} {
			answered = c.reuse(port, vip, inOrder)
			if inOrder {
				time.Sleep(1500 * time.Millisecond)
			}
		}
		if answered == "" {
			c.t.Fatalf("turn %d: no answer", i)
		}
	}
	if n := syns(sent); n > 2*times+1 {
		c.t.Errorf("%d connections took %d SYNs\n%s", 2*times, n, sent)
	}
	c.set(svc, endpointOf(c.pods[c.other(answered)]))
	for range times {
		if again := c.reuse(port, vip, false); again != c.other(answered) {
			c.t.Errorf("%s was removed, but the reply is by %q", answered, again)
		}
	}
}

// reuse connects from a port and returns which endpoint answered.
func (c *connections) reuse(port uint16, vip string, inOrder bool) string {
	c.t.Helper()
	connection, err := c.caller.ConnectFrom(port, lab.DialTimeout, lab.TCP, vip)
	if err != nil {
		c.t.Errorf("from port %d: %v", port, err)
		return ""
	}
	answer := connection.Ask(lab.DialTimeout)
	if answer.Err != nil {
		c.t.Errorf("from port %d: %s", port, answer)
	}
	if !inOrder {
		connection.Reset()
	} else if err := connection.Finish(lab.DialTimeout); err != nil {
		c.t.Errorf("closing in order: %v", err)
	}
	return answer.Server
}

func syns(c *lab.Capture) int {
	n := 0
	for _, p := range c.Packets() {
		if p.Out && p.Flags == "SYN" {
			n++
		}
	}
	return n
}

// opened creates a Service with both pods, connects to it, and returns which pod
// answered.
func (c *connections) opened(name, ip string, protocol lab.Protocol) (svc *corev1.Service, connection *lab.Connection, ends string) {
	return c.openedFrom(0, name, ip, protocol)
}

// openedFrom is opened with a source port.
func (c *connections) openedFrom(port uint16, name, ip string, protocol lab.Protocol) (svc *corev1.Service, connection *lab.Connection, ends string) {
	svc = newPair(name, ip)
	c.add(svc)
	connection, err := c.caller.ConnectFrom(port, lab.DialTimeout, protocol, at(ip, 80))
	if err != nil {
		c.t.Fatal(err)
	}
	return svc, connection, c.asked(connection)
}

// terminate makes an endpoint terminate and still serve, and returns the other one.
func (c *connections) terminate(svc *corev1.Service, pod string) (stays endpoint) {
	stays = endpointOf(c.pods[c.other(pod)])
	leaving := endpointOf(c.pods[pod])
	leaving.terminating = true
	c.set(svc, leaving, stays)
	return stays
}

// testUDPDrain terminates an endpoint while a client uses a socket. As long as the
// endpoint serves it keeps the flow; then the other one answers.
func (c *connections) testUDPDrain() {
	svc, socket, ends := c.opened("udpdrain", "10.96.1.3", lab.UDP)
	defer socket.Close()
	vip := at(svc.Spec.ClusterIP, 80)
	stays := c.terminate(svc, ends)
	if answer := socket.Ask(lab.DialTimeout); answer.Server != ends {
		c.t.Errorf("while %s terminates and serves: %s", ends, answer)
	}
	for range manyRequests {
		if answer := c.caller.Dial(lab.UDP, vip); answer.Server != c.other(ends) {
			c.t.Errorf("a new flow, while %s terminates: %s", ends, answer)
		}
	}
	c.set(svc, stays)
	lab.Eventually(c.t, syncLimit, "the socket meets who is left", func() error {
		if answer := socket.Ask(lab.DialTimeout); answer.Server != c.other(ends) {
			return fmt.Errorf("%s", answer)
		}
		return nil
	})
}

// testDrainDeadline leaves connections open. A connection to a terminating endpoint
// continues, and so does one to an endpoint that is removed, while its pod answers. When
// the pod does not answer any more, the client is reset after the deadline.
func (c *connections) testDrainDeadline() {
	const port = 41990
	svc, connection, ends := c.openedFrom(port, "deadline", "10.96.1.4", lab.TCP)
	defer connection.Close()
	stays := c.terminate(svc, ends)
	time.Sleep(4 * drainDeadline)
	if answer := connection.Ask(lab.DialTimeout); answer.Server != ends {
		c.t.Errorf("four deadlines after %s began to terminate: %s", ends, answer)
	}
	c.set(svc, stays)
	for since := time.Now(); time.Since(since) < 6*drainDeadline; time.Sleep(drainDeadline / 6) {
		if answer := connection.Ask(lab.DialTimeout); answer.Server != ends {
			c.t.Fatalf("%s is removed and answers: %s", ends, answer)
		}
	}
	gone(c.pods[ends], true, "-p", "tcp", "--sport", fmt.Sprint(port))
	lab.Eventually(c.t, syncLimit, "the connection is reset", func() error {
		answer := connection.Ask(lab.DialTimeout)
		if answer.Outcome() != lab.Reset {
			return fmt.Errorf("%s", answer)
		}
		return nil
	})
}

// gone makes a pod drop the packets that match, as one that does not exist any more, or accept
// them again.
func gone(pod *lab.Pod, drops bool, match ...string) {
	op := map[bool]string{true: "-I", false: "-D"}[drops]
	for _, program := range []string{"iptables", "ip6tables"} {
		pod.Exec(program, slices.Concat([]string{"-w", op, "INPUT"}, match, []string{"-j", "DROP"})...)
	}
}

// testOneSourcePort checks the kernel limit in docs/concepts/connections.md: of two
// simultaneous connections from one port, to a VIP and its endpoint or to two VIPs of one
// endpoint, exactly one is answered.
func (c *connections) testOneSourcePort() {
	one, two := newPair("one", "10.96.1.5"), newPair("two", "10.96.1.6")
	for _, svc := range []*corev1.Service{one, two} {
		c.add(svc)
		c.set(svc, endpointOf(c.pods["web1"]))
	}
	const limit = 2 * time.Second
	vip, pod := at(one.Spec.ClusterIP, 80), netip.AddrPortFrom(c.pods["web1"].Addresses[0], webPort).String()
	for i, ends := range [][]string{{vip, pod}, {pod, vip}, {vip, at(two.Spec.ClusterIP, 80)}} {
		var open []*lab.Connection
		for _, end := range ends {
			if connection, err := c.caller.ConnectFrom(uint16(41000+i), limit, lab.TCP, end); err == nil {
				defer connection.Reset()
				open = append(open, connection)
			}
		}
		answered := 0
		for _, connection := range open {
			if connection.Ask(limit).Err == nil {
				answered++
			}
		}
		if answered != 1 {
			c.t.Errorf("from one port to %v: %d answered, want one", ends, answered)
		}
	}
}

// testTimeouts checks that IPVS keeps connections for the configured time.
func (c *connections) testTimeouts() {
	got := c.node.Exec("ipvsadm", "-l", "--timeout")
	if want := "Timeout (tcp tcpfin udp): 3600 90 120"; strings.TrimSpace(got) != want {
		c.t.Errorf("%q, want %q", got, want)
	}
}
