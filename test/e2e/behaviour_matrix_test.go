//go:build e2e

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// behaviourMatrix is the ordinary cluster with every Service of the oracle's on
// it, served by node1 and node3.
//
//	outside1 (198.51.101.9)   outside3 (198.51.103.9)
//	              \           /
//	                 fabric: VIPs -> node1 for outside1, -> node3 for outside3
//	   +---------------+----------------+
//	 node1           node2            node3
//	web1, pod1       web2             pod3
type behaviourMatrix struct {
	*lab.ThreeNodes
	hosts    map[string]*lab.Namespace // clients by name
	ports    map[string]*atomic.Int32  // the last source port of each client
	pods     map[string]*lab.Pod       // the endpoints
	failures atomic.Int32
}

// TestBehaviourMatrixIPv4 tests every cell of the matrix: which endpoints answer, which
// source they see, and whether the client is refused or gets no reply.
func TestBehaviourMatrixIPv4(t *testing.T) { askBehaviour(t, 0) }

// TestBehaviourMatrixIPv6 does the same with IPv6.
func TestBehaviourMatrixIPv6(t *testing.T) { askBehaviour(t, 1) }

// askBehaviour runs all set-ups; in short mode the first one, without SCTP.
func askBehaviour(t *testing.T, family int) {
	m := newBehaviourMatrix(t)
	setups := slices.Clone(matrixSetups)
	if testing.Short() {
		setups = setups[:1]
		setups[0].protocols = []lab.Protocol{lab.TCP, lab.UDP}
	}
	for _, setup := range setups {
		// The lab saves the nodes' state when the test ends; stop at the first failure so
		// that it is the state of the failure.
		if !t.Run(setup.name, func(t *testing.T) { m.run(t, setup, family) }) {
			return
		}
	}
}

// run restarts the proxies and tests all cells.
func (m *behaviourMatrix) run(t *testing.T, setup matrixSetup, family int) {
	dir := writeManifests(t, m.manifests()...)
	for _, node := range []*lab.BridgeNode{m.Nodes[0], m.Nodes[2]} {
		runOnce(t, node.Node, dir, setup.flags...)
	}
	byFate := map[fate][]matrixCell{}
	for _, cell := range setup.cells(family) {
		f := cell.want().fate
		byFate[f] = append(byFate[f], cell)
	}
	for _, part := range []struct {
		fate    fate
		workers int
		ask     func(matrixCell) error
	}{
		{isAnswered, 8, m.askAnswered},
		{isRefused, 100, m.askRefused},
		{isDropped, len(byFate[isDropped]), m.askDropped}, // these only wait for timeouts
	} {
		begin, cells := time.Now(), byFate[part.fate]
		for _, err := range inParallel(part.workers, cells, m.untilTooMany(part.ask)) {
			if err != nil {
				t.Error(err)
			}
		}
		t.Logf("%d cells that are %s: %s", len(cells), part.fate, time.Since(begin).Round(time.Millisecond))
		if m.failures.Load() >= enoughFailures {
			t.Fatal("too many failures: some cells were not tested")
		}
	}
}

// TestBehaviourMatrixDocumented checks that the documentation names every deviation from
// the API.
func TestBehaviourMatrixDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(os.Getenv("LAB_SRC"), "docs/concepts/traffic-policies.md"))
	if err != nil {
		t.Fatal(err)
	}
	tested := map[string]bool{}
	for _, cell := range slices.Concat(matrixSetups[0].cells(0), matrixSetups[0].cells(1)) {
		if why := cell.want().why; why != "" {
			tested[string(why)] = true
		}
	}
	sameLimits(t, "docs/concepts/traffic-policies.md", tested, reasonsIn(string(text), "| behavior | the API | reason |"))
}

// enoughFailures is the number of failures after which the test stops, because each
// timeout takes time.
const enoughFailures = 50

func (m *behaviourMatrix) untilTooMany(ask func(matrixCell) error) func(matrixCell) error {
	return func(c matrixCell) error {
		if m.failures.Load() >= enoughFailures {
			return nil
		}
		err := ask(c)
		if err == nil {
			return nil
		}
		m.failures.Add(1)
		return fmt.Errorf("%s: %w", c, err)
	}
}

