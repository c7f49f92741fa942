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

// rule is one of iptables, in words.
type rule struct {
	matches []match
	target  string
	options map[string][]string // of the target, with their arguments
	jumps   bool                // -g, not -j
	err     error               // something that is not known here
}

// match is one condition.
type match struct {
	module, option string
	args           []string
	not            bool
}

// parse reads a rule of iptables-save.
func parse(r nat.Rule) rule {
	words, err := nat.Words(string(r))
	out := rule{options: map[string][]string{}, err: err}
	module, not := "", false
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
		case option == "-j" || option == "-g":
			out.target, out.jumps = strings.Join(args, " "), option == "-g"
		case out.target != "":
			out.options[option] = args
		default:
			out.matches = append(out.matches, match{module: module, option: option, args: args, not: not})
		}
		not = false
	}
	return out
}

// arguments are the words between an option and the next. A comment is one word,
// whatever it begins with.
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

// option gives an option of the target's with its arguments.
func (r rule) option(name string) (args string, given bool) {
	words, given := r.options[name]
	return strings.Join(words, " "), given
}

// holds tells whether every condition of a rule holds for a packet. A condition
// that is not known here is an error, unless another one fails.
func (n *Node) holds(r rule, p *packet) (bool, error) {
	err := r.err
	for _, m := range r.matches {
		is, e := n.is(m, p)
		switch {
		case e != nil:
			err = cmp.Or(err, e)
		case is == m.not:
			return false, nil
		}
	}
	return err == nil, err
}

func (n *Node) is(m match, p *packet) (bool, error) {
	arg := ""
	if len(m.args) > 0 {
		arg = m.args[0]
	}
	switch m.option {
	case "-s", "-d":
		return inPrefix(arg, pick(m.option == "-s", p).Addr())
	case "-i":
		return isLink(arg, p.in), nil
	case "-o":
		return isLink(arg, p.out), nil
	case "-p":
		return protocolIs(arg, p.protocol)
	case "--comment", "--limit-iface-in", "--limit-iface-out", "--return-nomatch":
		return !m.not, nil
	case "--match-set":
		if len(m.args) < 2 {
			return false, errors.New("--match-set has no directions")
		}
		_, is, known := n.member(arg, m.args[1], p)
		if !known {
			return false, fmt.Errorf("the set %s cannot be read here", arg)
		}
		return is, nil
	}
	return n.isOfModule(m, arg, p)
}

func (n *Node) isOfModule(m match, arg string, p *packet) (bool, error) {
	switch m.option {
	case "--mark":
		mark := p.mark
		if m.module == "connmark" {
			mark = p.conn.mark
		}
		value, mask, err := parseMark(arg)
		return mark&mask == value, err
	case "--ctstate":
		return slices.Contains(strings.Split(arg, ","), p.state()), nil
	case "--state":
		return slices.Contains(strings.Split(arg, ","), p.state()), nil
	case "--ctdir":
		return arg == p.direction(), nil
	case "--src-type", "--dst-type":
		return n.isType(arg, pick(m.option == "--src-type", p).Addr())
	case "--sport", "--dport", "--sports", "--dports":
		return inPorts(arg, pick(strings.HasPrefix(m.option, "--s"), p).Port())
	case "--physdev-is-in":
		l, _ := n.Link(p.in)
		return l.Type == "bridge", nil
	case "--tcp-flags", "--syn":
		return p.first, nil
	case "--vaddr", "--vport", "--vproto", "--ipvs":
		return isVirtual(m.option, arg, p)
	case "--icmp-type", "--icmpv6-type":
		return false, nil
	}
	return false, fmt.Errorf("the match %s is not known here", strings.TrimSpace(m.module+" "+m.option))
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

func inPrefix(text string, a netip.Addr) (bool, error) {
	if one, err := netip.ParseAddr(text); err == nil {
		return one == a, nil
	}
	p, err := netip.ParsePrefix(text)
	return err == nil && p.Contains(a), err
}

func protocolIs(text string, p ip.Protocol) (bool, error) {
	if number, err := strconv.Atoi(text); err == nil {
		return number == 0 || number == int(p), nil
	}
	return strings.EqualFold(text, p.String()) || text == "all", nil
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

// parseMark reads "0x4000/0x4000", or a mark without a mask.
func parseMark(text string) (value, mask uint32, err error) {
	left, right, masked := strings.Cut(text, "/")
	v, err := strconv.ParseUint(left, 0, 32)
	if err != nil || !masked {
		return uint32(v), ^uint32(0), err
	}
	m, err := strconv.ParseUint(right, 0, 32)
	return uint32(v), uint32(m), err
}

// isType knows what matters to service traffic. Broadcasts are asked for by
// rules that drop them.
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
	return false, fmt.Errorf("the address type %s is not known here", kind)
}

// localTable is RT_TABLE_LOCAL.
const localTable = 255

func isVirtual(option, arg string, p *packet) (bool, error) {
	if p.virtual == nil {
		return false, nil
	}
	switch option {
	case "--vaddr":
		return inPrefix(arg, p.virtual.Addr)
	case "--vport":
		return arg == fmt.Sprint(p.virtual.Port), nil
	case "--vproto":
		return protocolIs(arg, p.virtual.Protocol)
	}
	return true, nil
}
