package plan

import (
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Replies are routed a second time unless it is certain that this changes nothing.
func TestReroute(t *testing.T) {
	for _, c := range []struct {
		what              string
		reroute           routing.Reroute
		watched, readOnly bool
		rules             []routing.Rule
		want              string
	}{
		{"plain routing", routing.RerouteUnneeded, true, false, nil, "0"},
		{"policy routing", routing.RerouteNeeded, true, false, nil, "1"},
		{"not read", routing.RerouteUnknown, true, false, nil, ""},
		{"--once", routing.RerouteUnneeded, false, false, nil, ""},
		{"parameters cannot be set", routing.RerouteUnneeded, true, true, nil, ""},
		{"shared VIPs", routing.RerouteUnneeded, true, false, []routing.Rule{{Action: routing.SkipLocal, Mark: 4, Mask: 4}}, "0"},
		{"claimed ports", routing.RerouteUnneeded, true, false, []routing.Rule{{Priority: 100, Mark: 4, Mask: 4, Table: 80080}}, "0"},
		{"a rule of the plan", routing.RerouteUnneeded, true, false, []routing.Rule{{Priority: 99}}, "1"},
	} {
		part := NodePlan{Sysctls: map[string]string{}, Rules: c.rules}
		cfg := &Config{VIPs: VIPs{Table: 80080}}
		addReroute(&part, cfg, &Node{Watched: c.watched, ReadOnly: c.readOnly, Inventory: routing.Inventory{Reroute: c.reroute}})
		if got := part.Sysctls[SNATReroute]; got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

// TestReplyRoutingReroutes checks that reply routing sets the parameter in either family, also in a
// process that does not learn of route changes.
func TestReplyRoutingReroutes(t *testing.T) {
	for _, family := range ip.Families {
		part := NodePlan{Sysctls: map[string]string{}}
		addReplyRouting(&part, &Config{}, family, Paths{Bound: []Binding{{Link: "eth0", Mark: 0x20}, {Link: "eth1", Mark: 0x40}}})
		if got := part.Sysctls[SNATReroute]; got != "1" {
			t.Errorf("%s: %q", family, got)
		}
	}
}
