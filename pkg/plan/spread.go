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
//
// The list is ordered in place; dest gives the address of what stands in it.
func Spread[T any](node string, key ipvs.Key, scheduler string, list []T, dest func(T) netip.AddrPort) {
	if len(list) < 2 {
		return
	}
	if ipvs.Hashes(scheduler) {
		slices.SortFunc(list, func(a, b T) int { return dest(a).Compare(dest(b)) })
		return
	}
	type placed struct {
		place uint64
		what  T
	}
	places, prefix := make([]placed, len(list)), []byte(node+"\x00"+key.String()+"\x00")
	for i, what := range list {
		places[i] = placed{place(prefix, dest(what)), what}
	}
	slices.SortFunc(places, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.place, b.place), dest(a.what).Compare(dest(b.what)))
	})
	for i := range places {
		list[i] = places[i].what
	}
}

// place is a number that looks like a random one, for a node's Service and an
// endpoint.
func place(prefix []byte, dest netip.AddrPort) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(prefix) // never fails
	_, _ = h.Write(append(dest.AppendTo(make([]byte, 0, 64)), 0))
	// What was written last has reached few bits; this brings it to all.
	n := h.Sum64()
	n ^= n >> 32
	n *= 0x9e3779b97f4a7c15
	return n ^ n>>32
}
