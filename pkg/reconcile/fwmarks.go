package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// numbers assigns indexes of plan.LocalMark to addresses and ports that need a second
// virtual server, the lowest free one first. An address and port keeps its number while
// the kernel holds anything under it. A new process starts with the numbers that the
// first resync finds in the kernel.
type numbers struct {
	mark       plan.LocalMark
	masq       uint32
	byKey      map[ipvs.Key]uint32
	taken      map[uint32]struct{}
	wanted     map[types.NamespacedName][]ipvs.Key
	users      map[ipvs.Key]int      // number of Services that want it
	idle       map[ipvs.Key]struct{} // numbered, but no longer wanted by any Service
	unnumbered map[types.NamespacedName]struct{}
	seeded     bool
}

func newNumbers(cfg *plan.Config) *numbers {
	return &numbers{
		mark:       cfg.LocalMark,
		masq:       cfg.MasqueradeMark,
		byKey:      map[ipvs.Key]uint32{},
		taken:      map[uint32]struct{}{},
		wanted:     map[types.NamespacedName][]ipvs.Key{},
		users:      map[ipvs.Key]int{},
		idle:       map[ipvs.Key]struct{}{},
		unnumbered: map[types.NamespacedName]struct{}{},
	}
}

// seed takes over the marks in the kernel. Marks that are not ours, for example after a
// change of configuration, are skipped and will be replaced.
func (n *numbers) seed(marks map[ipvs.Key]uint32) {
	n.seeded = true
	for _, key := range slices.SortedFunc(maps.Keys(marks), ipvs.Key.Compare) {
		number, ok := n.mark.Index(marks[key], n.masq)
		if _, taken := n.taken[number]; !ok || taken || n.byKey[key] != 0 {
			continue
		}
		n.set(key, number)
		n.idle[key] = struct{}{}
	}
}

func (n *numbers) set(key ipvs.Key, number uint32) {
	n.byKey[key] = number
	n.taken[number] = struct{}{}
}

// assign replaces the keys for which a Service wants numbers, and returns the numbers.
// The error names keys without one.
func (n *numbers) assign(name types.NamespacedName, keys []ipvs.Key, usable func(number uint32) bool) (map[ipvs.Key]uint32, error) {
	before := n.wanted[name]
	n.want(name, keys)
	for _, key := range before {
		n.drop(key)
	}
	delete(n.unnumbered, name)
	out := make(map[ipvs.Key]uint32, len(keys))
	var errs []error
	for _, key := range keys {
		if n.byKey[key] == 0 {
			n.allocate(key, usable)
		}
		if n.byKey[key] == 0 {
			n.unnumbered[name] = struct{}{}
			errs = append(errs, fmt.Errorf("%s: all %d numbers of --local-mark are in use, so internal clients reach only this node's endpoints", key, n.mark.Max()))
			continue
		}
		out[key] = n.byKey[key]
	}
	return out, errors.Join(errs...)
}

func (n *numbers) want(name types.NamespacedName, keys []ipvs.Key) {
	for _, key := range keys {
		n.users[key]++
		delete(n.idle, key)
	}
	if len(keys) == 0 {
		delete(n.wanted, name)
		return
	}
	n.wanted[name] = keys
}

func (n *numbers) drop(key ipvs.Key) {
	if n.users[key]--; n.users[key] > 0 {
		return
	}
	delete(n.users, key)
	if n.byKey[key] != 0 {
		n.idle[key] = struct{}{}
	}
}

func (n *numbers) allocate(key ipvs.Key, usable func(uint32) bool) {
	for number := uint32(1); number <= n.mark.Max(); number++ {
		if _, taken := n.taken[number]; !taken && usable(number) {
			n.set(key, number)
			return
		}
	}
}

// release frees numbers that no Service wants and under which the kernel holds nothing.
// If any became free, it returns the Services that lack numbers.
func (n *numbers) release(held func(key ipvs.Key, number uint32) bool) []types.NamespacedName {
	freed := false
	for key := range n.idle {
		if number := n.byKey[key]; !held(key, number) {
			delete(n.taken, number)
			delete(n.byKey, key)
			delete(n.idle, key)
			freed = true
		}
	}
	if !freed {
		return nil
	}
	return slices.SortedFunc(maps.Keys(n.unnumbered), func(a, b types.NamespacedName) int { return cmp.Compare(a.String(), b.String()) })
}

// assignMarks returns a plan with fwmarks for the virtual servers of internal clients. The
// error names those without one.
func (r *Reconciler) assignMarks(name types.NamespacedName, part plan.ServicePlan) (plan.ServicePlan, error) {
	keys := make([]ipvs.Key, len(part.Internal))
	for i, o := range part.Internal {
		keys[i] = o.Key
	}
	assigned, err := r.numbers.assign(name, keys, func(number uint32) bool { return !r.markInUse(r.cfg.LocalMark.Mark(number)) })
	return plan.AssignMarks(r.cfg, part, assigned), err
}

// releaseMarks frees the fwmarks that no Service wants and the kernel no longer holds. If any
// became free, it returns the Services that lack some, which are to be set again.
func (r *Reconciler) releaseMarks() []types.NamespacedName {
	return r.numbers.release(func(key ipvs.Key, number uint32) bool { return r.holdsMark(key, r.cfg.LocalMark.Mark(number)) })
}
