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

// bindings assigns to the primary interface and to each ENI its previous value or a free one, and
// the first value to a primary interface that had none. It never assigns a value that conflicts with
// another program's marks. ENIs are left out once the values run out. There are no bindings if the
// primary interface has no value, or if our policy rules would precede that of table local. With
// reserve, no ENI newly gets the value of branches (branchMark).
//
// The primary interface stays bound once there was an ENI: an ENI that is set down
// and up again, for example to be renamed, is briefly not recognized as one. If a
// packet of a masqueraded flow then lacked its mark and left through the ENI, the
// kernel would drop the flow's conntrack entry (nf_nat_oif_changed).
func bindings(cfg *Config, n *Node, family ip.Family, found []ENI, reserve bool) []Binding {
	a := assignment{cfg: cfg, node: n, family: family, taken: map[uint32]bool{}}
	primary := primaryLink(&n.Inventory, family)
	if primary == "" || localIsLate(cfg, n, family) || len(found) == 0 && !slices.ContainsFunc(n.Bound, a.isPrimary) {
		return nil
	}
	out := []Binding{{Family: family, Link: primary, Index: linkIndex(&n.Inventory, primary), Table: routing.TableMain, Mark: a.previousOfPrimary()}}
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
	if out[0].Mark == 0 {
		return nil
	}
	return slices.DeleteFunc(out, func(b Binding) bool { return b.Mark == 0 })
}

// localIsLate reports whether table local is looked up after the policy rules of reply routing, as on
// nodes with a VRF, whose administrators move it to priority 32765. Packets to a VIP that carry a
// value would leave the node.
func localIsLate(cfg *Config, n *Node, family ip.Family) bool {
	at := slices.IndexFunc(n.Inventory.Rules, func(r routing.Rule) bool {
		return r == routing.Rule{Family: family, Priority: r.Priority, Table: routing.TableLocal}
	})
	return at >= 0 && n.Inventory.Rules[at].Priority > cfg.SNAT.Priority
}

// MergeBindings returns the bindings of a new plan, and those earlier ones that share neither value nor
// interface with a new one.
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

// value returns the i-th value, for i from 1.
func (a *assignment) value(i int) uint32 { return deposit(uint32(i), a.cfg.SNAT.Mark) }

// isPrimary reports whether a binding is that of the primary interface.
func (a *assignment) isPrimary(b Binding) bool {
	return b.Family == a.family && b.Table == routing.TableMain
}

// previousOfPrimary returns the value that the primary interface had before, whichever interface
// that was, or the first value. It returns 0 if that value is not available.
func (a *assignment) previousOfPrimary() uint32 {
	if at := slices.IndexFunc(a.node.Bound, a.isPrimary); at >= 0 {
		return a.ifAvailable(a.node.Bound[at].Mark)
	}
	if at := slices.IndexFunc(a.node.Inventory.Rules, a.isRuleOfPrimary); at >= 0 {
		return a.ifAvailable(a.node.Inventory.Rules[at].Mark)
	}
	return a.ifAvailable(a.value(1))
}

// isRuleOfPrimary reports whether a policy rule is that of the primary interface in an earlier plan.
func (a *assignment) isRuleOfPrimary(r routing.Rule) bool {
	return r == routing.Rule{
		Family: a.family, Priority: a.cfg.SNAT.Priority, Mark: r.Mark, Mask: a.cfg.SNAT.Mark, Table: routing.TableMain, Own: r.Own,
	}
}

// previous returns the value that an interface had before, or 0 if it had none or that value is not
// available.
func (a *assignment) previous(b Binding) uint32 {
	known := func(o Binding) bool {
		return o.Family == a.family && o.Index == b.Index && o.Table != routing.TableMain
	}
	if at := slices.IndexFunc(a.node.Bound, known); at >= 0 {
		return a.ifAvailable(a.node.Bound[at].Mark)
	}
	for _, r := range a.ourRules() {
		if a.routesVia(r.Table, b.Link) && !a.remembered(r.Mark) {
			return a.ifAvailable(r.Mark)
		}
	}
	return 0
}

// ifAvailable returns a value, or 0 if a present interface has it or another program's marks
// conflict with it.
func (a *assignment) ifAvailable(mark uint32) uint32 {
	if a.taken[mark] || conflictsWithMarks(a.cfg, a.node, a.family, mark) {
		return 0
	}
	return mark
}

// maxValues limits how many values are tried for an interface: a wide mask has millions.
const maxValues = 1 << 10

// free takes and returns the lowest available value, or 0 if there is none. It prefers values that
// no interface had before, because flows of a removed interface may still carry them.
func (a *assignment) free() uint32 {
	last := min(1<<bits.OnesCount32(a.cfg.SNAT.Mark)-1, maxValues)
	for _, mayBeUsed := range []bool{false, true} {
		for i := 1; i <= last; i++ {
			if m := a.ifAvailable(a.value(i)); m != 0 && (mayBeUsed || !a.used(m)) {
				a.taken[m] = true
				return m
			}
		}
	}
	return 0
}

// conflictsWithMarks reports whether a value of reply routing conflicts with another program:
//
//   - A mark of that program, reduced to our mask, equals the value. Our policy rule would route its
//     packets. For example, wg-quick marks WireGuard's own packets with 0xca6c to route them past the
//     tunnel.
//   - A policy rule of that program precedes ours and matches the value, as far as the bits of our
//     mask decide. It would route our packets. For example, strongSwan's rule has priority 220.
func conflictsWithMarks(cfg *Config, n *Node, family ip.Family, value uint32) bool {
	ours := cfg.SNAT.Mark
	return n.foreignMark(family, func(m uint32) bool { return m&ours == value }) ||
		slices.ContainsFunc(n.Inventory.Rules, func(r routing.Rule) bool {
			mark := r.Mark & r.Mask
			return r.Family == family && !r.Own && !r.Invert && mark != 0 && r.Priority <= cfg.SNAT.Priority &&
				r.Mask&ours != 0 && mark&ours == value&r.Mask
		})
}

// hasConflictingValue reports whether conflictsWithMarks holds for any value that may be assigned.
func hasConflictingValue(cfg *Config, n *Node, family ip.Family) bool {
	if conflictsWithMarks(cfg, n, family, cfg.SNAT.Mark) {
		return true
	}
	for i := 1; i <= min(1<<bits.OnesCount32(cfg.SNAT.Mark)-1, maxValues); i++ {
		if conflictsWithMarks(cfg, n, family, deposit(uint32(i), cfg.SNAT.Mark)) {
			return true
		}
	}
	return false
}

// used reports whether an interface has or had the value.
func (a *assignment) used(mark uint32) bool {
	return a.remembered(mark) || slices.ContainsFunc(a.ourRules(), func(r routing.Rule) bool { return r.Mark == mark })
}

// remembered reports whether an interface has or had the value since the process started.
func (a *assignment) remembered(mark uint32) bool {
	return slices.ContainsFunc(a.node.Bound, func(b Binding) bool { return b.Family == a.family && b.Mark == mark })
}

// ourRules returns the policy rules of ENIs from an earlier plan that the kernel still has.
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
