package routing

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/nlmsg"
)

// Removal is a deleted object of ours: a Rule that another program deleted and Watch has
// restored; or, deleted by any program or by Apply, an address of DummyLink or a local route to
// a single address in Table.
type Removal struct {
	Rule  Rule
	Addr  netip.Addr
	Table int // 0: an address
}

// Guard makes Watch restore these rules as soon as another program deletes them, before its
// callbacks are called. systemd-networkd deletes all rules that it does not know when it
// starts; until ours are restored, packets leave by the wrong interface. Guard replaces the
// rules of the last call. Call it before Apply deletes one of those.
func (n *Netlink) Guard(rules []Rule) { n.guard.set(rules) }

// guard holds the rules that Guard was given.
type guard struct {
	mu       sync.Mutex
	rules    map[Rule]struct{}
	began    time.Time // start of the period in which restored counts
	restored int
}

// At most maxRestored rules are restored at once in each restorePeriod. If another
// program keeps deleting rules, the rest is left to the slower resync.
const (
	maxRestored   = 256
	restorePeriod = 10 * time.Second
)

func (g *guard) set(rules []Rule) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rules = make(map[Rule]struct{}, len(rules))
	for _, r := range rules {
		g.rules[r] = struct{}{}
	}
}

// restore adds the guarded rules again that a change of a rule removed: the rule itself or,
// if it was part of a SkipLocal rule or a rule of table local, the SkipLocal rules. It
// returns the rules that were missing, and false if any could not be restored.
func (g *guard) restore(s stack, changed rawRule, deleted bool) (removals []Removal, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	ok = true
	for r := range g.rules {
		if !concerns(changed, deleted, r) {
			continue
		}
		if in, err := inEffect(s, r); err == nil && in {
			continue
		}
		if !g.allowed(time.Now()) || change(s, Change{Op: AddRule, Rule: r}, nil) != nil {
			ok = false
		} else {
			removals = append(removals, Removal{Rule: r})
		}
	}
	return removals, ok
}

// concerns reports whether a change of one of the kernel's rules may affect a guarded rule.
func concerns(changed rawRule, deleted bool, r Rule) bool {
	if r.Action == SkipLocal {
		return r.Family == changed.Family && (deleted && changed.part() || changed.localRule())
	}
	return deleted && changed == rawRule{r, Protocol}
}

// inEffect reports whether a rule exists and is in effect.
func inEffect(s stack, r Rule) (bool, error) {
	rules, err := s.rawRules(r.Family)
	if r.Action == SkipLocal {
		return slices.Contains(exemptions(rules), r), err
	}
	return slices.Contains(rules, rawRule{r, Protocol}), err
}

func (g *guard) allowed(now time.Time) bool {
	if now.Sub(g.began) > restorePeriod {
		g.began, g.restored = now, 0
	}
	g.restored++
	return g.restored <= maxRestored
}

// actionsByNumber are the actions of rules that can be read.
var actionsByNumber = map[uint8]Action{unix.FR_ACT_TO_TBL: Lookup, unix.FR_ACT_GOTO: Goto, unix.FR_ACT_NOP: Nop}

// parseRule parses a message about a rule: a struct fib_rule_hdr and attributes. It ignores
// conditions that our rules never have.
func parseRule(data []byte) (rawRule, bool) {
	const header = 12
	if len(data) < header {
		return rawRule{}, false
	}
	r := rawRule{Rule: Rule{Family: ip.IPv4, Table: int(data[4])}}
	if data[0] == unix.AF_INET6 {
		r.Family = ip.IPv6
	}
	action, known := actionsByNumber[data[7]]
	r.Action, r.Other = action, !known
	r.Invert = binary.NativeEndian.Uint32(data[8:])&unix.FIB_RULE_INVERT != 0
	attributes, err := nlmsg.Attributes(data[header:])
	for _, a := range attributes {
		r.attribute(a, int(data[1]), int(data[2]))
	}
	if r.Action != Lookup {
		r.Table = 0
	}
	return r, err == nil
}

func (r *rawRule) attribute(a syscall.NetlinkRouteAttr, toBits, fromBits int) {
	number := func() uint32 {
		if len(a.Value) < 4 {
			return 0
		}
		return binary.NativeEndian.Uint32(a.Value)
	}
	switch a.Attr.Type {
	case unix.FRA_DST:
		r.To = netip.PrefixFrom(address(a.Value), toBits)
	case unix.FRA_SRC:
		r.From = netip.PrefixFrom(address(a.Value), fromBits)
	case unix.FRA_IIFNAME:
		r.IIf = unix.ByteSliceToString(a.Value)
	case unix.FRA_OIFNAME:
		r.OIf = unix.ByteSliceToString(a.Value)
	case unix.FRA_GOTO:
		r.Target = int(number())
	case unix.FRA_PRIORITY:
		r.Priority = int(number())
	case unix.FRA_FWMARK:
		r.Mark = number()
	case unix.FRA_FWMASK:
		r.Mask = number()
	case unix.FRA_TABLE:
		r.Table = int(number())
	case unix.FRA_PROTOCOL:
		if len(a.Value) > 0 {
			r.protocol = a.Value[0]
		}
	}
}

// removedAddress parses a message about an address (struct ifaddrmsg).
func removedAddress(data []byte) (Removal, bool) {
	a, ok := attributeOf(data, unix.SizeofIfAddrmsg, unix.IFA_LOCAL)
	if !ok {
		a, ok = attributeOf(data, unix.SizeofIfAddrmsg, unix.IFA_ADDRESS)
	}
	return Removal{Addr: address(a)}, ok && address(a).IsValid()
}

// removedRoute parses a message about a route (struct rtmsg). It returns false unless the
// route is to a single address.
func removedRoute(data []byte) (Removal, bool) {
	dst, ok := attributeOf(data, unix.SizeofRtMsg, unix.RTA_DST)
	if !ok || 8*len(dst) != int(data[1]) || !address(dst).IsValid() {
		return Removal{}, false
	}
	table := int(data[4])
	if t, ok := uint32Of(data, unix.SizeofRtMsg, unix.RTA_TABLE); ok {
		table = int(t)
	}
	return Removal{Addr: address(dst), Table: table}, true
}

// attributeOf returns the value of the first attribute of a kind, after a message header of
// the given size.
func attributeOf(data []byte, header int, kind uint16) ([]byte, bool) {
	if len(data) < header {
		return nil, false
	}
	list, _ := nlmsg.Attributes(data[header:])
	for _, a := range list {
		if a.Attr.Type == kind {
			return a.Value, true
		}
	}
	return nil, false
}

// uint32Of returns the number in the first attribute of a kind, after a message header of the
// given size.
func uint32Of(data []byte, header int, kind uint16) (uint32, bool) {
	value, ok := attributeOf(data, header, kind)
	if !ok || len(value) < 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(value), true
}
