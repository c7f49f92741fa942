//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestThreeNodes tests the meaning of Services with packets, on three nodes that follow
// one API server. The subtests share the cluster, each with Services of its own, so each
// also tests proxies that learn of new objects.
func TestThreeNodes(t *testing.T) {
	c := newCluster(t)
	c.startProxies()
	for _, part := range []struct {
		name string
		test func(*testing.T, *cluster)
	}{
		{"every way is answered", testEveryWay},
		{"no endpoints", testNoEndpoints},
		{"session affinity", testSessionAffinity},
		{"external traffic policy Local", testExternalLocal},
		{"external traffic policy Local, session affinity", testExternalLocalAffinity},
		{"internal traffic policy Local", testInternalLocal},
		{"terminating endpoints", testTerminating},
		{"Services that are not ours", testNotOurs},
		{"only the Services' ports", testOtherPorts},
		{"ping", testPing},
		{"source ranges", testSourceRanges},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(t, c) })
	}
}

// way is an address and port of a Service, by family.
type way struct {
	name      string
	addresses []string
	port      uint16
	// entry is the node to which the external client's packets are routed. Pods and nodes
	// have every VIP on their own node, so it does not apply to them unless the address
	// is the node's own (a node port).
	entry    *lab.BridgeNode
	nodePort bool
	// keeps means that a pod's source is preserved.
	keeps bool
}

// ways returns the addresses of newExposed(_, n).
func (c *cluster) ways(n int) []way {
	node1, node3 := c.Nodes[0], c.Nodes[2]
	nodePort := uint16(30000 + n)
	return []way{
		{name: "cluster IP", addresses: clusterIPs(n), port: 80, entry: node1, keeps: true},
		{name: "load balancer IP", addresses: balancerIPs(n), port: 80, entry: node1},
		{name: "external IP", addresses: externalIPs(n), port: 80, entry: node3},
		{name: "node port of node1", addresses: nodeIPs(node1), port: nodePort, entry: node1, nodePort: true},
		{name: "node port of node3", addresses: nodeIPs(node3), port: nodePort, entry: node3, nodePort: true},
	}
}

func nodeIPs(node *lab.BridgeNode) []string { return []string{node.IPv4.String(), node.IPv6.String()} }

// caller is a client.
type caller struct {
	name string
	*lab.Namespace
	pod  *lab.Pod        // nil if it is not a pod
	node *lab.BridgeNode // its node, or itself; nil for an external client
}

func (c *cluster) callers() []caller {
	node1, node3 := c.Nodes[0], c.Nodes[2]
	return []caller{
		{"a pod beside an endpoint", c.caller1.Namespace, c.caller1, node1},
		{"a pod far from endpoints", c.caller3.Namespace, c.caller3, node3},
		{"an endpoint", c.web1.Namespace, c.web1, node1},
		{"a node with an endpoint", node1.Namespace, nil, node1},
		{"a node without endpoints", node3.Namespace, nil, node3},
		{"a client outside", c.Client, nil, nil},
	}
}

// source returns the expected source of a request at an endpoint: the client's own
// address, or that of the node that forwards it, on the side of the endpoint. family is 0
// for IPv4 and 1 for IPv6.
func (w way) source(from caller, endpoint *lab.Pod, family int) netip.Addr {
	if w.keeps && from.pod != nil && from.pod != endpoint {
		return from.pod.Addresses[family]
	}
	by := from.node
	if by == nil || w.nodePort {
		by = w.entry
	}
	if by.Node == endpoint.Node {
		return by.Gateways()[family]
	}
	return netip.MustParseAddr(nodeIPs(by)[family])
}

// testEveryWay connects every client to every address with every protocol in both
// families: all endpoints answer and see the expected source.
func testEveryWay(t *testing.T, c *cluster) {
	svc := newExposed("everyway", 1)
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	c.checkEveryWay(t, 1)
}

// checkEveryWay does this for newExposed(_, n). It stops testing an address after a
// failure, because timeouts would add up.
func (c *cluster) checkEveryWay(t *testing.T, n int) {
	for _, w := range c.ways(n) {
		for _, from := range c.callers() {
			if err := c.checkWay(w, from); err != nil {
				t.Errorf("%s, from %s: %v", w.name, from.name, err)
				break
			}
		}
	}
}

