package trace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// Conditions and values of rules of nftables, in the JSON of libnftables-json(5). A value is a
// netip.Addr, a uint64, a string, a bool, or a []any of them (a concatenation).

// conditions may keep a rule from matching. An error means that this is unknown.
var conditions = map[string]func(*nativeRule, any) (bool, error){
	"match": (*nativeRule).match,
	// What these depend on cannot be read.
	"limit":    unsupported("limit"),
	"quota":    unsupported("quota"),
	"ct count": unsupported("ct count"),
	"xt":       unsupported("an extension of iptables"),
}

func unsupported(what string) func(*nativeRule, any) (bool, error) {
	return func(*nativeRule, any) (bool, error) { return false, errors.New("unsupported: " + what) }
}

// errAbsent is the error of a field that the packet does not have. A rule that needs it does
// not match.
var errAbsent = errors.New("the packet does not have this field")

func member(object any, name string) any {
	m, _ := object.(map[string]any)
	return m[name]
}

func number(value any) (uint64, bool) {
	switch v := value.(type) {
	case uint64:
		return v, true
	case float64:
		return uint64(v), true
	case string:
		n, err := strconv.ParseUint(v, 0, 64)
		return n, err == nil
	}
	return 0, false
}

func (r *nativeRule) match(body any) (bool, error) {
	left, err := r.value(member(body, "left"))
	switch {
	case errors.Is(err, errAbsent):
		return false, nil
	case err != nil:
		return false, err
	}
	op, right := member(body, "op"), member(body, "right")
	if have, ok := left.(tcpFlags); ok {
		return have.match(op, right)
	}
	switch op {
	case "==", "in":
		return r.equal(left, right)
	case "!=", "!": // "!": none of the flags is set
		is, err := r.equal(left, right)
		return !is, err
	}
	a, isNumber := number(left)
	b, isNumberToo := number(right)
	if !isNumber || !isNumberToo {
		return false, fmt.Errorf("unsupported comparison %v", op)
	}
	switch op {
	case "<":
		return a < b, nil
	case ">":
		return a > b, nil
	case "<=":
		return a <= b, nil
	case ">=":
		return a >= b, nil
	}
	return false, fmt.Errorf("unsupported comparison %v", op)
}

// equal reports whether a value of the packet equals a literal, or is within it if that is a
// prefix, a range or a set.
func (r *nativeRule) equal(have, want any) (bool, error) {
	if there, ok := have.(bool); ok && fmt.Sprint(want) == "0" { // no interface
		return !there, nil
	}
	switch w := want.(type) {
	case []any: // flags
		return r.among(have, w)
	case bool:
		return have == w, nil
	case map[string]any:
		return r.equalObject(have, w)
	case string:
		if name, ok := strings.CutPrefix(w, "@"); ok {
			elements, ok := r.Native.Sets[r.chain.In(name)]
			if !ok {
				return false, fmt.Errorf("unknown set %s", name)
			}
			return r.among(have, elements)
		}
	}
	return equalScalar(have, want)
}

// among reports whether one of several literals equals a value.
func (r *nativeRule) among(have any, literals []any) (bool, error) {
	var unknown error
	for _, l := range literals {
		is, err := r.equal(have, l)
		if is {
			return true, nil
		}
		unknown = cmp.Or(unknown, err)
	}
	return false, unknown
}

func (r *nativeRule) equalObject(have any, want map[string]any) (bool, error) {
	for name, body := range want {
		switch name {
		case "set":
			literals, ok := body.([]any)
			if !ok {
				literals = []any{body}
			}
			return r.among(have, literals)
		case "elem":
			return r.equal(have, member(body, "val"))
		case "prefix":
			return inPrefix(have, body)
		case "range":
			return between(have, body)
		case "concat":
			return r.equalParts(have, body)
		}
		value, err := r.value(want)
		if err != nil {
			return false, err
		}
		return equalScalar(have, value)
	}
	return false, errors.New("unsupported: an empty literal")
}

func (r *nativeRule) equalParts(have, want any) (bool, error) {
	parts, _ := have.([]any)
	literals, _ := want.([]any)
	if len(parts) != len(literals) {
		return false, errors.New("unsupported concatenation")
	}
	for i := range parts {
		if is, err := r.equal(parts[i], literals[i]); err != nil || !is {
			return false, err
		}
	}
	return true, nil
}

