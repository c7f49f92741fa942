package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// postrouting sets the SNAT sources of the node, given as "eth1 10.12.192.10".
func (w *world) postrouting(sources ...string) {
	part := plan.ForNode(&w.cfg, &plan.Node{})
	part.NAT.Chains = maps.Clone(part.NAT.Chains)
	chain := nat.Chain{Family: ip.IPv4, Table: nat.NAT, Name: "KUBE-POSTROUTING"}
	for _, s := range sources {
		var link, source string
		if _, err := fmt.Sscan(s, &link, &source); err != nil {
			w.t.Fatal(err)
		}
		r := nat.Rule(fmt.Sprintf(`-o %s -m comment --comment "SNAT source of this interface" -j SNAT --to-source %s --random-fully`, link, source))
		part.NAT.Chains[chain] = append(slices.Clone(part.NAT.Chains[chain]), r)
	}
	w.reconciler.setNode(part)
}

// TestSourceIsForgotten: flows translated to a source are deleted once it is no longer used,
// after the rules are written, and no others.
func TestSourceIsForgotten(t *testing.T) {
	flow := func(protocol ip.Protocol, source string) conntrack.Entry {
		return conntrack.Entry{
			Protocol: protocol, OriginalSrc: netip.MustParseAddrPort("10.244.0.9:4000"), OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"),
			ReplySrc: netip.MustParseAddrPort("10.244.9.9:8000"), ReplyDst: netip.MustParseAddrPort(source + ":4000"),
		}
	}
	one, two := "10.12.192.10", "10.12.193.10"
	for name, tc := range map[string]struct {
		before, after []string
		forgotten     []string
	}{
		"the address changes":        {[]string{"eth1 " + one}, []string{"eth1 " + two}, []string{one}},
		"the interface goes":         {[]string{"eth1 " + one, "eth2 " + two}, []string{"eth2 " + two}, []string{one}},
		"the interface is renamed":   {[]string{"eth1 " + one}, []string{"ens6 " + one}, nil},
		"two swap":                   {[]string{"eth1 " + one, "eth2 " + two}, []string{"eth1 " + two, "eth2 " + one}, []string{one, two}},
		"another comes":              {[]string{"eth1 " + one}, []string{"eth1 " + one, "eth2 " + two}, nil},
		"no source any more":         {[]string{"eth1 " + one}, nil, []string{one}},
		"the address is taken along": {[]string{"eth1 " + one, "eth2 " + two}, []string{"eth2 " + one}, []string{two}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.postrouting(tc.before...)
			w.start()
			for _, source := range []string{one, two, "10.244.0.9"} {
				w.Conntrack.Add(flow(ip.UDP, source), flow(ip.TCP, source))
			}
			w.postrouting(tc.after...)
			w.Conntrack.FailDump = func() error {
				if w.position("write chain IPv4 nat/KUBE-POSTROUTING") < 0 {
					t.Error("flows are looked for before the rules are written")
				}
				return nil
			}
			w.order = nil
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
			left := map[string]int{}
			for _, e := range w.Conntrack.Entries() {
				left[e.ReplyDst.Addr().String()]++
			}
			for _, source := range []string{one, two, "10.244.0.9"} {
				want := 2
				if slices.Contains(tc.forgotten, source) {
					want = 0
				}
				if left[source] != want {
					t.Errorf("%d flows with source %s are left, want %d", left[source], source, want)
				}
			}
		})
	}
}

// TestConnectionsOfASourceStay: if the interface keeps the address, TCP connections from it stay
// and UDP flows take the new source.
func TestConnectionsOfASourceStay(t *testing.T) {
	source := netip.MustParsePrefix("10.12.192.10/24")
	for name, tc := range map[string]struct {
		link  string // that has the address
		after []string
		left  int
	}{
		"another source":          {"eth1", []string{"eth1 10.12.192.11"}, 1},
		"no source any more":      {"eth1", nil, 1},
		"moved":                   {"eth2", []string{"eth1 10.12.192.11"}, 0},
		"moved to another source": {"eth2", []string{"eth1 10.12.192.11", "eth2 10.12.192.10"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.postrouting("eth1 10.12.192.10")
			w.start()
			for _, protocol := range []ip.Protocol{ip.UDP, ip.TCP} {
				w.Conntrack.Add(conntrack.Entry{
					Protocol: protocol, OriginalSrc: netip.MustParseAddrPort("10.244.0.9:4000"), OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"),
					ReplySrc: netip.MustParseAddrPort("10.244.9.9:8000"), ReplyDst: netip.MustParseAddrPort("10.12.192.10:4000"),
				})
			}
			w.reconciler.input.Inventory.Links = []routing.Link{{Name: tc.link, Addresses: []routing.Address{{Prefix: source}}}}
			w.postrouting(tc.after...)
			if err := w.reconciler.Flush().Err(); err != nil {
				t.Fatal(err)
			}
			left := w.Conntrack.Entries()
			if len(left) != tc.left || tc.left == 1 && left[0].Protocol != ip.TCP {
				t.Errorf("%v are left, want %d of TCP", left, tc.left)
			}
		})
	}
}

