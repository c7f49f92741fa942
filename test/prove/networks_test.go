//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// TestRoutesOfTheNode compares with kube-proxy on a node whose second interface has two networks, a
// route to a third one, and a table with only a default route: which endpoints answer, with which
// source, and by which route each request and reply leaves. The oracle does not know routes. kube-proxy
// does not answer all of these connections either.
func TestRoutesOfTheNode(t *testing.T) {
	network := loadNetwork(t, "second-nic")
	ours := observed(t, network)
	peer, err := KubeProxy(network, ip.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	const web, node, second = "10.13.0.101:80", "10.12.97.49:30080", "10.13.0.5:30080"
	for _, c := range []struct{ in, from, to string }{
		{"eth1", "10.13.0.20", web}, {"eth1", "10.50.1.20", web}, {"eth1", "172.31.0.20", web},
		{"eth1", "10.13.0.20", second}, {"eth1", "10.50.1.20", second},
		{"eth0", "10.13.0.20", node}, {"eth0", "203.0.113.9", node}, {"eth0", "203.0.113.9", web},
		{"cni0", "10.42.0.7", web}, {"cni0", "10.42.0.7", node}, {"", "", web}, {"", "", "172.16.0.10:80"},
	} {
		q := trace.Question{Protocol: ip.TCP, In: c.in, To: netip.MustParseAddrPort(c.to)}
		if c.from != "" {
			q.From = netip.MustParseAddr(c.from)
		}
		if got, want := routes(ours, q), routes(peer, q); got != want {
			t.Errorf("%s by %s to %s\nkube-ipvs:\n%skube-proxy:\n%s", c.from, c.in, c.to, got, want)
		}
	}
}

// TestPodsOnUplink has pods on the bridge of the default route. Under Local, without an endpoint on the
// node, they are not dropped like external clients.
func TestPodsOnUplink(t *testing.T) {
	network := loadNetwork(t, "uplink-bridge")
	inv := &network.Node.Inventory
	inv.Links = append(inv.Links,
		routing.Link{Index: 20, Name: "eth0", Type: "device", Up: true, Master: "cnibr0"},
		routing.Link{Index: 21, Name: "veth21", Type: "veth", Up: true, Master: "cnibr0"})
	n := observed(t, network)
	var e trace.Evaluator
	for from, drops := range map[string]bool{"10.244.1.45": false, "203.0.113.9": true} {
		for _, to := range []string{"10.12.115.102:80", "192.168.0.11:30081"} {
			x := e.Explain(n, trace.Question{Protocol: ip.TCP, From: netip.MustParseAddr(from), In: "cnibr0", To: netip.MustParseAddrPort(to)})
			if got := len(x.RealServers) == 0; got != drops {
				t.Errorf("%s to %s: dropped is %v, want %v: %s", from, to, got, drops, x.Verdict)
			}
		}
	}
}

// loadNetwork returns a scenario of testdata/networks. They are apart from the others: the oracle does
// not hold on these networks.
func loadNetwork(t *testing.T, name string) *Scenario {
	t.Helper()
	list, err := load("testdata/networks/" + name + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	return list[0]
}

// observed returns the node of a scenario after a start.
func observed(t *testing.T, s *Scenario) *trace.Node {
	t.Helper()
	p, err := NewProduct(s)
	if err != nil {
		t.Fatal(err)
	}
	n, err := p.Observed(ip.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// routes describes the paths of a connection: a line for each endpoint, with the routes of the packets
// as they leave the node.
func routes(n *trace.Node, q trace.Question) string {
	var e trace.Evaluator
	x := e.Explain(n, q)
	lines := []string{}
	for _, r := range x.RealServers {
		lines = append(lines, fmt.Sprintf("  %s sees %s, %s: request %s; reply %s\n", r.RealServer, r.SeenSource, r.Verdict, last(r.Request), last(r.Reply)))
	}
	slices.Sort(lines)
	return x.Verdict.String() + "\n" + strings.Join(lines, "")
}

// last returns the last route that a packet takes, without the policy rule that selects it.
func last(steps []trace.Step) string {
	for _, s := range slices.Backward(steps) {
		if s.Where == "route" {
			route, _, _ := strings.Cut(s.What, " table ")
			if strings.HasPrefix(route, "local ") {
				return "to the node"
			}
			return route
		}
	}
	return "none"
}

// rulesOfFlannel are those of `flannel --ip-masq` on a node whose pods have 10.244.1.0/24.
const rulesOfFlannel = `*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.1.0/24 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
`

// TestNetworkPluginMasquerades has a Service under Local without an endpoint on the node, beside
// flannel, which masquerades external clients on the way to pods. Such clients are answered, as
// under kube-proxy. Without flannel's rules they are dropped.
func TestNetworkPluginMasquerades(t *testing.T) {
	network := loadNetwork(t, "flannel")
	for _, rules := range []string{"", rulesOfFlannel} {
		product := &Product{Kernel: NewKernel(network)}
		if rules != "" {
			if err := product.NAT[ip.IPv4].Restore(rules); err != nil {
				t.Fatal(err)
			}
		}
		if err := product.Start(); err != nil {
			t.Fatal(err)
		}
		node, err := product.Observed(ip.IPv4)
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"10.12.115.102:80", "192.168.0.11:30081"} {
			var e trace.Evaluator
			q := trace.Question{Protocol: ip.TCP, From: netip.MustParseAddr("203.0.113.9"), In: "eth0", To: netip.MustParseAddrPort(to)}
			want := trace.Dropped
			if rules != "" {
				want = trace.Answered
			}
			if x := e.Explain(node, q); x.Verdict.Outcome != want {
				t.Errorf("%s, flannel %v: %+v, want %s", to, rules != "", x.Verdict, want)
			}
		}
	}
}
