package trace

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// withLinkChain gives a node one chain of nftables for devices or bridges.
func withLinkChain(t *testing.T, n *Node, family, hook, device, rule string) {
	t.Helper()
	if device != "" {
		device = `, "dev": ` + device
	}
	chain := fmt.Sprintf(`{"chain": {"family": %q, "table": "links", "name": "base", "type": "filter", "hook": %q, "prio": 0, "policy": "accept"%s}}`, family, hook, device)
	text := fmt.Sprintf(`{"rule": {"family": %q, "table": "links", "chain": "base", "handle": 3, "expr": [%s, {"drop": null}]}}`, family, rule)
	ruleset, err := nft.ParseRuleset([]byte(`{"nftables": [`+chain+", "+text+`]}`), "table "+family+" links { # handle 1\nthe rule # handle 3\n}\n")
	if err != nil {
		t.Fatal(err)
	}
	n.Native = ruleset
}

// Chains of devices and of bridges, and chains behind IPVS. Each drops what its rule matches.
func TestChainsOfLinks(t *testing.T) {
	outside, pod := ask("192.0.2.9", vip+":80"), ask("10.244.1.8", vip+":80")
	fromVIP, sport := is(saddr, `"`+vip+`"`), `{"payload": {"protocol": "tcp", "field": "sport"}}`
	for name, c := range map[string]struct {
		family, hook, device, rule string
		endpoint                   string
		question                   Question
		outcome                    Outcome
	}{
		"where the request enters":                       {"netdev", "ingress", `"eth0"`, is(dport, "80"), remote, outside, Dropped},
		"one of several devices":                         {"netdev", "ingress", `["eth1", "eth0"]`, is(dport, "80"), remote, outside, Dropped},
		"of family inet":                                 {"inet", "ingress", `"eth0"`, is(dport, "80"), remote, outside, Dropped},
		"another device":                                 {"netdev", "ingress", `"eth1"`, is(dport, "80"), remote, outside, Answered},
		"another port":                                   {"netdev", "ingress", `"eth0"`, is(dport, "81"), remote, outside, Answered},
		"the reply of the endpoint":                      {"netdev", "ingress", `"eth0"`, is(sport, "8080"), remote, outside, Dropped},
		"where the request leaves":                       {"netdev", "egress", `"eth0"`, is(dport, "8080"), remote, outside, Dropped},
		"where the reply leaves":                         {"netdev", "egress", `"eth0"`, fromVIP, remote, outside, Dropped},
		"connections do not exist yet":                   {"netdev", "ingress", `"eth0"`, matching("in", ct("state"), `"new"`), remote, outside, Answered},
		"a port of the bridge":                           {"netdev", "ingress", `"veth8"`, is(dport, "80"), remote, pod, Undecided},
		"a port of the bridge, another port":             {"netdev", "ingress", `"veth8"`, is(dport, "81"), remote, pod, Answered},
		"a bridge where the request enters":              {"bridge", "input", "", is(dport, "80"), remote, pod, Dropped},
		"a bridge before that":                           {"bridge", "prerouting", "", is(saddr, `"10.244.1.8"`), remote, pod, Dropped},
		"a bridge by name":                               {"bridge", "input", "", is(meta("ibrname"), `"cni0"`), remote, pod, Dropped},
		"a bridge by its port":                           {"bridge", "input", "", is(meta("iifname"), `"veth8"`), remote, pod, Undecided},
		"a bridge by the frame's address":                {"bridge", "input", "", is(`{"payload": {"protocol": "ether", "field": "saddr"}}`, `"02:00:00:00:00:01"`), remote, pod, Undecided},
		"a bridge by the frame's type":                   {"bridge", "input", "", is(`{"payload": {"protocol": "ether", "field": "type"}}`, `"ip"`), remote, pod, Dropped},
		"a bridge that the request does not pass":        {"bridge", "input", "", is(dport, "80"), remote, outside, Answered},
		"a bridge where the reply leaves":                {"bridge", "output", "", fromVIP, remote, pod, Dropped},
		"a bridge where the request leaves":              {"bridge", "postrouting", "", is(dport, "8080"), here, outside, Dropped},
		"a frame between two ports":                      {"bridge", "forward", "", is(sport, "8080"), here, pod, Dropped},
		"a frame between two ports, but not of this":     {"bridge", "forward", "", is(sport, "8080"), here, outside, Answered},
		"the segment of a frame that is not on a bridge": {"bridge", "forward", "", is(sport, "8080"), remote, pod, Answered},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, c.endpoint)
			n.Links = append(n.Links, routing.Link{Index: 8, Name: "veth8", Type: "veth", Master: "cni0"})
			n.Hairpin = map[string]bool{"veth8": true}
			withLinkChain(t, n, c.family, c.hook, c.device, c.rule)
			x := Explain(n, c.question)
			if x.Verdict.Outcome != c.outcome {
				var text strings.Builder
				_ = x.Write(&text)
				t.Errorf("want %s:\n%s", c.outcome, text.String())
			}
		})
	}
}

