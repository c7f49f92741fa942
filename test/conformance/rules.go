package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

// packet is the first of a connection, or a ping, on its way through a node.
type packet struct {
	src, dst     netip.Addr
	protocol     string // TCP, UDP, SCTP, ICMP
	sport, dport uint16
	in           string // interface; "": from the node itself
	bridged      bool   // came in by a port of a bridge
	mark         uint32
	served       *endpoint // the virtual server that it came by
}

// ruleset is what iptables-save prints, compiled.
type ruleset struct {
	chains map[string][]rule // by "table chain"
}

// rule does what its target says to packets that all matches hold for.
type rule struct {
	matches []func(*packet) bool
	target  string
	value   uint32 // of MARK, or of SET the name
	mask    uint32
	set     string
}

// parseRules compiles a ruleset. What it does not know is an error, so that no
// rule goes unnoticed.
func parseRules(k *Kernel, saved string) (*ruleset, error) {
	r := &ruleset{chains: map[string][]rule{}}
	table := ""
	for _, line := range strings.Split(saved, "\n") {
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, "-A "):
			words, err := nat.Words(line[3:])
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", table, line, err)
			}
			p := ruleParser{kernel: k, words: words[1:]}
			if err := p.parse(); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", table, line, err)
			}
			chain := table + " " + words[0]
			r.chains[chain] = append(r.chains[chain], p.rule)
		}
	}
	return r, nil
}

// ruleParser goes over the words of one rule.
type ruleParser struct {
	kernel *Kernel
	words  []string
	rule   rule
	module string // of the last -m
}

func (p *ruleParser) next() string {
	if len(p.words) == 0 {
		return ""
	}
	word := p.words[0]
	p.words = p.words[1:]
	return word
}

func (p *ruleParser) parse() error {
	for {
		option, wanted := p.next(), true
		if option == "!" {
			option, wanted = p.next(), false
		}
		if option == "-j" {
			return p.parseTarget()
		}
		match, err := p.parseMatch(option)
		if err != nil {
			return err
		}
		if match != nil {
			p.rule.matches = append(p.rule.matches, func(pkt *packet) bool { return match(pkt) == wanted })
		}
	}
}

// parseMatch is nil for what is a match only with what follows.
func (p *ruleParser) parseMatch(option string) (func(*packet) bool, error) {
	switch option {
	case "-m":
		p.module = p.next()
		return nil, nil
	case "--comment":
		p.next()
		return nil, nil
	case "--physdev-is-in":
		return func(pkt *packet) bool { return pkt.bridged }, nil
	case "--ipvs":
		return func(pkt *packet) bool { return pkt.served != nil }, nil
	}
	arg := p.next()
	switch option {
	case "-s", "-d":
		return matchAddress(option, arg)
	case "-i":
		return matchInterface(arg), nil
	case "-o":
		return nil, fmt.Errorf("no packet here knows where it goes")
	case "-p":
		name := map[string]string{"icmp": "ICMP", "ipv6-icmp": "ICMP"}[arg]
		if name == "" {
			name = strings.ToUpper(arg)
		}
		return func(pkt *packet) bool { return pkt.protocol == name }, nil
	case "--icmp-type", "--icmpv6-type":
		return func(pkt *packet) bool { return arg == "8" || arg == "128" }, nil
	case "--match-set":
		return p.matchSet(arg, p.next())
	case "--mark":
		return p.matchMark(arg)
	case "--ctstate":
		states := strings.Split(arg, ",")
		return func(*packet) bool { return slices.Contains(states, "NEW") }, nil
	case "--ctdir":
		return func(*packet) bool { return arg == "ORIGINAL" }, nil
	case "--src-type", "--dst-type":
		return p.matchType(option, arg)
	case "--vaddr", "--vport", "--vproto":
		return matchServed(option, arg)
	}
	return nil, fmt.Errorf("unknown match %q", option)
}

func matchAddress(option, arg string) (func(*packet) bool, error) {
	prefix, err := parsePrefix(arg)
	if option == "-s" {
		return func(pkt *packet) bool { return prefix.Contains(pkt.src) }, err
	}
	return func(pkt *packet) bool { return prefix.Contains(pkt.dst) }, err
}

func matchInterface(arg string) func(*packet) bool {
	if prefix, ok := strings.CutSuffix(arg, "+"); ok {
		return func(pkt *packet) bool { return strings.HasPrefix(pkt.in, prefix) }
	}
	return func(pkt *packet) bool { return pkt.in == arg }
}

func parseMark(text string) (value, mask uint32, err error) {
	if _, err = fmt.Sscanf(text, "0x%x/0x%x", &value, &mask); err == nil {
		return value, mask, nil
	}
	_, err = fmt.Sscanf(text, "0x%x", &value)
	return value, 0xffffffff, err
}

func (p *ruleParser) matchMark(arg string) (func(*packet) bool, error) {
	value, mask, err := parseMark(arg)
	if p.module == "connmark" {
		// A new connection's is 0.
		return func(*packet) bool { return value == 0 }, err
	}
	return func(pkt *packet) bool { return pkt.mark&mask == value }, err
}

