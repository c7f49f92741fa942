package trace

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
)

// Parts of rules, as nft 1.0.6 prints them.
const (
	accept = `{"accept": null}`
	drop   = `{"drop": null}`
	dport  = `{"payload": {"protocol": "tcp", "field": "dport"}}`
	saddr  = `{"payload": {"protocol": "ip", "field": "saddr"}}`
	ctMark = `{"ct": {"key": "mark"}}`
	mark   = `{"meta": {"key": "mark"}}`
)

func is(left, right string) string { return matching("==", left, right) }

func matching(op, left, right string) string {
	return fmt.Sprintf(`{"match": {"op": %q, "left": %s, "right": %s}}`, op, left, right)
}

func meta(key string) string { return fmt.Sprintf(`{"meta": {"key": %q}}`, key) }

func ct(key string) string { return fmt.Sprintf(`{"ct": {"key": %q}}`, key) }

func set(key, value string) string {
	return fmt.Sprintf(`{"mangle": {"key": %s, "value": %s}}`, key, value)
}

// withNFT adds a chain with rules to a node, and sets, a map and another chain that they may use.
func withNFT(t *testing.T, n *Node, hook, kind, policy string, priority int, rules ...[]string) {
	t.Helper()
	objects := []string{
		`{"set": {"family": "inet", "table": "fw", "name": "good", "type": "ipv4_addr", "elem": [{"prefix": {"addr": "192.0.2.0", "len": 25}}, {"range": ["203.0.113.1", "203.0.113.9"]}]}}`,
		`{"set": {"family": "inet", "table": "fw", "name": "pairs", "type": ["ipv4_addr", "inet_service"], "elem": [{"concat": ["192.0.2.9", 80]}]}}`,
		`{"map": {"family": "inet", "table": "fw", "name": "ports", "type": "inet_service", "map": "verdict", "elem": [[22, {"accept": null}], [80, {"jump": {"target": "sub"}}]]}}`,
		`{"chain": {"family": "inet", "table": "fw", "name": "sub"}}`,
		`{"rule": {"family": "inet", "table": "fw", "chain": "sub", "handle": 1, "expr": [{"counter": {}}, {"reject": {}}]}}`,
		`{"chain": {"family": "inet", "table": "fw", "name": "returns"}}`,
		`{"rule": {"family": "inet", "table": "fw", "chain": "returns", "handle": 2, "expr": [{"return": null}]}}`,
		fmt.Sprintf(`{"chain": {"family": "inet", "table": "fw", "name": "base", "type": %q, "hook": %q, "prio": %d, "policy": %q}}`, kind, hook, priority, policy),
	}
	for _, r := range rules {
		objects = append(objects, fmt.Sprintf(`{"rule": {"family": "inet", "table": "fw", "chain": "base", "handle": 3, "expr": [%s]}}`, strings.Join(r, ", ")))
	}
	text := "table inet fw { # handle 1\nthe rule # handle 3\n}\n"
	ruleset, err := nft.ParseRuleset([]byte(`{"nftables": [`+strings.Join(objects, ",\n")+`]}`), text)
	if err != nil {
		t.Fatal(err)
	}
	n.Native = ruleset
}

// TestMarkWrites finds the chains that overwrite the packet mark, also in a chain that they jump to.
func TestMarkWrites(t *testing.T) {
	for name, c := range map[string]struct {
		rule []string
		want bool
	}{
		"whole":              {[]string{dport, set(mark, "128")}, true},
		"from the connmark":  {[]string{set(mark, ctMark)}, true},
		"only a bit":         {[]string{set(mark, `{"|": [`+mark+`, 128]}`)}, false},
		"the connmark":       {[]string{set(ctMark, mark)}, false},
		"a jump":             {[]string{`{"jump": {"target": "sub"}}`}, false},
		"a chain that loops": {[]string{`{"jump": {"target": "base"}}`}, false},
	} {
		n := newNode(t, remote)
		withNFT(t, n, "prerouting", "nat", "accept", -90, c.rule)
		got := n.MarkWrites()
		if (len(got) == 1 && got[0].Chain.Priority == -90 && got[0].Rule == "the rule") != c.want || len(got) > 1 {
			t.Errorf("%s: %+v, want %t", name, got, c.want)
		}
	}
}

