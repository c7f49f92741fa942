//go:build e2e

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// classLayouts have one of each kind of network in test/prove.
var classLayouts = []lab.Layout{
	lab.SeedLayout, lab.AWSLayout, lab.TerwayLayout, lab.CiliumLayout, lab.AWSStandardLayout, lab.AWSStrictLayout,
	lab.VolcanoLayout, lab.VolcanoSNATLayout, lab.NICsLayout, lab.NICsGatewayLayout,
}

// classLab is a node in one layout, with Services of every policy. It compares the
// kernel with the predictions of package trace's evaluator.
type classLab struct {
	*lab.ENICluster
	family    int        // 0: IPv4, 1: IPv6
	near      []*lab.Pod // endpoints on the node
	far       netip.Addr
	clients   []classClient
	delivered map[netip.Addr]string // VIP to the node's interface to which the fabric delivers it
	entries   map[string]string     // a pod's link to the interface by which the node receives its packets
	names     map[netip.AddrPort]string
	ports     map[string]uint16 // next source port by client: IPVS mixes up connections from one port to two VIPs
}

type classClient struct {
	*lab.Namespace
	name string
	from netip.Addr
	in   string // "": the node itself, or the interface to which the target is delivered
	home string // of a client beyond the node: the interface of the main route to it
}

// classQuestion is a packet to send.
type classQuestion struct {
	client   int
	protocol lab.Protocol
	to       netip.AddrPort
}

// classServices are numbered from 1; each has its own target port.
var classServices = []struct {
	name      string
	change    func(*corev1.Service)
	endpoints []string
}{
	{"cluster", func(*corev1.Service) {}, []string{"near", "far"}},
	{"local", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal }, []string{"near", "far"}},
	{"away", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal }, []string{"far"}},
	{"inner", func(s *corev1.Service) {
		s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}, []string{"near", "far"}},
	{"ranges", func(s *corev1.Service) {
		s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.9/32", "fd00:51::9/128"}
	}, []string{"near", "far"}},
	{"empty", func(*corev1.Service) {}, nil},
	{"host", func(*corev1.Service) {}, []string{"host", "far"}},
}

const (
	classTargetPort = 8100 // plus a Service's number
	classNodePort   = 30000
	classUnused     = 9
	// classVIPsByENI is added to a Service's number for the LoadBalancer IP that the
	// fabric delivers to eth1.
	classVIPsByENI = 64
)

// TestBehaviourPacketClasses compares the evaluator of package trace with the kernel. In
// each layout it draws questions at random, sends the packets, and compares the
// result with the evaluator's for the same kernel: which endpoint answers, which source
// it sees, and which interfaces the packets pass, or that there is no answer. It draws
// questions that match different rules first. CLASSES is the number of questions of each
// layout and family, SEED selects others, and LAYOUT is the number of the only layout,
// from 1. In short mode each layout has one family.
func TestBehaviourPacketClasses(t *testing.T) {
	seed, _ := strconv.ParseUint(os.Getenv("SEED"), 10, 64)
	count, err := strconv.Atoi(cmp.Or(os.Getenv("CLASSES"), "12"))
	if err != nil {
		t.Fatal(err)
	}
	for i, layout := range classLayouts {
		number := strconv.Itoa(i + 1)
		if cmp.Or(os.Getenv("LAYOUT"), number) != number {
			continue
		}
		t.Run(layout.Name, func(t *testing.T) {
			record := reliability.Begin(t, reliability.Packets, "kernel-"+number)
			sent, ways := 0, 0
			for family := range 2 {
				if testing.Short() && (family != i%2 || i%2 == 1) {
					continue
				}
				t.Run(ip.Families[family].String(), func(t *testing.T) {
					l := newClassLab(t, layout, family)
					n := l.kernel(t)
					drawn, distinct := l.draw(n, rand.New(rand.NewPCG(seed, uint64(2*i+family))), count)
					l.compare(t, n, drawn)
					sent, ways = sent+len(drawn), ways+distinct
				})
			}
			t.Logf("%d packets, %d ways through the rules", sent, ways)
			record(
				reliability.Figure{Name: "packet classes sent as real packets", Value: float64(sent), Shows: "IPv4 and IPv6; the kernel and the evaluator agree on each"},
				reliability.Figure{Name: "paths through the rules", Value: float64(ways), Shows: "sets of rules that matched, among these classes"},
			)
		})
	}
}