func newBehaviourMatrix(t *testing.T) *behaviourMatrix {
	c := lab.NewThreeNodes(t)
	node1, node2, node3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	m := &behaviourMatrix{ThreeNodes: c, ports: map[string]*atomic.Int32{}}
	m.pods = map[string]*lab.Pod{web1: node1.AddPod(web1), web2: node2.AddPod(web2)}
	m.hosts = map[string]*lab.Namespace{
		web1: m.pods[web1].Namespace, "pod1": node1.AddPod("pod1").Namespace, "pod3": node3.AddPod("pod3").Namespace,
		"node1": node1.Namespace, "node3": node3.Namespace,
		"outside1": m.addOutside(node1), "outside3": m.addOutside(node3),
	}
	for name, host := range m.hosts {
		m.ports[name] = &atomic.Int32{}
		// The test causes many refusals per second, which the kernel would rate-limit.
		host.Sysctl("net.ipv4.icmp_ratemask", "0")
		host.Sysctl("net.ipv6.icmp.ratemask", "0") // no ICMPv6 type
	}
	for name, pod := range m.pods {
		for _, service := range matrixServices() {
			for _, protocol := range lab.Protocols {
				pod.Serve(service.servedBy(name), protocol, service.targetPort())
			}
		}
	}
	return m
}

// addOutside adds an external client whose packets to every VIP are routed to one node.
func (m *behaviourMatrix) addOutside(node *lab.BridgeNode) *lab.Namespace {
	n := 100 + node.Number
	segment := m.Fabric.Segment(fmt.Sprintf("198.51.%d.1/24", n), fmt.Sprintf("fd00:51:%d::1/64", n))
	m.Fabric.Route(fmt.Sprintf("default via %s table %d", node.IPv4, n), fmt.Sprintf("default via %s table %d", node.IPv6, n))
	for _, vips := range []string{"10.96.0.0/16", "203.0.113.0/24"} {
		m.Fabric.Rule(fmt.Sprintf("pref %d from 198.51.%d.0/24 to %s lookup %d", n, n, vips, n))
	}
	for _, vips := range []string{"fd00:10:96::/112", "fd00:203::/32"} {
		m.Fabric.Rule(fmt.Sprintf("pref %d from fd00:51:%d::/64 to %s lookup %d", n, n, vips, n))
	}
	return segment.Client(fmt.Sprintf("outside%d", node.Number), fmt.Sprintf("198.51.%d.9/24", n), fmt.Sprintf("fd00:51:%d::9/64", n))
}

// The endpoints of each Service have their own port and names, so that a reply of another
// Service is recognized.
func (s matrixService) targetPort() uint16 { return uint16(webPort + s.number) }
func (s matrixService) servedBy(endpoint string) string {
	return fmt.Sprintf("%s-%d", endpoint, s.number)
}
func (s matrixService) nodePort() uint16 { return uint16(30000 + s.number) }

func (m *behaviourMatrix) manifests() []runtime.Object {
	var objects []runtime.Object
	for _, s := range matrixServices() {
		svc := newExposed(fmt.Sprintf("web%d", s.number), s.number)
		var internal corev1.ServiceInternalTrafficPolicy
		svc.Spec.ExternalTrafficPolicy, internal = s.policies()
		svc.Spec.InternalTrafficPolicy = &internal
		if s.externalLocal {
			svc.Spec.HealthCheckNodePort = int32(31000 + s.number)
		}
		var endpoints []podEndpoint
		for name, condition := range s.place.conditions {
			endpoints = append(endpoints, podEndpoint{m.pods[name], condition.endpoint()})
		}
		objects = append(objects, svc)
		for _, slice := range dualStackSlices(svc, int32(s.targetPort()), endpoints...) {
			objects = append(objects, slice)
		}
	}
	return objects
}

func (c condition) endpoint() endpoint {
	return endpoint{
		notReady:    c == isUnready || c == isGone,
		terminating: c == isTerminating || c == isGone,
	}
}