// Chains of INPUT behind IPVS do not see requests that it sends on, only what it leaves there.
func TestChainsBehindIPVS(t *testing.T) {
	local := "10.1.0.5:8080"
	for name, c := range map[string]struct {
		endpoint, to string
		rule         string
		outcome      Outcome
	}{
		"a request for another node":         {remote, vip + ":80", is(dport, "80"), Answered},
		"an endpoint in the node's network":  {local, vip + ":80", is(dport, "8080"), Dropped},
		"the same, by interface":             {local, vip + ":80", is(meta("iifname"), `"eth0"`), Dropped},
		"the same, by the VIP's port":        {local, vip + ":80", is(dport, "80"), Answered},
		"what is no Service":                 {remote, vip + ":81", is(dport, "81"), Dropped},
		"what is no Service on another port": {remote, vip + ":82", is(dport, "81"), Unserved},
	} {
		n := newNode(t, c.endpoint)
		withNFT(t, n, "input", "filter", "accept", 110, []string{c.rule, drop})
		if x := Explain(n, ask("192.0.2.9", c.to)); x.Verdict.Outcome != c.outcome {
			t.Errorf("%s: %s, want %s", name, x.Verdict, c.outcome)
		}
	}
}

// A chain of FORWARD behind IPVS sees the reply with the VIP as its source.
func TestForwardBehindIPVS(t *testing.T) {
	for _, c := range []struct {
		priority int
		source   string
		outcome  Outcome
	}{{0, "10.1.9.9", Dropped}, {0, vip, Answered}, {150, "10.1.9.9", Answered}, {150, vip, Dropped}} {
		n := newNode(t, remote)
		withNFT(t, n, "forward", "filter", "accept", c.priority, []string{is(saddr, `"`+c.source+`"`), drop})
		if x := Explain(n, ask("192.0.2.9", vip+":80")); x.Verdict.Outcome != c.outcome {
			t.Errorf("priority %d, source %s: %s, want %s", c.priority, c.source, x.Verdict, c.outcome)
		}
	}
}

// Rules of table security, and of the other back end of iptables.
func TestOtherTables(t *testing.T) {
	table := func(name, chain, policy, rule string) nat.Ruleset {
		rules, err := nat.ParseSave("*" + name + "\n:" + chain + " " + policy + " [0:0]\n:SUB - [0:0]\n-A " + chain + " " + rule + "\n-A SUB -j DROP\nCOMMIT\n")
		if err != nil {
			t.Fatal(err)
		}
		return rules
	}
	for name, c := range map[string]struct {
		own, other nat.Ruleset
		outcome    Outcome
		reason     string
	}{
		"security":                       {table("security", "INPUT", "ACCEPT", "-p tcp -m tcp --dport 80 -j DROP"), nil, Dropped, "security INPUT"},
		"security, the reply":            {table("security", "FORWARD", "ACCEPT", "-p tcp -m tcp --sport 8080 -j DROP"), nil, Dropped, "security FORWARD"},
		"security, the request":          {table("security", "OUTPUT", "ACCEPT", "-p tcp -m tcp --dport 8080 -j DROP"), nil, Dropped, "security OUTPUT"},
		"security of the other back end": {nil, table("security", "INPUT", "ACCEPT", "-p tcp -m tcp --dport 80 -j DROP"), Dropped, "security INPUT"},
		"the other back end":             {nil, table("filter", "INPUT", "ACCEPT", "-p tcp -m tcp --dport 80 -j SUB"), Dropped, "filter INPUT of the other back end"},
		"its policy":                     {nil, table("filter", "FORWARD", "DROP", "-p udp -j ACCEPT"), Dropped, "policy"},
		"its policy does not decide":     {nil, table("filter", "FORWARD", "DROP", "-p tcp -j ACCEPT"), Answered, ""},
		"what it does not match":         {nil, table("filter", "INPUT", "ACCEPT", "-p tcp -m tcp --dport 81 -j SUB"), Answered, ""},
		"what it cannot match":           {nil, table("filter", "INPUT", "ACCEPT", "-m string --string x --algo bm -j SUB"), Undecided, ""},
	} {
		n := newNode(t, remote)
		for name, contents := range c.own {
			n.Ruleset[name] = contents
		}
		n.Other = c.other
		x := Explain(n, ask("192.0.2.9", vip+":80"))
		if x.Verdict.Outcome != c.outcome || !strings.Contains(x.Verdict.Reason, c.reason) {
			t.Errorf("%s: %s, want %s: %s", name, x.Verdict, c.outcome, c.reason)
		}
	}
}

// Rules that cannot be read may drop what the others let pass.
func TestUnreadRules(t *testing.T) {
	for from, want := range map[string]Outcome{"192.0.2.9": Undecided, "192.0.2.66": Dropped} {
		n := newNode(t, remote)
		n.Unread = []string{"rules that programs wrote with nftables: nft: not found"}
		x := Explain(n, ask(from, vip+":80"))
		if x.Verdict.Outcome != want || len(x.Doubts) != 1 {
			t.Errorf("from %s: %s, doubts %q; want %s", from, x.Verdict, x.Doubts, want)
		}
	}
}

// A mark of the node's own packet changes its route if a chain of type route sets it, and not if
// one of type filter does.
func TestMarksInOutput(t *testing.T) {
	for kind, want := range map[string]string{"filter": "eth0", "route": "eth1"} {
		n := newNode(t, remote)
		n.Rules = append([]routing.Rule{{Family: n.Family, Priority: 1, Mark: 0x77, Mask: 0x77, Table: 1003}}, n.Rules...)
		withNFT(t, n, "output", kind, "accept", -160, []string{set(mark, "119")})
		x := Explain(n, ask("10.1.0.5", "198.51.100.7:443"))
		if x.Link != want {
			t.Errorf("type %s: leaves by %s, want %s: %s", kind, x.Link, want, x.Verdict)
		}
	}
}
