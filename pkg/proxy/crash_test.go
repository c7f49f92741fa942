package proxy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// crash is the panic value of a process that ends abruptly.
type crash struct{ before string }

// step is an event on a node while a process runs.
type step struct {
	name string
	do   func(*machine)
}

// changed returns a step that changes one Service.
func changed(name string, change func(*corev1.Service), endpoints ...string) step {
	return step{name, func(m *machine) {
		m.set(exposed("web", 2, change, at(endpoints...)...))
		m.turn()
	}}
}

// life lists the events on a node between two starts: objects of every kind are added,
// changed and deleted. The Service "steady" does not change.
var life = []step{
	{"start", func(m *machine) {
		if !m.boot() {
			m.t.Fatal("the kernel cannot be read")
		}
	}},
	changed("a Service", nil, "10.244.0.2", "10.244.1.2"),
	{"clients come", (*machine).connect},
	changed("another endpoint", nil, "10.244.0.3", "10.244.1.2"),
	{"connections end", func(m *machine) { m.disconnect(); m.drain() }},
	changed("affinity and scheduler", func(svc *corev1.Service) {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		svc.Annotations["kube-ipvs.io/scheduler"] = "wrr"
	}, "10.244.0.3", "10.244.1.2"),
	{"clients come by a mark", (*machine).connectMarked},
	changed("policy Cluster, without source ranges", func(svc *corev1.Service) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		svc.Spec.LoadBalancerSourceRanges = nil
	}, "10.244.0.3", "10.244.1.2"),
	changed("policy Local", nil, "10.244.0.3", "10.244.1.2"),
	{"connections by a mark end", func(m *machine) { m.disconnectMarked(); m.drain() }},
	{"an ENI", func(m *machine) { m.network(true); m.turn() }},
	changed("no endpoint", nil),
	changed("another port", func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 8080 }, "10.244.0.2", "10.244.1.2"),
	{"a Service that claims the same", func(m *machine) {
		m.set(exposed("younger", 3, func(svc *corev1.Service) { svc.Spec.ExternalIPs = []string{"203.0.2.2"} }, at("10.244.0.4")...))
		m.turn()
	}},
	changed("ClusterIP", func(svc *corev1.Service) {
		svc.Spec.Type, svc.Spec.ExternalTrafficPolicy, svc.Spec.HealthCheckNodePort = corev1.ServiceTypeClusterIP, "", 0
		svc.Spec.ExternalIPs, svc.Spec.LoadBalancerSourceRanges, svc.Status = nil, nil, corev1.ServiceStatus{}
	}, "10.244.0.2"),
	{"no ENI", func(m *machine) { m.network(false); m.turn() }},
	{"deletion", func(m *machine) { m.delete("web"); m.turn() }},
	{"another start", func(m *machine) { m.boot() }},
}

// The TCP connection and the UDP flow of a client with web.
var (
	tcp, udp = ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("203.0.1.2"), Port: 80}, netip.MustParseAddrPort("203.0.1.2:80")
	endpoint = netip.MustParseAddrPort("10.244.0.2:8000")
)

func (m *machine) connect() {
	m.IPVS.SetConnections(tcp, endpoint, ipvs.Connections{Active: 1})
	m.ask()
}

// ask sends a client's datagram to web.
func (m *machine) ask() {
	client := netip.MustParseAddrPort("10.244.0.5:40000")
	m.Conntrack.Add(conntrack.Entry{Protocol: ip.UDP, OriginalSrc: client, OriginalDst: udp, ReplySrc: endpoint, ReplyDst: client})
}

// connected reports whether the connection's real server exists.
func (m *machine) connected() bool {
	state, err := m.IPVS.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	_, there := state[tcp].RealServers[endpoint]
	return there
}

// marked returns the real servers of web that are selected by a mark.
func (m *machine) marked() map[ipvs.Key]ipvs.Connections {
	state, err := m.IPVS.Observe()
	if err != nil {
		m.t.Fatal(err)
	}
	out := map[ipvs.Key]ipvs.Connections{}
	for key := range state {
		if key.FWMark == 0 || key.Family() != ip.IPv4 {
			continue
		}
		counts, err := m.IPVS.Connections(key)
		if err != nil {
			m.t.Fatal(err)
		}
		if c, there := counts[markedEndpoint]; there {
			out[key] = c
		}
	}
	return out
}

var markedEndpoint = netip.MustParseAddrPort("10.244.0.3:8000")

// connectMarked opens a connection through every mark of web.
func (m *machine) connectMarked() {
	for key := range m.marked() {
		m.IPVS.SetConnections(key, markedEndpoint, ipvs.Connections{Active: 1})
	}
}

func (m *machine) disconnectMarked() {
	for key := range m.marked() {
		m.IPVS.SetConnections(key, markedEndpoint, ipvs.Connections{})
	}
}

