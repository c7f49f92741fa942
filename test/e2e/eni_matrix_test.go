//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// eniMatrix is a cluster in which every cell is tested under each mode.
type eniMatrix struct {
	*lab.ENINode
	enis    int
	address bool
	pods    map[int]*lab.Pod // clients, by their ENI's number; 0: on none
	outside map[eniClient]*lab.Namespace
	servers map[string]*lab.Pod // by the names of the endpoints
	dir     string              // of manifests
}

// TestENIMatrixOneENI tests every cell in every set-up, with strict rp_filter and a
// fabric that drops sources that do not belong to the interface: which endpoints answer,
// which source they see, and which interfaces each packet uses on the node. Cells that
// the oracle calls impossible must fail.
func TestENIMatrixOneENI(t *testing.T) { askMatrix(t, 1) }

// TestENIMatrixThreeENIs does the same with three ENIs.
func TestENIMatrixThreeENIs(t *testing.T) { askMatrix(t, 3) }

func askMatrix(t *testing.T, enis int) {
	for _, address := range []bool{false, true} {
		t.Run(fmt.Sprintf("with addresses=%v", address), func(t *testing.T) {
			m := newENIMatrix(t, enis, address)
			for _, mode := range eniModes {
				// The lab saves the state of the node when the test ends: stop at the
				// first failure.
				if !t.Run(mode, func(t *testing.T) { m.run(t, mode) }) {
					return
				}
			}
		})
	}
}

// TestENIMatrixDocumented checks that the documentation names every connection that
// cannot work.
func TestENIMatrixDocumented(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(os.Getenv("LAB_SRC"), "docs/concepts/eni.md"))
	if err != nil {
		t.Fatal(err)
	}
	limits := map[string]bool{}
	for _, mode := range eniModes {
		for _, address := range []bool{false, true} {
			for _, cell := range (eniSetup{mode, 1, address}).cells() {
				if _, why := cell.answering(); why != "" {
					limits[string(why)] = true
				}
			}
		}
	}
	sameLimits(t, "docs/concepts/eni.md", limits, reasonsIn(string(text), "| connection | modes | why it fails |"))
}

// reasonsIn returns the last column of a page's table, up to a semicolon.
func reasonsIn(page, head string) map[string]bool {
	out := map[string]bool{}
	_, table, _ := strings.Cut(page, head+"\n")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		if !strings.HasPrefix(line, "| ") {
			if strings.HasPrefix(line, "|-") {
				continue
			}
			break
		}
		why, _, _ := strings.Cut(strings.TrimSuffix(cells[len(cells)-1], " |"), "; ")
		out[why] = true
	}
	return out
}

// sameLimits compares a page's table with the cells that do not work: it must name each
// of their reasons, and no other.
func sameLimits(t *testing.T, page string, tested, documented map[string]bool) {
	t.Helper()
	if len(tested) == 0 {
		t.Error("no cell fails: the test tests nothing")
	}
	for why := range tested {
		if !documented[why] {
			t.Errorf("%s does not say: %s", page, why)
		}
	}
	for why := range documented {
		if !tested[why] {
			t.Errorf("%s names a reason that no cell has: %s", page, why)
		}
	}
}

func newENIMatrix(t *testing.T, enis int, address bool) *eniMatrix {
	m := &eniMatrix{
		ENINode: lab.NewENINode(t), enis: enis, address: address,
		pods: map[int]*lab.Pod{}, outside: map[eniClient]*lab.Namespace{}, servers: map[string]*lab.Pod{},
	}
	for range enis {
		eni := m.AddENI()
		if address {
			eni.Carry()
		}
	}
	m.servers[ordinary] = m.Primary.AddPod(ordinary)
	m.servers[onENI] = m.ENIs[0].AddPod(onENI)
	m.servers[remote] = m.AddRemote(remote)
	for name, pod := range m.servers {
		for _, service := range eniServices() {
			for _, protocol := range eniProtocols {
				pod.Serve(name, protocol, service.targetPort())
			}
		}
		// No retransmissions of failed cells during the next cell.
		pod.Sysctl("net.ipv4.tcp_synack_retries", "0")
	}
	for _, client := range eniClients(enis) {
		m.addClient(client)
	}
	m.Fabric.CheckSources()
	m.dir = writeManifests(t, m.manifests()...)
	return m
}