// inPrefix reports whether an address is within a prefix, or a mark has the first bits of one.
func inPrefix(have, prefix any) (bool, error) {
	bits, _ := member(prefix, "len").(float64)
	switch h := have.(type) {
	case netip.Addr:
		base, err := netip.ParseAddr(fmt.Sprint(member(prefix, "addr")))
		if err == nil {
			return netip.PrefixFrom(base, int(bits)).Contains(h), nil
		}
	case uint64:
		base, ok := number(member(prefix, "addr"))
		if ok && bits <= 32 {
			return (h^base)>>(32-int(bits)) == 0, nil
		}
	}
	return false, fmt.Errorf("unsupported prefix %v", prefix)
}

func between(have, ends any) (bool, error) {
	list, _ := ends.([]any)
	if len(list) != 2 {
		return false, fmt.Errorf("unsupported range %v", ends)
	}
	if a, ok := have.(netip.Addr); ok {
		from, err := netip.ParseAddr(fmt.Sprint(list[0]))
		to, errTo := netip.ParseAddr(fmt.Sprint(list[1]))
		return a.Compare(from) >= 0 && a.Compare(to) <= 0, errors.Join(err, errTo)
	}
	n, ok := number(have)
	from, okFrom := number(list[0])
	to, okTo := number(list[1])
	if !ok || !okFrom || !okTo {
		return false, fmt.Errorf("unsupported range %v", ends)
	}
	return n >= from && n <= to, nil
}

// tcpFlags are those of a packet.
type tcpFlags uint64

