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

	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
)

// testbed is a node with clients and servers of the traffic program:
//
//	client, server (pods) -- node -- eth0 -- fabric -- outside
//	                enipod --'   '-- eth1 --'      '-- remote (another node's pod)
type testbed struct {
	*site
	clients map[string]*lab.Namespace
	port    int // the next source port
}

// addressPair is an IPv4 and an IPv6 address. The second is absent if only IPv4 is
// measured.
type addressPair [2]netip.Addr

func pair(v4, v6 string) addressPair {
	p := addressPair{netip.MustParseAddr(v4)}
	if v6 != "" {
		p[1] = netip.MustParseAddr(v6)
	}
	return p
}

func (p addressPair) texts() []string {
	var list []string
	for _, address := range p {
		if address.IsValid() {
			list = append(list, address.String())
		}
	}
	return list
}

var (
	nodePair   = pair("192.168.60.11", "fd00:60::11")
	serverPair = pair("10.255.0.2", "fd00:128::2")
	clientPair = pair("10.255.0.3", "fd00:128::3")
	eniPodPair = pair("10.12.192.44", "")
	remotePair = pair("10.253.3.5", "")
)

// The prefixes of clients, and of masqueraded clients, for each family.
const (
	fromPod     = "client"
	fromOutside = "outside"
	fromENIPod  = "enipod"
	fromServer  = "server"
)

var prefixes = map[string][2]string{
	fromPod:     {"10.255.0.3/32", "fd00:128::3/128"},
	fromOutside: {"192.168.60.0/24", "fd00:60::/64"},
	fromENIPod:  {"10.12.192.44/32", "fd00:12:192::44/128"},
}

const (
	servicePort = 80
	targetPort  = 8000
)

func newTestbed(t testing.TB, s *subject, w *world) *testbed {
	t.Helper()
	l := lab.New(t)
	fabric := l.Fabric("fabric")
	segment := fabric.Segment("192.168.60.1/24", "fd00:60::1/64")
	node := l.Node("node")
	segment.Attach(node.Namespace, "eth0", "192.168.60.11/24", "fd00:60::11/64")
	segment.DefaultRoute(node.Namespace, "eth0")
	fabric.Uplink()
	b := &testbed{port: firstSourcePort, site: &site{t: t, node: node, subject: s, pages: pagesOf(node)}}
	outside := segment.Client("outside", "192.168.60.21/24", "fd00:60::21/64")
	outside.Route("10.255.0.0/24 via 192.168.60.11 dev eth0", "fd00:128::/64 via fd00:60::11 dev eth0",
		"203.0.113.0/24 via 192.168.60.11 dev eth0", "fd00:203::/64 via fd00:60::11 dev eth0")
	server := node.Pod("server", "", serverPair.texts()...)
	serveTraffic(server.Namespace, serverPair)
	b.clients = map[string]*lab.Namespace{fromPod: node.Pod("client", "", clientPair.texts()...).Namespace, fromOutside: outside, fromServer: server.Namespace}
	if w.eni {
		b.plugENI(fabric)
	}
	return b
}

// plugENI adds a second interface with a pod to the node, as a CNI does, and a pod of
// another node to the fabric.
func (b *testbed) plugENI(fabric *lab.Fabric) {
	subnet := fabric.Segment("10.12.192.1/24")
	port := subnet.Attach(b.node.Namespace, "eth1")
	b.node.Address("eth1", "10.12.192.10")
	port.Own("10.12.192.10", eniPodPair[0].String())
	b.node.Route("10.12.192.1 dev eth1 table 1003", "default via 10.12.192.1 dev eth1 table 1003")
	pod := b.node.Pod("enipod", "", eniPodPair.texts()...)
	b.node.Rule("pref 1000 to 10.12.192.44 lookup main", "pref 2000 from 10.12.192.44 lookup 1003")
	serveTraffic(pod.Namespace, eniPodPair)
	b.clients[fromENIPod] = pod.Namespace
	remote := fabric.Segment("10.253.3.1/24").Client("remote", remotePair[0].String()+"/24")
	serveTraffic(remote, remotePair)
}

func serveTraffic(host *lab.Namespace, addresses addressPair) {
	for _, address := range addresses.texts() {
		for _, protocol := range []string{"tcp", "udp"} {
			host.Start(trafficProgram(), "serve", protocol, address, strconv.Itoa(targetPort))
		}
	}
}

// pagesOf returns a client for the HTTP servers on the node.
func pagesOf(node *lab.Node) *http.Client {
	dial := func(_ context.Context, network, address string) (c net.Conn, err error) {
		err = node.Do(func() (err error) { c, err = net.Dial(network, address); return err })
		return c, err
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial}, Timeout: time.Minute}
}

func trafficProgram() string { return filepath.Join(os.Getenv("LAB_CACHE"), "e2e", "traffic") }