func (c *cluster) checkWay(w way, from caller) error {
	for _, protocol := range lab.Protocols {
		for family, ip := range w.addresses {
			if err := c.checkAnswers(w, from, protocol, family, at(ip, w.port)); err != nil {
				return fmt.Errorf("%s: %w", protocol, err)
			}
		}
	}
	return nil
}

// manyRequests reach each of two endpoints by round robin.
const manyRequests = 4

func (c *cluster) checkAnswers(w way, from caller, protocol lab.Protocol, family int, address string) error {
	endpoints := map[string]*lab.Pod{"web1": c.web1, "web2": c.web2}
	answered := map[string]bool{}
	for range manyRequests {
		answer := from.Dial(protocol, address)
		endpoint := endpoints[answer.Server]
		if endpoint == nil {
			return fmt.Errorf("%s: %s", address, answer)
		}
		if want := w.source(from, endpoint, family); answer.SeenSource.Addr() != want {
			return fmt.Errorf("%s: %s, want source %s", address, answer, want)
		}
		answered[answer.Server] = true
	}
	if len(answered) != len(endpoints) {
		return fmt.Errorf("%s: answered by %v alone", address, slices.Collect(maps.Keys(answered)))
	}
	return nil
}

// refusalLimit is how long to wait for a reply that must not come. A refusal may take
// more than a second: a TCP client does not see one that arrives while it is still
// sending, as between namespaces, and retransmits.
const refusalLimit = 2500 * time.Millisecond

// refused reports whether a request was refused at once. On the node itself a datagram is
// refused before it is sent.
func refused(answer lab.Answer) bool {
	return answer.Outcome() == lab.Refused || errors.Is(answer.Err, unix.EPERM)
}

// testNoEndpoints connects every client to every address of a Service without endpoints.
// They are refused; only SCTP, which treats ICMP errors as hints, retries until it times
// out.
func testNoEndpoints(t *testing.T, c *cluster) {
	c.serve(t, newExposed("noendpoints", 2), nil, 0, 0, 0)
	var requests sync.WaitGroup
	for _, w := range c.ways(2) {
		for _, from := range c.callers() {
			for _, protocol := range lab.Protocols {
				for _, ip := range w.addresses {
					requests.Go(func() {
						answer := from.DialWithin(refusalLimit, protocol, at(ip, w.port))
						inVain := protocol == lab.SCTP && answer.Outcome() == lab.TimedOut
						if !refused(answer) && !inVain {
							t.Errorf("%s, from %s, %s %s: %s, want refused", w.name, from.name, protocol, ip, answer)
						}
					})
				}
			}
		}
	}
	requests.Wait()
}

// testSessionAffinity checks that each client reaches one endpoint for the Service's
// timeout.
func testSessionAffinity(t *testing.T, c *cluster) {
	svc := newDualStack("affinity", 3)
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(100))}}
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	table := readIPVS(c.Nodes[0].Node)
	for _, ip := range clusterIPs(3) {
		for _, protocol := range lab.Protocols {
			vs := virtualServer{protocol, netip.MustParseAddrPort(at(ip, 80))}
			if words := table[vs].options; !strings.Contains(words+" ", "-p 100 ") {
				t.Errorf("%s is programmed with %q, want a timeout of 100 s", vs, words)
			}
			answered := map[string]int{}
			for range 2 * manyRequests {
				answered[c.caller1.Dial(protocol, at(ip, 80)).Server]++
			}
			if len(answered) != 1 || answered[""] > 0 {
				t.Errorf("%s %s: answered by %v, want one endpoint", protocol, ip, answered)
			}
		}
	}
}