// Conditions of nftables. Each rule drops the request from 192.0.2.9 to the VIP if it matches.
func TestNativeConditions(t *testing.T) {
	flags := `{"&": [{"payload": {"protocol": "tcp", "field": "flags"}}, ["fin", "syn", "rst", "ack"]]}`
	for condition, want := range map[string]Outcome{
		is(dport, "80"):                                 Dropped,
		is(dport, "81"):                                 Answered,
		matching("!=", dport, "80"):                     Answered,
		matching("<", dport, "81"):                      Dropped,
		matching(">=", dport, "81"):                     Answered,
		is(dport, `{"set": [22, {"range": [79, 81]}]}`): Dropped,
		is(`{"payload": {"protocol": "udp", "field": "dport"}}`, "80"):             Answered,
		is(`{"payload": {"protocol": "th", "field": "dport"}}`, "80"):              Dropped,
		is(`{"payload": {"protocol": "ip6", "field": "saddr"}}`, `"fe80::1"`):      Answered,
		is(`{"payload": {"protocol": "icmp", "field": "type"}}`, `"echo-request"`): Answered,
		is(`{"payload": {"protocol": "ip", "field": "protocol"}}`, `"tcp"`):        Dropped,
		is(saddr, `"192.0.2.9"`):                                                        Dropped,
		is(saddr, `{"prefix": {"addr": "192.0.2.0", "len": 24}}`):                       Dropped,
		matching("!=", saddr, `{"prefix": {"addr": "192.0.2.0", "len": 24}}`):           Answered,
		is(saddr, `"@good"`):                                                            Dropped,
		matching("!=", saddr, `"@good"`):                                                Answered,
		is(saddr, `"@unknown"`):                                                         Undecided,
		is(`{"concat": [`+saddr+`, `+dport+`]}`, `"@pairs"`):                            Dropped,
		is(meta("iifname"), `"eth0"`):                                                   Dropped,
		is(meta("iif"), `"lo"`):                                                         Answered,
		is(meta("iifname"), `{"set": ["cali1", "eth*"]}`):                               Dropped,
		is(meta("l4proto"), `{"set": ["udp", "tcp"]}`):                                  Dropped,
		is(meta("nfproto"), `"ipv6"`):                                                   Answered,
		is(meta("pkttype"), `"broadcast"`):                                              Answered,
		is(meta("skuid"), "0"):                                                          Undecided,
		is(mark, "16"):                                                                  Answered,
		matching("!=", `{"&": [`+mark+`, 255]}`, "16"):                                  Dropped,
		matching("in", ct("state"), `["invalid", "related"]`):                           Answered,
		matching("in", ct("state"), `"new"`):                                            Dropped,
		is(ct("state"), `{"set": ["established", "new"]}`):                              Dropped,
		matching("in", ct("status"), `"dnat"`):                                          Answered,
		is(`{"exthdr": {"name": "frag"}}`, "true"):                                      Answered,
		is(`{"exthdr": {"name": "rt", "field": "type"}}`, "0"):                          Answered,
		is(`{"fib": {"result": "oif", "flags": ["saddr", "mark", "iif"]}}`, `"0"`):      Answered,
		matching("!", ct("status"), `"dnat"`):                                           Dropped,
		matching("!=", mark, `{"prefix": {"addr": 0, "len": 12}}`):                      Answered,
		is(mark, `{"prefix": {"addr": 1048576, "len": 12}}`):                            Answered,
		is(`{"fib": {"result": "oif", "flags": ["saddr", "mark", "iif"]}}`, "0"):        Answered,
		matching("in", ct("status"), `"assured"`):                                       Undecided,
		is(ct("direction"), `"original"`):                                               Dropped,
		is(`{"ct": {"key": "ip saddr", "dir": "original"}}`, `"192.0.2.9"`):             Dropped,
		is(flags, `"syn"`):                                                              Dropped,
		matching("!=", flags, `"syn"`):                                                  Dropped,
		matching("in", `{"payload": {"protocol": "tcp", "field": "flags"}}`, `["rst"]`): Answered,
		is(`{"fib": {"result": "type", "flags": ["daddr"]}}`, `"local"`):                Dropped,
		matching("!=", `{"fib": {"result": "type", "flags": ["saddr"]}}`, `"local"`):    Dropped,
		is(`{"fib": {"result": "type", "flags": ["daddr", "iif"]}}`, `"local"`):         Undecided,
		is(`{"fib": {"result": "oif", "flags": ["saddr", "iif"]}}`, "false"):            Answered,
		is(`{"socket": {"key": "transparent"}}`, "1"):                                   Undecided,
		`{"limit": {"rate": 5, "per": "second"}}`:                                       Undecided,
		`{"ct count": {"val": 5}}`:                                                      Undecided,
		`{"xt": null}`:                                                                  Undecided,
	} {
		n := newNode(t, remote)
		withNFT(t, n, "input", "filter", "accept", 0, []string{condition, `{"counter": {}}`, drop})
		x := Explain(n, ask("192.0.2.9", vip+":80"))
		if x.Verdict.Outcome != want {
			t.Errorf("%s: %s, want %s", condition, x.Verdict, want)
		}
		if (want == Undecided) != (len(x.Doubts) > 0) {
			t.Errorf("%s: doubts %q", condition, x.Doubts)
		}
	}
}

