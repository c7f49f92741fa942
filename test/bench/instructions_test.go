//go:build e2e

package bench

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// TestInstructions counts the instructions that exchanges through each subject take more
// than the same exchanges take directly. It needs a guest whose clock counts
// instructions (the lab's flag -icount).
//
//	INSTRUCTIONS_SUBJECTS, INSTRUCTIONS_PATHS, INSTRUCTIONS_WORKLOADS
//	                      names, separated by commas; all if empty
//	INSTRUCTIONS_ABLATION "jumps" or "rules": measures each subject with rules again
//	                      without each rule of its base chains, or of all chains
func TestInstructions(t *testing.T) {
	b := &bench{t: t, results: NewResults(), api: newAPI(t)}
	b.api.addNode()
	b.api.addCounted()
	for _, n := range numbers(t, "BENCH_SIZES") {
		b.api.grow(n)
		table := &instructionTable{}
		for _, s := range chosen(t, "INSTRUCTIONS_SUBJECTS", countedSubjects(), func(s countedSubject) string { return s.name }) {
			t.Run(fmt.Sprintf("%s, %d Services", s.name, n), func(t *testing.T) { b.count(t, s, n, table) })
		}
		fmt.Printf("\n%s\n", table.text())
	}
}

// chosen returns those of a list that an environment variable names, or all.
func chosen[T any](t testing.TB, variable string, all []T, name func(T) string) []T {
	t.Helper()
	value := os.Getenv(variable)
	if value == "" {
		return all
	}
	var list []T
	for word := range strings.SplitSeq(value, ",") {
		i := slices.IndexFunc(all, func(s T) bool { return name(s) == strings.TrimSpace(word) })
		if i < 0 {
			t.Fatalf("%s: nothing is named %q", variable, word)
		}
		list = append(list, all[i])
	}
	return list
}

// countedSubject is what leads packets from a VIP to an endpoint.
type countedSubject struct {
	name string
	// direct says that packets are sent to the endpoint.
	direct bool
	// program is run, then stopped; or rules are set up, where there is none.
	program *subject
	rules   func(*ground)
}

const directName = "direct"

func countedSubjects() []countedSubject {
	return []countedSubject{
		{name: directName, direct: true, rules: func(*ground) {}},
		{name: "bare", rules: func(g *ground) { g.virtualServers("0") }},
		{name: "floor", rules: (*ground).floor},
		{name: "kube-ipvs", program: byDefault()},
		{name: "kube-proxy-ipvs", program: dualStack(ipvsPeer)},
		{name: "kube-proxy-iptables", program: dualStack(iptPeer)},
		{name: "kube-proxy-nftables", program: dualStack(nftPeer)},
	}
}

// byDefault is our program with default settings.
func byDefault() *subject {
	program := os.Getenv("LAB_KUBE_IPVS")
	if program == "" {
		program = filepath.Join(os.Getenv("LAB_SRC"), "bin/kube-ipvs")
	}
	return dualStack(&subject{name: "kube-ipvs", program: program, args: common})
}

func dualStack(s *subject) *subject {
	both := *s
	both.args = append(slices.Clone(s.args), "--cluster-cidr", "10.128.0.0/9,fd00:128::/32")
	return &both
}

// ground is a node with a client and a server in pods, and a client outside.
type ground struct {
	*site
	server  *lab.Pod
	outside *lab.Namespace
	port    int // the next source port
}

var (
	groundNode   = addressPair{netip.MustParseAddr("192.168.60.11"), netip.MustParseAddr("fd00:60::11")}
	groundServer = addressPair{netip.MustParseAddr("10.255.0.2"), netip.MustParseAddr("fd00:128::2")}
	groundClient = addressPair{netip.MustParseAddr("10.255.0.3"), netip.MustParseAddr("fd00:128::3")}
	groundVIP    = addressPair{netip.MustParseAddr("10.96.0.30"), netip.MustParseAddr("fd00:10:96::30")}
)

// addressPair is an IPv4 and an IPv6 address.
type addressPair [2]netip.Addr

func (p addressPair) texts() []string { return []string{p[0].String(), p[1].String()} }

const (
	groundPort    = 80
	groundTarget  = 8000
	groundNodeTCP = 30080
	groundNodeUDP = 30081
)

