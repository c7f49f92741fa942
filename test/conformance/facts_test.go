package conformance

import (
	"maps"
	"net/netip"
	"strings"
	"testing"
)

// served is a node with one Service that is claimed as an address, and one that
// is claimed by port and may be reached from one range alone.
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
-A -f 11 -6 -s rr
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
### iptables-save
*mangle
:PREROUTING ACCEPT [0:0]
-A PREROUTING -d 203.0.113.1/32 -p tcp -j MARK --set-xmark 0x4/0x4
-A INPUT ! -s 10.244.0.0/16 -m addrtype ! --src-type LOCAL -j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark
COMMIT
*nat
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES ! -s 10.244.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
-A INPUT -d 203.0.113.1/32 -p tcp -m set ! --match-set KUBE-RANGES dst,dst,src -j DROP
-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A INPUT -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable
-A OUTPUT -m ipvs --vaddr 10.96.0.1 --vproto 6 --vport 81 -j DROP
COMMIT
### ip6tables-save
### ip -o address
1: lo    inet 127.0.0.1/8 scope host lo
2: eth0    inet 192.168.50.11/24 brd 192.168.50.255 scope global eth0
4: kube-ipvs0    inet 10.96.0.1/32 scope link kube-ipvs0
### ip -4 route show table 80080
local 203.0.113.1 dev lo proto 81
### ip -6 route show table 80080
`

func TestAnswers(t *testing.T) {
	k, err := ParseKernel(served)
	if err != nil {
		t.Fatal(err)
	}
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
		{"outside", "UDP 203.0.113.1:80", "forwarded"},
		{"node", "UDP 203.0.113.1:80", "sent away"},
		{"node", "TCP 192.168.50.11:22", "the node's own"},
		{"outside", "TCP 192.168.50.11:22", "the node's own"},
	} {
		protocol, at, _ := strings.Cut(tc.to, " ")
		if got := k.answer(Question{tc.from, protocol, netip.MustParseAddrPort(at)}); got != tc.want {
			t.Errorf("%s to %s: %s, want %s", tc.from, tc.to, got, tc.want)
		}
	}
}

func TestFacts(t *testing.T) {
	k, err := ParseKernel(served)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for f, v := range k.Facts(nil) {
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

// What the evaluator does not know must not go unnoticed.
func TestUnknownRules(t *testing.T) {
	for _, rule := range []string{
		"-m recent --rcheck -j DROP", "-m set --match-set NONE dst -j DROP", "-j MARK --or-mark 0x1",
		"-m addrtype --dst-type BROADCAST -j DROP", "-o eth0 -j ACCEPT", "-s nowhere -j ACCEPT", "-j SET --add-set X dst",
	} {
		if _, err := ParseKernel("### iptables-save\n*filter\n-A INPUT " + rule + "\n"); err == nil {
			t.Errorf("%q is taken", rule)
		}
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
