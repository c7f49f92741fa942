package conformance

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
)

// A broken promise is found although kube-proxy breaks it too.
func TestBroken(t *testing.T) {
	const vip, cluster = "203.0.113.1:80", "10.96.1.10:80"
	const both = "10.244.1.2:8080 as itself, 10.244.2.2:8080 as itself"
	for _, tc := range []struct {
		name  string
		world []Change
		from  string
		facts map[string]string
		want  bool
	}{
		{"inside, all endpoints", local(), "pod", map[string]string{vip: both, cluster: both}, false},
		{"inside, those of this node", local(), "pod", map[string]string{vip: "10.244.1.2:8080 as itself", cluster: both}, true},
		{"the node, those of this node", local(), "node", map[string]string{vip: "10.244.1.2:8080 masqueraded", cluster: both}, true},
		{"inside, dropped", local(), "pod", map[string]string{vip: "dropped", cluster: both}, true},
		{"inside, none", local(), "pod", map[string]string{vip: "refused", cluster: "refused"}, false},
		{"inside, Cluster", balancer(), "pod", map[string]string{vip: "10.244.1.2:8080 as itself", cluster: both}, false},
		{"outside, those of this node", local(), "outside", map[string]string{vip: "10.244.1.2:8080 as itself"}, false},
		{"outside, dropped", local(), "outside", map[string]string{vip: "dropped"}, false},
		{"outside, another node's", local(), "outside", map[string]string{vip: both}, true},
		{"outside, Cluster", balancer(), "outside", map[string]string{vip: both}, false},
	} {
		w, facts := NewWorld(), Facts{}
		for _, c := range tc.world {
			w.Apply(c)
		}
		for at, answer := range tc.facts {
			facts[packetTo("TCP", tc.from, at, "", "").Fact] = answer
		}
		got := w.Broken(facts)
		if len(got) > 0 != tc.want || slices.ContainsFunc(got, func(d Diff) bool { return Allowed(w, d) != nil || d.At != netip.MustParseAddrPort(vip) }) {
			t.Errorf("%s: %v, want broken %t, and not allowed", tc.name, got, tc.want)
		}
	}
}

// The node's packets can have the VIP or any of the node's addresses as their source.
func TestMissingSources(t *testing.T) {
	const vip = "203.0.113.1:80"
	member := func(set, text string) Fact {
		return Fact{Kind: "member", Name: set, Protocol: "TCP", At: netip.MustParseAddrPort(vip), Member: text}
	}
	all := Facts{member("KUBE-LOAD-BALANCER-FW", "203.0.113.1,tcp:80"): "listed"}
	for _, source := range []string{"203.0.113.1", NodeIPv4, "10.244.1.1"} {
		all[member("KUBE-LOAD-BALANCER-SOURCE-IP", "203.0.113.1,tcp:80,"+source)] = "listed"
	}
	for _, tc := range []struct {
		name    string
		world   []Change
		without string
		want    int
	}{
		{"all", ranges("192.168.50.0/24"), "", 0},
		{"not the bridge's address", ranges("192.168.50.0/24"), "203.0.113.1,tcp:80,10.244.1.1", 1},
		{"the node is not admitted", ranges("100.64.0.0/16"), "203.0.113.1,tcp:80,10.244.1.1", 0},
	} {
		w, facts := NewWorld(), maps.Clone(all)
		for _, c := range tc.world {
			w.Apply(c)
		}
		delete(facts, member("KUBE-LOAD-BALANCER-SOURCE-IP", tc.without))
		if got := w.Broken(facts); len(got) != tc.want {
			t.Errorf("%s: %v, want %d", tc.name, got, tc.want)
		}
	}
}
