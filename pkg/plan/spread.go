package plan

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// Spread puts the real servers that are to be added to a virtual server in
// order. The kernel puts a new one at the head of its list, where rr and the
// others begin, and all nodes hear of a Service at the same time: in one order,
// the first connection of every node would meet the same endpoint
// (kubernetes#121591, #126378, #88580). So each node and Service has an order of
// its own, which is always the same.
//
// Schedulers that hash assign clients by the places in the list. They get them
// in one order, so that nodes agree.
func Spread(node string, key ipvs.Key, scheduler string, list []netip.AddrPort) {
	if ipvs.Hashes(scheduler) {
		slices.SortFunc(list, netip.AddrPort.Compare)
		return
	}
	places := make(map[netip.AddrPort]uint64, len(list))
	for _, dest := range list {
		places[dest] = place(node, key, dest)
	}
	slices.SortFunc(list, func(a, b netip.AddrPort) int {
		return cmp.Or(cmp.Compare(places[a], places[b]), a.Compare(b))
	})
}

// place is a number that looks like a random one.
func place(node string, key ipvs.Key, dest netip.AddrPort) uint64 {
	h := fnv.New64a()
	for _, part := range []string{node, key.String(), dest.String()} {
		_, _ = h.Write([]byte(part)) // never fails
		_, _ = h.Write([]byte{0})
	}
	// What was written last has reached few bits; this brings it to all.
	n := h.Sum64()
	n ^= n >> 32
	n *= 0x9e3779b97f4a7c15
	return n ^ n>>32
}
