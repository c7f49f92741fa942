package plan_test

import (
	"fmt"
	"math/rand"
	"net/netip"
	"slices"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

func itself(dest netip.AddrPort) netip.AddrPort { return dest }

func someDests(n int) []netip.AddrPort {
	var out []netip.AddrPort
	for i := range n {
		out = append(out, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 5}), 8080))
	}
	return out
}

// Over many nodes, each endpoint is the first one of the scheduler, the one added last,
// on about the same number of nodes.
func TestSpreadOverNodes(t *testing.T) {
	const nodes, endpoints = 1000, 5
	key := ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}
	first := map[netip.AddrPort]int{}
	for i := range nodes {
		list := someDests(endpoints)
		plan.OrderRealServers(fmt.Sprintf("node%d", i), key, "rr", list, itself)
		first[list[endpoints-1]]++
	}
	for _, dest := range someDests(endpoints) {
		if n := first[dest]; n < nodes/endpoints*8/10 || n > nodes/endpoints*12/10 {
			t.Errorf("%d of %d nodes begin at %s", n, nodes, dest)
		}
	}
}

// A node has one order for a Service, whatever the order of the endpoints, and another
// for another Service.
func TestSpreadIsStable(t *testing.T) {
	orders := map[string]bool{}
	for i := range 20 {
		key := ipvs.Key{Protocol: ip.TCP, Addr: netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), Port: 80}
		want := someDests(8)
		plan.OrderRealServers("node1", key, "rr", want, itself)
		got := someDests(8)
		rand.New(rand.NewSource(int64(i))).Shuffle(len(got), func(i, j int) { got[i], got[j] = got[j], got[i] })
		plan.OrderRealServers("node1", key, "rr", got, itself)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v and %v", key, got, want)
		}
		orders[fmt.Sprint(want)] = true
	}
	if len(orders) < 19 {
		t.Errorf("%d orders for 20 Services", len(orders))
	}
}

func TestHashingSchedulersAgreeOnAllNodes(t *testing.T) {
	for _, scheduler := range []string{"sh", "dh", "mh"} {
		list := someDests(8)
		plan.OrderRealServers("node1", ipvs.Key{Protocol: ip.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}, scheduler, list, itself)
		if !slices.Equal(list, someDests(8)) {
			t.Errorf("%s: %v", scheduler, list)
		}
	}
}