// Statements of nftables, in chains at the hooks that a request to a remote endpoint passes.
func TestNativeStatements(t *testing.T) {
	type chain struct {
		hook, kind, policy string
		priority           int
	}
	input := chain{"input", "filter", "accept", 0}
	for name, c := range map[string]struct {
		chain
		rules   [][]string
		outcome Outcome
		reason  string
	}{
		"a policy":                               {chain{"forward", "filter", "drop", 0}, nil, Dropped, "in inet fw base: the chain's policy is drop"},
		"a policy of input":                      {chain{"input", "filter", "drop", 0}, nil, Dropped, "policy"},
		"accepted in spite of the policy":        {chain{"input", "filter", "drop", 0}, [][]string{{is(dport, "80"), accept}}, Answered, ""},
		"accepted by one chain only":             {chain{"input", "filter", "drop", -1}, [][]string{{is(dport, "443"), accept}}, Dropped, ""},
		"a rule":                                 {input, [][]string{{drop}}, Dropped, "in inet fw base by the rule"},
		"a jump":                                 {input, [][]string{{`{"jump": {"target": "sub"}}`}}, Refused, ""},
		"a goto":                                 {chain{"input", "filter", "drop", 0}, [][]string{{`{"goto": {"target": "returns"}}`}, {accept}}, Dropped, "policy"},
		"a jump returns":                         {chain{"input", "filter", "drop", 0}, [][]string{{`{"jump": {"target": "returns"}}`}, {accept}}, Answered, ""},
		"a verdict map":                          {input, [][]string{{`{"vmap": {"key": ` + dport + `, "data": "@ports"}}`}}, Refused, ""},
		"a verdict map without the key":          {input, [][]string{{`{"vmap": {"key": ` + dport + `, "data": {"set": [[22, {"drop": null}]]}}}`}}, Answered, ""},
		"an unknown verdict map":                 {input, [][]string{{`{"vmap": {"key": ` + dport + `, "data": "@theirs"}}`}}, Undecided, "unknown map @theirs"},
		"another hook":                           {chain{"output", "filter", "accept", -250}, [][]string{{is(meta("oifname"), `"eth0"`), drop}}, Dropped, ""},
		"after IPVS":                             {chain{"output", "filter", "accept", 0}, [][]string{{is(dport, "8080"), drop}}, Dropped, ""},
		"after the last table":                   {chain{"postrouting", "filter", "accept", 300}, [][]string{{drop}}, Dropped, ""},
		"the reply":                              {chain{"prerouting", "filter", "accept", 10}, [][]string{{matching("in", ct("state"), `"established"`), drop}}, Dropped, ""},
		"a mark that nothing reads":              {chain{"prerouting", "filter", "accept", -140}, [][]string{{set(mark, "32")}}, Answered, ""},
		"of type nat, the reply does not see it": {chain{"prerouting", "nat", "accept", -90}, [][]string{{is(saddr, `"10.1.9.9"`), drop}}, Answered, ""},
		"of type nat, the request sees it":       {chain{"prerouting", "nat", "accept", -90}, [][]string{{drop}}, Dropped, ""},
		"a connmark":                             {chain{"prerouting", "filter", "accept", -160}, [][]string{{set(ctMark, "16")}, {is(ctMark, "16"), drop}}, Dropped, ""},
		"a mark of the connection's":             {chain{"prerouting", "filter", "accept", -160}, [][]string{{set(ctMark, "16")}, {set(mark, `{"|": [{"&": [`+ctMark+`, 240]}, 1]}`)}, {is(mark, "17"), drop}}, Dropped, ""},
		"a mark from a map":                      {input, [][]string{{set(mark, `{"map": {"key": `+saddr+`, "data": {"set": [["192.0.2.9", 7]]}}}`)}, {is(mark, "7"), drop}}, Dropped, ""},
		"an unknown mark":                        {input, [][]string{{set(mark, meta("random"))}}, Undecided, ""},
		"another field":                          {input, [][]string{{set(`{"payload": {"protocol": "ip", "field": "dscp"}}`, `"cs1"`)}}, Answered, ""},
		"another address":                        {input, [][]string{{set(`{"payload": {"protocol": "ip", "field": "daddr"}}`, `"10.0.0.1"`)}}, Undecided, ""},
		"a segment size under a condition":       {input, [][]string{{is(meta("skuid"), "0"), set(`{"tcp option": {"name": "maxseg", "field": "size"}}`, `{"rt": {"key": "mtu"}}`)}}, Answered, ""},
		"a queue":                                {input, [][]string{{`{"queue": {"num": 1}}`}}, Undecided, "unsupported statement queue"},
		"another destination":                    {chain{"prerouting", "nat", "accept", -110}, [][]string{{`{"dnat": {"family": "ip", "addr": "10.9.9.9", "port": 81}}`}}, Unserved, "leaves the node by eth0"},
		"to the node":                            {chain{"prerouting", "nat", "accept", -110}, [][]string{{`{"redirect": {"port": 82}}`}}, Unserved, "delivered to the node"},
		"by chance":                              {chain{"prerouting", "nat", "accept", -110}, [][]string{{`{"dnat": {"family": "ip", "addr": {"map": {"key": {"numgen": {"mode": "random", "mod": 2}}, "data": {"set": [[0, "10.0.0.3"]]}}}}}`}}, Undecided, "no address to translate to"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, remote)
			withNFT(t, n, c.hook, c.kind, c.policy, c.priority, c.rules...)
			x := Explain(n, ask("192.0.2.9", vip+":80"))
			if x.Verdict.Outcome != c.outcome || !strings.Contains(x.Verdict.Reason, c.reason) {
				var text strings.Builder
				_ = x.Write(&text)
				t.Errorf("want %s: %s\n%s", c.outcome, c.reason, text.String())
			}
		})
	}
}

// A source that a chain of nftables sets is what the endpoint sees.
func TestNativeSource(t *testing.T) {
	for _, c := range []struct{ statement, seen string }{
		{`{"snat": {"family": "ip", "addr": {"range": ["10.1.0.7", "10.1.0.9"]}}}`, "10.1.0.7"},
		{`{"masquerade": {"flags": ["fully-random"]}}`, "10.1.0.5"},
	} {
		n := newNode(t, remote)
		n.Ruleset["nat"].Chains["POSTROUTING"] = nil
		withNFT(t, n, "postrouting", "nat", "accept", 100, []string{is(meta("oifname"), `"eth0"`), c.statement})
		x := Explain(n, ask("192.0.2.9", vip+":80"))
		if len(x.RealServers) != 1 || x.RealServers[0].SeenSource != c.seen {
			t.Errorf("%s: %+v", c.statement, x.RealServers)
		}
	}
}