func (p *ruleParser) matchType(option, arg string) (func(*packet) bool, error) {
	if arg != "LOCAL" {
		return nil, fmt.Errorf("unknown type %q", arg)
	}
	k := p.kernel
	if option == "--src-type" {
		return func(pkt *packet) bool { return k.local(pkt.src) }, nil
	}
	return func(pkt *packet) bool { return k.local(pkt.dst) }, nil
}

func matchServed(option, arg string) (func(*packet) bool, error) {
	var match func(endpoint) bool
	var err error
	switch option {
	case "--vaddr":
		var prefix netip.Prefix
		prefix, err = parsePrefix(arg)
		match = func(e endpoint) bool { return prefix.Contains(e.at.Addr()) }
	case "--vport":
		var port uint64
		port, err = strconv.ParseUint(arg, 10, 16)
		match = func(e endpoint) bool { return e.at.Port() == uint16(port) }
	default:
		number := map[string]string{"6": "TCP", "17": "UDP", "132": "SCTP"}[arg]
		match = func(e endpoint) bool { return number == e.protocol || strings.EqualFold(arg, e.protocol) }
	}
	return func(pkt *packet) bool { return pkt.served != nil && match(*pkt.served) }, err
}

// matchSet looks the packet up as the set's members are written. Whether its
// third part is an address or a range makes no difference to how it is read.
func (p *ruleParser) matchSet(name, flags string) (func(*packet) bool, error) {
	k := p.kernel
	if k.sets[name] == nil {
		return nil, fmt.Errorf("no set %s", name)
	}
	fields := strings.Split(flags, ",")
	return func(pkt *packet) bool {
		_, found := k.lookUp(name, fields, pkt)
		return found
	}, nil
}

func (k *Kernel) lookUp(set string, fields []string, pkt *packet) (mark uint32, found bool) {
	pick := func(field string) (netip.Addr, uint16) {
		if field == "src" {
			return pkt.src, pkt.sport
		}
		return pkt.dst, pkt.dport
	}
	first, port := pick(fields[0])
	if len(fields) == 1 {
		for _, member := range []string{first.String(), fmt.Sprint(port)} {
			if mark, found = k.sets[set][member]; found {
				return mark, true
			}
		}
		return 0, false
	}
	if pkt.protocol == "ICMP" {
		return 0, false
	}
	_, port = pick(fields[1])
	front := k.front(endpoint{pkt.protocol, netip.AddrPortFrom(first, port)})
	if len(fields) == 2 {
		mark, found = k.sets[set][front]
		return mark, found
	}
	third, _ := pick(fields[2])
	return 0, slices.ContainsFunc(k.nets[set][front], func(p netip.Prefix) bool { return p.Contains(third) })
}

// front is how the first two fields of a member are written. Every packet looks
// into many sets.
func (k *Kernel) front(e endpoint) string {
	text, known := k.fronts[e]
	if !known {
		text = fmt.Sprintf("%s,%s:%d", e.at.Addr(), strings.ToLower(e.protocol), e.at.Port())
		k.fronts[e] = text
	}
	return text
}

// parseTarget reads what stands behind -j.
func (p *ruleParser) parseTarget() error {
	p.rule.target = p.next()
	switch p.rule.target {
	case "MARK":
		if option := p.next(); option != "--set-xmark" {
			return fmt.Errorf("unknown option %q", option)
		}
		var err error
		p.rule.value, p.rule.mask, err = parseMark(p.next())
		return err
	case "SET":
		if option := p.next(); option != "--map-set" {
			return fmt.Errorf("unknown option %q", option)
		}
		p.rule.set = p.next()
	}
	return nil
}

// run gives a chain's verdict, or "" at its end. CONNMARK changes nothing that
// a first packet meets.
func (k *Kernel) run(table, chain string, pkt *packet) string {
	rules := k.rules[pkt.dst.Is6()]
	for _, r := range rules.chains[table+" "+chain] {
		if slices.ContainsFunc(r.matches, func(m func(*packet) bool) bool { return !m(pkt) }) {
			continue
		}
		switch r.target {
		case "MARK":
			pkt.mark = pkt.mark&^r.mask ^ r.value
		case "SET":
			if mark, found := k.lookUp(r.set, []string{"dst", "dst"}, pkt); found {
				pkt.mark = mark
			}
		case "CONNMARK":
		case "RETURN":
			return ""
		case "ACCEPT", "DROP", "REJECT", "MASQUERADE", "SNAT", "REDIRECT":
			return r.target
		default:
			if verdict := k.run(table, r.target, pkt); verdict != "" {
				return verdict
			}
		}
	}
	return ""
}

// local tells whether the kernel's table "local" has an address.
func (k *Kernel) local(a netip.Addr) bool { return k.addresses[a] != "" || a.IsLoopback() }