// testExternalLocal preserves the address of an external client and serves it with the
// endpoints of its ingress node. On a node without endpoints it gets no reply, because a
// load balancer with health checks would not send it there. All endpoints serve pods and
// nodes, on every node, and pods keep their address at a VIP.
func testExternalLocal(t *testing.T, c *cluster) {
	svc := newExposed("externallocal", 4)
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	node1, node3 := c.Nodes[0], c.Nodes[2]
	outside, pod1, pod3 := c.Client, c.caller1.Namespace, c.caller3.Namespace
	clientIPs := []string{"198.51.100.9", "fd00:51::9"}
	c.demandInternal(t, 4)
	var nobody sync.WaitGroup
	for _, test := range []struct {
		name       string
		from       *lab.Namespace
		addresses  []string
		port       uint16
		web1, web2 []string // the source that each must see; nil: it must not be reached
	}{
		{"load balancer IP, outside", outside, balancerIPs(4), 80, clientIPs, nil},
		{"node port here, outside", outside, nodeIPs(node1), 30004, clientIPs, nil},
		{"node port elsewhere, outside", outside, nodeIPs(node3), 30004, nil, nil},
		{"external IP elsewhere, outside", outside, externalIPs(4), 80, nil, nil},
		{"load balancer IP, pod here", pod1, balancerIPs(4), 80, texts(c.caller1.Addresses), texts(c.caller1.Addresses)},
		{"external IP, pod here", pod1, externalIPs(4), 80, texts(c.caller1.Addresses), texts(c.caller1.Addresses)},
		{"node port here, pod here", pod1, nodeIPs(node1), 30004, texts(node1.Gateways()), nodeIPs(node1)},
		{"load balancer IP, an endpoint", c.web1.Namespace, balancerIPs(4), 80, texts(node1.Gateways()), texts(c.web1.Addresses)},
		{"load balancer IP, node here", node1.Namespace, balancerIPs(4), 80, texts(node1.Gateways()), nodeIPs(node1)},
		{"external IP, node here", node1.Namespace, externalIPs(4), 80, texts(node1.Gateways()), nodeIPs(node1)},
		{"node port here, node here", node1.Namespace, nodeIPs(node1), 30004, texts(node1.Gateways()), nodeIPs(node1)},
		{"load balancer IP, pod elsewhere", pod3, balancerIPs(4), 80, texts(c.caller3.Addresses), texts(c.caller3.Addresses)},
		{"external IP, pod elsewhere", pod3, externalIPs(4), 80, texts(c.caller3.Addresses), texts(c.caller3.Addresses)},
		{"load balancer IP, node elsewhere", node3.Namespace, balancerIPs(4), 80, nodeIPs(node3), nodeIPs(node3)},
		{"cluster IP, pod elsewhere", pod3, clusterIPs(4), 80, texts(c.caller3.Addresses), texts(c.caller3.Addresses)},
	} {
		for family, ip := range test.addresses {
			for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
				name := fmt.Sprintf("%s, %s %s", test.name, protocol, ip)
				if test.web1 == nil {
					nobody.Go(func() { checkNoAnswer(t, name, test.from, protocol, at(ip, test.port)) })
					continue
				}
				want := map[string]string{"web1": test.web1[family]}
				if test.web2 != nil {
					want["web2"] = test.web2[family]
				}
				checkSources(t, name, test.from, protocol, at(ip, test.port), want)
			}
		}
	}
	nobody.Wait()
	testLocalConnections(t, c, svc)
	testPolicyConnections(t, c, svc)
	// An external IP that is routed to the endpoint's node preserves the client's address
	// too.
	c.Fabric.Route(externalIPs(4)[0] + " via " + node1.IPv4.String())
	if answer := outside.Dial(lab.TCP, at(externalIPs(4)[0], 80)); answer.SeenSource.Addr().String() != clientIPs[0] {
		t.Errorf("external IP, outside: %s, want source %s", answer, clientIPs[0])
	}
}