// TestSourceChangedOverARestart: the rules in the kernel show the old source.
func TestSourceChangedOverARestart(t *testing.T) {
	w := newWorld(t)
	w.postrouting("eth1 10.12.192.10")
	w.start()
	client := netip.MustParseAddrPort("10.244.0.9:4000")
	w.Conntrack.Add(conntrack.Entry{
		Protocol: ip.UDP, OriginalSrc: client, OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"),
		ReplySrc: netip.MustParseAddrPort("10.244.9.9:8000"), ReplyDst: netip.MustParseAddrPort("10.12.192.10:4000"),
	})
	w.restart()
	w.postrouting("eth1 10.12.193.10")
	w.start()
	if n := len(w.Conntrack.Entries()); n != 0 {
		t.Errorf("%d flows are left", n)
	}
}

// TestNoDumpBeforeSweep: at startup conntrack is read once for each family, however many
// batches there are.
func TestNoDumpBeforeSweep(t *testing.T) {
	w := newWorld(t)
	w.observe()
	w.reconciler.Flush()
	for i := range 5 {
		s := clusterIP(fmt.Sprint("s", i), fmt.Sprintf("10.96.0.%d", i+1), "10.244.0.2:53")
		s.Ports[0].Protocol = ip.UDP
		w.mustApply(s)
	}
	if n := w.Conntrack.Dumps(); n != 0 {
		t.Errorf("%d dumps before everything is programmed", n)
	}
	client := netip.MustParseAddrPort("10.244.0.9:4000")
	w.Conntrack.Add(conntrack.Entry{
		Protocol: ip.UDP, OriginalSrc: client, OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"),
		ReplySrc: netip.MustParseAddrPort("10.96.0.1:80"), ReplyDst: client,
	})
	w.reconciler.Prune()
	if n := len(w.Conntrack.Entries()); n != 0 {
		t.Error("a flow that is older than its Service is left")
	}
}

// TestReroutedClientIsForgotten: UDP flows of a source that is bound to the main table's
// interface from now on are deleted, once, and not at startup.
func TestReroutedClientIsForgotten(t *testing.T) {
	w := newWorld(t)
	pod, other := netip.MustParsePrefix("10.244.0.9/32"), netip.MustParsePrefix("10.244.0.8/32")
	reroute := func(sources ...netip.Prefix) {
		part := plan.ForNode(&w.cfg, &plan.Node{})
		part.Members = slices.Clone(part.Members)
		for _, p := range sources {
			part.Members = append(part.Members, plan.Member{Set: plan.ReplyRoutedSources.In(ip.IPv4), Entry: ipset.Entry{Net: p}})
		}
		w.reconciler.setNode(part)
	}
	begin := func() {
		w.Conntrack.Add(conntrack.Entry{
			Protocol: ip.UDP, OriginalSrc: netip.MustParseAddrPort("10.244.0.9:4000"), OriginalDst: netip.MustParseAddrPort("10.96.0.1:80"),
			ReplySrc: netip.MustParseAddrPort("10.244.9.9:8000"), ReplyDst: netip.MustParseAddrPort("192.0.2.11:4000"),
		})
	}
	left := func(when string, want int) {
		t.Helper()
		if err := w.reconciler.Flush().Err(); err != nil {
			t.Fatal(err)
		}
		if n := len(w.Conntrack.Entries()); n != want {
			t.Errorf("%s: %d flows are left, want %d", when, n, want)
		}
	}
	begin()
	reroute(other)
	w.start()
	left("at the start", 1)
	reroute(other, pod)
	left("it is rerouted", 0)
	begin()
	reroute(pod)
	left("another one is not any more", 1)
}

// TestFlowsOfOtherProgramsStay has a flow that another program translates to a SNAT source, and that
// does not pass IPVS.
func TestFlowsOfOtherProgramsStay(t *testing.T) {
	w := newWorld(t)
	w.postrouting("eth1 10.12.192.10")
	w.start()
	w.Conntrack.Add(conntrack.Entry{
		Protocol: ip.UDP, OriginalSrc: netip.MustParseAddrPort("172.17.0.9:4000"), OriginalDst: netip.MustParseAddrPort("198.51.100.1:51820"),
		ReplySrc: netip.MustParseAddrPort("198.51.100.1:51820"), ReplyDst: netip.MustParseAddrPort("10.12.192.10:4000"),
	})
	w.postrouting("eth1 10.12.193.10")
	if err := w.reconciler.Flush().Err(); err != nil {
		t.Fatal(err)
	}
	if n := len(w.Conntrack.Entries()); n != 1 {
		t.Errorf("%d flows are left, want 1", n)
	}
}