// openByMark counts the connections by marks.
func (m *machine) openByMark() int {
	n := 0
	for _, c := range m.marked() {
		n += c.Active
	}
	return n
}

func (m *machine) disconnect() { m.IPVS.SetConnections(tcp, endpoint, ipvs.Connections{}) }

// Initial states of a node before its first start.
var beginnings = []step{
	{"an empty node", func(*machine) {}},
	{"kube-proxy's iptables mode", func(m *machine) {
		m.restore(ip.IPv4, "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n"+
			"-A KUBE-SERVICES -d 203.0.1.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-NPX46M4PTMTKRN6Y\nCOMMIT\n")
	}},
	{"kube-proxy's IPVS mode", func(m *machine) {
		m.restore(ip.IPv6, "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODE-PORT - [0:0]\n-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT\nCOMMIT\n")
		m.Routing.Do(routing.Change{Op: routing.AddLink})
		m.Routing.AddWrongScope(netip.MustParseAddr("203.0.1.1"))
	}},
	{"kube-proxy's nftables mode", func(m *machine) { m.KubeProxy.Create(ip.Families...) }},
}

func (m *machine) restore(family ip.Family, input string) {
	m.t.Helper()
	if err := m.NAT[family].Restore(input); err != nil {
		m.t.Fatal(err)
	}
}

// node returns a machine in an initial state, with a Service that stays.
func node(t testing.TB, beginning step) *machine {
	m := newMachine(t)
	m.set(exposed("steady", 1, nil, at("10.244.0.9", "10.244.1.9")...))
	beginning.do(m)
	return m
}

// dieBefore ends the process before the nth of the following operations, counted from
// 0. The returned counter holds the number of operations so far.
func (m *machine) dieBefore(n int) (count *int) {
	count = new(int)
	boundary := func(text string) {
		if *count == n {
			panic(crash{text})
		}
		*count++
	}
	m.OnChange = func(text string) error { boundary(text); return nil }
	for family, f := range m.NAT {
		f.Refuse = nil // the rules of a table are written together
		f.Commit = func(table nat.Table) { boundary(fmt.Sprintf("the commit of %s %s", family, table)) }
	}
	return count
}

// live continues the machine's life from a step. It returns the step in which the
// process died, if it did, and before which operation.
func (m *machine) live(from int) (died int, before string) {
	for i := from; i < len(life); i++ {
		if before = m.try(life[i]); before != "" {
			return i, fmt.Sprintf("%s, before %q", life[i].name, before)
		}
	}
	return len(life), ""
}

func (m *machine) try(s step) (before string) {
	defer func() {
		switch reason := recover().(type) {
		case nil:
		case crash:
			before = reason.before
		default:
			panic(reason)
		}
	}()
	s.do(m)
	return ""
}

// TestReliabilityCrash ends the process at every boundary between two operations on the
// kernel, in a life with all kinds of changes, from each initial state; and at a
// second, random boundary while the next process starts. After the next start the
// kernel equals that of a node programmed at once; a further start finds nothing to do;
// unchanged state was not touched.
func TestReliabilityCrash(t *testing.T) {
	record := reliability.Begin(t, reliability.Crash, "fakes")
	references := map[int]string{}
	crashes, again, connected := 0, 0, 0
	var faults faults
	random := rand.New(rand.NewPCG(1, 2))
	for b, beginning := range beginnings {
		for n := 0; ; n += reliability.Times(29, 1) {
			m := node(t, beginning)
			m.dieBefore(n)
			died, before := m.live(0)
			if before == "" || b > 0 && died > 0 {
				break // the lives differ only in their first step
			}
			crashes++
			context := beginning.name + ": " + before
			for random.IntN(4) == 0 {
				m.dieBefore(random.IntN(30))
				if second := m.try(life[0]); second != "" {
					context += fmt.Sprintf(", and again before %q", second)
					again++
				}
			}
			if died > stepNamed("clients come") && died < stepNamed("connections end") ||
				died > stepNamed("clients come by a mark") && died < stepNamed("connections by a mark end") {
				connected++
			}
			m.checkRestart(context, died, references, &faults)
		}
	}
	if crashes < 40 || again < 5 {
		t.Errorf("%d crashes, %d second ones: not all boundaries were reached", crashes, again)
	}
	record(
		reliability.Figure{Name: "boundaries between two operations, each with one crash", Value: float64(crashes), Shows: "with fakes of the kernel"},
		reliability.Figure{Name: "of these, crashed again at a boundary of the next start", Value: float64(again), Shows: "at random"},
		reliability.Figure{Name: "kernels that differed from the plan after the next start", Value: float64(faults.kernels)},
		reliability.Figure{Name: "operations of the next start on state of unchanged Services", Value: float64(faults.touched)},
		reliability.Figure{Name: "crashes while a real server drained", Value: float64(connected), Shows: "with a connection through it"},
		reliability.Figure{Name: "of these connections, broken", Value: float64(faults.cut)},
	)
}

