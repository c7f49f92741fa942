package plan

import (
	"math/bits"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// A flow that is open carries its interface's value in conntrack, so an
// interface keeps the value it has, whatever others come and go: as long as
// the process runs by the kernel's number of the interface (Node.Bound), and
// after a restart by our policy rule, which leads from the value to its table.

// bindings gives the main table's interface the first value, and each ENI the
// one that it had, or a free one. ENIs for which the bits do not suffice are
// not bound. With reserve no more ENIs get the value of branches.
//
// Where there was an ENI the main table's interface stays bound: an ENI that is
// set down and up again, to be renamed, say, is none for a moment. A packet of
// a masqueraded flow that then left by the ENI, for want of its mark, would
// have the kernel forget the flow (nf_nat_oif_changed).
func bindings(cfg *Config, n *Node, family ip.Family, found []ENI, reserve bool) []Binding {
	a := assignment{cfg: cfg, node: n, family: family, taken: map[uint32]bool{}}
	main := mainLink(&n.Inventory, family)
	if main == "" || len(found) == 0 && !a.remembered(a.value(1)) {
		return nil
	}
	out := []Binding{{Family: family, Link: main, Index: linkIndex(&n.Inventory, main), Table: tableMain, Mark: a.value(1)}}
	a.taken[out[0].Mark] = true
	for _, e := range found {
		b := Binding{Family: family, Link: e.Link, Index: linkIndex(&n.Inventory, e.Link), Table: e.Table}
		b.Mark = a.before(b)
		a.taken[b.Mark] = true
		out = append(out, b)
	}
	if reserve {
		a.taken[cfg.SNAT.Mark] = true
	}
	slices.SortStableFunc(out[1:], func(a, b Binding) int { return a.Index - b.Index })
	for i := range out {
		if out[i].Mark == 0 {
			out[i].Mark = a.free()
		}
	}
	return slices.DeleteFunc(out, func(b Binding) bool { return b.Mark == 0 })
}

// Remember adds the bindings of a plan to those of earlier ones, of which a
// value that is given to another interface is forgotten.
func Remember(earlier, now []Binding) []Binding {
	out := slices.Clone(now)
	for _, b := range earlier {
		same := func(o Binding) bool { return o.Family == b.Family && (o.Mark == b.Mark || o.Index == b.Index) }
		if !slices.ContainsFunc(now, same) {
			out = append(out, b)
		}
	}
	return out
}

// assignment hands out the values of one family.
type assignment struct {
	cfg    *Config
	node   *Node
	family ip.Family
	taken  map[uint32]bool // by interfaces that are there
}

// value is the i-th mark.
func (a *assignment) value(i int) uint32 { return deposit(uint32(i), a.cfg.SNAT.Mark) }

// before is the value that an interface had, if no other has it now; or 0.
func (a *assignment) before(b Binding) uint32 {
	known := func(o Binding) bool { return o.Family == a.family && o.Index == b.Index && o.Table != tableMain }
	if at := slices.IndexFunc(a.node.Bound, known); at >= 0 {
		return a.unlessTaken(a.node.Bound[at].Mark)
	}
	for _, r := range a.ourRules() {
		if a.leads(r.Table, b.Link) && !a.remembered(r.Mark) {
			return a.unlessTaken(r.Mark)
		}
	}
	return 0
}

func (a *assignment) unlessTaken(mark uint32) uint32 {
	if a.taken[mark] {
		return 0
	}
	return mark
}

// free is the least value that no interface has, one that none had lately if
// there is such: flows of an interface that is gone may still carry it. It is
// 0 if all are taken.
func (a *assignment) free() uint32 {
	last := 1<<bits.OnesCount32(a.cfg.SNAT.Mark) - 1
	for _, lately := range []bool{false, true} {
		// Of so many values one is free, whatever the mask.
		for i := 1; i <= min(last, len(a.taken)+len(a.node.Bound)+len(a.node.Inventory.Rules)+1); i++ {
			if m := a.value(i); !a.taken[m] && (lately || !a.used(m)) {
				a.taken[m] = true
				return m
			}
		}
	}
	return 0
}

// used tells whether an interface has or had the value.
func (a *assignment) used(mark uint32) bool {
	return a.remembered(mark) || slices.ContainsFunc(a.ourRules(), func(r routing.Rule) bool { return r.Mark == mark })
}

func (a *assignment) remembered(mark uint32) bool {
	return slices.ContainsFunc(a.node.Bound, func(b Binding) bool { return b.Family == a.family && b.Mark == mark })
}

// ourRules are the policy rules of an earlier plan that stand in the kernel.
func (a *assignment) ourRules() []routing.Rule {
	return filter(a.node.Inventory.Rules, func(r routing.Rule) bool {
		return r.Family == a.family && r.Priority == a.cfg.SNAT.Priority && r.Mask == a.cfg.SNAT.Mark && !r.To.IsValid() && !r.Other && r.Table != tableMain
	})
}

// leads tells whether a table's default route leaves by an interface.
func (a *assignment) leads(table int, link string) bool {
	return slices.ContainsFunc(a.node.Inventory.Defaults, func(r routing.Route) bool {
		return r.Family == a.family && r.Table == table && r.Link == link
	})
}

// deposit spreads the low bits of a value over the bits of a mask, lowest
// first.
func deposit(value, mask uint32) uint32 {
	var out uint32
	for ; mask != 0; mask &= mask - 1 {
		if value&1 != 0 {
			out |= mask & -mask
		}
		value >>= 1
	}
	return out
}

// gather is the inverse: the bits of a value at those of a mask, side by side.
func gather(value, mask uint32) uint32 {
	var out uint32
	for i := 0; mask != 0; mask &= mask - 1 {
		if value&mask&-mask != 0 {
			out |= 1 << i
		}
		i++
	}
	return out
}

func linkIndex(inv *routing.Inventory, name string) int {
	at := slices.IndexFunc(inv.Links, func(l routing.Link) bool { return l.Name == name })
	if at < 0 {
		return 0
	}
	return inv.Links[at].Index
}