func newClassLab(t *testing.T, layout lab.Layout, family int) *classLab {
	c := lab.NewENICluster(t, lab.ENIOptions{IPv6: family == 1, CheckSources: true, Layout: &layout})
	l := &classLab{
		ENICluster: c, family: family, near: []*lab.Pod{c.AddPod("near")},
		delivered: map[netip.Addr]string{c.NodeAddress: "eth0", c.ENIAddress: "eth1"},
		entries:   map[string]string{}, names: map[netip.AddrPort]string{}, ports: map[string]uint16{},
	}
	if layout.Endpoints > 1 {
		l.near = append(l.near, c.AddPod("near2"))
	}
	for _, pod := range l.pods() {
		l.delivered[pod.Addresses[0]] = c.Uplink(pod)
		l.entries[pod.HostInterface] = c.Entry(pod)
	}
	c.Node.Sysctl([]string{"net.ipv4.icmp_ratelimit", "net.ipv6.icmp.ratelimit"}[family], "0")
	pick := func(v4, v6 string) string { return []string{v4, v6}[family] }
	beyond := c.Fabric.Segment(pick("10.253.9.1/24", "fd00:253:9::1/64"))
	farText := pick("10.253.9.5", "fd00:253:9::5")
	far := beyond.Client("far", farText+pick("/24", "/64"))
	l.far = netip.MustParseAddr(farText)
	outside := c.Fabric.Segment(pick("198.51.100.1/24", "fd00:51::1/64"))
	friend := outside.Client("friend", pick("198.51.100.9/24", "fd00:51::9/64"))
	stranger := outside.Client("stranger", pick("198.51.100.10/24", "fd00:51::10/64"))
	l.clients = []classClient{
		{c.Node.Namespace, "the node", c.NodeAddress, "", ""},
		{c.Pod.Namespace, "a pod", c.Pod.Addresses[0], c.Entry(c.Pod), ""},
		{l.near[0].Namespace, "an endpoint", l.near[0].Addresses[0], c.Entry(l.near[0]), ""},
		{friend, "a client in the ranges", netip.MustParseAddr(pick("198.51.100.9", "fd00:51::9")), "", "eth0"},
		{stranger, "another client", netip.MustParseAddr(pick("198.51.100.10", "fd00:51::10")), "", "eth0"},
	}
	if layout.Plain {
		address := pick("10.12.192.9", "fd00:12:192::9")
		l.clients = append(l.clients, classClient{c.Neighbor("neighbor", address), "a neighbor at eth1", netip.MustParseAddr(address), "", "eth1"})
	}
	hosts := map[string]*lab.Namespace{"far": far, "host": c.Node.Namespace}
	addresses := map[string]netip.Addr{"far": l.far, "host": c.NodeAddress}
	for _, pod := range l.near {
		hosts[pod.Name], addresses[pod.Name] = pod.Namespace, pod.Addresses[0]
	}
	var objects []runtime.Object
	for i, s := range classServices {
		objects = append(objects, l.service(i+1, addresses)...)
		port := uint16(classTargetPort + i + 1)
		for _, name := range l.endpoints(s.endpoints) {
			for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
				hosts[name].Serve(name, protocol, port)
			}
			l.names[netip.AddrPortFrom(addresses[name], port)] = name
		}
	}
	for address, link := range l.delivered {
		if address != c.NodeAddress && address != c.ENIAddress && !address.Is4() == (family == 1) {
			l.deliver(address, link)
		}
	}
	runOnce(t, c.Node, writeManifests(t, objects...), c.ProxyFlags()...)
	return l
}

