package conformance

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// Fact says where in a node's state something stands. Fields that make no sense
// for its kind are zero.
type Fact struct {
	Kind     string // virtual server, real server, address, member, packet
	Protocol string
	At       netip.AddrPort // the virtual server's; with port 0 an address alone
	Name     string         // the real server, the set's name or the packet's source
	Member   string         // as ipset(8) writes it
}

func (f Fact) String() string {
	words := []string{f.Kind}
	for _, w := range []string{f.Name, f.Member, f.Protocol} {
		if w != "" {
			words = append(words, w)
		}
	}
	if f.At.IsValid() {
		words = append(words, f.At.String())
	}
	return strings.Join(words, " ")
}

// Facts are a node's state in normal form: what stands there, and in which way.
// The state of two nodes is the same if their facts are.
type Facts map[Fact]string

// Diff is a fact that differs; "" is absent.
type Diff struct {
	Fact
	KubeProxy, Ours string
}

func (d Diff) String() string {
	show := func(s string) string { return cmp.Or(s, "nothing") }
	return fmt.Sprintf("%s: kube-proxy has %s, kube-ipvs %s", d.Fact, show(d.KubeProxy), show(d.Ours))
}

// Compare lists what differs.
func Compare(kubeProxy, ours Facts) []Diff {
	var out []Diff
	for f, v := range kubeProxy {
		if ours[f] != v {
			out = append(out, Diff{f, v, ours[f]})
		}
	}
	for f, v := range ours {
		if _, known := kubeProxy[f]; !known {
			out = append(out, Diff{f, "", v})
		}
	}
	slices.SortFunc(out, func(a, b Diff) int { return cmp.Compare(a.String(), b.String()) })
	return out
}

// Kernel is what a proxy has programmed, as the tools print it.
type Kernel struct {
	virtualServers map[endpoint]virtualServer
	marked         map[uint32]virtualServer // of IPv4, then of IPv6
	marked6        map[uint32]virtualServer
	sets           map[string]map[string]uint32 // members with their marks
	nets           map[string]map[string][]netip.Prefix
	addresses      map[netip.Addr]string // with their interface
	claimed        map[netip.Addr]bool   // VIPs that are claimed port by port
	skips          bool                  // marked packets skip table local
	rules          map[bool]*ruleset     // by whether they are IPv6's
	fronts         map[endpoint]string   // as members are written
}

// endpoint is one as a virtual server's key.
type endpoint struct {
	protocol string
	at       netip.AddrPort
}

func (e endpoint) String() string { return e.protocol + " " + e.at.String() }

type virtualServer struct {
	options     string
	realServers map[netip.AddrPort]string
}

// StateCommand prints everything that ParseKernel reads.
const StateCommand = `for c in "ipvsadm -Sn" "ipset save" "iptables-save" "ip6tables-save" "ip -o address" \
	"ip -4 route show table 80080" "ip -6 route show table 80080" \
	"ip -4 route show table local proto 81" "ip -6 route show table local proto 81" "ip rule"; do echo "### $c"; $c 2>/dev/null; done; true`

// ParseKernel reads the output of StateCommand.
func ParseKernel(text string) (*Kernel, error) {
	k := &Kernel{
		virtualServers: map[endpoint]virtualServer{}, marked: map[uint32]virtualServer{}, marked6: map[uint32]virtualServer{},
		sets: map[string]map[string]uint32{}, nets: map[string]map[string][]netip.Prefix{},
		addresses: map[netip.Addr]string{}, claimed: map[netip.Addr]bool{}, rules: map[bool]*ruleset{}, fronts: map[endpoint]string{},
	}
	saved := map[string]string{}
	for _, section := range strings.Split(text, "### ")[1:] {
		command, body, _ := strings.Cut(section, "\n")
		saved[command] = body
		read := map[string]func([]string) error{
			"ipvsadm -Sn": k.readIPVS, "ipset save": k.readSet, "ip -o address": k.readAddress,
			"ip -4 route show table 80080": k.readClaim, "ip -6 route show table 80080": k.readClaim,
			"ip -4 route show table local proto 81": k.readLocal, "ip -6 route show table local proto 81": k.readLocal,
			"ip rule": k.readRule,
		}[command]
		if read == nil {
			continue
		}
		for _, line := range strings.Split(strings.TrimSpace(body), "\n") {
			if words := strings.Fields(line); len(words) > 1 {
				if err := read(words); err != nil {
					return nil, fmt.Errorf("%s: %q: %w", command, line, err)
				}
			}
		}
	}
	for v6, command := range map[bool]string{false: "iptables-save", true: "ip6tables-save"} {
		r, err := parseRules(k, saved[command])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", command, err)
		}
		k.rules[v6] = r
	}
	return k, nil
}

var ipvsProtocols = map[string]string{"-t": "TCP", "-u": "UDP", "--sctp-service": "SCTP"}