// demandInternal lets a pod connect to a LoadBalancer IP under externalTrafficPolicy Local, and
// waits until its node has written the rules that this demands. Until then an endpoint on the
// node answers.
func (c *cluster) demandInternal(t *testing.T, n int) {
	t.Helper()
	for family, ip := range balancerIPs(n) {
		save := []string{"iptables-save", "ip6tables-save"}[family]
		written := func() error {
			if !strings.Contains(c.Nodes[0].Exec(save, "-t", "mangle"), "-j KUBE-IPVS-INTERNAL") {
				return fmt.Errorf("no rules for internal clients")
			}
			return nil
		}
		if written() == nil {
			continue
		}
		if answer := c.caller1.Dial(lab.TCP, at(ip, 80)); answer.Server != "web1" {
			t.Errorf("the first connection of a pod to %s: %s, want web1", ip, answer)
		}
		lab.Eventually(t, syncLimit, "rules for internal clients are written on demand", written)
	}
}

// testExternalLocalAffinity checks that each client reaches one endpoint on its own port:
// an external one on the ingress node, an internal one anywhere.
func testExternalLocalAffinity(t *testing.T, c *cluster) {
	svc := newExposed("affinitylocal", 13)
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 2, 2, 2)
	c.demandInternal(t, 13)
	for family, ip := range balancerIPs(13) {
		for _, protocol := range lab.Protocols {
			checkSources(t, "outside", c.Client, protocol, at(ip, 80), map[string]string{"web1": []string{"198.51.100.9", "fd00:51::9"}[family]})
			answered := map[string]int{}
			for range manyRequests {
				answered[c.caller1.Dial(protocol, at(ip, 80)).Server]++
			}
			if len(answered) != 1 || answered[""] > 0 {
				t.Errorf("%s %s: answered by %v, want one endpoint", protocol, ip, answered)
			}
		}
	}
}

func checkNoAnswer(t *testing.T, name string, from *lab.Namespace, protocol lab.Protocol, address string) {
	if answer := from.DialWithin(refusalLimit, protocol, address); answer.Outcome() != lab.TimedOut {
		t.Errorf("%s: %s, want no answer", name, answer)
	}
}

// checkSources sends requests until all expected endpoints have answered, and some more:
// no other endpoint answers, and each sees the expected source.
func checkSources(t *testing.T, name string, from *lab.Namespace, protocol lab.Protocol, address string, want map[string]string) {
	t.Helper()
	answered := map[string]int{}
	for range manyRequests {
		answer := from.Dial(protocol, address)
		if source, ok := want[answer.Server]; !ok || answer.SeenSource.Addr().String() != source {
			t.Errorf("%s: %s, want %v", name, answer, want)
			return
		}
		answered[answer.Server]++
	}
	if len(answered) != len(want) {
		t.Errorf("%s: answered by %v, want %v", name, answered, want)
	}
}

// testLocalConnections makes a node's only endpoint not ready, and ready again. External
// clients are rejected meanwhile, but open connections continue, both external and
// internal ones.
func testLocalConnections(t *testing.T, c *cluster, svc *corev1.Service) {
	var open []*lab.Connection
	for _, from := range []*lab.Namespace{c.Client, c.Client, c.caller1.Namespace, c.caller1.Namespace} {
		for _, ip := range balancerIPs(4) {
			connection, err := from.Connect(lab.DialTimeout, lab.TCP, at(ip, 80))
			if err != nil {
				t.Fatal(err)
			}
			defer connection.Close()
			open = append(open, connection)
		}
	}
	stillAnswer := func(when string) {
		for _, connection := range open {
			if answer := connection.Ask(lab.DialTimeout); answer.Err != nil {
				t.Errorf("a connection that was open before %s: %s", when, answer)
			}
		}
	}
	address := at(balancerIPs(4)[0], 80)
	own := c.caller1.Addresses[0].String()
	for _, step := range []struct {
		when   string
		web1   podEndpoint
		want   lab.Outcome
		inside map[string]string
	}{
		{"the endpoint was not ready", podEndpoint{c.web1, endpoint{notReady: true}}, lab.TimedOut, map[string]string{"web2": own}},
		{"the endpoint was ready again", ready(c.web1), lab.OK, map[string]string{"web1": own, "web2": own}},
	} {
		for _, slice := range dualStackSlices(svc, webPort, step.web1, ready(c.web2)) {
			c.api.setSlice(slice)
		}
		lab.Eventually(t, syncLimit, step.when, func() error {
			for _, ip := range balancerIPs(4) { // of each family: their slices change one by one
				if answer := c.Client.DialWithin(refusalLimit, lab.TCP, at(ip, 80)); answer.Outcome() != step.want {
					return fmt.Errorf("%s from outside: %s", ip, answer)
				}
			}
			return nil
		})
		stillAnswer(step.when)
		checkSources(t, step.when+", from inside", c.caller1.Namespace, lab.UDP, address, step.inside)
	}
}