// addClient adds a client and, for external ones, routes its LoadBalancer IPs in the
// fabric.
func (m *eniMatrix) addClient(c eniClient) {
	switch {
	case c.kind == aPod:
		m.pods[c.number] = m.Interfaces()[c.number].AddPod(fmt.Sprintf("client%d", c.number))
	case c.kind == outside:
		m.outside[c] = m.AddClient(fmt.Sprintf("outside%d", len(m.outside)))
	}
	for _, subnet := range c.vipSubnets() {
		if c.kind == outside {
			m.Interfaces()[c.number].Deliver(subnet)
		} else {
			m.Fabric.Route("blackhole " + subnet)
		}
	}
}

// vipSubnet numbers the LoadBalancer IPs of one client. Each client has its own, so that
// other clients do not disturb its round robin. Each Service has its own target port,
// because IPVS matches replies on endpoint and client only and would mix up two VIPs of
// an endpoint that one port connects to.
func (c eniClient) vipSubnet() int {
	return map[string]int{aPod: 10, outside: 20, aNode: 30}[c.kind] + c.number
}

func (c eniClient) vipSubnets() []string {
	return []string{fmt.Sprintf("10.115.%d.0/24", c.vipSubnet()), fmt.Sprintf("fd00:115:%d::/64", c.vipSubnet())}
}

// vips returns the LoadBalancer IPs of a Service for a client, IPv4 first.
func (s eniService) vips(c eniClient) []string {
	return []string{fmt.Sprintf("10.115.%d.%d", c.vipSubnet(), s.number), fmt.Sprintf("fd00:115:%d::%d", c.vipSubnet(), s.number)}
}

func (s eniService) nodePort() uint16   { return uint16(30000 + s.number) }
func (s eniService) targetPort() uint16 { return uint16(webPort + s.number) }

func (m *eniMatrix) manifests() []runtime.Object {
	var objects []runtime.Object
	for _, s := range eniServices() {
		svc := newDualStack(fmt.Sprintf("web%d", s.number), s.number)
		for _, client := range eniClients(m.enis) {
			if !client.nodePort {
				newLoadBalancer(svc, s.vips(client)...)
			}
		}
		for i := range svc.Spec.Ports {
			svc.Spec.Ports[i].NodePort = int32(s.nodePort())
		}
		svc.Spec.ExternalTrafficPolicy = s.policy
		if s.policy == corev1.ServiceExternalTrafficPolicyLocal {
			svc.Spec.HealthCheckNodePort = int32(31000 + s.number)
		}
		var endpoints []podEndpoint
		for _, name := range s.place {
			endpoints = append(endpoints, ready(m.servers[name]))
		}
		objects = append(objects, svc)
		for _, slice := range dualStackSlices(svc, int32(s.targetPort()), endpoints...) {
			objects = append(objects, slice)
		}
	}
	return objects
}

// target returns the address that a cell's client connects to.
func (m *eniMatrix) target(c eniCell) string {
	if c.client.nodePort {
		return netip.AddrPortFrom(m.Interfaces()[c.client.number].Addresses[c.family], c.nodePort()).String()
	}
	return at(c.vips(c.client)[c.family], 80)
}

// endpoint returns the address that a cell's requests reach.
func (m *eniMatrix) endpoint(c eniCell, name string) netip.AddrPort {
	return netip.AddrPortFrom(m.servers[name].Addresses[c.family], c.targetPort())
}

func (m *eniMatrix) asker(c eniClient) *lab.Namespace {
	switch c.kind {
	case aNode:
		return m.Node.Namespace
	case outside:
		return m.outside[c]
	}
	return m.pods[c.number].Namespace
}

// asked is a cell with its results.
type asked struct {
	eniCell
	answers []lab.Answer
}

