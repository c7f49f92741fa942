package nft

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// The expressions are what nft 1.0.6 prints for the rules.
func TestMarkUses(t *testing.T) {
	const mark, connmark = `{"meta":{"key":"mark"}}`, `{"ct":{"key":"mark"}}`
	set := func(value string) string { return `{"mangle":{"key":` + mark + `,"value":` + value + `}}` }
	match := func(op, left, right string) string {
		return `{"match":{"op":"` + op + `","left":` + left + `,"right":` + right + `}}`
	}
	for rule, c := range map[string]struct {
		expr       string
		values     []uint32
		bits       uint32
		translates bool
	}{
		"meta mark set 0x20": {set(`32`), []uint32{0x20}, 0x20, false},
		"meta mark set meta mark & 0xffffff9f | 0x40": {
			set(`{"|":[{"&":[` + mark + `,4294967199]},64]}`), []uint32{0x40}, 0x60, false,
		},
		"meta mark set meta mark ^ 0x80":                 {set(`{"^":[` + mark + `,128]}`), []uint32{0x80}, 0x80, false},
		"meta mark set ct mark":                          {set(connmark), nil, 0, false},
		"meta mark set ct mark & 0xff":                   {set(`{"&":[` + connmark + `,255]}`), nil, 0, false},
		"ct mark & 0xf000 == 0x3000":                     {match("==", `{"&":[`+connmark+`,61440]}`, `12288`), []uint32{0x3000}, 0xf000, false},
		"meta mark & 0x8 != 0":                           {match("!=", `{"&":[`+mark+`,8]}`, `0`), []uint32{8}, 8, false},
		"meta mark { 1-2, 0x10/28 }":                     {match("==", mark, `{"set":[{"range":[1,2]},{"prefix":{"addr":16,"len":28}}]}`), []uint32{1, 2, 16}, 0x13, false},
		"meta mark vmap { 0x60 : accept, 0x61 : drop }":  {`{"vmap":{"key":` + mark + `,"data":{"set":[[96,{"accept":null}],[97,{"drop":null}]]}}}`, []uint32{0x60, 0x61}, 0x61, false},
		"meta mark set tcp dport map { 80 : 5, 443 : 6}": {set(`{"map":{"key":{"payload":{"protocol":"tcp","field":"dport"}},"data":{"set":[[80,5],[443,6]]}}}`), []uint32{5, 6}, 7, false},
		"meta mark set ip saddr map @m":                  {set(`{"map":{"key":{"payload":{"protocol":"ip","field":"saddr"}},"data":"@m"}}`), nil, 0, false},
		"meta mark set numgen inc mod 4 offset 256":      {set(`{"numgen":{"mode":"inc","mod":4,"offset":256}}`), nil, 0, false},
		"tcp dport 99":                                   {match("==", `{"payload":{"protocol":"tcp","field":"dport"}}`, `99`), nil, 0, false},
		"ct state 2 meta mark set 4":                     {match("in", `{"ct":{"key":"state"}}`, `"related"`) + "," + set(`4`), []uint32{4}, 4, false},
		"ip saddr 10.0.0.0/8 masquerade":                 {match("==", `{"payload":{"protocol":"ip","field":"saddr"}}`, `{"prefix":{"addr":"10.0.0.0","len":8}}`) + `,{"masquerade":null}`, nil, 0, true},
		"meta mark & 0x8 == 0x8 masquerade":              {match("==", `{"&":[`+mark+`,8]}`, `8`) + `,{"masquerade":null}`, []uint32{8}, 8, false},
		"meta mark & 0x8 != 0 snat":                      {match("!=", `{"&":[`+mark+`,8]}`, `0`) + `,{"snat":{"addr":"192.0.2.1"}}`, []uint32{8}, 8, false},
		"meta mark != 0x8 snat":                          {match("!=", mark, `8`) + `,{"snat":{"addr":"192.0.2.1"}}`, []uint32{8}, 8, true},
	} {
		var exprs []map[string]any
		if err := json.Unmarshal([]byte("["+c.expr+"]"), &exprs); err != nil {
			t.Fatalf("%s: %v", rule, err)
		}
		r := &Ruleset{Chains: map[ID]*Chain{{}: {Rules: []*Rule{{Text: rule, Expr: exprs}}}}}
		var want []MarkUse
		if c.bits != 0 || c.translates {
			want = []MarkUse{{Rule: rule, Values: c.values, Bits: c.bits, Translates: c.translates}}
		}
		if got := r.markUses(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", rule, got, want)
		}
	}
}

func TestMarkUseAffects(t *testing.T) {
	for family, want := range map[string][2]bool{"ip": {true, false}, "ip6": {false, true}, "inet": {true, true}, "bridge": {true, true}, "netdev": {true, true}} {
		u := MarkUse{Chain: ID{Family: family}}
		if got := [2]bool{u.Affects(ip.IPv4), u.Affects(ip.IPv6)}; got != want {
			t.Errorf("%s: %v, want %v", family, got, want)
		}
	}
}

func TestMayMark(t *testing.T) {
	for table, want := range map[string]bool{
		"inet qos": true, "ip filter": false, "inet filter": true, "ip security": true, "ip6 kube-proxy": false, "ip kube-ipvs": false, "arp filter": false, "bridge mangle": true,
	} {
		if got := mayMark(table); got != want {
			t.Errorf("%s: %v, want %v", table, got, want)
		}
	}
}

func TestRefusals(t *testing.T) {
	chain := func(text string) string { return `{"chain":{"family":"inet","table":"t",` + text + `}}` }
	forward, input := chain(`"name":"f","type":"filter","hook":"forward","prio":0,"policy":"accept"`), chain(`"name":"i","type":"filter","hook":"input","prio":0,"policy":"drop"`)
	rule := func(expr string) string {
		return `{"rule":{"family":"inet","table":"t","chain":"f","handle":9,"expr":[` + expr + `]}}`
	}
	for _, c := range []struct {
		objects string
		want    bool
	}{
		{forward + "," + rule(`{"accept":null}`), false},
		{forward + "," + rule(`{"drop":null}`), true},
		{forward + "," + rule(`{"reject":{"type":"icmpx","expr":"admin-prohibited"}}`), true},
		{forward + "," + rule(`{"vmap":{"key":{"meta":{"key":"iifname"}},"data":{"set":[["eth0",{"accept":null}],["eth1",{"drop":null}]]}}}`), true},
		{forward + "," + rule(`{"vmap":{"key":{"meta":{"key":"iifname"}},"data":"@zones"}}`), true},
		{forward + "," + rule(`{"vmap":{"key":{"meta":{"key":"iifname"}},"data":{"set":[["eth0",{"accept":null}]]}}}`), false},
		{chain(`"name":"f","type":"filter","hook":"forward","prio":0,"policy":"drop"`), true},
		{input, false},
		{input + "," + rule(`{"drop":null}`), false},
	} {
		r, err := ParseRuleset([]byte(`{"nftables":[`+c.objects+`]}`), "")
		if err != nil {
			t.Fatal(err)
		}
		want := []MarkUse(nil)
		if c.want {
			want = []MarkUse{{Chain: ID{"inet", "t", "f"}, Refuses: true}}
		}
		if got := r.refusals(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", c.objects, got, want)
		}
	}
}