// readIPVS reads "-A -t 10.96.0.1:443 -s rr" and "-a -t 10.96.0.1:443 -r
// 10.12.97.2:6443 -m -w 1"; with a mark, "-f 9" and, for IPv6, "-6" behind it.
func (k *Kernel) readIPVS(words []string) error {
	rest := words[3:]
	var vs virtualServer
	if words[1] == "-f" {
		var mark uint32
		if _, err := fmt.Sscan(words[2], &mark); err != nil {
			return err
		}
		into := k.marked
		if len(rest) > 0 && rest[0] == "-6" {
			into, rest = k.marked6, rest[1:]
		}
		if words[0] == "-A" {
			into[mark] = virtualServer{strings.Join(rest, " "), map[netip.AddrPort]string{}}
		}
		vs = into[mark]
	} else {
		at, err := netip.ParseAddrPort(words[2])
		if err != nil {
			return err
		}
		key := endpoint{ipvsProtocols[words[1]], at}
		if words[0] == "-A" {
			k.virtualServers[key] = virtualServer{strings.Join(rest, " "), map[netip.AddrPort]string{}}
		}
		vs = k.virtualServers[key]
	}
	if words[0] == "-A" {
		return nil
	}
	to, err := netip.ParseAddrPort(rest[1])
	if err == nil {
		vs.realServers[to] = strings.Join(rest[2:], " ")
	}
	return err
}

// readSet reads "create NAME …" and "add NAME MEMBER [skbmark 0x9/0x…]".
func (k *Kernel) readSet(words []string) error {
	if words[0] == "create" {
		k.sets[words[1]] = map[string]uint32{}
		return nil
	}
	member, mark := words[2], uint32(0)
	if len(words) > 4 && words[3] == "skbmark" {
		if _, err := fmt.Sscanf(words[4], "0x%x", &mark); err != nil {
			return err
		}
	}
	k.sets[words[1]][member] = mark
	if parts := strings.Split(member, ","); len(parts) == 3 {
		prefix, err := parsePrefix(parts[2])
		if err != nil {
			return err
		}
		if k.nets[words[1]] == nil {
			k.nets[words[1]] = map[string][]netip.Prefix{}
		}
		front := parts[0] + "," + parts[1]
		k.nets[words[1]][front] = append(k.nets[words[1]][front], prefix)
	}
	return nil
}

func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}

// readAddress reads "2: eth0    inet 192.168.50.11/24 brd …".
func (k *Kernel) readAddress(words []string) error {
	prefix, err := netip.ParsePrefix(words[3])
	if err == nil {
		k.addresses[prefix.Addr()] = words[1]
	}
	return err
}

// readClaim reads "local 203.0.113.1 dev lo proto 81 …".
func (k *Kernel) readClaim(words []string) error {
	a, err := netip.ParseAddr(words[1])
	if err == nil {
		k.claimed[a] = true
	}
	return err
}

// readLocal reads "local 203.0.113.1 dev lo metric 1024", a VIP that is local
// without being an address.
func (k *Kernel) readLocal(words []string) error {
	a, err := netip.ParseAddr(words[1])
	if err == nil {
		k.addresses[a] = dummy
	}
	return err
}

// readRule reads "0: from all fwmark 0x4/0xd goto 1 proto 81".
func (k *Kernel) readRule(words []string) error {
	k.skips = k.skips || slices.Contains(words, "goto")
	return nil
}

// dummy is the interface that VIPs are on.
const dummy = "kube-ipvs0"

// ownSets are those that kube-proxy has nothing like, and the one that lists
// VIPs.
var ownSets = regexp.MustCompile(`^KUBE-(6-)?IPVS-`)

// Facts brings the state into normal form. What becomes of packets is asked of
// every address and port that either side serves: see Questions.
func (k *Kernel) Facts(questions []Question) Facts {
	facts := Facts{}
	for key, vs := range k.virtualServers {
		facts[Fact{Kind: "virtual server", Protocol: key.protocol, At: key.at}] = vs.options
		for to, options := range vs.realServers {
			facts[Fact{Kind: "real server", Protocol: key.protocol, At: key.at, Name: to.String()}] = options
		}
	}
	for a, link := range k.addresses {
		if link == dummy && !a.IsLinkLocalUnicast() {
			facts[Fact{Kind: "VIP", At: netip.AddrPortFrom(a, 0)}] = "local"
		}
	}
	for a := range k.claimed {
		facts[Fact{Kind: "VIP", At: netip.AddrPortFrom(a, 0)}] = "local"
	}
	for name, members := range k.sets {
		for m := range members {
			if f, ok := memberFact(name, m); ok {
				facts[f] = "listed"
			}
		}
	}
	for _, q := range questions {
		facts[q.fact()] = k.answer(q)
	}
	return facts
}

// memberFact is false for members that the fact of a VIP stands for already,
// and for sets that only one of both programs has.
func memberFact(set, member string) (Fact, bool) {
	if ownSets.MatchString(set) {
		return Fact{}, false
	}
	f := Fact{Kind: "member", Name: set, Member: member}
	parts := strings.Split(member, ",")
	if len(parts) < 2 {
		return f, true
	}
	a, err := netip.ParseAddr(parts[0])
	protocol, number, ok := strings.Cut(parts[1], ":")
	var port uint16
	if _, scanned := fmt.Sscan(number, &port); err == nil && ok && scanned == nil {
		f.At, f.Protocol = netip.AddrPortFrom(a, port), strings.ToUpper(protocol)
	}
	return f, true
}