// testPolicyConnections changes the traffic policy, removes the node's only endpoint from
// its slice, and toggles masquerading. Open TCP connections and UDP flows of external
// clients, of a pod and of the node continue.
func testPolicyConnections(t *testing.T, c *cluster, svc *corev1.Service) {
	type client struct {
		name string
		*lab.Connection
		endpoint string
	}
	var open []client
	for name, from := range map[string]*lab.Namespace{"external": c.Client, "pod": c.caller1.Namespace, "node": c.Nodes[0].Namespace} {
		for _, ip := range balancerIPs(4) {
			for range 2 { // round robin: one of the internal ones to each endpoint
				for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
					connection, err := from.Connect(lab.DialTimeout, protocol, at(ip, 80))
					if err != nil {
						t.Fatal(err)
					}
					defer connection.Close()
					answer := connection.Ask(lab.DialTimeout)
					if answer.Err != nil {
						t.Fatalf("%s, %s %s: %s", name, protocol, ip, answer)
					}
					open = append(open, client{fmt.Sprintf("%s, %s %s", name, protocol, ip), connection, answer.Server})
				}
			}
		}
	}
	gone := false // flows of a removed endpoint are deleted
	change := func(when string, web1 bool, change func(*corev1.Service), want lab.Outcome, source string) {
		t.Helper()
		c.api.changeService(svc.Name, func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy, s.Annotations = svc.Spec.ExternalTrafficPolicy, nil
			change(s)
		})
		pods := []podEndpoint{ready(c.web2)}
		if web1 {
			pods = append(pods, ready(c.web1))
		}
		for _, slice := range dualStackSlices(svc, webPort, pods...) {
			c.api.setSlice(slice)
		}
		address := at(balancerIPs(4)[0], 80)
		lab.Eventually(t, syncLimit, when, func() error {
			answer := c.Client.DialWithin(refusalLimit, lab.TCP, address)
			if answer.Outcome() != want || want == lab.OK && (answer.SeenSource.Addr().String() == "198.51.100.9") != (source == "kept") {
				return fmt.Errorf("a new external connection: %s", answer)
			}
			return nil
		})
		for _, o := range open {
			if gone = gone || !web1; gone && o.endpoint == "web1" && strings.Contains(o.name, "UDP") {
				continue
			}
			answer := o.Ask(lab.DialTimeout)
			if answer.Err != nil || answer.Server != o.endpoint {
				t.Errorf("%s: the open connection of %s to %s: %s", when, o.name, o.endpoint, answer)
			}
		}
	}
	same := func(*corev1.Service) {}
	toCluster := func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster }
	masquerade := func(s *corev1.Service) { s.Annotations = map[string]string{"kube-ipvs.io/masquerade": "true"} }
	change("policy Cluster", true, toCluster, lab.OK, "masqueraded")
	change("policy Local again", true, same, lab.OK, "kept")
	change("masqueraded", true, masquerade, lab.OK, "masqueraded")
	change("not masqueraded again", true, same, lab.OK, "kept")
	change("the endpoint has left its slice", false, same, lab.TimedOut, "")
	change("the endpoint is back", true, same, lab.OK, "kept")
}

func texts(addresses []netip.Addr) []string {
	var out []string
	for _, a := range addresses {
		out = append(out, a.String())
	}
	return out
}

// testInternalLocal checks that the endpoint's node answers and the others refuse.
func testInternalLocal(t *testing.T, c *cluster) {
	svc := newDualStack("internallocal", 5)
	svc.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)), 1, 1, 0)
	for _, ip := range clusterIPs(5) {
		for range manyRequests {
			if answer := c.caller1.Dial(lab.TCP, at(ip, 80)); answer.Server != "web1" {
				t.Errorf("%s beside web1: %s", ip, answer)
			}
		}
		if answer := c.caller3.Dial(lab.TCP, at(ip, 80)); answer.Outcome() != lab.Refused {
			t.Errorf("%s far from endpoints: %s, want refused", ip, answer)
		}
	}
}

