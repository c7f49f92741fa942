package reconcile

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kube-ipvs/kube-ipvs/pkg/conntrack"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// readings is a Meter that records its calls.
type readings struct{ lines []string }

func (r *readings) note(format string, args ...any) {
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}
func (r *readings) Wrote(part string, _ time.Duration, refused int) {
	r.note("%s written, %d refused", part, refused)
}
func (r *readings) Refused(part, operation string) { r.note("%s refused to %s", part, operation) }
func (r *readings) Forgot(flows int)               { r.note("%d flows forgotten", flows) }

// take returns what was recorded since the last call.
func (r *readings) take() []string {
	lines := r.lines
	r.lines = nil
	return lines
}

// Every part of the kernel is metered, and reports the operation that it refused.
func TestMetered(t *testing.T) {
	w := newWorld(t)
	var r readings
	tables := nft.NewFakeKubeProxy()
	tables.Refuse = func(nft.KubeProxyChange) error { return errors.New("no") }
	k := Kernel{
		IPVS: w.IPVS, IPSet: w.IPSet, Routing: w.Routing, Sysctl: w.Sysctl, Conntrack: w.Conntrack, Loopback: w.Loopback,
		NAT: map[ip.Family]NAT{ip.IPv4: w.NAT[ip.IPv4]}, KubeProxy: tables,
	}.Metered(&r)
	w.refuse = func(string) error { return errors.New("no") }
	dns := conntrack.Match{Protocol: ip.UDP, OriginalDst: netip.MustParseAddrPort("10.96.0.10:53")}
	for want, write := range map[string]func(){
		"ipvs refused to add virtual server":  func() { k.writeIPVS([]ipvs.Change{{Op: ipvs.AddVirtualServer}}) },
		"ipset refused to create set":         func() { k.writeSets([]ipset.Change{{Op: ipset.CreateSet}}) },
		"routing refused to add link":         func() { k.writeRouting([]routing.Change{{Op: routing.AddLink}}) },
		"iptables refused to write chain":     func() { k.writeNAT(k.NAT[ip.IPv4], []nat.Change{{Op: nat.WriteChain}}) },
		"sysctl refused to set":               func() { k.writeSysctls([]sysctl.Change{{Key: "net/ipv4/ip_forward"}}) },
		"nftables refused to write":           func() { k.writeLoopback([]nft.LoopbackChange{{Family: ip.IPv4}}) },
		"nftables refused to delete table":    func() { k.writeKubeProxy([]nft.KubeProxyChange{{Family: ip.IPv4}}) },
		"conntrack refused to delete entries": func() { _ = k.deleteFlows([]conntrack.Match{dns}) },
	} {
		w.Conntrack.FailDump = func() error { return errors.New("no") }
		write()
		got := r.take()
		if len(got) < 2 || got[0] != want && got[1] != want {
			t.Errorf("%q, no %q", got, want)
		}
	}
}

func TestMeteredSuccess(t *testing.T) {
	w := newWorld(t)
	var r readings
	k := Kernel{IPVS: w.IPVS, Conntrack: w.Conntrack}.Metered(&r)
	k.writeIPVS(nil)
	_ = k.deleteFlows(nil)
	want := []string{"ipvs written, 0 refused", "conntrack written, 0 refused", "0 flows forgotten"}
	if diff := cmp.Diff(want, r.take()); diff != "" {
		t.Error(diff)
	}
}
