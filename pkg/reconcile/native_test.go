package reconcile

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// nativeRules are nftables rules of other programs.
type nativeRules struct {
	uses []nft.MarkUse
	err  error
}

func (n *nativeRules) Observe() ([]nft.MarkUse, error) { return n.uses, n.err }

// TestNativeMarks checks that the plan knows the marks of nftables rules, also those that cannot be
// read any more.
func TestNativeMarks(t *testing.T) {
	w := newWorld(t)
	rules := &nativeRules{uses: []nft.MarkUse{
		{Chain: nft.ID{Family: "inet", Table: "qos", Name: "pre"}, Rule: "meta mark set 0x20", Values: []uint32{0x20}, Bits: 0x20},
		{Chain: nft.ID{Family: "ip", Table: "vpn", Name: "out"}, Rule: "meta mark set 0x4", Values: []uint32{4}, Bits: 4},
	}}
	w.reconciler.kernel.Native = rules
	w.reconciler.SetNode(plan.Node{}, 0)
	warned := func(text string) bool {
		w.reconciler.input.warnings = nil // as after each comparison
		return slices.ContainsFunc(w.reconciler.nodeWarnings(), func(s string) bool { return strings.Contains(s, text) })
	}
	want := map[ip.Family][]uint32{ip.IPv4: {0x4, 0x20}, ip.IPv6: {0x20}}
	check := func(when string) {
		t.Helper()
		if _, err := w.observe(); err != nil {
			t.Fatal(err)
		}
		w.reconciler.Flush()
		if got := w.reconciler.input.ForeignMarks; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: marks %v, want %v", when, got, want)
		}
		if !warned(`the rule "meta mark set 0x4" in the nftables chain ip vpn out, of another program, uses bits 0x4`) {
			t.Errorf("%s: no warning about --claim-mark: %q", when, w.reconciler.nodeWarnings())
		}
	}
	check("readable")
	rules.uses, rules.err = nil, errors.New("no memory")
	check("unreadable")
	if !warned("cannot read nftables rules of other programs, which may use marks of kube-ipvs: no memory") {
		t.Errorf("no warning about the error: %q", w.reconciler.nodeWarnings())
	}
	rules.err = nil
	if _, err := w.observe(); err != nil {
		t.Fatal(err)
	}
	w.reconciler.Flush()
	if got := w.reconciler.input.ForeignMarks; len(got) > 0 {
		t.Errorf("marks %v of rules that were deleted", got)
	}
}

// TestRefusesIsPlanned checks that the plan knows of rules that may drop forwarded packets, and
// leaves br_netfilter's parameter alone then.
func TestRefusesIsPlanned(t *testing.T) {
	const key = "net/bridge/bridge-nf-call-iptables"
	for refuses, want := range map[bool]string{false: "1", true: "0"} {
		w := newWorld(t)
		w.reconciler.kernel.Native = &nativeRules{uses: []nft.MarkUse{{Chain: nft.ID{Family: "inet", Table: "firewalld", Name: "filter_FORWARD"}, Refuses: refuses}}}
		w.Sysctl.Set(key, "0")
		w.reconciler.SetNode(plan.Node{BridgeNetfilter: plan.BridgeAvailable, Inventory: routing.Inventory{Links: []routing.Link{
			{Index: 2, Name: "cni0", Type: "bridge", Addresses: []routing.Address{{Prefix: netip.MustParsePrefix("10.244.1.1/24"), Global: true}}},
			{Index: 3, Name: "veth1", Type: "veth", Master: "cni0"},
		}}}, 0)
		if _, err := w.observe(); err != nil {
			t.Fatal(err)
		}
		w.reconciler.Flush()
		if got := w.Sysctl.Values()[key]; got != want {
			t.Errorf("nftables rules drop: %t: %s is %q, want %q", refuses, key, got, want)
		}
	}
}