func (m *eniMatrix) run(t *testing.T, mode string) {
	runOnce(t, m.Node, m.dir, "--snat-mode", mode, "--cluster-cidr", lab.ENIPodCIDRs)
	// A client may reuse a port that it has used under the previous mode.
	for _, family := range []string{"ipv4", "ipv6"} {
		m.Node.Exec("conntrack", "-F", "-f", family)
	}
	var sure, doubtful []eniCell
	for _, cell := range (eniSetup{mode, m.enis, m.address}).cells() {
		if _, why := cell.answering(); why == "" {
			sure = append(sure, cell)
		} else {
			doubtful = append(doubtful, cell)
		}
	}
	watches := map[lab.Protocol]*lab.Capture{}
	for _, protocol := range eniProtocols {
		watches[protocol] = m.Node.Watch(protocol, m.ends(append(slices.Clone(sure), doubtful...))...)
		defer watches[protocol].Stop()
	}

	begin, spoofed := time.Now(), m.Fabric.Spoofed()
	done := inParallel(8, sure, m.ask)
	if n := m.Fabric.Spoofed() - spoofed; n != 0 {
		t.Errorf("the fabric dropped %d packets for their source", n)
	}
	middle := time.Now()
	// These mostly wait.
	done = append(done, inParallel(len(doubtful), doubtful, m.askBriefly)...)
	t.Logf("%d cells that are answered: %s; %d that are not, or not always: %s",
		len(sure), middle.Sub(begin).Round(time.Millisecond), len(doubtful), time.Since(middle).Round(time.Millisecond))

	for _, a := range done {
		m.checkAnswers(t, a)
	}
	for protocol, onNode := range watches {
		m.checkWays(t, slices.DeleteFunc(slices.Clone(done), func(a asked) bool { return a.protocol != protocol }), onNode)
	}
	m.checkTraces(t, done)
}

// ends returns all source and destination addresses of the cells' packets, before and
// after IPVS.
func (m *eniMatrix) ends(cells []eniCell) []string {
	var ends []string
	for _, cell := range cells {
		ends = append(ends, m.target(cell))
		for _, name := range cell.place {
			ends = append(ends, m.endpoint(cell, name).String())
		}
	}
	return ends
}

func inParallel[cell, result any](workers int, cells []cell, ask func(cell) result) []result {
	todo, done := make(chan cell), make(chan result)
	for range workers {
		go func() {
			for cell := range todo {
				done <- ask(cell)
			}
		}()
	}
	go func() {
		for _, cell := range cells {
			todo <- cell
		}
		close(todo)
	}()
	var all []result
	for range cells {
		all = append(all, <-done)
	}
	return all
}

// tries is the number of connections that reach each of a cell's endpoints twice by round
// robin.
func (c eniCell) tries() int { return 2 * len(c.place) }

// lostAfter is the timeout of a connection. TCP retransmits what a starved machine
// delayed; lost packets are never answered.
const lostAfter = 10 * time.Second

// dial connects once. It repeats a datagram that is not answered, as on a starved machine.
func (m *eniMatrix) dial(c eniCell) lab.Answer {
	answer := m.asker(c.client).DialWithin(lostAfter, c.protocol, m.target(c))
	if c.protocol == lab.UDP && answer.Outcome() == lab.TimedOut {
		answer = m.asker(c.client).DialWithin(lostAfter, c.protocol, m.target(c))
	}
	return answer
}

// ask sends requests until all expected endpoints have answered, and some more otherwise.
func (m *eniMatrix) ask(c eniCell) asked {
	out := asked{eniCell: c}
	answering, _ := c.answering()
	met := map[string]bool{}
	for i := 0; i < c.tries() || len(met) < len(answering) && i < 2*c.tries(); i++ {
		answer := m.dial(c)
		out.answers = append(out.answers, answer)
		if answer.Err == nil {
			met[answer.Server] = true
		}
	}
	return out
}

// briefly is long enough for a reply, and short for a timeout.
const briefly = time.Second

// askBriefly sends all requests at once, and repeats them if an expected reply was late.
func (m *eniMatrix) askBriefly(c eniCell) (out asked) {
	out.eniCell = c
	answering, _ := c.answering()
	met := map[string]bool{}
	for round := 0; round == 0 || len(met) < len(answering) && round < 3; round++ {
		answers := make([]lab.Answer, c.tries())
		var all sync.WaitGroup
		for i := range answers {
			all.Go(func() { answers[i] = m.asker(c.client).DialWithin(briefly, c.protocol, m.target(c)) })
		}
		all.Wait()
		out.answers = append(out.answers, answers...)
		for _, answer := range answers {
			if answer.Err == nil {
				met[answer.Server] = true
			}
		}
	}
	return out
}