var tcpFlagNames = map[string]tcpFlags{"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128}

// flagsOf returns the flags of a literal: a name, a list of names, or a number.
func flagsOf(literal any) (out tcpFlags, ok bool) {
	switch l := literal.(type) {
	case string:
		out, ok = tcpFlagNames[l]
		return out, ok
	case float64:
		return tcpFlags(l), true
	case map[string]any:
		return flagsOf(l["|"])
	case []any:
		for _, name := range l {
			one, ok := flagsOf(name)
			if !ok {
				return 0, false
			}
			out |= one
		}
		return out, true
	}
	return 0, false
}

func (f tcpFlags) match(op, literal any) (bool, error) {
	want, ok := flagsOf(literal)
	switch {
	case ok && op == "==":
		return f == want, nil
	case ok && op == "in":
		return f&want != 0, nil
	case ok && op == "!=":
		return f != want, nil
	}
	return false, fmt.Errorf("unsupported comparison of TCP flags with %v", literal)
}

// tcpFlags returns the flags that the packet has.
func (p *packet) tcpFlags() tcpFlags {
	switch {
	case p.phase == Reply:
		return tcpFlagNames["syn"] | tcpFlagNames["ack"]
	case p.state == New:
		return tcpFlagNames["syn"]
	}
	return tcpFlagNames["ack"]
}

// flags are flags of a packet or connection that are known to be set or not.
type flags map[string]bool

// equalScalar compares values that nft may print as text or as numbers.
func equalScalar(have, want any) (bool, error) {
	switch h := have.(type) {
	case netip.Addr:
		if a, ok := want.(netip.Addr); ok {
			return a == h, nil
		}
		a, err := netip.ParseAddr(fmt.Sprint(want))
		return a == h, err
	case flags:
		is, known := h[fmt.Sprint(want)]
		if !known {
			return false, fmt.Errorf("unsupported flag %v", want)
		}
		return is, nil
	case uint64:
		n, ok := number(want)
		if !ok {
			return false, fmt.Errorf("unsupported value %v", want)
		}
		return n == h, nil
	case string:
		w, ok := want.(string)
		if !ok {
			return false, fmt.Errorf("unsupported value %v", want)
		}
		if prefix, isPattern := strings.CutSuffix(w, "*"); isPattern {
			return strings.HasPrefix(h, prefix), nil
		}
		return h == w, nil
	}
	return false, fmt.Errorf("unsupported value %v", want)
}

// value evaluates an expression.
func (r *nativeRule) value(expr any) (any, error) {
	switch e := expr.(type) {
	case float64:
		return uint64(e), nil
	case string:
		return e, nil
	case map[string]any:
		for name, body := range e {
			return r.operation(name, body)
		}
	}
	return nil, fmt.Errorf("unsupported expression %v", expr)
}

func (r *nativeRule) operation(name string, body any) (any, error) {
	switch name {
	case "payload":
		return r.payload(body)
	case "meta":
		return r.meta(member(body, "key"))
	case "ct":
		return r.conntrack(body)
	case "fib":
		return r.fib(body)
	case "exthdr": // packets of Services have none
		if member(body, "field") == nil {
			return false, nil
		}
		return nil, errAbsent
	case "map":
		return r.lookUpIn(body)
	case "concat":
		return r.concatenation(body)
	case "&", "|", "^", "<<", ">>":
		return r.binary(name, body)
	}
	return nil, fmt.Errorf("unsupported expression %s", name)
}

func (r *nativeRule) concatenation(body any) (any, error) {
	list, _ := body.([]any)
	var out []any
	for _, expr := range list {
		v, err := r.value(expr)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

func (r *nativeRule) binary(op string, body any) (any, error) {
	list, _ := body.([]any)
	if len(list) < 2 {
		return nil, fmt.Errorf("unsupported expression %s", op)
	}
	if have, err := r.value(list[0]); err == nil {
		if f, ok := have.(tcpFlags); ok && op == "&" {
			mask, ok := flagsOf(list[1])
			if !ok {
				return nil, fmt.Errorf("unsupported TCP flags %v", list[1])
			}
			return f & mask, nil
		}
	}
	var out uint64
	for i, expr := range list {
		v, err := r.value(expr)
		if err != nil {
			return nil, err
		}
		n, ok := number(v)
		if !ok {
			return nil, fmt.Errorf("unsupported operand %v", v)
		}
		switch {
		case i == 0:
			out = n
		case op == "&":
			out &= n
		case op == "|":
			out |= n
		case op == "^":
			out ^= n
		case op == "<<":
			out <<= n
		case op == ">>":
			out >>= n
		}
	}
	return out, nil
}

// lookUpIn returns the value that a map has for a key. A key that is not in the map is absent.
func (r *nativeRule) lookUpIn(body any) (any, error) {
	key, err := r.value(member(body, "key"))
	if err != nil {
		return nil, err
	}
	elements, _ := member(member(body, "data"), "set").([]any)
	if name, ok := member(body, "data").(string); ok {
		if elements, ok = r.Native.Sets[r.chain.In(strings.TrimPrefix(name, "@"))]; !ok {
			return nil, fmt.Errorf("unknown map %s", name)
		}
	}
	var fallback any
	for _, e := range elements {
		pair, _ := e.([]any)
		if len(pair) != 2 {
			continue
		}
		if pair[0] == "*" {
			fallback = pair[1]
			continue
		}
		is, err := r.equal(key, pair[0])
		if err != nil {
			return nil, err
		}
		if is {
			return r.element(pair[1])
		}
	}
	if fallback != nil {
		return r.element(fallback)
	}
	return nil, errAbsent
}

// element returns a value of a map: a verdict as it is.
func (r *nativeRule) element(value any) (any, error) {
	if object, ok := value.(map[string]any); ok {
		for _, verdict := range []string{"accept", "drop", "continue", "return", "jump", "goto"} {
			if _, ok := object[verdict]; ok {
				return object, nil
			}
		}
	}
	return r.value(value)
}

func (r *nativeRule) payload(body any) (any, error) {
	protocol, _ := member(body, "protocol").(string)
	field, _ := member(body, "field").(string)
	p := r.p
	switch protocol {
	case "ip", "ip6":
		if protocol != familyName(r.Family) {
			return nil, errAbsent
		}
	case "ether":
		if field == "type" {
			return familyName(r.Family), nil
		}
		return nil, fmt.Errorf("unsupported field ether %s", field)
	case "vlan":
		return nil, fmt.Errorf("unsupported field vlan %s", field)
	case "th":
		if p.protocol == ICMP || p.protocol == ICMPv6 {
			return nil, errAbsent
		}
	case "icmpv6":
		if p.protocol != ICMPv6 {
			return nil, errAbsent
		}
	default:
		if protocolName(p.protocol) != protocol {
			return nil, errAbsent
		}
	}
	switch field {
	case "saddr":
		return p.src.Addr(), nil
	case "daddr":
		return p.dst.Addr(), nil
	case "sport":
		return uint64(p.src.Port()), nil
	case "dport":
		return uint64(p.dst.Port()), nil
	case "protocol", "nexthdr":
		return protocolName(p.protocol), nil
	case "flags":
		if p.protocol == ip.TCP {
			return p.tcpFlags(), nil
		}
	}
	return nil, fmt.Errorf("unsupported field %s %s", protocol, field)
}

func protocolName(p ip.Protocol) string {
	switch p {
	case ICMP:
		return "icmp"
	case ICMPv6:
		return "ipv6-icmp"
	}
	return strings.ToLower(p.String())
}

func (r *nativeRule) meta(key any) (any, error) {
	p := r.p
	switch key {
	case "mark":
		return uint64(p.mark), nil
	case "iif", "iifname", "oif", "oifname":
		return r.link(key)
	case "ibrname":
		return r.bridgeName(p.in), nil
	case "obrname":
		return r.bridgeName(p.out), nil
	case "pkttype":
		return flags{"broadcast": false, "multicast": p.dst.Addr().IsMulticast(), "other": false}, nil
	case "l4proto":
		return protocolName(p.protocol), nil
	case "nfproto":
		return map[ip.Family]string{ip.IPv4: "ipv4", ip.IPv6: "ipv6"}[r.Family], nil
	case "protocol":
		return familyName(r.Family), nil
	}
	return nil, fmt.Errorf("unsupported field meta %v", key)
}

// link returns the interface by which the packet enters or leaves, "" if there is none
// (nft_meta_store_ifname). In chains of bridges it is a port.
func (r *nativeRule) link(key any) (any, error) {
	if r.base.Family == "bridge" {
		return nil, errors.New("unsupported: the port of a bridge")
	}
	if key == "iif" || key == "iifname" {
		return r.p.in, nil
	}
	return r.p.out, nil
}

// bridgeName returns the name of an interface if it is a bridge, or "".
func (r *nativeRule) bridgeName(link string) string {
	if r.isBridge(link) {
		return link
	}
	return ""
}

// conntrack returns a field of the connection. Its state is a word in lower case. A packet that
// is not tracked yet has the state "invalid" (nft_ct_get_eval).
func (r *nativeRule) conntrack(body any) (any, error) {
	p := r.p
	switch untracked := r.base.Hook == "ingress"; {
	case untracked && member(body, "key") == "state":
		return "invalid", nil
	case untracked:
		return nil, errAbsent
	case r.base.Family == "bridge":
		return nil, errors.New("unsupported: connections in chains of bridges")
	}
	switch key, _ := member(body, "key").(string); key {
	case "state":
		return strings.ToLower(string(p.state)), nil
	case "status":
		return flags{"dnat": p.conn.dnat, "snat": p.conn.snat}, nil
	case "mark":
		return uint64(p.conn.mark), nil
	case "direction":
		return strings.ToLower(p.direction()), nil
	case "ip saddr", "ip6 saddr", "saddr":
		if member(body, "dir") == "original" {
			return p.conn.source.Addr(), nil
		}
	case "l4proto", "protocol":
		return protocolName(p.protocol), nil
	}
	return nil, fmt.Errorf("unsupported field ct %v", member(body, "key"))
}

// fib returns the type of an address, or whether there is a route to it, by the interface on
// which the packet entered if that is among the flags (nft_fib4_eval, nft_fib6_eval).
func (r *nativeRule) fib(body any) (any, error) {
	by, _ := member(body, "flags").([]any)
	if f, ok := member(body, "flags").(string); ok {
		by = []any{f}
	}
	has := func(flag string) bool { return slices.Contains(by, any(flag)) }
	address := r.p.dst.Addr()
	if has("saddr") {
		address = r.p.src.Addr()
	}
	q := lookup{dst: address, in: "lo"}
	if has("mark") {
		q.mark = r.p.mark
	}
	byLink := has("iif")
	switch result := member(body, "result"); {
	case has("oif"):
	case result == "type" && !byLink:
		for name, kind := range map[string]string{"local": "LOCAL", "multicast": "MULTICAST"} {
			if is, err := r.isType(kind, address); err == nil && is {
				return name, nil
			}
		}
		return "unicast", nil
	case result == "oif" || result == "oifname":
		way, ok, _ := r.route(q)
		return byLink && r.p.in == "lo" || ok && !way.Local && (!byLink || way.Link == r.p.in), nil
	}
	return nil, fmt.Errorf("unsupported fib %v", body)
}
