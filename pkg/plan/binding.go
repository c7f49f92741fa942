package plan

import (
	"math/bits"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Reply routing gives each interface a mark value. Established flows have the value in their
// connmark, so an interface keeps its value when others are added or removed. While the process
// runs, the value belongs to the interface index (Node.Bound). After a restart it is recovered
// from our policy rule, which maps the value to the interface's table.

// bindings assigns the first value to the primary interface, and to each ENI its
// previous value or a free one. ENIs are left out once the values run out. With
// reserve, no further ENI gets the value of branches.
//
// The primary interface stays bound once there was an ENI: an ENI that is set down
// and up again, for example to be renamed, is briefly not recognized as one. If a
// packet of a masqueraded flow then lacked its mark and left through the ENI, the
// kernel would drop the flow's conntrack entry (nf_nat_oif_changed).
func bindings(cfg *Config, n *Node, family ip.Family, found []ENI, reserve bool) []Binding {
	a := assignment{cfg: cfg, node: n, family: family, taken: map[uint32]bool{}}
	main := primaryLink(&n.Inventory, family)
	if main == "" || len(found) == 0 && !a.remembered(a.value(1)) {
		return nil
	}
	out := []Binding{{Family: family, Link: main, Index: linkIndex(&n.Inventory, main), Table: routing.TableMain, Mark: a.value(1)}}
	a.taken[out[0].Mark] = true
	for _, e := range found {
		b := Binding{Family: family, Link: e.Link, Index: linkIndex(&n.Inventory, e.Link), Table: e.Table}
		b.Mark = a.previous(b)
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

// MergeBindings merges the bindings of a new plan into the earlier ones. An earlier binding
// is dropped if its value or its interface is bound anew.
func MergeBindings(earlier, now []Binding) []Binding {
	out := slices.Clone(now)
	for _, b := range earlier {
		same := func(o Binding) bool { return o.Family == b.Family && (o.Mark == b.Mark || o.Index == b.Index) }
		if !slices.ContainsFunc(now, same) {
			out = append(out, b)
		}
	}
	return out
}

// assignment assigns the values of one family.
type assignment struct {
	cfg    *Config
	node   *Node
	family ip.Family
	taken  map[uint32]bool // by present interfaces
}

// value returns the i-th mark.
func (a *assignment) value(i int) uint32 { return deposit(uint32(i), a.cfg.SNAT.Mark) }

// previous returns the value that an interface had before, or 0 if it had none or
// another interface has it now.
func (a *assignment) previous(b Binding) uint32 {
	known := func(o Binding) bool {
		return o.Family == a.family && o.Index == b.Index && o.Table != routing.TableMain
	}
	if at := slices.IndexFunc(a.node.Bound, known); at >= 0 {
		return a.unlessTaken(a.node.Bound[at].Mark)
	}
	for _, r := range a.ourRules() {
		if a.routesVia(r.Table, b.Link) && !a.remembered(r.Mark) {
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

// free takes and returns the lowest unused value, or 0 if all are taken. It prefers
// values that no interface had before, because flows of a removed interface may still
// carry them, and values that no mark of another program contains.
func (a *assignment) free() uint32 {
	last := 1<<bits.OnesCount32(a.cfg.SNAT.Mark) - 1
	preferences := []func(mark uint32) bool{
		func(m uint32) bool { return !a.used(m) && !a.inForeignRule(m) },
		func(m uint32) bool { return !a.used(m) },
		func(uint32) bool { return true },
	}
	for _, accepts := range preferences {
		// With this many candidates, one is free for any mask that has one.
		for i := 1; i <= min(last, len(a.taken)+len(a.node.Bound)+2*len(a.node.Inventory.Rules)+1); i++ {
			if m := a.value(i); !a.taken[m] && accepts(m) {
				a.taken[m] = true
				return m
			}
		}
	}
	return 0
}

// inForeignRule reports whether the mark of another program's policy rule, reduced to our
// mask, equals the value. For example, wg-quick marks WireGuard's own packets with 0xca6c
// to route them past the tunnel. Our rule for the same value would match them first.
func (a *assignment) inForeignRule(mark uint32) bool {
	return slices.ContainsFunc(a.node.Inventory.Rules, func(r routing.Rule) bool {
		return r.Family == a.family && r.Mask != a.cfg.SNAT.Mark && r.Mark&r.Mask&a.cfg.SNAT.Mark == mark
	})
}

// used reports whether an interface has or had the value.
func (a *assignment) used(mark uint32) bool {
	return a.remembered(mark) || slices.ContainsFunc(a.ourRules(), func(r routing.Rule) bool { return r.Mark == mark })
}

func (a *assignment) remembered(mark uint32) bool {
	return slices.ContainsFunc(a.node.Bound, func(b Binding) bool { return b.Family == a.family && b.Mark == mark })
}

// ourRules returns the policy rules of an earlier plan that the kernel still has.
func (a *assignment) ourRules() []routing.Rule {
	return filter(a.node.Inventory.Rules, func(r routing.Rule) bool {
		return r.Family == a.family && r.Priority == a.cfg.SNAT.Priority && r.Mask == a.cfg.SNAT.Mark && !r.To.IsValid() && !r.Other && r.Table != routing.TableMain
	})
}

// routesVia reports whether a table has a default route through an interface.
func (a *assignment) routesVia(table int, link string) bool {
	return slices.ContainsFunc(a.node.Inventory.Defaults, func(r routing.Route) bool {
		return r.Family == a.family && r.Table == table && r.Link == link
	})
}

// deposit spreads the low bits of value over the bits of mask, lowest first.
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

// gather is the inverse of deposit: it packs the bits of value selected by mask.
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