// testTerminating checks that a terminating endpoint gets no new connections while
// another is ready, and gets them if none is.
func testTerminating(t *testing.T, c *cluster) {
	svc := newDualStack("terminating", 6)
	c.serve(t, svc, dualStackSlices(svc, webPort, terminating(c.web1), ready(c.web2)), 1, 1, 1)
	check := func(want string) {
		t.Helper()
		for _, ip := range clusterIPs(6) {
			for range manyRequests {
				if answer := c.caller3.Dial(lab.TCP, at(ip, 80)); answer.Server != want {
					t.Errorf("%s: %s, want %s", ip, answer, want)
				}
			}
		}
	}
	check("web2")
	notReady := podEndpoint{c.web2, endpoint{notReady: true}}
	for _, slice := range dualStackSlices(svc, webPort, terminating(c.web1), notReady) {
		c.api.setSlice(slice)
	}
	c.awaitRealServer(t, svc, c.web1)
	check("web1")
}

// awaitRealServer waits until a pod is the only active real server of a Service.
func (c *cluster) awaitRealServer(t *testing.T, svc *corev1.Service, pod *lab.Pod) {
	t.Helper()
	for _, node := range c.Nodes {
		lab.Eventually(t, syncLimit, node.Name+" uses "+pod.Name, func() error {
			table := readIPVS(node.Node)
			for family, ip := range svc.Spec.ClusterIPs {
				entry := table[virtualServer{lab.TCP, netip.MustParseAddrPort(at(ip, 80))}]
				to := netip.AddrPortFrom(pod.Addresses[family], webPort)
				if entry.active() != 1 || !strings.Contains(entry.realServers[to], "-w 1") {
					return fmt.Errorf("%s has %v", ip, entry.realServers)
				}
			}
			return nil
		})
	}
}

// testNotOurs creates Services that no proxy serves, or another proxy. They are created
// before a served one, so that they have been processed when that is served.
func testNotOurs(t *testing.T, c *cluster) {
	headless := newDualStack("headless", 7)
	headless.Spec.ClusterIP, headless.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	another := newDualStack("another", 8)
	another.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "another"}
	external := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "externalname"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.org"},
	}
	for _, svc := range []*corev1.Service{headless, another, external} {
		for _, slice := range dualStackSlices(svc, webPort+1, ready(c.web1)) {
			slice.Labels = withLabels(slice.Labels, svc.Labels)
			c.api.addSlice(slice)
		}
		c.api.addService(svc)
	}
	ours := newDualStack("ours", 9)
	c.serve(t, ours, dualStackSlices(ours, webPort, ready(c.web1)), 1, 1, 1)
	for i, node := range c.Nodes {
		if found := serversOn(readIPVS(node.Node), webPort+1); len(found) > 0 {
			t.Errorf("%s serves %v", node.Name, found)
		}
		for _, ip := range clusterIPs(8) {
			if vips(node.Node)[netip.MustParseAddr(ip)] {
				t.Errorf("%s has another proxy's %s", node.Name, ip)
			}
		}
		for _, svc := range []*corev1.Service{headless, another, external} {
			if log := c.proxies[i].Log(); strings.Contains(log, c.api.namespace+"/"+svc.Name) {
				t.Errorf("%s complains of %s:\n%s", node.Name, svc.Name, log)
			}
		}
	}
}

func withLabels(labels, more map[string]string) map[string]string {
	maps.Copy(labels, more)
	return labels
}

// serversOn returns the virtual servers that have real servers on a port.
func serversOn(table ipvsTable, port uint16) []virtualServer {
	var found []virtualServer
	for vs, entry := range table {
		for to := range entry.realServers {
			if to.Port() == port {
				found = append(found, vs)
			}
		}
	}
	return found
}