func (l *classLab) pods() []*lab.Pod { return append([]*lab.Pod{l.Pod}, l.near...) }

func (l *classLab) isPod(a netip.Addr) bool {
	return slices.ContainsFunc(l.pods(), func(p *lab.Pod) bool { return p.Addresses[0] == a })
}

// endpoints returns the names of a Service's endpoints, with all those of the node's pods
// in place of "near".
func (l *classLab) endpoints(names []string) []string {
	var out []string
	for _, name := range names {
		if name != "near" {
			out = append(out, name)
			continue
		}
		for _, pod := range l.near {
			out = append(out, pod.Name)
		}
	}
	return out
}

// deliver makes the fabric deliver packets for a VIP to an interface.
func (l *classLab) deliver(vip netip.Addr, link string) {
	if l.isPod(vip) {
		return
	}
	port, next := l.Eth0, l.NodeAddress
	if link == "eth1" {
		port, next = l.Eth1, l.ENIAddress
	}
	l.Fabric.Route(fmt.Sprintf("%s via %s", vip, next))
	port.Accept(vip.String())
}

// service returns one of classServices, with its EndpointSlice.
func (l *classLab) service(n int, addresses map[string]netip.Addr) []runtime.Object {
	s := classServices[n-1]
	svc := newService(s.name, corev1.ProtocolTCP, 80, clusterIPs(n)[l.family])
	svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80})
	for i := range svc.Spec.Ports {
		svc.Spec.Ports[i].NodePort = int32(classNodePort + n)
	}
	newLoadBalancer(svc, balancerIPs(n)[l.family], balancerIPs(n + classVIPsByENI)[l.family])
	svc.Spec.ExternalIPs = []string{externalIPs(n)[l.family]}
	s.change(svc)
	if svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		svc.Spec.HealthCheckNodePort = int32(31000 + n)
	}
	for vip, link := range map[string]string{
		svc.Spec.ClusterIP: "eth0", svc.Spec.ExternalIPs[0]: "eth0",
		balancerIPs(n)[l.family]: "eth0", balancerIPs(n + classVIPsByENI)[l.family]: "eth1",
	} {
		l.delivered[netip.MustParseAddr(vip)] = link
	}
	var endpoints []endpoint
	for _, name := range l.endpoints(s.endpoints) {
		e := endpoint{address: addresses[name].String(), node: "node"}
		if name == "far" {
			e.node = "other"
		}
		endpoints = append(endpoints, e)
	}
	return []runtime.Object{svc, newSlice(svc, ip.Families[l.family].String(), int32(classTargetPort+n), endpoints...)}
}

// kernel reads the state that the evaluator needs.
func (l *classLab) kernel(t *testing.T) *trace.Node {
	t.Helper()
	n := l.Node.Trace()[l.family]
	n.Delivers = func(a netip.Addr) string { return l.delivered[a] }
	return n
}

func (l *classLab) question(q classQuestion) trace.Question {
	c := l.clients[q.client]
	return trace.Question{Protocol: traced[q.protocol], From: c.from, To: q.to, In: l.entry(q)}
}

// entry returns the interface by which a question enters.
func (l *classLab) entry(q classQuestion) string {
	if q.client < 3 {
		return l.clients[q.client].in
	}
	return l.delivered[q.to.Addr()]
}

func (l *classLab) String(q classQuestion) string {
	return fmt.Sprintf("%s, %s to %s", l.clients[q.client].name, q.protocol, q.to)
}