// faults counts what a restart must not cause.
type faults struct{ kernels, touched, cut int }

// checkRestart starts a process after one died in a step.
func (m *machine) checkRestart(context string, died int, references map[int]string, f *faults) {
	m.t.Helper()
	writes := m.recording()
	before, connected, byMark := steady(m.IPVS.Dump()), m.connected(), m.openByMark()
	m.boot()
	m.drain()
	if n := m.openByMark(); n != byMark && died < stepNamed("connections by a mark end") {
		f.cut++
		m.t.Errorf("%s: the next start cut %d of %d connections by a mark", context, byMark-n, byMark)
	}
	m.disconnectMarked()
	if connected && died < stepNamed("connections end") && !m.connected() {
		f.cut++
		m.t.Errorf("%s: the next start cut a connection", context)
	}
	m.disconnect()
	m.drain()
	if touched := slices.DeleteFunc(slices.Clone(*writes), func(w string) bool { return !ofSteady(w) }); died > 0 && len(touched) > 0 {
		f.touched += len(touched)
		m.t.Errorf("%s: the next start touched unchanged state: %q", context, touched)
	}
	if after := steady(m.IPVS.Dump()); died > 0 && after != before {
		m.t.Errorf("%s: unchanged state was\n%s\nand is\n%s", context, before, after)
	}
	if references[died] == "" {
		references[died] = m.reference(died)
	}
	if diff := cmp.Diff(references[died], normal(m.kernel())); diff != "" {
		f.kernels++
		m.t.Errorf("%s: planned (-), observed (+):\n%s", context, diff)
	}
	*writes = nil
	m.boot()
	m.drain()
	if len(*writes) > 0 {
		f.kernels++
		m.t.Errorf("%s: a further start found work: %q", context, *writes)
	}
}

// recording records operations instead of ending the process.
func (m *machine) recording() (writes *[]string) {
	writes = new([]string)
	m.OnChange = func(text string) error { *writes = append(*writes, text); return nil }
	for _, f := range m.NAT {
		f.Refuse = func(c nat.Change) error { return m.OnChange(c.String()) }
		f.Commit = nil
	}
	return writes
}

// reference returns the kernel of an empty node on which the objects and the network of
// a step existed from the beginning.
func (m *machine) reference(died int) string {
	fresh := newMachine(m.t)
	fresh.network(died >= stepNamed("an ENI") && died < stepNamed("no ENI"))
	fresh.services, fresh.slices = m.services, m.slices
	if died >= stepNamed("an ENI") { // they stay until --cleanup
		fresh.Sysctl.Set("net/ipv4/conf/all/src_valid_mark", "1")
		fresh.Sysctl.Set("net/ipv4/vs/snat_reroute", "1")
	}
	fresh.boot()
	return normal(fresh.kernel())
}

func stepNamed(name string) int {
	return slices.IndexFunc(life, func(s step) bool { return s.name == name })
}

// ofSteady reports whether an operation concerns the Service that stays.
func ofSteady(text string) bool { return steadyAddress.MatchString(text) }

var steadyAddress = regexp.MustCompile(`203\.0\.\d+\.1\b[^0-9]|fd00:10:96::1\b|fd00:203::1\b|:3001\d|10\.244\.[01]\.9`)

func steady(dump string) string {
	var kept []string
	for line := range strings.Lines(dump) {
		if ofSteady(line) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// normal replaces marks by their address and port, and sorts lines: the numbers of
// Services depend on the order in which they were added.
func normal(kernel string) string {
	lines := strings.Split(kernel, "\n")
	addresses := map[string]string{}
	for i, line := range lines {
		if m := markedMember.FindStringSubmatch(line); m != nil {
			mark, err := strconv.ParseUint(m[3], 0, 32)
			if err != nil {
				panic(err)
			}
			addresses[fmt.Sprintf("-f %d%s", mark, map[bool]string{true: " -6"}[m[1] != ""])] = m[2]
			lines[i] = strings.TrimSuffix(line, m[3])
		}
	}
	for i, line := range lines {
		lines[i] = markedServer.ReplaceAllStringFunc(line, func(mark string) string { return "-f " + addresses[mark] })
	}
	if servers := slices.IndexFunc(lines, func(line string) bool { return !strings.HasPrefix(line, "-") }); servers > 0 {
		slices.Sort(lines[:servers])
	}
	return strings.Join(lines, "\n")
}

var (
	markedMember = regexp.MustCompile(`^add KUBE-(6-)?IPVS-LOCAL (\S+) skbmark (\S+)$`)
	markedServer = regexp.MustCompile(`-f \d+( -6)?`)
)
