package conformance

import (
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// served is a node with one Service that is claimed as an address, and one that is
// claimed by a route and has a fwmark virtual server.
const served = `### ipvsadm -Sn
-A -t 10.96.0.1:80 -s rr
-a -t 10.96.0.1:80 -r 10.244.1.2:8080 -m -w 1
-a -t 10.96.0.1:80 -r 10.244.2.2:8080 -m -w 1
-a -t 10.96.0.1:80 -r 10.244.2.3:8080 -m -w 0
-A -u 10.96.0.1:53 -s rr -p 60
-A -t 203.0.113.1:80 -s rr
-a -t 203.0.113.1:80 -r 10.244.2.2:8080 -m -w 1
-A -f 11 -s rr
-a -f 11 -r 10.244.1.2:8080 -m -w 1
### ipset save
create KUBE-CLUSTER-IP hash:ip,port family inet
add KUBE-CLUSTER-IP 10.96.0.1,tcp:80
create KUBE-LOOP-BACK hash:ip,port,ip family inet
add KUBE-LOOP-BACK 10.244.1.2,tcp:8080,10.244.1.2
create KUBE-RANGES hash:ip,port,net family inet
add KUBE-RANGES 203.0.113.1,tcp:80,100.64.0.0/16
create KUBE-IPVS-LOCAL hash:ip,port family inet skbinfo
add KUBE-IPVS-LOCAL 203.0.113.1,tcp:80 skbmark 0xb/0xffffffff
create KUBE-IPVS-IPS hash:ip family inet
add KUBE-IPVS-IPS 10.96.0.1
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
add KUBE-NODE-PORT-TCP 30080
### ip -o address
1: lo    inet 127.0.0.1/8 scope host lo
2: eth0    inet 192.168.50.11/24 brd 192.168.50.255 scope global eth0
4: kube-ipvs0    inet 10.96.0.1/32 scope link kube-ipvs0
### ip -4 route show table 80080
local 203.0.113.1 dev lo proto 81
### ip -6 route show table 80080
`

// rules are the iptables rules of served.
const rules = `*mangle
:INPUT ACCEPT [0:0]
-A INPUT ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
-A OUTPUT -j KUBE-SERVICES
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES ! -s 10.244.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:INPUT ACCEPT [0:0]
-A INPUT -d 203.0.113.1/32 -p tcp -m set ! --match-set KUBE-RANGES dst,dst,src -j DROP
-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A INPUT -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable
COMMIT
`

// newNode returns served as the evaluator reads it.
func newNode(t *testing.T, extra string) *trace.Node {
	t.Helper()
	ruleset, err := nat.ParseSave(extra + rules)
	if err != nil {
		t.Fatal(err)
	}
	addr, at := netip.MustParseAddr, netip.MustParseAddrPort
	entry := func(to string) ipset.Entry {
		return ipset.Entry{Addr: at(to).Addr(), Port: at(to).Port(), Protocol: ip.TCP}
	}
	server := func(to ...string) ipvs.Service {
		vs := ipvs.Service{VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}, RealServers: map[netip.AddrPort]ipvs.RealServer{}}
		for _, a := range to {
			vs.RealServers[at(a)] = ipvs.RealServer{Weight: 1}
		}
		return vs
	}
	cluster := server("10.244.1.2:8080", "10.244.2.2:8080")
	cluster.RealServers[at("10.244.2.3:8080")] = ipvs.RealServer{}
	loopback := entry("10.244.1.2:8080")
	loopback.Addr2 = loopback.Addr
	ranges := entry("203.0.113.1:80")
	ranges.Net = netip.MustParsePrefix("100.64.0.0/16")
	contents := func(kind ipset.Type, e ipset.Entry, mark uint32) ipset.Contents {
		return ipset.Contents{Set: ipset.Set{Type: kind}, Entries: map[ipset.Entry]uint32{e: mark}}
	}
	route := func(table int, dst, link string, local bool) routing.Route {
		return routing.Route{Table: table, Dst: netip.MustParsePrefix(dst), Link: link, Local: local}
	}
	prefix := netip.MustParsePrefix("192.168.50.11/24")
	out := route(routing.TableMain, "0.0.0.0/0", "eth0", false)
	out.Via = addr("192.168.50.1")
	return &trace.Node{
		Family: ip.IPv4,
		Links: []routing.Link{
			{Name: "eth0", Type: "device", Addresses: []routing.Address{{Prefix: prefix, Global: true}}},
			{Name: "cni0", Type: "bridge", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.244.1.1/24"), Global: true}}},
		},
		Rules: []routing.Rule{{Table: routing.TableLocal}, {Priority: routing.PriorityMain, Table: routing.TableMain}},
		Routes: []routing.Route{
			route(routing.TableLocal, "192.168.50.11/32", "eth0", true), route(routing.TableLocal, "10.96.0.1/32", dummy, true), route(routing.TableLocal, "203.0.113.1/32", "lo", true),
			route(routing.TableMain, "192.168.50.0/24", "eth0", false), route(routing.TableMain, "10.244.1.0/24", "cni0", false), out,
		},
		Ruleset: ruleset,
		Sets: ipset.State{
			"KUBE-CLUSTER-IP": contents(ipset.HashIPPort, entry("10.96.0.1:80"), 0),
			"KUBE-LOOP-BACK":  contents(ipset.HashIPPortIP, loopback, 0),
			"KUBE-RANGES":     contents(ipset.HashIPPortNet, ranges, 0),
			"KUBE-IPVS-LOCAL": contents(ipset.HashIPPort, entry("203.0.113.1:80"), 11),
			"KUBE-IPVS-IPS":   contents(ipset.HashIP, ipset.Entry{Addr: addr("10.96.0.1")}, 0),
		},
		IPVS: ipvs.State{
			{Protocol: ip.TCP, Addr: addr("10.96.0.1"), Port: 80}:   cluster,
			{Protocol: ip.TCP, Addr: addr("203.0.113.1"), Port: 80}: server("10.244.2.2:8080"),
			{FWMark: 11, Addr: addr("0.0.0.0")}:                     server("10.244.1.2:8080"),
		},
		Sysctls: sysctl.State{"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"},
	}
}

func TestAnswers(t *testing.T) {
	k := &Kernel{nodes: [2]*trace.Node{newNode(t, "")}}
	for _, tc := range []struct{ from, to, want string }{
		{"pod", "TCP 10.96.0.1:80", "10.244.1.2:8080 as itself, 10.244.2.2:8080 as itself"},
		{"endpoint", "TCP 10.96.0.1:80", "10.244.1.2:8080 masqueraded, 10.244.2.2:8080 as itself"},
		{"outside", "TCP 10.96.0.1:80", "10.244.1.2:8080 masqueraded, 10.244.2.2:8080 masqueraded"},
		{"node", "TCP 10.96.0.1:80", "10.244.1.2:8080 masqueraded, 10.244.2.2:8080 masqueraded"},
		{"pod", "TCP 10.96.0.1:81", "refused"},
		{"node", "TCP 10.96.0.1:81", "refused"},
		{"pod", "ICMP 10.96.0.1:0", "refused"},
		{"pod", "UDP 10.96.0.1:53", "refused"}, // no set lists it
		{"outside", "TCP 203.0.113.1:80", "dropped"},
		{"friend", "TCP 203.0.113.1:80", "10.244.1.2:8080 as itself"}, // by the mark
		{"node", "TCP 203.0.113.1:80", "10.244.2.2:8080 as itself"},   // its source is the VIP
		{"outside", "UDP 203.0.113.2:80", "forwarded"},
		{"node", "UDP 203.0.113.2:80", "sent away"},
		{"node", "TCP 192.168.50.11:22", "the node's own"},
		{"outside", "TCP 192.168.50.11:22", "the node's own"},
	} {
		protocol, at, _ := strings.Cut(tc.to, " ")
		got, err := k.answer(Question{tc.from, protocol, netip.MustParseAddrPort(at)})
		if got != tc.want || err != nil {
			t.Errorf("%s to %s: %s, %v, want %s", tc.from, tc.to, got, err, tc.want)
		}
	}
}

// Rules that the evaluator does not support must be reported.
func TestUnknownRules(t *testing.T) {
	for _, rule := range []string{"-m recent --rcheck -j DROP", "-m set --match-set NONE dst -j DROP", "-s nowhere -j ACCEPT", "-j TARPIT"} {
		k := &Kernel{nodes: [2]*trace.Node{newNode(t, "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING "+rule+"\nCOMMIT\n")}}
		if _, err := k.Facts([]Question{{"pod", "TCP", netip.MustParseAddrPort("10.96.0.1:80")}}); err == nil {
			t.Errorf("%q is taken", rule)
		}
	}
}

func TestFacts(t *testing.T) {
	k, err := ParseKernel(served)
	if err != nil {
		t.Fatal(err)
	}
	facts, err := k.Facts(nil)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for f, v := range facts {
		got[f.String()] = v
	}
	want := map[string]string{
		"virtual server TCP 10.96.0.1:80":                                          "-s rr",
		"real server 10.244.1.2:8080 TCP 10.96.0.1:80":                             "-m -w 1",
		"real server 10.244.2.2:8080 TCP 10.96.0.1:80":                             "-m -w 1",
		"real server 10.244.2.3:8080 TCP 10.96.0.1:80":                             "-m -w 0",
		"virtual server UDP 10.96.0.1:53":                                          "-s rr -p 60",
		"virtual server TCP 203.0.113.1:80":                                        "-s rr",
		"real server 10.244.2.2:8080 TCP 203.0.113.1:80":                           "-m -w 1",
		"VIP 10.96.0.1:0":                                                          "local",
		"VIP 203.0.113.1:0":                                                        "local",
		"member KUBE-CLUSTER-IP 10.96.0.1,tcp:80 TCP 10.96.0.1:80":                 "listed",
		"member KUBE-LOOP-BACK 10.244.1.2,tcp:8080,10.244.1.2 TCP 10.244.1.2:8080": "listed",
		"member KUBE-RANGES 203.0.113.1,tcp:80,100.64.0.0/16 TCP 203.0.113.1:80":   "listed",
		"member KUBE-NODE-PORT-TCP 30080":                                          "listed",
	}
	if !maps.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestCompare(t *testing.T) {
	a, b, c := Fact{Kind: "VIP", Name: "a"}, Fact{Kind: "VIP", Name: "b"}, Fact{Kind: "VIP", Name: "c"}
	got := Compare(Facts{a: "1", b: "1", c: "1"}, Facts{a: "1", b: "2"})
	want := []Diff{{b, "1", "2"}, {c, "1", ""}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := Compare(Facts{}, Facts{a: "1"}); len(got) != 1 || got[0] != (Diff{a, "", "1"}) {
		t.Errorf("got %v", got)
	}
}
