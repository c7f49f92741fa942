package trace

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/capture"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// The node of these tests: eth0 leads out, eth1 is an ENI without an address,
// cali1 is its pod, cni0 is a bridge with pods. The VIP is an address of
// kube-ipvs0, and its endpoints are beyond the node and on the bridge.
const (
	nodeRules = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -s 10.244.1.0/24 -j RETURN
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A INPUT -s 192.0.2.66/32 -p tcp -m tcp --dport 80 -j DROP
-A INPUT -s 192.0.2.67/32 -j REJECT --reject-with icmp-port-unreachable
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`
	vip    = "10.96.0.10"
	remote = "10.1.9.9:8080"
	here   = "10.244.1.7:8080"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func newNode(t *testing.T, endpoints ...string) *Node {
	t.Helper()
	rules, err := nat.ParseSave(nodeRules)
	if err != nil {
		t.Fatal(err)
	}
	address := func(s string) routing.Address { return routing.Address{Prefix: prefix(s), Global: true} }
	n := &Node{
		Family: ip.IPv4,
		Links: []routing.Link{
			{Index: 1, Name: "lo", Loopback: true},
			{Index: 2, Name: "eth0", Addresses: []routing.Address{address("10.1.0.5/24")}},
			{Index: 3, Name: "eth1"}, {Index: 4, Name: "cali1"},
			{Index: 5, Name: "cni0", Type: "bridge", Addresses: []routing.Address{address("10.244.1.1/24")}},
		},
		Rules: []routing.Rule{
			{Family: ip.IPv4, Priority: 0, Table: 255},
			{Family: ip.IPv4, Priority: 480, Mark: 0x20, Mask: 0x20, Table: 254},
			{Family: ip.IPv4, Priority: 2000, From: prefix("10.12.0.44/32"), Table: 1003},
			{Family: ip.IPv4, Priority: 32766, Table: 254},
		},
		Routes: []routing.Route{
			{Table: 255, Dst: prefix("10.1.0.5/32"), Link: "eth0", Local: true},
			{Table: 255, Dst: prefix(vip + "/32"), Link: "kube-ipvs0", Local: true},
			{Table: 254, Dst: prefix("0.0.0.0/0"), Link: "eth0", Via: netip.MustParseAddr("10.1.0.1")},
			{Table: 254, Dst: prefix("10.12.0.44/32"), Link: "cali1"},
			{Table: 254, Dst: prefix("10.244.1.0/24"), Link: "cni0"},
			{Table: 1003, Dst: prefix("0.0.0.0/0"), Link: "eth1", Via: netip.MustParseAddr("10.12.0.1")},
		},
		Ruleset: rules,
		Sets: ipset.State{"KUBE-CLUSTER-IP": {
			Set:     ipset.Set{Name: "KUBE-CLUSTER-IP", Type: ipset.HashIPPort, Family: ip.IPv4},
			Entries: map[ipset.Entry]uint32{{Addr: netip.MustParseAddr(vip), Port: 80, Protocol: ip.TCP}: 0},
		}},
		IPVS: ipvs.State{},
		Sysctls: sysctl.State{
			"net/ipv4/ip_forward": "1", "net/ipv4/vs/snat_reroute": "1", "net/bridge/bridge-nf-call-iptables": "1",
			"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/eth0/rp_filter": "1", "net/ipv4/conf/eth1/rp_filter": "1",
		},
	}
	server := ipvs.Service{VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}, RealServers: map[netip.AddrPort]ipvs.RealServer{}}
	for _, e := range endpoints {
		server.RealServers[netip.MustParseAddrPort(e)] = ipvs.RealServer{Weight: 1}
	}
	n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80}] = server
	return n
}

// byInput gives a pod behind cali2 a way out by vlan1, by a rule with a priority
// beside that of table local, and a route in a table.
func byInput(n *Node, priority, local, table int) {
	n.Links = append(n.Links, routing.Link{Index: 6, Name: "cali2"}, routing.Link{Index: 7, Name: "vlan1"})
	n.Rules[0].Priority = local
	n.Rules = append(n.Rules, routing.Rule{Family: ip.IPv4, Priority: priority, IIf: "cali2", Table: 101})
	slices.SortStableFunc(n.Rules, func(a, b routing.Rule) int { return a.Priority - b.Priority })
	n.Routes = append(n.Routes,
		routing.Route{Table: 101, Dst: prefix("0.0.0.0/0"), Link: "vlan1", Via: netip.MustParseAddr("10.12.0.1")},
		routing.Route{Table: 101, Dst: prefix("10.12.0.45/32"), Link: "cali2"})
	if table != 101 {
		n.Routes = append(n.Routes, routing.Route{Table: table, Dst: prefix("10.12.0.45/32"), Link: "cali2"})
	}
}

func ask(from, to string) Question {
	return Question{Protocol: ip.TCP, From: netip.MustParseAddr(from), To: netip.MustParseAddrPort(to)}
}

func TestExplain(t *testing.T) {
	noBridge := func(n *Node) { n.Sysctls["net/bridge/bridge-nf-call-iptables"] = "0" }
	connectsToItself := func(n *Node) {
		post := n.Ruleset["nat"].Chains
		post["KUBE-POSTROUTING"] = append([]nat.Rule{"-s 10.244.1.7/32 -d 10.244.1.7/32 -j MASQUERADE --random-fully"}, post["KUBE-POSTROUTING"]...)
		n.Links = append(n.Links, routing.Link{Index: 6, Name: "veth7", Type: "veth", Master: "cni0"})
	}
	toItself := ask("10.244.1.7", vip+":80")
	for name, c := range map[string]struct {
		endpoints []string
		change    func(*Node)
		question  Question
		outcome   Outcome
		reason    string // a part of it
		leavesBy  string // of the first real server
		seen      string
	}{
		"an external client": {[]string{remote}, nil, ask("192.0.2.9", vip+":80"), Answered, "", "eth0", "10.1.0.5"},
		"the node":           {[]string{remote}, nil, ask("10.1.0.5", vip+":80"), Answered, "", "eth0", "10.1.0.5"},
		"the node, an endpoint on the bridge": {[]string{here}, nil, ask("10.1.0.5", vip+":80"),
			Answered, "", "cni0", "10.244.1.1"},
		"the node, an endpoint in its own network": {[]string{"10.1.0.5:8080"}, nil, ask("10.1.0.5", vip+":80"),
			Answered, "", "lo", "10.1.0.5"},
		"a pod on the bridge":    {[]string{remote}, nil, ask("10.244.1.5", vip+":80"), Answered, "", "eth0", "10.244.1.5"},
		"two pods on the bridge": {[]string{here}, nil, ask("10.244.1.5", vip+":80"), Answered, "", "cni0", "10.244.1.5"},
		"a bridge without br_netfilter": {[]string{here}, noBridge, ask("10.244.1.5", vip+":80"),
			Dropped, "bypass the rules (br_netfilter is not loaded", "cni0", "10.244.1.5"},
		"a pod connects to itself, its port is not in hairpin mode": {[]string{here}, connectsToItself, toItself,
			Dropped, "no port is in hairpin mode", "cni0", "10.244.1.1"},
		"a pod connects to itself, its port is in hairpin mode": {[]string{here}, func(n *Node) { connectsToItself(n); n.Hairpin = map[string]bool{"veth7": true} }, toItself,
			Answered, "", "cni0", "10.244.1.1"},
		"a pod connects to itself, br_netfilter is off": {[]string{here}, func(n *Node) { connectsToItself(n); noBridge(n) }, toItself,
			Answered, "", "cni0", "10.244.1.1"},
		"a pod on the ENI, which has no address": {[]string{remote}, nil, ask("10.12.0.44", vip+":80"),
			Asymmetric, "the request leaves by eth1 with the source 10.1.0.5, which belongs to eth0", "eth1", "10.1.0.5"},
		"the reply fails the reverse-path check": {[]string{remote}, func(n *Node) {
			n.Ruleset["nat"].Chains["KUBE-POSTROUTING"] = []nat.Rule{"-j SNAT --to-source 10.1.0.5"}
			n.Rules = append(n.Rules[:1], routing.Rule{Priority: 1, Mark: 0x4000, Mask: 0x4000, Table: 254}, n.Rules[2], n.Rules[3])
		}, ask("10.12.0.44", vip+":80"), Dropped, "rp_filter=1 on eth0: the return path to 10.1.9.9 is", "eth0", "10.1.0.5"},
		"the source is the node's": {[]string{remote}, nil,
			Question{Protocol: ip.TCP, From: netip.MustParseAddr("192.0.2.9"), To: netip.MustParseAddrPort(vip + ":80"), In: "eth1"},
			Dropped, "rp_filter=1 on eth1", "", ""},
		"the node, and nothing is masqueraded": {[]string{remote}, func(n *Node) { n.Ruleset["nat"].Chains["OUTPUT"] = nil }, ask("10.1.0.5", vip+":80"),
			Asymmetric, "with the VIP 10.96.0.10 as its source", "eth0", vip},
		"a rule that drops":        {[]string{remote}, nil, ask("192.0.2.66", vip+":80"), Dropped, "-A INPUT -s 192.0.2.66/32", "", ""},
		"a rule that refuses":      {[]string{remote}, nil, ask("192.0.2.67", vip+":80"), Refused, "-A INPUT -s 192.0.2.67/32", "", ""},
		"a policy that drops":      {[]string{remote}, func(n *Node) { n.Ruleset["filter"].Policies["INPUT"] = "DROP" }, ask("192.0.2.9", vip+":80"), Dropped, "policy is DROP", "", ""},
		"no endpoint":              {nil, nil, ask("192.0.2.9", vip+":80"), Refused, "no real server", "", ""},
		"a port without a Service": {[]string{remote}, nil, ask("192.0.2.9", vip+":81"), Unserved, "delivered to the node", "", ""},
		"an address elsewhere":     {[]string{remote}, nil, ask("10.244.1.5", "192.0.2.1:80"), Unserved, "leaves the node by eth0", "", ""},
		"no forwarding": {[]string{remote}, func(n *Node) { n.Sysctls["net/ipv4/ip_forward"] = "0" }, ask("192.0.2.9", vip+":80"),
			Dropped, "forwarding is disabled", "eth0", "10.1.0.5"},
		"a way out by input interface, before table local": {[]string{remote}, func(n *Node) { byInput(n, 10, 20, 101) }, ask("10.12.0.45", vip+":80"),
			Unserved, "leaves the node by vlan1", "", ""},
		"a way out by input interface, and the node has no route to the pod": {[]string{remote}, func(n *Node) { byInput(n, 10, 0, 101) }, ask("10.12.0.45", vip+":80"),
			Asymmetric, "the request entered by cali2, the reply leaves by eth0", "eth0", "10.1.0.5"},
		"a way out by input interface, and the network checks sources": {[]string{remote}, func(n *Node) {
			byInput(n, 10, 0, 254)
			n.Ruleset["nat"].Chains["PREROUTING"] = nil
		}, ask("10.12.0.45", vip+":80"), Asymmetric, "whose own traffic leaves by vlan1", "eth0", "10.12.0.45"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, c.endpoints...)
			if c.change != nil {
				c.change(n)
			}
			expectPath(t, Explain(n, c.question), c.outcome, c.reason, c.leavesBy, c.seen)
		})
	}
}

// expectPath checks the verdict, the first real server's path, and that there are no doubts.
// reason is a part of the verdict's.
func expectPath(t *testing.T, x Explanation, outcome Outcome, reason, leavesBy, seen string) {
	t.Helper()
	var path ServerPath
	if len(x.RealServers) > 0 {
		path = x.RealServers[0]
	}
	if x.Verdict.Outcome != outcome || !strings.Contains(x.Verdict.Reason, reason) ||
		path.LeavesBy != leavesBy || path.SeenSource != seen || len(x.Doubts) > 0 {
		var text strings.Builder
		_ = x.Write(&text)
		t.Errorf("want %s: %s, by %s as %s:\n%s", outcome, reason, leavesBy, seen, text.String())
	}
}

// A rule that cannot be evaluated is named. The verdict is undecided only if it depends on it.
func TestDoubts(t *testing.T) {
	for name, c := range map[string]struct {
		rules   []nat.Rule
		doubt   string
		outcome Outcome
		reason  string
	}{
		"a match": {[]nat.Rule{"-m recent --rcheck --name x -j DROP"}, "unsupported match recent --rcheck",
			Undecided, "answered, but dropped if this applies: filter: -A INPUT -m recent"},
		"a set":    {[]nat.Rule{"-m set --match-set theirs src -j REJECT"}, "unknown set theirs", Undecided, "but refused if"},
		"a target": {[]nat.Rule{"-p tcp -j SYNPROXY"}, "unsupported target SYNPROXY", Undecided, "but dropped if"},
		// Its source is another one's anyway.
		"another client's":        {[]nat.Rule{"-s 192.0.2.1/32 -m recent --rcheck -j DROP"}, "", Answered, ""},
		"a header that is absent": {[]nat.Rule{"-m rt --rt-type 0 -j DROP"}, "", Answered, ""},
		"a log":                   {[]nat.Rule{"-m limit --limit 5/min -j LOG"}, "", Answered, ""},
		"accepted anyway":         {[]nat.Rule{"-m recent --rcheck -j ACCEPT"}, "unsupported match recent", Answered, ""},
		"dropped otherwise": {[]nat.Rule{"-m recent --rcheck -j ACCEPT", "-j DROP"}, "unsupported match recent",
			Undecided, "but answered if"},
		"dropped anyway": {[]nat.Rule{"-m recent --rcheck -j MARK --set-xmark 0x1/0x1", "-j DROP"}, "unsupported match recent", Dropped, "-j DROP"},
		"two that must match": {[]nat.Rule{"-m recent --rcheck -j MARK --set-xmark 0x8/0x8", "-m recent --update -m mark --mark 0x8/0x8 -j DROP"},
			"unsupported match recent --rcheck", Undecided, "--rcheck -j MARK --set-xmark 0x8/0x8: unsupported match recent --rcheck; filter:"},
		"too many": {[]nat.Rule{
			"-m recent --a -j ACCEPT", "-m recent --b -j MARK --set-xmark 0x0/0x1", "-m recent --c -j MARK --set-xmark 0x0/0x1",
			"-m recent --d -j MARK --set-xmark 0x0/0x1", "-m recent --e -j MARK --set-xmark 0x0/0x1", "-m recent --f -j MARK --set-xmark 0x0/0x1",
			"-m recent --g -j MARK --set-xmark 0x0/0x1", "-m recent --h -j MARK --set-xmark 0x0/0x1", "-m recent --i -j MARK --set-xmark 0x0/0x1",
		}, "unsupported match recent", Undecided, "too many"},
	} {
		n := newNode(t, remote)
		n.Ruleset["filter"].Chains["INPUT"] = c.rules
		x := Explain(n, ask("192.0.2.9", vip+":80"))
		if x.Verdict.Outcome != c.outcome || !strings.Contains(x.Verdict.Reason, c.reason) {
			t.Errorf("%s: %s, want %s: %s", name, x.Verdict, c.outcome, c.reason)
		}
		if got := strings.Join(x.Doubts, "; "); (c.doubt == "") != (got == "") || !strings.Contains(got, c.doubt) {
			t.Errorf("%s: doubts %q, want %q", name, got, c.doubt)
		}
	}
}

// The match rpfilter, as Calico uses it: it must not drop what the kernel's own check accepts.
func TestReversePathMatch(t *testing.T) {
	for _, c := range []struct {
		rule, in string
		outcome  Outcome
	}{
		{"-m rpfilter --validmark --invert -j DROP", "eth0", Answered},
		{"-m rpfilter --validmark --invert -j DROP", "eth1", Dropped},
		{"-m rpfilter --loose --invert -j DROP", "eth1", Asymmetric}, // the reply leaves by eth0
		{"-m rpfilter -j DROP", "eth0", Dropped},
	} {
		n := newNode(t, remote)
		n.Ruleset["raw"] = nat.Contents{Chains: map[string][]nat.Rule{"PREROUTING": {nat.Rule("-i " + c.in + " " + c.rule)}}}
		for _, link := range []string{"all", "eth0", "eth1"} {
			n.Sysctls[sysctl.LinkKey(ip.IPv4, link, "rp_filter")] = "0"
		}
		q := ask("192.0.2.9", vip+":80")
		q.In = c.in
		x := Explain(n, q)
		if x.Verdict.Outcome != c.outcome || len(x.Doubts) > 0 {
			t.Errorf("%s on %s: %s, doubts %q, want %s", c.rule, c.in, x.Verdict, x.Doubts, c.outcome)
		}
	}
}

// A set of another program is evaluated, unless it was not read in full.
func TestForeignSets(t *testing.T) {
	for partial, want := range map[bool]Outcome{false: Dropped, true: Undecided} {
		n := newNode(t, remote)
		n.Ruleset["filter"].Chains["INPUT"] = []nat.Rule{"-m set --match-set theirs src -j DROP"}
		n.Sets["theirs"] = ipset.Contents{
			Set:     ipset.Set{Name: "theirs", Type: ipset.HashNet, Family: ip.IPv4},
			Entries: map[ipset.Entry]uint32{{Net: prefix("192.0.2.0/24")}: 0}, Partial: partial,
		}
		if x := Explain(n, ask("192.0.2.9", vip+":80")); x.Verdict.Outcome != want {
			t.Errorf("partial: %v: %s, want %s", partial, x.Verdict, want)
		}
	}
}

// JSON has empty lists, not null.
func TestEmptyLists(t *testing.T) {
	for name, q := range map[string]Question{"dropped": ask("192.0.2.66", vip+":80"), "answered": ask("192.0.2.9", vip+":80"), "no route": ask("fd00::1", vip+":80")} {
		text, err := json.Marshal(Explain(newNode(t, remote), q))
		if err != nil || strings.Contains(string(text), "null") {
			t.Errorf("%s: %v, %s", name, err, text)
		}
	}
}

// Several next hops are no doubt if all have the same outcome. They are one if the reply would leave
// by another interface than the request entered by.
func TestNextHops(t *testing.T) {
	for name, c := range map[string]struct {
		second  string // link of the second next hop
		outcome Outcome
		reason  string
	}{
		"two gateways":   {"eth0", Answered, ""},
		"two interfaces": {"eth1", Undecided, "asymmetric if this applies: 0.0.0.0/0: the kernel may choose the next hop eth1 instead of eth0"},
	} {
		n := newNode(t, remote)
		for i, r := range n.Routes {
			if r.Table == 254 && r.Dst.Bits() == 0 {
				n.Routes[i].Multipath = true
				r.Link, r.Multipath = c.second, true
				n.Routes = append(n.Routes, r)
			}
		}
		question := ask("192.0.2.9", vip+":80")
		question.In = "eth0"
		x := Explain(n, question)
		if x.Verdict.Outcome != c.outcome || !strings.Contains(x.Verdict.Reason, c.reason) {
			t.Errorf("%s: %s, want %s: %s", name, x.Verdict, c.outcome, c.reason)
		}
	}
}

// If only some ports of a bridge are in hairpin mode, it is unknown whether that of a pod
// that connects to itself is.
func TestDoubtsHairpin(t *testing.T) {
	n := newNode(t, here)
	n.Ruleset["nat"].Chains["KUBE-POSTROUTING"] = []nat.Rule{"-s 10.244.1.7/32 -d 10.244.1.7/32 -j MASQUERADE --random-fully"}
	n.Links = append(n.Links, routing.Link{Index: 6, Name: "veth7", Master: "cni0"}, routing.Link{Index: 7, Name: "veth8", Master: "cni0"})
	n.Hairpin = map[string]bool{"veth8": true}
	if x := Explain(n, ask("10.244.1.7", vip+":80")); len(x.Doubts) != 1 || !strings.Contains(x.Doubts[0], "1 of 2 ports") ||
		x.Verdict.Outcome != Undecided {
		t.Errorf("%s, doubts %q", x.Verdict, x.Doubts)
	}
}

// Draining real servers accept no connections, so they do not affect the verdict.
func TestDraining(t *testing.T) {
	n := newNode(t, remote)
	n.IPVS[ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80}].RealServers[netip.MustParseAddrPort("10.1.9.10:8080")] = ipvs.RealServer{}
	x := Explain(n, ask("192.0.2.9", vip+":80"))
	if x.Verdict.Outcome != Answered || x.RealServers[1].Verdict.Outcome != Draining {
		t.Errorf("%+v", x)
	}
}

func TestMatches(t *testing.T) {
	n := newNode(t, remote)
	p := &packet{
		protocol: ip.TCP, state: New, phase: Request, in: "cali1", out: "eth0", mark: 0x24, conn: &connection{mark: 0x40},
		src: netip.MustParseAddrPort("10.12.0.44:40000"), dst: netip.MustParseAddrPort(vip + ":80"),
		virtual: &ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80},
	}
	e := &Evaluator{}
	w := &walk{Node: e.at(n), eval: e}
	for rule, want := range map[nat.Rule]bool{
		"-s 10.12.0.0/16 -d 10.96.0.10/32":        true,
		"! -s 10.12.0.0/16":                       false,
		"-i cali+ -o eth0":                        true,
		"-i eth0":                                 false,
		"-p tcp -m tcp --dport 80":                true,
		"-p tcp -m multiport --dports 22,79:81":   true,
		"-p tcp -m multiport ! --dports 22,79:81": false,
		"-p udp":                                        false,
		"-m mark --mark 0x20/0x20":                      true,
		"-m mark ! --mark 0x20/0x20":                    false,
		"-m mark --mark 0x20":                           false,
		"-m connmark --mark 0x40/0x60":                  true,
		"-m conntrack --ctstate RELATED,NEW":            true,
		"-m conntrack ! --ctstate NEW":                  false,
		"-m conntrack --ctdir REPLY":                    false,
		"-m addrtype --dst-type LOCAL":                  true,
		"-m addrtype ! --src-type LOCAL":                true,
		"-m set --match-set KUBE-CLUSTER-IP dst,dst":    true,
		"-m set --match-set KUBE-CLUSTER-IP src,src":    false,
		"-m ipvs --vaddr 10.96.0.10/32 --vport 80":      true,
		"-m ipvs --vdir ORIGINAL":                       true,
		"-m ipvs --vdir REPLY":                          false,
		"-m physdev --physdev-is-in":                    false,
		"-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN": true,
		"-p tcp -m tcp --syn":                           true,
		"-p tcp -m tcp --tcp-flags SYN,ACK SYN,ACK":     false,
		"-p tcp -m tcp --tcp-flags ALL NONE":            false,
		`-m comment --comment "a, \"b\" ! -s c"`:        true,
	} {
		if is, err := w.matches(parse(rule), p); is != want || err != nil {
			t.Errorf("%s: %v, %v, want %v", rule, is, err, want)
		}
	}
}

// TestFlagsOfReply requires that the reply to a new connection is a SYN-ACK.
func TestFlagsOfReply(t *testing.T) {
	w := &walk{Node: newNode(t, remote), eval: &Evaluator{}}
	p := &packet{protocol: ip.TCP, state: Established, phase: Reply, reply: true, conn: &connection{}}
	for rule, want := range map[nat.Rule]bool{
		"-p tcp -m tcp --tcp-flags SYN,RST SYN":     true,
		"-p tcp -m tcp --tcp-flags SYN,ACK SYN,ACK": true,
		"-p tcp -m tcp --syn":                       false,
	} {
		if is, err := w.matches(parse(rule), p); is != want || err != nil {
			t.Errorf("%s: %v, %v, want %v", rule, is, err, want)
		}
	}
}

func TestMarks(t *testing.T) {
	for text, want := range map[nat.Rule][2]uint32{
		"-j MARK --set-xmark 0x4000/0x4000":                      {0x4024, 0x40},
		"-j MARK --set-xmark 0x20/0x0":                           {0x4, 0x40},
		"-j MARK --set-xmark 0x1/0xffffffff":                     {0x1, 0x40},
		"-j CONNMARK --set-xmark 0x20/0x60":                      {0x24, 0x20},
		"-j CONNMARK --save-mark --nfmask 0x24 --ctmask 0x60":    {0x24, 0x24},
		"-j CONNMARK --restore-mark --nfmask 0x60 --ctmask 0x60": {0x44, 0x40},
		"-j SET --map-set KUBE-IPVS-LOCAL dst,dst --map-mark":    {0xb, 0x40},
		"-d 192.0.2.1/32 -j MARK --set-xmark 0x4000/0x4000":      {0x24, 0x40},
	} {
		n := newNode(t, remote)
		n.Sets["KUBE-IPVS-LOCAL"] = ipset.Contents{
			Set:     ipset.Set{Type: ipset.HashIPPortMark},
			Entries: map[ipset.Entry]uint32{{Addr: netip.MustParseAddr(vip), Port: 80, Protocol: ip.TCP}: 0xb},
		}
		n.Ruleset = nat.Ruleset{nat.Mangle: {Chains: map[string][]nat.Rule{"INPUT": {text}}}}
		e := &Evaluator{}
		w := &walk{Node: e.at(n), eval: e}
		p := &packet{protocol: ip.TCP, mark: 0x24, conn: &connection{mark: 0x40}, dst: netip.MustParseAddrPort(vip + ":80")}
		w.hook(nat.Mangle, "INPUT", p)
		if got := [2]uint32{p.mark, p.conn.mark}; got != want || len(w.doubts) > 0 {
			t.Errorf("%s: marks %#x, want %#x; doubts %q", text, got, want, w.doubts)
		}
	}
}

func TestBestSource(t *testing.T) {
	n := &Node{Family: ip.IPv6, Links: []routing.Link{
		{Name: "eth0", Addresses: []routing.Address{{Prefix: prefix("fd00:97::49/64"), Global: true}}},
		{Name: "eth1", Addresses: []routing.Address{{Prefix: prefix("fd00:192::10/64"), Global: true}}},
		{Name: "veth"},
	}}
	dst := netip.MustParseAddr("fd00:192::44")
	for link, want := range map[string]string{"eth0": "fd00:97::49", "eth1": "fd00:192::10", "veth": "fd00:192::10"} {
		if got := n.SourceOn(link, dst); got.String() != want {
			t.Errorf("on %s: %s, want %s", link, got, want)
		}
	}
}

func TestFlow(t *testing.T) {
	q := ask("10.12.0.44", vip+":80")
	has := Flow(q, Explanation{RealServers: []ServerPath{{RealServer: remote, SeenSource: "10.1.0.5"}}})
	for text, want := range map[string]bool{
		"10.12.0.44:1 10.96.0.10:80": true,
		"10.96.0.10:80 10.12.0.44:1": true,
		"10.1.0.5:7 10.1.9.9:8080":   true, // masqueraded
		"10.1.9.9:8080 10.1.0.5:7":   true,
		"10.1.9.9:8080 10.12.0.44:1": true, // behind conntrack
		"10.12.0.45:1 10.96.0.10:80": false,
		"10.12.0.44:1 10.96.0.10:81": false,
		"10.1.0.6:7 10.1.9.9:8080":   false,
		"10.1.0.5:7 10.1.9.9:8081":   false,
	} {
		from, to, _ := strings.Cut(text, " ")
		p := capture.Packet{Protocol: ip.TCP, From: netip.MustParseAddrPort(from), To: netip.MustParseAddrPort(to)}
		if has(p) != want {
			t.Errorf("%s: %v", text, !want)
		}
		if p.Protocol = ip.UDP; has(p) {
			t.Errorf("%s over UDP", text)
		}
	}
}

// FuzzRule: whatever stands in a ruleset is judged, or named as not judged.
func FuzzRule(f *testing.F) {
	for _, rule := range []string{
		"-m set --match-set KUBE-CLUSTER-IP dst,dst -j MARK --set-xmark 0x4000/0x4000", "! -s 10.0.0.0/8 -p tcp -m multiport --dports 1:2,3 -g x",
		"-j SET --map-set", "-m set --match-set x -j SNAT --to-source", "-m conntrack --ctstate", "-m", "-j", "--comment", "! !",
	} {
		f.Add(rule)
	}
	f.Fuzz(func(t *testing.T, rule string) {
		n := newNode(t, remote)
		for _, table := range []string{"nat PREROUTING", "nat POSTROUTING", "filter INPUT"} {
			name, chain, _ := strings.Cut(table, " ")
			n.Ruleset[nat.Table(name)].Chains[chain] = []nat.Rule{nat.Rule(rule)}
		}
		if x := Explain(n, ask("192.0.2.9", vip+":80")); x.Verdict.Outcome == "" {
			t.Errorf("%q: no verdict", rule)
		}
	})
}

// Counted by hand: up to IPVS, a client's first packet is matched against one rule of
// PREROUTING, two of KUBE-SERVICES and two of INPUT, then against one of POSTROUTING and
// three of KUBE-POSTROUTING; its reply is matched against one of FORWARD.
func TestRulesEvaluated(t *testing.T) {
	x := Explain(newNode(t, remote, here), ask("192.0.2.9", vip+":80"))
	if met := x.Steps[len(x.Steps)-1].Rules; met != 5 {
		t.Errorf("%d rules up to IPVS, not 5: %+v", met, x.Steps)
	}
	for _, r := range x.RealServers {
		if r.Rules != 10 {
			t.Errorf("by %s: %d rules, not 10: %+v %+v", r.RealServer, r.Rules, r.Request, r.Reply)
		}
	}
}

// A goto whose mark the packet has goes on behind the rules in between; one
// without a target matches nothing.
func TestGoto(t *testing.T) {
	n := newNode(t)
	jump := routing.Rule{Family: ip.IPv4, Mark: 4, Mask: 4, Action: routing.Goto, Target: 1}
	for name, test := range map[string]struct {
		rules []routing.Rule
		mark  uint32
		want  bool
	}{
		"marked":    {[]routing.Rule{jump, {Family: ip.IPv4, Table: 255}, {Family: ip.IPv4, Priority: 1, Action: routing.Nop}}, 4, false},
		"unmarked":  {[]routing.Rule{jump, {Family: ip.IPv4, Table: 255}, {Family: ip.IPv4, Priority: 1, Action: routing.Nop}}, 0, true},
		"no target": {[]routing.Rule{jump, {Family: ip.IPv4, Table: 255}}, 4, true},
	} {
		n.Rules = append(test.rules, routing.Rule{Family: ip.IPv4, Priority: 32766, Table: 254})
		if got, ok, _ := n.route(lookup{dst: netip.MustParseAddr(vip), in: "cali1", mark: test.mark}); !ok || got.Local != test.want {
			t.Errorf("%s: %s, %t", name, got, ok)
		}
	}
}

// TestRejectRoutes: a blackhole for the pods of a node, as Calico writes it, drops packets
// to a pod that has no route, although there is a default route. A throw goes on with the next
// rule.
func TestRejectRoutes(t *testing.T) {
	pods := netip.MustParsePrefix("10.244.1.0/26")
	n := newNode(t)
	n.Rules = []routing.Rule{{Family: ip.IPv4, Priority: 100, Table: 100}, {Family: ip.IPv4, Priority: 32766, Table: 254}}
	for name, test := range map[string]struct {
		route routing.Route
		want  bool
	}{
		"none":      {routing.Route{Family: ip.IPv4, Table: 254, Dst: netip.MustParsePrefix("10.0.0.0/8"), Link: "eth0"}, true},
		"blackhole": {routing.Route{Family: ip.IPv4, Table: 254, Dst: pods, Type: routing.Reject}, false},
		"throw":     {routing.Route{Family: ip.IPv4, Table: 100, Dst: pods, Type: routing.Throw}, true},
	} {
		n.Routes = []routing.Route{{Family: ip.IPv4, Table: 254, Dst: netip.MustParsePrefix("0.0.0.0/0"), Link: "eth0"}, test.route}
		if got, ok, _ := n.route(lookup{dst: netip.MustParseAddr("10.244.1.9"), in: "cali1"}); ok != test.want {
			t.Errorf("%s: %s, %t", name, got, ok)
		}
	}
}

// TestUnroutableClient: a client without a route is not taken for the node itself, which is
// answered.
func TestUnroutableClient(t *testing.T) {
	n := newNode(t, remote)
	if x := Explain(n, ask("192.0.2.9", vip+":80")); x.Verdict.Outcome != Answered && x.Verdict.Outcome != "" {
		t.Errorf("with a route: %s", x.Verdict)
	}
	n.Routes = append(n.Routes, routing.Route{Table: 254, Dst: netip.MustParsePrefix("192.0.2.0/24"), Type: routing.Reject})
	if x := Explain(n, ask("192.0.2.9", vip+":80")); x.Verdict.Outcome != Dropped || !strings.Contains(x.Verdict.Reason, "no route to 192.0.2.9") {
		t.Errorf("without: %s, enters by %q", x.Verdict, x.EntersBy)
	}
	if x := Explain(n, ask("10.1.0.5", vip+":80")); x.Verdict.Outcome == Dropped {
		t.Errorf("the node: %s", x.Verdict)
	}
}

// TestLimit: a full real server is left out, one that may be full is named, and if all are
// full, the connection is refused.
func TestLimit(t *testing.T) {
	const one, other = "10.12.0.45:8080", "10.12.0.46:8080"
	for name, c := range map[string]struct {
		counts    [2]ipvs.Connections
		want      []Outcome
		doubtful  bool
		of, whole string
	}{
		"room":     {[2]ipvs.Connections{{Active: 2}, {Active: 1, Inactive: 1}}, []Outcome{Answered, Answered}, false, "", "answered"},
		"may be":   {[2]ipvs.Connections{{Active: 3}, {Active: 1}}, []Outcome{Answered, Answered}, true, "3 of at most 4 connections", "answered"},
		"one full": {[2]ipvs.Connections{{Active: 3, Inactive: 1}, {}}, []Outcome{Full, Answered}, false, "full: it has 4 connections", "answered"},
		"all full": {[2]ipvs.Connections{{Active: 4}, {Active: 5}}, []Outcome{Full, Full}, false, "5 of at most 4", "refused: all real servers that accept connections are full"},
	} {
		n := newNode(t, one, other)
		key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr(vip), Port: 80}
		n.Connections = Connections{key: {}}
		for i, e := range []string{one, other} {
			at := netip.MustParseAddrPort(e)
			n.IPVS[key].RealServers[at] = ipvs.RealServer{Weight: 1, MaxConnections: 4}
			n.Connections[key][at] = c.counts[i]
		}
		x := Explain(n, ask("192.0.2.9", vip+":80"))
		var text strings.Builder
		if err := x.Write(&text); err != nil {
			t.Fatal(err)
		}
		for i, want := range c.want {
			if got := x.RealServers[i].Verdict.Outcome; got != want {
				t.Errorf("%s: real server %d: %s, want %s", name, i, got, want)
			}
		}
		if doubtful := x.RealServers[0].Doubt != ""; doubtful != c.doubtful || !strings.Contains(text.String(), c.of) || !strings.HasSuffix(text.String(), c.whole+"\n") {
			t.Errorf("%s: want %q and %q, doubt %t:\n%s", name, c.of, c.whole, c.doubtful, &text)
		}
	}
}

// An open connection needs its real server, and rules that let its packets pass.
func TestContinue(t *testing.T) {
	n := newNode(t, "10.244.1.5:8080")
	var open []*Connection
	e := Evaluator{Opened: func(c *Connection) { open = append(open, c) }}
	e.Explain(n, ask("10.1.0.5", "10.96.0.10:80"))
	if len(open) != 1 || open[0].RealServer() != "10.244.1.5:8080" {
		t.Fatalf("open: %v", open)
	}
	if v := e.Continue(n, open[0]); v.Outcome != Answered {
		t.Errorf("on the same node: %s", v)
	}
	other := newNode(t, "10.244.2.5:8080")
	if v := e.Continue(other, open[0]); v.Outcome != Dropped {
		t.Errorf("without the real server: %s", v)
	}
	dropping := newNode(t, "10.244.1.5:8080")
	dropping.Ruleset[nat.Filter] = nat.Contents{Chains: map[string][]nat.Rule{"INPUT": {"-m conntrack --ctstate ESTABLISHED -j DROP"}}}
	if v := e.Continue(dropping, open[0]); v.Outcome != Dropped {
		t.Errorf("with rules that drop the reply: %s", v)
	}
	unknown := newNode(t, "10.244.1.5:8080")
	unknown.Ruleset[nat.Filter] = nat.Contents{Chains: map[string][]nat.Rule{"INPUT": {"-m conntrack --ctstate ESTABLISHED -m unknown --option -j DROP"}}}
	if v := e.Continue(unknown, open[0]); v.Outcome != Undecided || !strings.Contains(v.Reason, "unsupported match unknown --option") {
		t.Errorf("with a rule that cannot be evaluated: %s", v)
	}
}
