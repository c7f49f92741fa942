package nft

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// listing is what nft 1.0.6 prints of a table of another program, one of iptables-nft and one of
// kube-ipvs.
const (
	listing = `{"nftables": [{"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
{"table": {"family": "inet", "name": "fw", "handle": 1}},
{"set": {"family": "inet", "name": "pairs", "table": "fw", "type": ["ipv4_addr", "inet_service"], "handle": 8, "elem": [{"concat": ["192.0.2.9", 80]}]}},
{"map": {"family": "inet", "name": "vm", "table": "fw", "type": "inet_service", "handle": 7, "map": "verdict", "elem": [[80, {"accept": null}]]}},
{"chain": {"family": "inet", "table": "fw", "name": "sub", "handle": 1}},
{"chain": {"family": "inet", "table": "fw", "name": "input", "handle": 2, "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}},
{"chain": {"family": "inet", "table": "fw", "name": "early", "handle": 3, "type": "filter", "hook": "prerouting", "prio": -300, "policy": "accept"}},
{"rule": {"family": "inet", "table": "fw", "chain": "input", "handle": 17, "expr": [{"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "lo"}}, {"accept": null}]}},
{"table": {"family": "netdev", "name": "links", "handle": 4}},
{"chain": {"family": "netdev", "table": "links", "name": "in", "handle": 1, "type": "filter", "hook": "ingress", "dev": "eth0", "prio": 0, "policy": "accept"}},
{"chain": {"family": "netdev", "table": "links", "name": "in1", "handle": 2, "type": "filter", "hook": "ingress", "prio": 1, "policy": "accept"}},
{"chain": {"family": "netdev", "table": "links", "name": "in2", "handle": 3, "type": "filter", "hook": "ingress", "prio": 2, "policy": "accept"}},
{"chain": {"family": "ip", "table": "security", "name": "INPUT", "handle": 1, "type": "filter", "hook": "input", "prio": 150, "policy": "accept"}},
{"chain": {"family": "inet", "table": "fw", "name": "out", "handle": 9, "type": "filter", "hook": "egress", "dev": ["eth0", "eth1"], "prio": -5, "policy": "accept"}},
{"chain": {"family": "bridge", "table": "links", "name": "out", "handle": 2, "type": "filter", "hook": "postrouting", "prio": -9, "policy": "accept"}},
{"chain": {"family": "arp", "table": "links", "name": "in", "handle": 2, "type": "filter", "hook": "input", "prio": -9, "policy": "accept"}},
{"table": {"family": "ip", "name": "nat", "handle": 2}},
{"chain": {"family": "ip", "table": "nat", "name": "KUBE-SERVICES", "handle": 1}},
{"chain": {"family": "ip", "table": "nat", "name": "PREROUTING", "handle": 2, "type": "nat", "hook": "prerouting", "prio": -100, "policy": "accept"}},
{"chain": {"family": "ip", "table": "nat", "name": "prerouting", "handle": 3, "type": "nat", "hook": "prerouting", "prio": -90, "policy": "accept"}},
{"table": {"family": "ip", "name": "kube-ipvs", "handle": 3}},
{"chain": {"family": "ip", "table": "kube-ipvs", "name": "output", "handle": 2, "type": "nat", "hook": "output", "prio": -100, "policy": "accept"}}
]}`
	texts = `table inet fw { # handle 1
	set pairs { # handle 8
		type ipv4_addr . inet_service
	}
	chain input { # handle 2
		type filter hook input priority filter; policy drop;
		iifname "lo" accept # handle 17
	}
}
table netdev links { # handle 4
	chain in1 { # handle 2
		type filter hook ingress device "eth7" priority 1; policy accept;
	}
	chain in2 { # handle 3
		type filter hook ingress devices = { eth8, eth9 } priority 2; policy accept;
	}
}
table ip nat { # handle 2
	chain PREROUTING { # handle 2
		type nat hook prerouting priority dstnat; policy accept;
		counter jump KUBE-SERVICES # handle 17
	}
}
`
)

// Chains of iptables-nft, of kube-ipvs and of ARP are left out; the others are in the order of
// their priorities.
func TestParseRuleset(t *testing.T) {
	r, err := ParseRuleset([]byte(listing), texts)
	if err != nil {
		t.Fatal(err)
	}
	var base []string
	for _, c := range r.Base {
		base = append(base, c.String()+" "+c.Type+" "+c.Hook+" "+c.Policy)
	}
	want := []string{"inet fw early filter prerouting accept", "ip nat prerouting nat prerouting accept", "inet fw input filter input drop",
		"ip security INPUT filter input accept"}
	if diff := cmp.Diff(want, base); diff != "" {
		t.Errorf("base chains (-want +got):\n%s", diff)
	}
	var link []string
	for _, c := range r.Link {
		link = append(link, fmt.Sprint(c, " ", c.Hook, " ", c.Devices))
	}
	want = []string{"bridge links out postrouting []", "inet fw out egress [eth0 eth1]", "netdev links in ingress [eth0]",
		"netdev links in1 ingress [eth7]", "netdev links in2 ingress [eth8 eth9]"}
	if diff := cmp.Diff(want, link); diff != "" {
		t.Errorf("chains of links (-want +got):\n%s", diff)
	}
	fw := ID{Family: "inet", Table: "fw"}
	rules := r.Chains[fw.In("input")].Rules
	if len(rules) != 1 || rules[0].Text != `iifname "lo" accept` || len(rules[0].Expr) != 2 {
		t.Errorf("rules of input: %+v", rules)
	}
	if r.Chains[fw.In("sub")] == nil || r.Chains[ID{"ip", "nat", "KUBE-SERVICES"}] != nil {
		t.Errorf("chains: %v", r.Chains)
	}
	if len(r.Sets[fw.In("pairs")]) != 1 || len(r.Sets[fw.In("vm")]) != 1 {
		t.Errorf("sets: %v", r.Sets)
	}
	if _, err := ParseRuleset([]byte("no JSON"), ""); err == nil {
		t.Error("no error for what is not JSON")
	}
}