// testOtherPorts connects to ports that no Service has. A process that listens on all of
// the node's addresses does not answer on a VIP.
func testOtherPorts(t *testing.T, c *cluster) {
	svc := newExposed("otherports", 10)
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1)), 1, 1, 1)
	node1 := c.Nodes[0]
	const hostPort, closedPort = 9000, 9001
	var requests sync.WaitGroup
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		node1.Serve("host", protocol, hostPort)
		for _, ip := range node1.Gateways() {
			if answer := c.caller1.Dial(protocol, at(ip.String(), hostPort)); answer.Server != "host" {
				t.Errorf("the host's own %s %s: %s", protocol, ip, answer)
			}
		}
		for _, ip := range slices.Concat(clusterIPs(10), balancerIPs(10)) {
			for _, from := range []*lab.Namespace{c.caller1.Namespace, node1.Namespace, c.Client} {
				// From internal clients, the load balancer's other ports are left to the
				// load balancer, which does not exist here.
				left := from != c.Client && slices.Contains(balancerIPs(10), ip)
				for _, port := range []uint16{hostPort, closedPort} {
					requests.Go(func() {
						answer := from.Dial(protocol, at(ip, port))
						if left && answer.Err == nil || !left && !refused(answer) {
							t.Errorf("%s %s from %s: %s, want it refused, or left to the load balancer: %t", protocol, at(ip, port), from.Name, answer, left)
						}
					})
				}
			}
		}
	}
	requests.Wait()
}

// testPing checks that VIPs answer ping.
func testPing(t *testing.T, c *cluster) {
	svc := newExposed("ping", 11)
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web1)), 1, 1, 1)
	fromOutside := []*lab.Namespace{c.Client}
	fromAnywhere := append(fromOutside, c.caller1.Namespace, c.Nodes[0].Namespace)
	for _, ip := range slices.Concat(clusterIPs(11), balancerIPs(11), externalIPs(11)) {
		callers := fromOutside // pings of internal clients reach the load balancer
		if slices.Contains(clusterIPs(11), ip) {
			callers = fromAnywhere
		}
		for _, from := range callers {
			if _, err := from.TryExec("ping", "-c", "1", "-W", "3", ip); err != nil {
				t.Errorf("%s: %v", from.Name, err)
			}
		}
	}
}

// testSourceRanges checks that only the listed clients reach a LoadBalancer IP, nodes and
// pods included.
func testSourceRanges(t *testing.T, c *cluster) {
	svc := newLoadBalancer(newDualStack("sourceranges", 12), balancerIPs(12)...)
	node1, node3 := c.Nodes[0], c.Nodes[2]
	svc.Spec.LoadBalancerSourceRanges = []string{
		"198.51.100.0/24", "fd00:51::/64", node1.IPv4.String() + "/32", node1.IPv6.String() + "/128",
	}
	var requests sync.WaitGroup
	stranger := c.Fabric.Segment("198.51.101.1/24", "fd00:52::1/64").Client("stranger", "198.51.101.9/24", "fd00:52::9/64")
	c.serve(t, svc, dualStackSlices(svc, webPort, ready(c.web2)), 1, 1, 1)
	for _, test := range []struct {
		from *lab.Namespace
		may  bool
	}{
		{c.Client, true}, {stranger, false}, {node1.Namespace, true}, {node3.Namespace, false}, {c.caller1.Namespace, false},
	} {
		for family, ip := range balancerIPs(12) {
			for _, protocol := range lab.Protocols {
				requests.Go(func() {
					answer := test.from.DialWithin(refusalLimit, protocol, at(ip, 80))
					if answered := answer.Server == "web2"; answered != test.may {
						t.Errorf("%s %s from %s: %s, want an answer: %v", protocol, ip, test.from.Name, answer, test.may)
					}
					// The ranges do not apply to the cluster IP.
					if answer := test.from.Dial(protocol, at(clusterIPs(12)[family], 80)); answer.Server != "web2" {
						t.Errorf("the cluster IP over %s from %s: %s", protocol, test.from.Name, answer)
					}
				})
			}
		}
	}
	requests.Wait()
}
