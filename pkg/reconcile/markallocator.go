package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// markAllocator assigns fwmarks, as indexes of plan.LocalMark, to addresses and ports that
// need a virtual server for internal clients. It assigns the lowest index that is free in the
// address's family: the kernel looks up virtual servers by family and fwmark
// (__ip_vs_svc_fwm_find). An address and port keeps its index while the kernel has anything
// with the fwmark. A new process starts with the fwmarks that the first resync finds in the
// kernel.
type markAllocator struct {
	mark       plan.LocalMark
	masq       uint32 // masquerade mark, which a fwmark may include
	indexes    map[ipvs.Key]uint32
	taken      map[familyIndex]struct{}
	requests   map[types.NamespacedName][]ipvs.Key
	requesters map[ipvs.Key]int      // number of Services that request an index
	unused     map[ipvs.Key]struct{} // keys with an index that no Service requests
	lacking    map[types.NamespacedName]struct{}
	restored   bool
}

// familyIndex is an index in one family.
type familyIndex struct {
	family ip.Family
	index  uint32
}

func newMarkAllocator(cfg *plan.Config) *markAllocator {
	return &markAllocator{
		mark:       cfg.LocalMark,
		masq:       cfg.MasqueradeMark,
		indexes:    map[ipvs.Key]uint32{},
		taken:      map[familyIndex]struct{}{},
		requests:   map[types.NamespacedName][]ipvs.Key{},
		requesters: map[ipvs.Key]int{},
		unused:     map[ipvs.Key]struct{}{},
		lacking:    map[types.NamespacedName]struct{}{},
	}
}

// restore takes over the fwmarks in the kernel. It skips marks outside plan.LocalMark, for
// example of an earlier configuration; they are replaced later.
func (a *markAllocator) restore(marks map[ipvs.Key]uint32) {
	a.restored = true
	for _, key := range slices.SortedFunc(maps.Keys(marks), ipvs.Key.Compare) {
		index, ok := a.mark.Index(marks[key], a.masq)
		if _, taken := a.taken[familyIndex{key.Family(), index}]; !ok || taken || a.indexes[key] != 0 {
			continue
		}
		a.use(key, index)
		a.unused[key] = struct{}{}
	}
}

func (a *markAllocator) use(key ipvs.Key, index uint32) {
	a.indexes[key] = index
	a.taken[familyIndex{key.Family(), index}] = struct{}{}
}

// assign replaces the keys for which a Service requests indexes, and returns the indexes. The
// error names keys without one.
func (a *markAllocator) assign(name types.NamespacedName, keys []ipvs.Key, usable func(ip.Family, uint32) bool) (map[ipvs.Key]uint32, error) {
	before := a.requests[name]
	a.request(name, keys)
	for _, key := range before {
		a.withdraw(key)
	}
	delete(a.lacking, name)
	out := make(map[ipvs.Key]uint32, len(keys))
	var errs []error
	for _, key := range keys {
		if a.indexes[key] == 0 {
			a.allocate(key, usable)
		}
		if a.indexes[key] == 0 {
			a.lacking[name] = struct{}{}
			errs = append(errs, fmt.Errorf("%s: all %d %s fwmarks of --local-mark are in use, so internal clients reach only this node's endpoints", key, a.mark.Max(), key.Family()))
			continue
		}
		out[key] = a.indexes[key]
	}
	return out, errors.Join(errs...)
}

// request adds a Service's requests. withdraw must follow for its earlier ones, so that a key
// in both lists keeps its index.
func (a *markAllocator) request(name types.NamespacedName, keys []ipvs.Key) {
	for _, key := range keys {
		a.requesters[key]++
		delete(a.unused, key)
	}
	if len(keys) == 0 {
		delete(a.requests, name)
		return
	}
	a.requests[name] = keys
}

func (a *markAllocator) withdraw(key ipvs.Key) {
	if a.requesters[key]--; a.requesters[key] > 0 {
		return
	}
	delete(a.requesters, key)
	if a.indexes[key] != 0 {
		a.unused[key] = struct{}{}
	}
}

func (a *markAllocator) allocate(key ipvs.Key, usable func(ip.Family, uint32) bool) {
	for index := uint32(1); index <= a.mark.Max(); index++ {
		if _, taken := a.taken[familyIndex{key.Family(), index}]; !taken && usable(key.Family(), index) {
			a.use(key, index)
			return
		}
	}
}

// release frees the indexes of unused keys that the kernel no longer uses. If it freed any, it
// returns the Services that lack an index.
func (a *markAllocator) release(inKernel func(key ipvs.Key, index uint32) bool) []types.NamespacedName {
	freed := false
	for key := range a.unused {
		if index := a.indexes[key]; !inKernel(key, index) {
			delete(a.taken, familyIndex{key.Family(), index})
			delete(a.indexes, key)
			delete(a.unused, key)
			freed = true
		}
	}
	if !freed {
		return nil
	}
	return slices.SortedFunc(maps.Keys(a.lacking), func(a, b types.NamespacedName) int { return cmp.Compare(a.String(), b.String()) })
}

// assignMarks returns a plan with fwmarks for the virtual servers of internal clients. The
// error names those without one.
func (r *Reconciler) assignMarks(name types.NamespacedName, desired plan.ServicePlan) (plan.ServicePlan, error) {
	keys := make([]ipvs.Key, len(desired.Internal))
	for i, in := range desired.Internal {
		keys[i] = in.Key
	}
	assigned, err := r.allocator.assign(name, keys, func(f ip.Family, index uint32) bool {
		mark := r.cfg.LocalMark.Mark(index)
		return !r.marks.inUse(f, mark) && !r.input.HasForeignMark(r.cfg, f, mark)
	})
	return plan.AssignMarks(r.cfg, desired, assigned), err
}

// releaseMarks frees the fwmarks that neither a Service nor the kernel uses. If it freed any,
// it returns the Services that lack a fwmark; Set must be called for them again.
func (t *serviceTables) releaseMarks() []types.NamespacedName {
	return t.allocator.release(func(key ipvs.Key, index uint32) bool { return t.marks.kernelUses(key, t.cfg.LocalMark.Mark(index)) })
}
