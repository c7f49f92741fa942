package trace

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
)

// Chains that programs wrote with nftables directly stand between those of iptables, by
// priority.

// priorities of the chains of iptables' tables: NF_IP_PRI_* of <linux/netfilter_ipv4.h>.
// Table nat has two.
var priorities = map[nat.Table]int{nat.Raw: -300, nat.Mangle: -150, nat.NAT: -100, nat.Filter: 0, security: 50}

// security is a table that kube-ipvs does not use; the priority is that of iptables-legacy.
const security nat.Table = "security"

func (w *walk) hasSecurity() bool {
	return w.Ruleset[security].Chains != nil || w.Other[security].Chains != nil
}

const (
	sourceNATPriority = 100 // of nat in POSTROUTING
	ipvsPriority      = -99 // of IPVS in OUTPUT
)

// behindIPVS are the priorities of IPVS in other hooks (ip_vs_ops4 and ip_vs_ops6 of
// net/netfilter/ipvs/ip_vs_core.c). Chains from there on see what IPVS leaves in the hook: no
// requests to virtual servers, and replies with the VIP as their source.
var behindIPVS = map[string]int{"INPUT": 98, "FORWARD": 100}

// hookNames are nftables' names of the hooks.
var hookNames = map[string]string{
	"PREROUTING": "prerouting", "INPUT": "input", "FORWARD": "forward", "OUTPUT": "output", "POSTROUTING": "postrouting",
}

// span returns the priorities of the chains that are traversed with tables of a hook. Those of
// OUTPUT are split: before nat, with nat, and after IPVS. Those of INPUT and FORWARD end at IPVS:
// see rest.
func span(hook string, tables []nat.Table) (first, last int) {
	first, last = math.MinInt32, math.MaxInt32
	if from, ok := behindIPVS[hook]; ok {
		return first, from - 1
	}
	if hook != "OUTPUT" {
		return first, last
	}
	switch tables[0] {
	case nat.NAT:
		return priorities[nat.NAT], ipvsPriority
	case nat.Filter:
		return ipvsPriority + 1, last
	}
	return first, priorities[nat.NAT] - 1
}

// rest follows a packet through the chains of INPUT or FORWARD that come after IPVS.
func (w *walk) rest(hook string, p *packet) end {
	return w.native(hook, behindIPVS[hook], math.MaxInt32, true, p)
}

func priority(hook string, table nat.Table) int {
	if hook == "POSTROUTING" && table == nat.NAT {
		return sourceNATPriority
	}
	return priorities[table]
}

// native follows a packet through the base chains with priorities from first to last. Those of
// type nat follow iptables' table nat: they see no packet that it does not see.
func (w *walk) native(hook string, first, last int, nats bool, p *packet) end {
	if w.Native == nil || first > last {
		return undecided
	}
	for _, c := range w.Native.Base {
		switch {
		case c.Hook != hookNames[hook] || c.Priority < first || c.Priority > last:
			continue
		case c.Family != "inet" && c.Family != familyName(w.Family):
			continue
		case c.Type == "nat" && !(nats && p.seesNAT()):
			continue
		}
		if verdict := w.nativeBase(c, p); verdict == dropped || verdict == refused {
			return verdict
		}
	}
	return undecided
}

// nativeBase evaluates a base chain and its policy.
func (w *walk) nativeBase(c *nft.Chain, p *packet) end {
	before := p.mark
	verdict, _ := w.nativeChain(c, c, p)
	if c.Hook == "output" && c.Type == "filter" && w.routedBy == before {
		w.routedBy = p.mark
	}
	if verdict == undecided && c.Policy == "drop" {
		w.note(c.String(), p, "", "the chain's policy is drop")
		return dropped
	}
	return verdict
}

func familyName(f ip.Family) string {
	if f == ip.IPv6 {
		return "ip6"
	}
	return "ip"
}

// nativeChain returns the verdict of a chain, or undecided at its end. base is the base chain
// from which it is reached.
func (w *walk) nativeChain(base, c *nft.Chain, p *packet) (_ end, found bool) {
	if c == nil {
		return undecided, false
	}
	for _, r := range c.Rules {
		w.rules++
		e := &nativeRule{walk: w, base: base, chain: c, rule: r, p: p}
		if verdict, ends := e.evaluate(); ends {
			return verdict, true
		}
	}
	return undecided, true
}

// nativeRule is the evaluation of one rule of nftables.
type nativeRule struct {
	*walk
	base, chain *nft.Chain
	rule        *nft.Rule
	p           *packet
	unknown     error // why it is unknown whether the rule matches
}

// evaluate returns the verdict of a rule. ends reports whether the chain ends with it. The
// verdict is undecided if the rule returns.
func (r *nativeRule) evaluate() (verdict end, ends bool) {
	for _, expr := range r.rule.Expr {
		for name, body := range expr {
			if condition, ok := conditions[name]; ok {
				is, err := condition(r, body)
				switch {
				case err != nil:
					r.unknown = err
				case !is:
					return undecided, false
				}
				continue
			}
			if isHarmless(name, body) {
				continue
			}
			if r.unknown != nil && !r.assumed("%s: %s: %s", r.chain, r.rule.Text, r.unknown) {
				return undecided, false
			}
			r.unknown = nil
			if verdict, ends := r.execute(name, body); ends {
				return verdict, true
			}
		}
	}
	return undecided, false
}

// harmless are statements that change nothing that matters here.
var harmless = map[string]bool{
	"counter": true, "log": true, "notrack": true, "set": true, "ct helper": true, "ct timeout": true,
	"ct expectation": true, "last": true, "dup": true, "secmark": true, "continue": true,
}

