package plan

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// OrderRealServers sorts, in place, the real servers to be added to a virtual server. The
// kernel inserts a new one at the head of its list, where rr and similar schedulers begin, and
// all nodes learn of a Service at the same time. With one common order, the first
// connection of every node would reach the same endpoint (kubernetes#121591, #126378,
// #88580). So the order is deterministic, but differs by node and Service.
//
// Hashing schedulers assign clients by position in the list. For them the order is the
// same on all nodes, so that nodes agree.
//
// dest returns the address of an element.
func OrderRealServers[T any](node string, key ipvs.Key, scheduler string, list []T, dest func(T) netip.AddrPort) {
	if len(list) < 2 {
		return
	}
	if ipvs.Hashes(scheduler) {
		slices.SortFunc(list, func(a, b T) int { return dest(a).Compare(dest(b)) })
		return
	}
	type ranked struct {
		rank uint64
		elem T
	}
	order, prefix := make([]ranked, len(list)), []byte(node+"\x00"+key.String()+"\x00")
	for i, elem := range list {
		order[i] = ranked{rank(prefix, dest(elem)), elem}
	}
	slices.SortFunc(order, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), dest(a.elem).Compare(dest(b.elem)))
	})
	for i := range order {
		list[i] = order[i].elem
	}
}

// rank returns a pseudo-random number for an endpoint, given a prefix for node and
// Service.
func rank(prefix []byte, dest netip.AddrPort) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(prefix) // never fails
	_, _ = h.Write(append(dest.AppendTo(make([]byte, 0, 64)), 0))
	// FNV mixes its last input bytes into few bits; these steps spread them to all.
	n := h.Sum64()
	n ^= n >> 32
	n *= 0x9e3779b97f4a7c15
	return n ^ n>>32
}
