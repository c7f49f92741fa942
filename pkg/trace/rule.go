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
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// rule is a compiled iptables rule.
type rule struct {
	text       nat.Rule
	conditions []condition
	target     string
	options    map[string][]string // options of the target with their arguments
	isGoto     bool                // -g, not -j
	err        error               // set if part of the rule is unsupported
}

// condition evaluates one condition.
type condition struct {
	not   bool
	holds func(*walk, *packet) (bool, error)
}

// match is the text of one condition.
type match struct {
	module, option string
	args           []string
}

// parse parses a rule of iptables-save.
func parse(text nat.Rule) *rule {
	words, err := nat.Words(string(text))
	out := &rule{text: text, options: map[string][]string{}, err: err}
	module, not := "", false
	var reverse *reversePathMatch
	for len(words) > 0 {
		if words[0] == "!" {
			not, words = true, words[1:]
			continue
		}
		option, args := words[0], arguments(words)
		words = words[1+len(args):]
		switch {
		case option == "-m":
			module = strings.Join(args, " ")
			if module == "rpfilter" {
				reverse = &reversePathMatch{}
				out.conditions = append(out.conditions, condition{false, reverse.holds})
			}
		case option == "-j" || option == "-g":
			out.target, out.isGoto = strings.Join(args, " "), option == "-g"
		case out.target != "":
			out.options[option] = args
		case module == "rpfilter":
			reverse.set(option)
		default:
			if holds := compile(match{module: module, option: option, args: args}); holds != nil {
				out.conditions = append(out.conditions, condition{not, holds})
			}
		}
		not = false
	}
	return out
}

// arguments returns the words between an option and the next one. A comment is one
// word, whatever it begins with.
func arguments(words []string) []string {
	option, words := words[0], words[1:]
	if option == "--comment" && len(words) > 0 {
		return words[:1]
	}
	i := slices.IndexFunc(words, func(w string) bool { return w == "!" || strings.HasPrefix(w, "-") })
	if i < 0 {
		return words
	}
	return words[:i]
}

// option returns an option of the target with its arguments.
func (r rule) option(name string) (args string, given bool) {
	words, given := r.options[name]
	return strings.Join(words, " "), given
}

// matches reports whether all conditions of a rule hold for a packet. An unknown
// condition is an error, unless another one fails.
func (w *walk) matches(r *rule, p *packet) (bool, error) {
	err := r.err
	w.eval.Evaluated++
	for i := range r.conditions {
		w.eval.Evaluated++
		is, e := r.conditions[i].holds(w, p)
		switch {
		case e != nil:
			err = cmp.Or(err, e)
		case is == r.conditions[i].not:
			return false, nil
		}
	}
	return err == nil, err
}

// near reports a rule that exactly one condition keeps from matching.
func (w *walk) near(table nat.Table, chain string, index int, r *rule, p *packet) {
	failed := -1
	for i := range r.conditions {
		is, err := r.conditions[i].holds(w, p)
		if err == nil && is != r.conditions[i].not {
			continue
		}
		if failed >= 0 {
			return
		}
		failed = i
	}
	if failed >= 0 {
		w.eval.Near(table, chain, index, failed)
	}
}

// compile returns nil for options that are no condition.
func compile(m match) func(*walk, *packet) (bool, error) {
	arg := ""
	if len(m.args) > 0 {
		arg = m.args[0]
	}
	switch m.option {
	case "-s", "-d":
		source := m.option == "-s"
		prefix, err := parsePrefix(arg)
		return func(_ *walk, p *packet) (bool, error) {
			return err == nil && prefix.Contains(pick(source, p).Addr()), err
		}
	case "-i":
		return func(_ *walk, p *packet) (bool, error) { return isLink(arg, p.in), nil }
	case "-o":
		return func(_ *walk, p *packet) (bool, error) { return isLink(arg, p.out), nil }
	case "-p":
		return func(_ *walk, p *packet) (bool, error) { return protocolIs(arg, p.protocol) }
	case "--comment", "--limit-iface-in", "--limit-iface-out", "--return-nomatch":
		return nil
	case "--match-set":
		return matchSet(arg, m.args)
	}
	return compileModule(m, arg)
}

func matchSet(name string, args []string) func(*walk, *packet) (bool, error) {
	return func(w *walk, p *packet) (bool, error) {
		if len(args) < 2 {
			return false, errors.New("--match-set has no directions")
		}
		_, entry, is, known := w.member(name, args[1], p)
		if !known {
			return false, fmt.Errorf("unknown set %s", name)
		}
		if is && w.eval.Member != nil {
			w.eval.Member(name, entry)
		}
		return is, nil
	}
}

