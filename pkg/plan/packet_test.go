package plan_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// packet is a packet as rules see it. Its connection is new.
type packet struct {
	src, dst     netip.Addr
	protocol     ip.Protocol // icmp for a ping
	sport, dport uint16
	in, out      string // interfaces
	mark, connmk uint32
	reply        bool // in the reply direction of its connection
	invalid      bool // conntrack cannot assign it to a connection
	related      bool // an ICMP error about a connection
	established  bool // not its connection's first packet
	ipvs         bool // IPVS has forwarded it
}

// state returns the conntrack state: a packet here starts a connection or belongs to
// none.
func (p *packet) state() string {
	switch {
	case p.invalid:
		return "INVALID"
	case p.related:
		return "RELATED"
	case p.established || p.reply:
		return "ESTABLISHED"
	}
	return "NEW"
}

// icmp stands for an echo request of either family.
const icmp ip.Protocol = 1

// firewall is the compiled rule set of a plan. It supports only the matches and targets
// that the plan uses and rejects all others, so that a new one is noticed.
type firewall struct {
	t      *testing.T
	family ip.Family
	chains map[nat.Chain][]rule
	types  map[string]ipset.Type
	drops  map[string]bool // base chains of table filter with policy DROP
	sets   map[string]map[ipset.Entry]uint32
	local  map[netip.Addr]bool // addresses of the node, including VIPs
}

// rule is a compiled rule: target applies if every match holds.
type rule struct {
	text    string
	matches []func(*packet) bool
	target  target
}

// target is a verdict, a chain to jump to, or a change of the packet that does not end
// the chain.
type target struct {
	verdict string
	jump    string
	change  func(*packet)
	source  netip.Addr // of SNAT
}

func newFirewall(t *testing.T, family ip.Family, part plan.NodePlan, members []plan.Member, local map[netip.Addr]bool) *firewall {
	f := &firewall{
		t: t, family: family, local: local,
		chains: map[nat.Chain][]rule{}, types: map[string]ipset.Type{}, sets: map[string]map[ipset.Entry]uint32{},
	}
	for _, s := range part.Sets {
		f.types[s.Name], f.sets[s.Name] = s.Type, map[ipset.Entry]uint32{}
	}
	for _, m := range slices.Concat(part.Members, members) {
		f.sets[m.Set][m.Entry] = m.Mark
	}
	for _, j := range part.NAT.Jumps {
		f.add(j.Chain, j.Rule)
	}
	for c, rules := range part.NAT.Chains {
		for _, r := range rules {
			f.add(c, r)
		}
	}
	f.checkJumps(part.NAT.Chains)
	return f
}

func (f *firewall) add(c nat.Chain, text nat.Rule) {
	if c.Family != f.family {
		return
	}
	r, err := f.compile(string(text))
	if err != nil {
		f.t.Fatalf("%s: %s: %v", c, text, err)
	}
	f.chains[c] = append(f.chains[c], r)
}

func (f *firewall) checkJumps(planned map[nat.Chain][]nat.Rule) {
	for c, rules := range f.chains {
		for _, r := range rules {
			to := nat.Chain{Family: c.Family, Table: c.Table, Name: r.target.jump}
			if _, ok := planned[to]; r.target.jump != "" && !ok {
				f.t.Fatalf("%s: %s: no such chain", c, r.text)
			}
		}
	}
}

// hook runs the rules of a base chain.
func (f *firewall) hook(table nat.Table, chain string, p *packet) target {
	got := f.run(nat.Chain{Family: f.family, Table: table, Name: chain}, p)
	switch {
	case got.verdict != "" && got.verdict != "RETURN":
		return got
	case table == nat.Filter && f.drops[chain]:
		return target{verdict: "DROP"}
	}
	return target{verdict: "ACCEPT"}
}