// all returns every question: each client, each address, and each port that rules or
// Services distinguish.
func (l *classLab) all() []classQuestion {
	targets := []netip.AddrPort{netip.AddrPortFrom(l.far, classUnused)}
	for address := range l.delivered {
		own := address == l.NodeAddress || address == l.ENIAddress && l.Node.Exec("ip", "-o", "address", "show", "to", address.String()) != ""
		if !own && (address == l.ENIAddress || l.isPod(address)) {
			continue
		}
		ports := []uint16{80, classUnused}
		for n := range classServices {
			if own || n == 0 {
				ports = append(ports, uint16(classNodePort+n+1))
			}
		}
		for _, port := range ports {
			targets = append(targets, netip.AddrPortFrom(address, port))
		}
	}
	slices.SortFunc(targets, netip.AddrPort.Compare)
	var out []classQuestion
	for client := range l.clients {
		for _, to := range targets {
			if client >= 3 && l.delivered[to.Addr()] == "" {
				continue
			}
			for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
				out = append(out, classQuestion{client, protocol, to})
			}
		}
	}
	return out
}

// draw selects questions at random, those that match different rules first.
func (l *classLab) draw(n *trace.Node, random *rand.Rand, count int) (drawn []classQuestion, distinct int) {
	all := l.all()
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	seen := map[uint64]bool{}
	var later []classQuestion
	for _, q := range all {
		way := fnv.New64()
		e := trace.Evaluator{Quiet: true, Matched: func(table nat.Table, chain string, index int) { fmt.Fprintln(way, table, chain, index) }}
		x := e.Explain(n, l.question(q))
		fmt.Fprintln(way, x.Verdict.Outcome, x.Link)
		if seen[way.Sum64()] {
			later = append(later, q)
			continue
		}
		seen[way.Sum64()] = true
		drawn = append(drawn, q)
	}
	if len(drawn) >= count {
		return drawn[:count], count
	}
	distinct = len(drawn)
	return append(drawn, later[:min(len(later), count-distinct)]...), distinct
}

// classResult is a question with its result.
type classResult struct {
	classQuestion
	port   uint16
	answer lab.Answer
}

// compare sends the questions and compares the results with the evaluator's.
func (l *classLab) compare(t *testing.T, n *trace.Node, drawn []classQuestion) {
	ends := map[string]bool{}
	for _, q := range drawn {
		ends[q.to.String()] = true
	}
	for e := range l.names {
		ends[e.String()] = true
	}
	watches := map[lab.Protocol]*lab.Capture{}
	for _, protocol := range []lab.Protocol{lab.TCP, lab.UDP} {
		watches[protocol] = l.Node.Watch(protocol, slices.Collect(maps.Keys(ends))...)
	}
	todo := drawn
	for try := 0; len(todo) > 0; try++ {
		limit := time.Duration(1+2*try) * time.Second
		var asks []classResult
		for _, q := range todo {
			asks = append(asks, classResult{classQuestion: q, port: l.nextPort(q)})
		}
		done := inParallel(32, asks, func(r classResult) classResult {
			r.answer = l.clients[r.client].DialFrom(r.port, limit, r.protocol, r.to.String())
			return r
		})
		passed := map[lab.Protocol]passes{}
		for protocol, watch := range watches {
			passed[protocol] = l.passesOf(watch.Packets())
		}
		todo = nil
		for _, r := range done {
			x := trace.Explain(n, l.question(r.classQuestion))
			what := l.disagreement(r, &x, passed[r.protocol])
			switch {
			case what == "":
			case try < 2: // a busy machine answers late
				todo = append(todo, r.classQuestion)
			default:
				t.Errorf("%s: %s\n  sent: %s\n%s", l.String(r.classQuestion), what, r.answer, lab.Explained(&x))
			}
		}
	}
}

func (l *classLab) nextPort(q classQuestion) uint16 {
	name := l.clients[q.client].name
	l.ports[name] = max(l.ports[name], 20000) + 1
	return l.ports[name]
}

// passes returns the interfaces on which packets from one address to another passed the
// node.
type passes map[leg]map[pass]bool