func compileModule(m match, arg string) func(*walk, *packet) (bool, error) {
	switch m.option {
	case "--mark":
		value, mask, err := parseMark(arg)
		if m.module == "connmark" {
			return func(_ *walk, p *packet) (bool, error) { return p.conn.mark&mask == value, err }
		}
		return func(_ *walk, p *packet) (bool, error) { return p.mark&mask == value, err }
	case "--ctstate", "--state":
		states := strings.Split(arg, ",")
		return func(_ *walk, p *packet) (bool, error) { return slices.Contains(states, string(p.state)), nil }
	case "--ctorigsrc", "--ctorigdst":
		source := m.option == "--ctorigsrc"
		prefix, err := parsePrefix(arg)
		return func(_ *walk, p *packet) (bool, error) {
			original := p.conn.destination
			if source {
				original = p.conn.source
			}
			return err == nil && prefix.Contains(original.Addr()), err
		}
	case "--ctdir":
		return func(_ *walk, p *packet) (bool, error) { return arg == p.direction(), nil }
	case "--src-type", "--dst-type":
		source := m.option == "--src-type"
		return func(w *walk, p *packet) (bool, error) { return w.isType(arg, pick(source, p).Addr()) }
	case "--sport", "--dport", "--sports", "--dports":
		source := strings.HasPrefix(m.option, "--s")
		return func(_ *walk, p *packet) (bool, error) { return inPorts(arg, pick(source, p).Port()) }
	case "--physdev-is-in":
		return func(w *walk, p *packet) (bool, error) {
			l, _ := w.Link(p.in)
			return l.Type == "bridge", nil
		}
	case "--tcp-flags":
		return matchTCPFlags(m.args)
	case "--syn":
		return matchTCPFlags([]string{"FIN,SYN,RST,ACK", "SYN"})
	case "--vaddr", "--vport", "--vproto", "--vdir", "--ipvs":
		return func(_ *walk, p *packet) (bool, error) { return isVirtual(m.option, arg, p) }
	case "--icmp-type", "--icmpv6-type":
		echo := arg == "8" || arg == "128"
		return func(_ *walk, p *packet) (bool, error) { return echo && p.isEcho(), nil }
	}
	if extensionHeaders[m.module] {
		return func(*walk, *packet) (bool, error) { return false, nil }
	}
	err := fmt.Errorf("unsupported match %s", strings.TrimSpace(m.module+" "+m.option))
	return func(*walk, *packet) (bool, error) { return false, err }
}

// extensionHeaders are matches of headers that packets of Services do not have.
var extensionHeaders = map[string]bool{"rt": true, "frag": true, "hbh": true, "dst": true, "ah": true, "esp": true}

// matchTCPFlags matches packets of TCP whose flags among the first list are those of the second.
func matchTCPFlags(args []string) func(*walk, *packet) (bool, error) {
	if len(args) != 2 {
		return func(*walk, *packet) (bool, error) { return false, errors.New("--tcp-flags needs two lists") }
	}
	mask, ofMask := flagsOf(flagList(args[0]))
	want, ofWant := flagsOf(flagList(args[1]))
	if !ofMask || !ofWant {
		return func(*walk, *packet) (bool, error) { return false, fmt.Errorf("unsupported TCP flags %v", args) }
	}
	return func(_ *walk, p *packet) (bool, error) { return p.protocol == ip.TCP && p.tcpFlags()&mask == want, nil }
}

// flagList returns a list of flags as nft prints it.
func flagList(text string) any {
	switch text {
	case "ALL":
		text = "FIN,SYN,RST,PSH,ACK,URG"
	case "NONE":
		return float64(0)
	}
	var out []any
	for _, name := range strings.Split(strings.ToLower(text), ",") {
		out = append(out, name)
	}
	return out
}

func pick(source bool, p *packet) netip.AddrPort {
	if source {
		return p.src
	}
	return p.dst
}

func isLink(pattern, name string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "+"); ok {
		return strings.HasPrefix(name, prefix)
	}
	return pattern == name
}

// parsePrefix parses a prefix or a single address.
func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}

func protocolIs(text string, p ip.Protocol) (bool, error) {
	if number, err := strconv.Atoi(text); err == nil {
		return number == 0 || number == int(p), nil
	}
	switch text {
	case "all":
		return true, nil
	case "icmp":
		return p == ICMP, nil
	case "ipv6-icmp", "icmpv6":
		return p == ICMPv6, nil
	}
	return strings.EqualFold(text, p.String()), nil
}

func inPorts(text string, port uint16) (bool, error) {
	for _, part := range strings.Split(text, ",") {
		from, to, isRange := strings.Cut(part, ":")
		first, err := strconv.ParseUint(from, 10, 16)
		if err != nil {
			return false, err
		}
		last := first
		if isRange {
			if last, err = strconv.ParseUint(to, 10, 16); err != nil {
				return false, err
			}
		}
		if uint64(port) >= first && uint64(port) <= last {
			return true, nil
		}
	}
	return false, nil
}

// parseMark parses "0x4000/0x4000", or a mark without a mask.
func parseMark(text string) (value, mask uint32, err error) {
	left, right, masked := strings.Cut(text, "/")
	v, err := strconv.ParseUint(left, 0, 32)
	if err != nil || !masked {
		return uint32(v), ^uint32(0), err
	}
	m, err := strconv.ParseUint(right, 0, 32)
	return uint32(v), uint32(m), err
}

// isType supports the address types that affect Service traffic. BROADCAST, ANYCAST and
// BLACKHOLE never match, because addresses of Service traffic are unicast.
func (n *Node) isType(kind string, a netip.Addr) (bool, error) {
	isLocal := n.Local(a)
	switch kind {
	case "LOCAL":
		return isLocal, nil
	case "UNICAST":
		return !isLocal && !a.IsMulticast(), nil
	case "MULTICAST":
		return a.IsMulticast(), nil
	case "BROADCAST", "ANYCAST", "BLACKHOLE":
		return false, nil
	}
	return false, fmt.Errorf("unsupported address type %s", kind)
}

func isVirtual(option, arg string, p *packet) (bool, error) {
	if p.virtual == nil {
		return false, nil
	}
	switch option {
	case "--vaddr":
		prefix, err := parsePrefix(arg)
		return err == nil && prefix.Contains(p.virtual.Addr), err
	case "--vport":
		return arg == fmt.Sprint(p.virtual.Port), nil
	case "--vproto":
		return protocolIs(arg, p.virtual.Protocol)
	case "--vdir":
		return arg == p.direction(), nil
	}
	return true, nil
}