func (f *firewall) run(c nat.Chain, p *packet) target {
	for _, r := range f.chains[c] {
		if !r.holds(p) {
			continue
		}
		got := r.target
		switch {
		case got.change != nil:
			got.change(p)
			continue
		case got.jump != "":
			got = f.run(nat.Chain{Family: c.Family, Table: c.Table, Name: got.jump}, p)
			if got.verdict == "RETURN" || got.verdict == "" {
				continue
			}
		}
		return got
	}
	return target{}
}

func (r rule) holds(p *packet) bool {
	for _, m := range r.matches {
		if !m(p) {
			return false
		}
	}
	return true
}

// compiler parses the words of one rule.
type compiler struct {
	fw    *firewall
	words []string
	not   bool
	marks string // the last -m, to which a --mark belongs
	rule  rule
}

func (f *firewall) compile(text string) (rule, error) {
	words, err := nat.Words(text)
	if err != nil {
		return rule{}, err
	}
	c := compiler{fw: f, words: words, rule: rule{text: text}}
	for len(c.words) > 0 {
		option := c.next()
		if option == "!" {
			c.not = true
			option = c.next()
		}
		if option == "-j" {
			err := c.target()
			return c.rule, err
		}
		m, err := c.match(option)
		if err != nil {
			return rule{}, err
		}
		if m != nil {
			c.rule.matches = append(c.rule.matches, c.maybeNot(m))
		}
	}
	return rule{}, fmt.Errorf("no target")
}

func (c *compiler) maybeNot(m func(*packet) bool) func(*packet) bool {
	not := c.not
	c.not = false
	return func(p *packet) bool { return m(p) != not }
}

func (c *compiler) next() string {
	if len(c.words) == 0 {
		return ""
	}
	w := c.words[0]
	c.words = c.words[1:]
	return w
}

// match parses an option with its argument. It returns nil for options that match
// nothing by themselves.
func (c *compiler) match(option string) (func(*packet) bool, error) {
	arg := c.next()
	switch option {
	case "-m":
		return nil, c.module(arg)
	case "--comment":
		return nil, nil
	case "--ipvs":
		c.words = append([]string{arg}, c.words...)
		return func(p *packet) bool { return p.ipvs }, nil
	case "-s":
		return within(arg, func(p *packet) netip.Addr { return p.src })
	case "-i":
		return onInterface(arg, func(p *packet) string { return p.in }), nil
	case "-o":
		return onInterface(arg, func(p *packet) string { return p.out }), nil
	case "-p":
		return ofProtocol(arg)
	case "--match-set":
		return c.fw.inSet(arg, strings.Split(c.next(), ","))
	case "--mark":
		return c.marked(arg)
	case "--ctstate":
		return func(p *packet) bool { return slices.Contains(strings.Split(arg, ","), p.state()) }, nil
	case "--ctdir":
		return func(p *packet) bool { return p.reply == (arg == "REPLY") }, nil
	case "--src-type":
		return c.fw.ofType(arg)
	case "--icmp-type", "--icmpv6-type":
		return func(p *packet) bool { return p.protocol == icmp && !p.related }, nil
	}
	return nil, fmt.Errorf("unknown option %q", option)
}

func (c *compiler) module(name string) error {
	if !slices.Contains([]string{"comment", "set", "mark", "connmark", "conntrack", "addrtype", "icmp", "icmp6", "ipvs"}, name) {
		return fmt.Errorf("unknown match %q", name)
	}
	c.marks = name
	return nil
}

func within(cidr string, field func(*packet) netip.Addr) (func(*packet) bool, error) {
	prefix, err := netip.ParsePrefix(cidr)
	return func(p *packet) bool { return prefix.Contains(field(p)) }, err
}

func onInterface(name string, field func(*packet) string) func(*packet) bool {
	if prefix, ok := strings.CutSuffix(name, "+"); ok {
		return func(p *packet) bool { return strings.HasPrefix(field(p), prefix) }
	}
	return func(p *packet) bool { return field(p) == name }
}