// checkAnswers compares the endpoints that answered, and the sources that they saw, with
// the oracle.
func (m *eniMatrix) checkAnswers(t *testing.T, a asked) {
	answering, why := a.answering()
	met, failures := map[string]bool{}, 0
	for _, answer := range a.answers {
		if answer.Err != nil {
			failures++
			if why == "" {
				t.Errorf("%s: %s", a, answer)
			}
			continue
		}
		want, ok := answering[answer.Server]
		if !ok {
			t.Errorf("%s: answered by %s, although it must not be: %s%s", a, answer, why, noEndpoint)
			continue
		}
		met[answer.Server] = true
		if !m.isSeen(a.eniCell, want, answer) {
			t.Errorf("%s: %s, want %s %s seen", a, answer, want.seen, want.link)
		}
	}
	if len(met) < len(answering) {
		t.Errorf("%s: answered by %v, want %v", a, met, answering)
	}
	if why != "" && failures == 0 {
		t.Errorf("%s: always answered, although it must not be: %s", a, why)
	}
}

func (m *eniMatrix) isSeen(c eniCell, want eniWant, answer lab.Answer) bool {
	for _, i := range m.Interfaces() {
		carried := i.Number == 0 || c.address
		if answer.SeenSource.Addr() == i.Addresses[c.family] &&
			(want.seen == theNode && carried || want.seen == theLink && want.link == i.Name()) {
			return true
		}
	}
	return want.seen == theClient && answer.SeenSource == answer.Local
}

// leg is one direction of a flow on one side of the node.
type leg struct{ from, to netip.AddrPort }

// pass is a packet on an interface.
type pass struct {
	link string
	out  bool
}

// eniWay is the expected path of a connection on the node.
type eniWay struct {
	eniCell
	legs map[leg]pass
}

// wayOf returns the expected path of an answered connection.
func (m *eniMatrix) wayOf(c eniCell, answer lab.Answer) eniWay {
	answering, _ := c.answering()
	behind := cmp.Or(answering[answer.Server].link, m.servers[answer.Server].HostInterface)
	target, endpoint := netip.MustParseAddrPort(m.target(c)), m.endpoint(c, answer.Server)
	w := eniWay{c, map[leg]pass{
		{answer.SeenSource, endpoint}: {behind, true},
		{endpoint, answer.SeenSource}: {behind, false},
	}}
	if link := m.linkOf(c.client); link != "" {
		w.legs[leg{answer.Local, target}] = pass{link, false}
		w.legs[leg{target, answer.Local}] = pass{link, true}
	}
	return w
}

// checkWays compares the interfaces that the packets used with the oracle.
func (m *eniMatrix) checkWays(t *testing.T, all []asked, onNode *lab.Capture) {
	var ways []eniWay
	for _, a := range all {
		for _, answer := range a.answers {
			if answer.Err == nil {
				ways = append(ways, m.wayOf(a.eniCell, answer))
			}
		}
	}
	passed := m.packets(ways, onNode)
	for _, w := range ways {
		for l, want := range w.legs {
			for _, p := range passed[l] {
				if p.Interface != want.link || p.Out != want.out {
					t.Errorf("%s: passed %s, want %+v", w, p, want)
				}
			}
		}
	}
	arrived := map[netip.AddrPort]string{}
	for l, packets := range passed {
		if first := packets[0]; !first.Out {
			arrived[l.to] = first.Interface
		}
	}
	// The request of an unanswered connection must have been captured.
	for _, a := range all {
		link := m.linkOf(a.client)
		if got := arrived[netip.MustParseAddrPort(m.target(a.eniCell))]; link != "" && got != link {
			t.Errorf("%s: requests came in by %q, want %s", a, got, link)
		}
	}
}

// packets sorts the captured packets. The capture may lag a little behind the replies.
func (m *eniMatrix) packets(ways []eniWay, onNode *lab.Capture) map[leg][]lab.Packet {
	passed := map[leg][]lab.Packet{}
	m.Eventually(followLimit, "every packet is seen", func() error {
		clear(passed)
		for _, p := range onNode.Packets() {
			passed[leg{p.From, p.To}] = append(passed[leg{p.From, p.To}], p)
		}
		for _, w := range ways {
			for l := range w.legs {
				if len(passed[l]) == 0 {
					return fmt.Errorf("%s: none from %s to %s", w, l.from, l.to)
				}
			}
		}
		return nil
	})
	return passed
}

// linkOf returns the node's interface towards a client, or "" for the node itself.
func (m *eniMatrix) linkOf(c eniClient) string {
	switch c.kind {
	case aNode:
		return ""
	case outside:
		return m.Interfaces()[c.number].Name()
	}
	return m.pods[c.number].HostInterface
}