func newGround(t testing.TB, s *subject) *ground {
	t.Helper()
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	segment := fabric.Segment("192.168.60.1/24", "fd00:60::1/64")
	node := l.Node("node")
	segment.Attach(node.Namespace, "eth0", "192.168.60.11/24", "fd00:60::11/64")
	segment.DefaultRoute(node.Namespace, "eth0")
	fabric.Uplink()
	g := &ground{port: firstSourcePort, site: &site{t: t, node: node, subject: s, pages: pagesOf(node)}}
	g.outside = segment.Client("outside", "192.168.60.21/24", "fd00:60::21/64")
	g.outside.Route("10.255.0.0/24 via 192.168.60.11 dev eth0", "fd00:128::/64 via fd00:60::11 dev eth0")
	g.server = node.Pod("server", "", groundServer.texts()...)
	g.client = node.Pod("client", "", groundClient.texts()...)
	for _, address := range groundServer.texts() {
		for _, protocol := range []string{"tcp", "udp"} {
			g.server.Start(trafficProgram(), "serve", protocol, address, strconv.Itoa(groundTarget))
		}
	}
	return g
}

// pagesOf is a client for what programs serve on the node.
func pagesOf(node *lab.Node) *http.Client {
	dial := func(_ context.Context, network, address string) (c net.Conn, err error) {
		err = node.Do(func() (err error) { c, err = net.Dial(network, address); return err })
		return c, err
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial}, Timeout: time.Minute}
}

func trafficProgram() string { return filepath.Join(os.Getenv("LAB_CACHE"), "e2e", "traffic") }

// virtualServers has IPVS serve the counted Service, without any rules.
func (g *ground) virtualServers(conntrack string) {
	g.node.Sysctl("net.ipv4.vs.conntrack", conntrack)
	for i, vip := range groundVIP {
		g.node.Exec("ip", "route", "add", "local", vip.String(), "dev", "lo", "table", "local")
		for _, protocol := range []string{"-t", "-u"} {
			nodePort := map[string]uint16{"-t": groundNodeTCP, "-u": groundNodeUDP}[protocol]
			for _, service := range []netip.AddrPort{netip.AddrPortFrom(vip, groundPort), netip.AddrPortFrom(groundNode[i], nodePort)} {
				g.node.Exec("ipvsadm", "-A", protocol, service.String(), "-s", "rr")
				g.node.Exec("ipvsadm", "-a", protocol, service.String(), "-r", netip.AddrPortFrom(groundServer[i], groundTarget).String(), "-m")
			}
		}
	}
}

// floor is the least that can lead external clients to any endpoint: IPVS with
// connection tracking, and one rule to masquerade them.
func (g *ground) floor() {
	g.virtualServers("1")
	for family, source := range map[string]string{"iptables": "192.168.60.0/24", "ip6tables": "fd00:60::/64"} {
		g.node.Exec(family, "-w", "-t", "nat", "-A", "POSTROUTING", "-s", source, "-j", "MASQUERADE")
	}
}

// path is from where to where packets go.
type path struct {
	name    string
	outside bool
	ip6     bool
}

func (p path) family() int {
	if p.ip6 {
		return 1
	}
	return 0
}

// target is the address that the client calls.
func (p path) target(direct bool, w workload) netip.AddrPort {
	switch {
	case direct:
		return netip.AddrPortFrom(groundServer[p.family()], groundTarget)
	case p.outside && w.udp:
		return netip.AddrPortFrom(groundNode[p.family()], groundNodeUDP)
	case p.outside:
		return netip.AddrPortFrom(groundNode[p.family()], groundNodeTCP)
	}
	return netip.AddrPortFrom(groundVIP[p.family()], groundPort)
}

var paths = []path{
	{name: "ClusterIP"},
	{name: "NodePort", outside: true},
	{name: "ClusterIPv6", ip6: true},
	{name: "NodePortv6", outside: true, ip6: true},
}

// workload is one of the traffic program's.
type workload struct {
	name  string
	udp   bool
	count int // of exchanges in a batch
	ports int // that each exchange takes
}

var workloads = []workload{
	{name: "tcp-connection", count: 60, ports: 1},
	{name: "tcp-round-trip", count: 300},
	{name: "udp-exchange", count: 400, ports: 1, udp: true},
	{name: "udp-round-trip", count: 300, udp: true},
}

// A figure is the median of batches: a timer of the kernel's disturbs one or two.
const batches = 9