func ofProtocol(name string) (func(*packet) bool, error) {
	want, ok := map[string]ip.Protocol{"tcp": ip.TCP, "udp": ip.UDP, "sctp": ip.SCTP, "icmp": icmp, "ipv6-icmp": icmp}[name]
	if !ok {
		return nil, fmt.Errorf("unknown protocol %q", name)
	}
	return func(p *packet) bool { return p.protocol == want }, nil
}

func (c *compiler) marked(arg string) (func(*packet) bool, error) {
	value, mask, err := valueMask(arg)
	switch c.marks {
	case "mark":
		return func(p *packet) bool { return p.mark&mask == value }, err
	case "connmark":
		return func(p *packet) bool { return p.connmk&mask == value }, err
	}
	return nil, fmt.Errorf("--mark of %q", c.marks)
}

func valueMask(arg string) (value, mask uint32, err error) {
	_, err = fmt.Sscanf(arg, "0x%x/0x%x", &value, &mask)
	return value, mask, err
}

func (f *firewall) ofType(kind string) (func(*packet) bool, error) {
	if kind != "LOCAL" {
		return nil, fmt.Errorf("unknown address type %q", kind)
	}
	return func(p *packet) bool { return f.local[p.src] || p.src.IsLoopback() }, nil
}

// inSet looks up a packet in a set. The set's type determines the parts of an entry,
// the flags whether each comes from the packet's source or destination.
func (f *firewall) inSet(name string, flags []string) (func(*packet) bool, error) {
	kind, ok := f.types[name]
	types, _, _ := strings.Cut(string(kind), " ") // without options
	parts := strings.Split(strings.TrimPrefix(strings.TrimPrefix(types, "hash:"), "bitmap:"), ",")
	switch {
	case !ok:
		return nil, fmt.Errorf("no set %s", name)
	case len(parts) != len(flags):
		return nil, fmt.Errorf("set %s is %s, but is matched by %d flags", name, kind, len(flags))
	}
	for _, flag := range flags {
		if flag != "src" && flag != "dst" {
			return nil, fmt.Errorf("unknown flag %q", flag)
		}
	}
	return func(p *packet) bool {
		_, found := f.find(name, parts, flags, p)
		return found
	}, nil
}

// find returns the mark of the member that matches a packet.
func (f *firewall) find(name string, parts, flags []string, p *packet) (mark uint32, found bool) {
	if slices.Contains(parts, "port") && p.protocol == icmp {
		return 0, false
	}
	for e, mark := range f.sets[name] {
		if inEntry(f.types[name], parts, flags, e, p) {
			return mark, true
		}
	}
	return 0, false
}

// mapSet implements --map-set: the packet gets the member's mark. The kernel accepts it
// only in table mangle, which TestCanonicalRules checks.
func (c *compiler) mapSet() (func(*packet), error) {
	if err := c.expect("--map-set"); err != nil {
		return nil, err
	}
	name := c.next()
	if c.fw.types[name] != ipset.HashIPPortMark {
		return nil, fmt.Errorf("members of %s carry no marks", name)
	}
	if flags := c.next(); flags != "dst,dst" {
		return nil, fmt.Errorf("unknown flags %q", flags)
	}
	return func(p *packet) {
		if mark, ok := c.fw.find(name, []string{"ip", "port"}, []string{"dst", "dst"}, p); ok {
			p.mark = mark
		}
	}, c.expect("--map-mark")
}

func inEntry(kind ipset.Type, parts, flags []string, e ipset.Entry, p *packet) bool {
	for i, part := range parts {
		addr, port := p.dst, p.dport
		if flags[i] == "src" {
			addr, port = p.src, p.sport
		}
		want := e.Addr
		if i == 2 {
			want = e.Addr2
		}
		var ok bool
		switch part {
		case "ip":
			ok = want == addr
		case "port":
			ok = e.Port == port && (kind == ipset.BitmapPort || e.Protocol == p.protocol)
		case "net":
			ok = e.Net.Contains(addr)
		}
		if !ok {
			return false
		}
	}
	return true
}

