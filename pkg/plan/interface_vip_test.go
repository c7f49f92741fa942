package plan_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// TestAddressOnAnInterfaceStaysLocal: a VIP that another program has put on an interface is kept
// local by a route, because that program may remove it. The Node's own address needs none.
func TestAddressOnAnInterfaceStaysLocal(t *testing.T) {
	own, vip := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("192.0.2.50")
	node := plan.Node{Addresses: []netip.Addr{own}, Inventory: routing.Inventory{Links: []routing.Link{{
		Index: 2, Name: "eth0", Type: "device", Up: true,
		Addresses: []routing.Address{{Prefix: netip.PrefixFrom(own, 24), Global: true}, {Prefix: netip.PrefixFrom(vip, 32), Global: true}},
	}}}}
	for _, c := range []struct {
		claim plan.ClaimMode
		vip   netip.Addr
		want  []plan.VIP
	}{
		{plan.ClaimAuto, vip, []plan.VIP{{Addr: vip, Claim: plan.ClaimRoute}}},
		{plan.ClaimAddress, vip, []plan.VIP{{Addr: vip, Claim: plan.ClaimRoute}}},
		{plan.ClaimPort, vip, nil},
		{plan.ClaimAuto, own, nil},
	} {
		cfg := defaultConfig()
		cfg.VIPs.LoadBalancers = c.claim
		facts := plan.NewFacts(&cfg, &node)
		s := service.Service{
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, LoadBalancers: []netip.Addr{c.vip},
			Ports: []service.Port{{Protocol: ip.TCP, Port: 80, Endpoints: []service.Endpoint{{Addr: netip.MustParseAddrPort("10.244.1.5:80"), Ready: true}}}},
		}
		part := plan.ForService(&cfg, &facts, &s)
		got := slices.DeleteFunc(slices.Clone(part.VIPs), func(v plan.VIP) bool { return v.Addr != c.vip })
		if !slices.Equal(got, c.want) {
			t.Errorf("%s claimed by %s: %v, want %v", c.vip, c.claim, got, c.want)
		}
		if part.Deps&plan.OnPrimary == 0 {
			t.Errorf("%s claimed by %s: does not depend on the Node's addresses", c.vip, c.claim)
		}
	}
}
