package conformance

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Fact identifies one item of a node's state. Fields that its kind does not use are zero.
type Fact struct {
	Kind     string // virtual server, real server, address, member, packet
	Protocol string
	At       netip.AddrPort // of the virtual server; port 0: only an address
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

// Facts are a node's state in normal form: each item with its value. Two nodes have the
// same state if their Facts are equal.
type Facts map[Fact]string

// Diff is a fact that differs. An absent one has the value "".
type Diff struct {
	Fact
	KubeProxy, Ours string
}

func (d Diff) String() string {
	show := func(s string) string { return cmp.Or(s, "nothing") }
	if d.Kind == promised {
		return fmt.Sprintf("%s: the API promises %s, kube-ipvs has %s", d.Fact, d.KubeProxy, show(d.Ours))
	}
	return fmt.Sprintf("%s: kube-proxy has %s, kube-ipvs %s", d.Fact, show(d.KubeProxy), show(d.Ours))
}

// Compare returns the differences, sorted.
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
	slices.SortFunc(out, compareDiffs)
	return out
}

func compareDiffs(a, b Diff) int { return cmp.Compare(a.String(), b.String()) }

// Kernel is the state that a proxy has programmed, as the tools print it and as the
// packet evaluator reads it.
type Kernel struct {
	virtualServers map[endpoint]virtualServer // without fwmark virtual servers
	sets           map[string][]string        // members
	addresses      map[netip.Addr]string      // with their interface
	claimed        map[netip.Addr]bool        // VIPs claimed by port

	nodes     [2]*trace.Node // of IPv4 and IPv6, for the evaluator
	evaluator trace.Evaluator
}

// endpoint is the key of a virtual server, or a real server.
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
const StateCommand = `for c in "ipvsadm -Sn" "ipset save" "ip -o address" \
	"ip -4 route show table 80080" "ip -6 route show table 80080" \
	"ip -4 route show table local proto 81" "ip -6 route show table local proto 81"; do echo "### $c"; $c 2>/dev/null; done; true`

// ParseKernel reads the output of StateCommand.
func ParseKernel(text string) (*Kernel, error) {
	k := &Kernel{
		virtualServers: map[endpoint]virtualServer{}, sets: map[string][]string{},
		addresses: map[netip.Addr]string{}, claimed: map[netip.Addr]bool{}, evaluator: trace.Evaluator{Quiet: true},
	}
	for _, section := range strings.Split(text, "### ")[1:] {
		command, body, _ := strings.Cut(section, "\n")
		read := map[string]func([]string) error{
			"ipvsadm -Sn": k.readIPVS, "ipset save": k.readSet, "ip -o address": k.readAddress,
			"ip -4 route show table 80080": k.readClaim, "ip -6 route show table 80080": k.readClaim,
			"ip -4 route show table local proto 81": k.readLocal, "ip -6 route show table local proto 81": k.readLocal,
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
	return k, nil
}

var ipvsProtocols = map[string]string{"-t": "TCP", "-u": "UDP", "--sctp-service": "SCTP"}

// readIPVS reads "-A -t 10.96.0.1:443 -s rr" and "-a -t 10.96.0.1:443 -r 10.12.97.2:6443
// -m -w 1". It ignores fwmark virtual servers, "-f 9".
func (k *Kernel) readIPVS(words []string) error {
	if words[1] == "-f" {
		return nil
	}
	at, err := netip.ParseAddrPort(words[2])
	if err != nil {
		return err
	}
	key, rest := endpoint{ipvsProtocols[words[1]], at}, words[3:]
	if words[0] == "-A" {
		k.virtualServers[key] = virtualServer{strings.Join(rest, " "), map[netip.AddrPort]string{}}
		return nil
	}
	to, err := netip.ParseAddrPort(rest[1])
	if err == nil {
		k.virtualServers[key].realServers[to] = strings.Join(rest[2:], " ")
	}
	return err
}

// readSet reads "create NAME …" and "add NAME MEMBER …".
func (k *Kernel) readSet(words []string) error {
	if words[0] == "add" {
		k.sets[words[1]] = append(k.sets[words[1]], words[2])
	}
	return nil
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

// dummy is the interface that carries VIPs.
const dummy = "kube-ipvs0"

// ownSets matches the sets that kube-proxy has no counterpart for, and the set that lists
// VIPs.
var ownSets = regexp.MustCompile(`^KUBE-(6-)?IPVS-`)

// Facts returns the state in normal form. The evaluator decides what happens to packets
// to every address and port that either program serves; see Questions.
func (k *Kernel) Facts(questions []Question) (Facts, error) {
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
		for _, m := range members {
			if f, ok := memberFact(name, m); ok {
				facts[f] = "listed"
			}
		}
	}
	for _, q := range questions {
		answer, err := k.answer(q)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", q.fact(), err)
		}
		facts[q.fact()] = answer
	}
	return facts, nil
}

// memberFact returns the fact of a set member. It returns false for members that the fact
// of a VIP already covers, and for sets that only one program has.
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