// warmUpExchanges is no fewer than those that the traffic program makes before the first
// batch.
const warmUpExchanges = 250

const (
	firstSourcePort = 10000
	lastSourcePort  = 60000
)

// instructions counts what one exchange takes.
func (g *ground) instructions(p path, w workload, direct bool) (int, error) {
	from := g.client.Namespace
	if p.outside {
		from = g.outside
	}
	need := warmUpExchanges + w.ports*w.count*batches
	if g.port+need > lastSourcePort {
		g.port = firstSourcePort
	}
	first := g.port
	g.port += need
	target := p.target(direct, w)
	out, err := from.TryExec(trafficProgram(), w.name, target.Addr().String(), strconv.Itoa(int(target.Port())),
		strconv.Itoa(first), strconv.Itoa(batches), strconv.Itoa(w.count))
	if err != nil {
		return 0, err
	}
	var list []int
	for word := range strings.FieldsSeq(out) {
		n, err := strconv.Atoi(word)
		if err != nil {
			return 0, err
		}
		list = append(list, n/w.count)
	}
	slices.Sort(list)
	if spread := list[len(list)-1] - list[0]; spread*100 > list[len(list)/2] {
		g.t.Logf("%s, %s: batches differ by %d: %v", p.name, w.name, spread, list)
	}
	return list[len(list)/2], nil
}

// passLimit is for a peer's first pass: on one emulated processor some are slow.
const passLimit = 2 * time.Hour

// count measures a subject in a lab of its own.
func (b *bench) count(t *testing.T, s countedSubject, n int, table *instructionTable) {
	g := newGround(t, s.program)
	if s.program == nil {
		s.rules(g)
	} else {
		g.start()
		g.passed(passLimit)
		must(t, g.process.Signal(unix.SIGSTOP))
	}
	g.measureAll(s.name, s.direct, table)
	if how := os.Getenv("INSTRUCTIONS_ABLATION"); how != "" && !s.direct {
		g.ablation(s.name, how == "rules", table)
	}
	if s.program != nil {
		must(t, g.process.Signal(unix.SIGCONT))
		g.stop()
	}
}

// measureAll adds a row to the table.
func (g *ground) measureAll(name string, direct bool, table *instructionTable) {
	for _, p := range chosen(g.t, "INSTRUCTIONS_PATHS", paths, func(p path) string { return p.name }) {
		for _, w := range chosen(g.t, "INSTRUCTIONS_WORKLOADS", workloads, func(w workload) string { return w.name }) {
			value, err := g.instructions(p, w, direct)
			if err != nil {
				fmt.Printf("instructions: %s, %s, %s: %v\n", name, p.name, w.name, err)
				continue
			}
			table.put(name, p.name+" "+w.name, value)
			fmt.Printf("instructions: %-40s %-12s %-15s %8d %+8d\n", name, p.name, w.name, value, table.over(name, p.name+" "+w.name))
		}
	}
}

// instructionTable holds figures by subject and column.
type instructionTable struct {
	rows, columns []string
	values        map[[2]string]int
}

func (i *instructionTable) put(row, column string, value int) {
	if i.values == nil {
		i.values = map[[2]string]int{}
	}
	if !slices.Contains(i.rows, row) {
		i.rows = append(i.rows, row)
	}
	if !slices.Contains(i.columns, column) {
		i.columns = append(i.columns, column)
	}
	i.values[[2]string{row, column}] = value
}

// over returns what a figure is over the direct path's.
func (i *instructionTable) over(row, column string) int {
	return i.values[[2]string{row, column}] - i.values[[2]string{directName, column}]
}

// text is a table for a terminal: the direct path's figures, and what others are over
// them.
func (i *instructionTable) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-60s", "instructions over the direct path")
	for _, column := range i.columns {
		fmt.Fprintf(&b, " | %27s", column)
	}
	b.WriteString("\n")
	for _, row := range i.rows {
		fmt.Fprintf(&b, "%-60s", row)
		for _, column := range i.columns {
			value, ok := i.values[[2]string{row, column}]
			text := "-"
			if ok && row == directName {
				text = strconv.Itoa(value)
			} else if ok {
				text = fmt.Sprintf("%+d", i.over(row, column))
			}
			fmt.Fprintf(&b, " | %27s", text)
		}
		b.WriteString("\n")
	}
	return b.String()
}
