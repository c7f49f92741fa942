package reconcile

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// The rules for the loopback address exist before the rules that set the marks they match.
// They are repaired, and deleted with everything else.
func TestLoopbackRules(t *testing.T) {
	w := newWorld(t)
	w.cfg.LocalhostNodePorts = true
	part := plan.ForNode(&w.cfg, &plan.Node{Inventory: routing.Inventory{Links: []routing.Link{{
		Name: "eth0", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("192.0.2.11/24"), Global: true}},
	}}}})
	w.reconciler.setNode(part)
	want := nft.Loopback{ip.IPv4: {Mark: w.cfg.MasqueradeMark, Source: netip.MustParseAddr("192.0.2.11")}}
	check := func(when string, want nft.Loopback) {
		t.Helper()
		have, err := w.Loopback.Observe()
		if err != nil || !maps.Equal(have, want) {
			t.Errorf("%s: %v, %v, want %v", when, have, err, want)
		}
	}
	if err := w.start().Err(); err != nil {
		t.Fatal(err)
	}
	check("after the start", want)
	rules, mark := w.position("loopback address to 192.0.2.11"), w.position("write chain IPv4 raw/KUBE-IPVS-LOCALHOST")
	if rules < 0 || mark < rules {
		t.Errorf("rules at %d, mark at %d of %q", rules, mark, w.order)
	}
	w.Loopback.Spoil(ip.IPv4)
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	check("after another program's change", want)
	if _, err := w.cleaner().cleanup(); err != nil {
		t.Fatal(err)
	}
	check("after the cleanup", nft.Loopback{})
}