// target parses the words after -j.
func (c *compiler) target() error {
	name := c.next()
	t := &c.rule.target
	var err error
	switch name {
	case "ACCEPT", "DROP", "RETURN", "REDIRECT":
		t.verdict = name
	case "REJECT":
		t.verdict = name
		err = c.expect("--reject-with", "icmp-port-unreachable", "icmp6-port-unreachable")
	case "MASQUERADE":
		t.verdict = name
		err = c.expect("--random-fully")
	case "SNAT":
		t.verdict = name
		if err = c.expect("--to-source"); err == nil {
			t.source, err = netip.ParseAddr(c.next())
		}
		c.next() // --random-fully
	case "SET":
		t.change, err = c.mapSet()
	case "MARK", "CONNMARK":
		t.change, err = c.setMark(name)
	default:
		if !strings.HasPrefix(name, "KUBE-") {
			return fmt.Errorf("unknown target %q", name)
		}
		t.jump = name
	}
	if err == nil && len(c.words) > 0 {
		err = fmt.Errorf("unknown words %q after the target", c.words)
	}
	return err
}

func (c *compiler) expect(option string, args ...string) error {
	if got := c.next(); got != option {
		return fmt.Errorf("%q instead of %s", got, option)
	}
	if len(args) == 0 {
		return nil
	}
	if got := c.next(); !slices.Contains(args, got) {
		return fmt.Errorf("unknown argument %q of %s", got, option)
	}
	return nil
}

// setMark implements --set-xmark (clear the bits of the mask, then XOR the value), and
// copies of the masked bits between the two marks.
func (c *compiler) setMark(name string) (func(*packet), error) {
	switch option := c.next(); {
	case option == "--set-xmark":
		value, mask, err := valueMask(c.next())
		if name == "CONNMARK" {
			return func(p *packet) { p.connmk = p.connmk&^mask ^ value }, err
		}
		return func(p *packet) { p.mark = p.mark&^mask ^ value }, err
	case name == "CONNMARK" && option == "--save-mark":
		mask, err := c.markMask()
		return func(p *packet) { p.connmk = p.connmk&^mask | p.mark&mask }, err
	case name == "CONNMARK" && option == "--restore-mark":
		mask, err := c.markMask()
		return func(p *packet) { p.mark = p.mark&^mask | p.connmk&mask }, err
	}
	return nil, fmt.Errorf("unknown option of %s", name)
}

// markMask parses the two masks of a copy, which must be equal.
func (c *compiler) markMask() (uint32, error) {
	var masks [2]uint32
	for i, option := range []string{"--nfmask", "--ctmask"} {
		if err := c.expect(option); err != nil {
			return 0, err
		}
		if _, err := fmt.Sscanf(c.next(), "0x%x", &masks[i]); err != nil {
			return 0, err
		}
	}
	if masks[0] != masks[1] {
		return 0, fmt.Errorf("different masks %#x", masks)
	}
	return masks[0], nil
}

// The simulator must reject what it does not support.
func TestFirewallRejectsUnknownRules(t *testing.T) {
	f := &firewall{t: t, family: ip.IPv4, types: map[string]ipset.Type{"S": ipset.HashIPPort}}
	for _, text := range []string{
		"",
		"-m physdev --physdev-is-in -j ACCEPT",
		"-d 10.0.0.1/32 -j ACCEPT",
		"-p gre -j ACCEPT",
		"--mark 0x1/0x1 -j ACCEPT",
		"-m mark --mark 1 -j ACCEPT",
		"-m set --match-set S dst -j ACCEPT",
		"-m set --match-set S dst,net -j ACCEPT",
		"-m set --match-set OTHER dst -j ACCEPT",
		"-m addrtype --src-type UNICAST -j ACCEPT",
		"-j NOTRACK",
		"-j MARK --or-mark 0x1",
		"-j SET --add-set S dst,dst",
		"-j SET --map-set S dst,dst --map-mark",
		"-j REJECT --reject-with tcp-reset",
		"-j ACCEPT --random-fully",
	} {
		if _, err := f.compile(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