// virtualServers programs the world's Services in IPVS, without any rules.
func (b *testbed) virtualServers(w *world, conntrack string) {
	b.node.Sysctl("net.ipv4.vs.conntrack", conntrack)
	for _, s := range w.services {
		for family, endpoint := range s.endpoint {
			if !endpoint.IsValid() {
				continue
			}
			for _, vip := range []addressPair{s.vip, s.balancer} {
				if !vip[family].IsValid() {
					continue
				}
				b.node.Exec("ip", "route", "add", "local", vip[family].String(), "dev", "lo", "table", "local")
				b.virtualServer(netip.AddrPortFrom(vip[family], servicePort), "-t", endpoint)
				b.virtualServer(netip.AddrPortFrom(vip[family], servicePort), "-u", endpoint)
			}
			if s.nodePorts[0] != 0 {
				b.virtualServer(netip.AddrPortFrom(nodePair[family], s.nodePorts[0]), "-t", endpoint)
				b.virtualServer(netip.AddrPortFrom(nodePair[family], s.nodePorts[1]), "-u", endpoint)
			}
		}
	}
}

func (b *testbed) virtualServer(service netip.AddrPort, protocol string, endpoint netip.Addr) {
	b.node.Exec("ipvsadm", "-A", protocol, service.String(), "-s", "rr")
	b.node.Exec("ipvsadm", "-a", protocol, service.String(), "-r", netip.AddrPortFrom(endpoint, targetPort).String(), "-m")
}

var iptablesPrograms = [2]string{"iptables", "ip6tables"}

// masqueradeOnly replaces all rules with one that masquerades the clients of a path, or
// with none.
func (b *testbed) masqueradeOnly(p path) {
	for family, program := range iptablesPrograms {
		source := [2]string{"192.0.2.0/24", "2001:db8::/32"}[family]
		if p.masqueraded {
			source = prefixes[p.from][family]
		}
		b.node.Exec(program, "-w", "-t", "nat", "-F", "POSTROUTING")
		b.node.Exec(program, "-w", "-t", "nat", "-A", "POSTROUTING", "-s", source, "-j", "MASQUERADE")
	}
}

// path is the client and the destination of an exchange.
type path struct {
	name        string
	from        string
	service     *countedService
	kind        vipKind
	family      int  // 0 is IPv4's
	masqueraded bool // by every subject
	// elsewhere means that the world's feature does not affect the path.
	elsewhere bool
}

// vipKind is the kind of address that the client connects to.
type vipKind int

const (
	byClusterIP vipKind = iota
	byNodePort
	byBalancer
)

// target returns the address that the client connects to.
func (p path) target(direct bool, w workload) netip.AddrPort {
	s := p.service
	switch {
	case direct:
		return netip.AddrPortFrom(s.endpoint[p.family], targetPort)
	case p.kind == byNodePort && w.udp:
		return netip.AddrPortFrom(nodePair[p.family], s.nodePorts[1])
	case p.kind == byNodePort:
		return netip.AddrPortFrom(nodePair[p.family], s.nodePorts[0])
	case p.kind == byBalancer:
		return netip.AddrPortFrom(s.balancer[p.family], servicePort)
	}
	return netip.AddrPortFrom(s.vip[p.family], servicePort)
}

// workload is a workload of the traffic program.
type workload struct {
	name  string
	title string
	udp   bool
	count int // of exchanges in a batch
	ports int // that each exchange takes
}

var workloads = []workload{
	{name: "tcp-connection", title: "TCP connection", count: 60, ports: 1},
	{name: "tcp-round-trip", title: "TCP round trip", count: 150},
	{name: "udp-exchange", title: "UDP exchange", count: 200, ports: 1, udp: true},
	{name: "udp-round-trip", title: "UDP round trip", count: 150, udp: true},
}

// batches is the number of batches. A kernel timer disturbs one or two.
const batches = 9

// warmUpExchanges is at least the number of exchanges with a new port that the traffic
// program makes before the first batch.
const warmUpExchanges = 100

const (
	firstSourcePort = 2000
	lastSourcePort  = 60000
)

// instructions returns the numbers of instructions of one exchange, one per batch, the
// lowest first.
func (b *testbed) instructions(p path, w workload, direct bool) ([]int, error) {
	need := warmUpExchanges + w.ports*w.count*batches
	if b.port+need > lastSourcePort {
		b.port = firstSourcePort
	}
	first := b.port
	b.port += need
	target := p.target(direct, w)
	out, err := b.clients[p.from].TryExec(trafficProgram(), w.name, target.Addr().String(), strconv.Itoa(int(target.Port())),
		strconv.Itoa(first), strconv.Itoa(batches), strconv.Itoa(w.count))
	if err != nil {
		return nil, err
	}
	var list []int
	for word := range strings.FieldsSeq(out) {
		n, err := strconv.Atoi(word)
		if err != nil {
			return nil, err
		}
		list = append(list, n/w.count)
	}
	slices.Sort(list)
	middle := list[len(list)/2]
	if spread := list[len(list)-2] - list[1]; spread*50 > middle {
		fmt.Printf("instructions: %s, %s: batches differ: %v\n", p.name, w.name, list)
	}
	return list, nil
}