// target returns the address that a cell's client connects to.
func (m *behaviourMatrix) target(c matrixCell) string {
	switch c.destination.kind {
	case clusterIP:
		return at(clusterIPs(c.number)[c.family], 80)
	case externalIP:
		return at(externalIPs(c.number)[c.family], 80)
	case balancerIP:
		return at(balancerIPs(c.number)[c.family], 80)
	case podSidePort:
		return at(m.Nodes[c.destination.node-1].Gateways()[c.family].String(), c.nodePort())
	case loopbackPort:
		return at([]string{"127.0.0.1", "::1"}[c.family], c.nodePort())
	case vipNodePort:
		return at(clusterIPs(c.number)[c.family], c.nodePort())
	}
	return at(nodeIPs(m.Nodes[c.destination.node-1])[c.family], c.nodePort())
}

// dial sends one request from a port that the client has not used before. IPVS matches
// replies on endpoint and client only, and would mix up two VIPs that one port connects
// to.
func (m *behaviourMatrix) dial(c matrixCell, limit time.Duration) lab.Answer {
	const first = 33000 // behind the node ports
	port := first + m.ports[c.client.name].Add(1)
	return m.hosts[c.client.name].DialFrom(uint16(port), limit, c.protocol, m.target(c))
}

// askAnswered sends requests until all expected endpoints have answered, and often enough
// that every other endpoint would have.
func (m *behaviourMatrix) askAnswered(c matrixCell) error {
	want := c.want().answers
	met := map[string]bool{}
	enough := 2 * len(c.place.conditions)
	for i := 0; i < enough || len(met) < len(want) && i < 3*enough; i++ {
		answer := m.dial(c, lostAfter)
		name, err := m.answeredBy(c, answer)
		if err != nil {
			return err
		}
		met[name] = true
	}
	if len(met) < len(want) {
		return fmt.Errorf("answered by %v alone, want %v", met, want)
	}
	return nil
}

// answeredBy returns the endpoint that answered. It fails if another endpoint should
// have, or if the endpoint saw an unexpected source.
func (m *behaviourMatrix) answeredBy(c matrixCell, answer lab.Answer) (string, error) {
	want := c.want().answers
	for name, source := range want {
		if answer.Server != c.servedBy(name) {
			continue
		}
		seen := m.sourceOf(c, name, source, answer)
		if answer.SeenSource.Addr() != seen {
			return name, fmt.Errorf("%s, want %s source, %s", answer, source, seen)
		}
		return name, nil
	}
	return "", fmt.Errorf("%s, want %v", answer, want)
}

// sourceOf returns the address that an endpoint should have seen. A node has one on each
// side.
func (m *behaviourMatrix) sourceOf(c matrixCell, endpoint string, source source, answer lab.Answer) netip.Addr {
	node := m.Nodes[c.asked()-1]
	switch {
	case source == theClients:
		return answer.Local.Addr()
	case endpointNodes[endpoint] == c.asked():
		return node.Gateways()[c.family]
	}
	return netip.MustParseAddr(nodeIPs(node)[c.family])
}

// askRefused sends one request. There are no endpoints, so another endpoint cannot answer
// the next request.
func (m *behaviourMatrix) askRefused(c matrixCell) error {
	if answer := m.dial(c, lostAfter); !refused(answer) {
		return fmt.Errorf("%s, want it refused", answer)
	}
	return nil
}

// askDropped waits longer than a reply or a refusal takes, often enough to reach each
// endpoint.
func (m *behaviourMatrix) askDropped(c matrixCell) error {
	answers := make(chan lab.Answer)
	tries := 2 * len(c.place.conditions)
	for range tries {
		go func() { answers <- m.dial(c, droppedAfter) }()
	}
	var wrong error
	for range tries {
		if answer := <-answers; answer.Outcome() != lab.TimedOut {
			wrong = fmt.Errorf("%s, want no answer", answer)
		}
	}
	return wrong
}

const droppedAfter = 5 * time.Second