// passesOf counts a port of a bridge as the bridge, which does not see the frames that it
// switches.
func (l *classLab) passesOf(packets []lab.Packet) passes {
	out := passes{}
	for _, p := range packets {
		way := leg{p.From, p.To}
		if out[way] == nil {
			out[way] = map[pass]bool{}
		}
		out[way][pass{cmp.Or(l.entries[p.Interface], p.Interface), p.Out}] = true
	}
	return out
}

// disagreement compares one result with the explanation.
func (l *classLab) disagreement(r classResult, x *trace.Explanation, p passes) string {
	if len(x.Doubts) > 0 {
		return fmt.Sprintf("not judged: %q", x.Doubts)
	}
	outcome := r.answer.Outcome()
	// If a hook drops the node's own datagram, the system call returns an error.
	forbidden := errors.Is(r.answer.Err, unix.EPERM)
	// A refusal leaves by the main route, where the fabric may drop it.
	astray := r.client >= 3 && l.entry(r.classQuestion) != l.clients[r.client].home
	if outcome == lab.OK {
		return l.disagreesOn(r, x, p)
	}
	silent := outcome == lab.TimedOut || outcome == lab.Unreachable || forbidden
	switch x.Verdict.Outcome {
	case trace.Answered:
		return "traced as answered"
	case trace.Unserved:
		if x.Link == "lo" && outcome != lab.Refused && !astray {
			return "traced to the node itself, which refuses"
		}
		if x.Link != "lo" && !l.leftBy(r, x.Link, p) {
			return "traced as leaving by " + x.Link + ", which it did not"
		}
	case trace.Refused:
		if outcome != lab.Refused && !forbidden && !(astray && silent) {
			return "traced as " + x.Verdict.String()
		}
	case trace.Dropped:
		if !silent {
			return "traced as " + x.Verdict.String()
		}
	}
	return ""
}

// disagreesOn compares an answer with the branch of the server that sent it.
func (l *classLab) disagreesOn(r classResult, x *trace.Explanation, p passes) string {
	for _, b := range x.RealServers {
		at := netip.MustParseAddrPort(b.RealServer)
		if l.names[at] != r.answer.Server {
			continue
		}
		if b.Verdict.Outcome != trace.Answered {
			if r.protocol == lab.UDP && strings.Contains(b.Verdict.Reason, "next packet") {
				return "" // only one datagram was sent each way
			}
			return fmt.Sprintf("answered by %s, traced as %s", at, b.Verdict)
		}
		seen := r.answer.SeenSource
		if seen.Addr().String() != b.SeenSource {
			return fmt.Sprintf("%s sees %s, traced as %s", at, seen, b.SeenSource)
		}
		legs := map[leg]pass{{seen, at}: {b.LeavesBy, true}, {at, seen}: {b.ReplyEntersBy, false}}
		if b.ReturnsBy != "" { // as a second connection, with another source port
			legs[leg{seen, at}] = pass{b.ReplyEntersBy, true}
		}
		if in := l.entry(r.classQuestion); in != "" {
			legs[leg{r.answer.Local, r.to}], legs[leg{r.to, r.answer.Local}] = pass{in, false}, pass{b.ReplyLeavesBy, true}
		}
		for way, want := range legs {
			if want.link != "" && want.link != "lo" && !p[way][want] {
				return fmt.Sprintf("no packet %s > %s by %s, out %v: %v", way.from, way.to, want.link, want.out, p[way])
			}
		}
		return ""
	}
	return fmt.Sprintf("answered by %s, traced as %s", r.answer.Server, x.Verdict)
}

// leftBy reports whether the request left the node by an interface. A request of the node
// itself may have got another source.
func (l *classLab) leftBy(r classResult, link string, p passes) bool {
	for way, how := range p {
		if way.to == r.to && how[pass{link, true}] && (way.from.Port() == r.port || r.client == 0) {
			return true
		}
	}
	return false
}