// isHarmless reports whether a statement changes nothing that matters here. Of the fields that
// mangle sets, only marks, addresses and ports matter.
func isHarmless(name string, body any) bool {
	if name != "mangle" {
		return harmless[name]
	}
	key := member(body, "key")
	if payload := member(key, "payload"); payload != nil {
		field, _ := member(payload, "field").(string)
		return !slices.Contains([]string{"saddr", "daddr", "sport", "dport"}, field)
	}
	return member(member(key, "meta"), "key") != "mark" && member(member(key, "ct"), "key") != "mark"
}

// execute executes a statement.
func (r *nativeRule) execute(name string, body any) (verdict end, ends bool) {
	switch name {
	case "accept":
		r.say("accepted")
		return accepted, true
	case "drop":
		r.say("dropped")
		return dropped, true
	case "reject":
		r.say("refused")
		return refused, true
	case "return":
		return undecided, true
	case "jump", "goto":
		return r.jump(name, body)
	case "vmap":
		return r.verdictMap(body)
	case "mangle":
		if err := r.mangle(body); err != nil && r.assumed("%s: %s: %s", r.chain, r.rule.Text, err) {
			r.say("assumed to be dropped")
			return dropped, true
		}
		return undecided, false
	case "snat", "dnat", "masquerade", "redirect":
		return r.translate(name, body)
	}
	if r.assumed("%s: %s: unsupported statement %s", r.chain, r.rule.Text, name) {
		r.say("assumed to be dropped")
		return dropped, true
	}
	return undecided, false
}

func (r *nativeRule) say(format string, args ...any) {
	r.note(r.chain.String(), r.p, r.rule.Text, format, args...)
}

func (r *nativeRule) jump(name string, body any) (end, bool) {
	target, _ := member(body, "target").(string)
	verdict, found := r.nativeChain(r.base, r.Native.Chains[r.chain.In(target)], r.p)
	if !found {
		r.doubt("%s: %s: unknown chain %s", r.chain, r.rule.Text, target)
	}
	return verdict, verdict != undecided || name == "goto"
}

// verdictMap executes the verdict that a map has for a key.
func (r *nativeRule) verdictMap(body any) (end, bool) {
	value, err := r.lookUpIn(body)
	if errors.Is(err, errAbsent) {
		return undecided, false
	}
	if err != nil {
		if !r.assumed("%s: %s: %s", r.chain, r.rule.Text, err) {
			return undecided, false
		}
		r.say("assumed to be dropped")
		return dropped, true
	}
	verdict, _ := value.(map[string]any)
	for name, body := range verdict {
		if !harmless[name] {
			return r.execute(name, body)
		}
	}
	return undecided, false
}

// mangle sets the mark of the packet or of the connection.
func (r *nativeRule) mangle(body any) error {
	if member(member(body, "key"), "payload") != nil {
		return errors.New("unsupported: it sets an address or a port")
	}
	value, err := r.value(member(body, "value"))
	if errors.Is(err, errAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	mark, ok := number(value)
	if !ok {
		return fmt.Errorf("unsupported mark %v", value)
	}
	if member(member(body, "key"), "ct") != nil {
		r.p.conn.mark = uint32(mark)
		r.say("connmark %#x", r.p.conn.mark)
	} else {
		r.p.mark = uint32(mark)
		r.say("mark %#x", r.p.mark)
	}
	return nil
}

// translate sets another source or destination for the connection. It ends the chain.
func (r *nativeRule) translate(name string, body any) (end, bool) {
	address, port, err := r.translation(name, body)
	if err != nil || name != "redirect" && !address.IsValid() {
		if r.assumed("%s: %s: no address to translate to", r.chain, r.rule.Text) {
			r.say("assumed to be dropped")
			return dropped, true
		}
		return accepted, true
	}
	p := r.p
	switch {
	case name == "redirect" && !address.IsValid():
		r.say("dropped: %s has no address", p.in)
		return dropped, true
	case name == "snat" || name == "masquerade":
		p.src, p.conn.snat = netip.AddrPortFrom(address, p.src.Port()), true
		r.say("source becomes %s", address)
	default:
		if port == 0 {
			port = p.dst.Port()
		}
		p.dst, p.conn.dnat = netip.AddrPortFrom(address, port), true
		r.say("destination becomes %s", p.dst)
	}
	return accepted, true
}

// translation returns the new address and, unless it is 0, the new port.
func (r *nativeRule) translation(name string, body any) (address netip.Addr, port uint16, err error) {
	if given := member(body, "port"); given != nil {
		value, err := r.value(first(given))
		if err != nil {
			return address, 0, err
		}
		n, _ := number(value)
		port = uint16(n)
	}
	switch name {
	case "masquerade":
		return r.masquerade(r.p), port, nil
	case "redirect":
		return r.redirected(r.p), port, nil
	}
	given := member(body, "addr")
	if given == nil {
		if name == "dnat" {
			return r.p.dst.Addr(), port, nil
		}
		return r.p.src.Addr(), port, nil
	}
	value, err := r.value(first(given))
	if err != nil {
		return address, port, err
	}
	switch a := value.(type) {
	case netip.Addr:
		return a, port, nil
	case string:
		address, err = netip.ParseAddr(a)
		return address, port, err
	}
	return address, port, fmt.Errorf("unsupported address %v", value)
}

// first returns the first value of a range.
func first(value any) any {
	if ends, ok := member(value, "range").([]any); ok && len(ends) > 0 {
		return ends[0]
	}
	return value
}
