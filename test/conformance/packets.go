package conformance

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// Question asks what becomes of a packet.
type Question struct {
	From     string // one of Sources
	Protocol string
	To       netip.AddrPort
}

func (q Question) fact() Fact {
	return Fact{Kind: "packet", Name: q.From, Protocol: q.Protocol, At: q.To}
}

// Source is a place that packets come from.
type Source struct {
	IPv4, IPv6 string
	In         string // the node's interface; "": the node itself
}

// Sources are the kinds of clients.
var Sources = map[string]Source{
	"pod":       {"10.244.1.9", "fd00:244:1::9", "cni0"},
	"endpoint":  {Hosts[0].IPv4, Hosts[0].IPv6, "cni0"},
	"other pod": {"10.244.2.9", "fd00:244:2::9", "eth0"},
	"node":      {NodeIPv4, NodeIPv6, ""},
	"outside":   {"192.0.2.9", "fd00:99::9", "eth0"},
	"friend":    {"100.64.7.7", "fd00:64:7::7", "eth0"},
}

// Inside reports whether a source is this node or a pod on it. To this node another
// node's pod is an external client.
func Inside(source string) bool { return Sources[source].In != "eth0" }

// UnservedPort is one that no Service has.
const UnservedPort = 9999

// Questions asks of every address and port that one of the kernels serves, and
// of the ports around it: another protocol's, node ports on VIPs, and one that
// nobody serves; and whether the address answers ping.
func Questions(kernels ...*Kernel) []Question {
	targets := map[endpoint]bool{}
	for _, k := range kernels {
		nodePorts := k.nodePorts()
		for key := range k.virtualServers {
			if key.at.Addr().IsLinkLocalUnicast() || key.at.Addr().IsLoopback() {
				continue
			}
			targets[key] = true
			targets[endpoint{"ICMP", netip.AddrPortFrom(key.at.Addr(), 0)}] = true
			targets[endpoint{"TCP", netip.AddrPortFrom(key.at.Addr(), UnservedPort)}] = true
			targets[endpoint{"UDP", key.at}] = true
			for _, p := range nodePorts {
				targets[endpoint{p.protocol, netip.AddrPortFrom(key.at.Addr(), p.at.Port())}] = true
			}
		}
	}
	var out []Question
	for to := range targets {
		for from := range Sources {
			out = append(out, Question{from, to.protocol, to.at})
		}
	}
	return out
}

func (k *Kernel) nodePorts() []endpoint {
	var out []endpoint
	for key := range k.virtualServers {
		if key.at.Addr() == netip.MustParseAddr(NodeIPv4) && key.at.Port() >= FirstNodePort {
			out = append(out, key)
		}
	}
	return out
}

// answer follows a packet through the node. The hooks come in the kernel's
// order, and IPVS after INPUT's filter; for the node's own packets it comes
// between nat and filter in OUTPUT.
func (k *Kernel) answer(q Question) string {
	source := Sources[q.From]
	pkt := &packet{dst: q.To.Addr(), dport: q.To.Port(), protocol: q.Protocol, sport: 40000, in: source.In, bridged: source.In == "cni0"}
	pkt.src = netip.MustParseAddr(source.IPv4)
	if pkt.dst.Is6() {
		pkt.src = netip.MustParseAddr(source.IPv6)
	}
	if pkt.in == "" {
		return k.sent(pkt)
	}
	return k.received(pkt)
}

// received is a packet that has come in by an interface.
func (k *Kernel) received(pkt *packet) string {
	if verdict := cmp.Or(stopped(k.run("mangle", "PREROUTING", pkt)), stopped(k.run("nat", "PREROUTING", pkt))); verdict != "" {
		return verdict
	}
	if k.skipsLocal(pkt) || !k.local(pkt.dst) && !(k.claimed[pkt.dst] && pkt.mark&claimMark != 0) {
		return k.forwarded(pkt)
	}
	return k.delivered(pkt)
}

// claimMark is the default of --claim-mark. Under foreignMask it marks what is for
// a port of another device, and skips table local.
const claimMark, foreignMask = 0x4, 0xd

// skipsLocal reports whether a policy rule leads the packet past table local.
func (k *Kernel) skipsLocal(pkt *packet) bool { return k.skips && pkt.mark&foreignMask == claimMark }

func (k *Kernel) forwarded(pkt *packet) string {
	return cmp.Or(stopped(k.run("mangle", "FORWARD", pkt)), stopped(k.run("filter", "FORWARD", pkt)), "forwarded")
}

func (k *Kernel) delivered(pkt *packet) string {
	verdict := cmp.Or(stopped(k.run("mangle", "INPUT", pkt)), stopped(k.run("filter", "INPUT", pkt)))
	if verdict != "" {
		return verdict
	}
	if answer, served := k.scheduled(pkt); served {
		return answer
	}
	return "the node's own"
}

// sent is a packet of the node's own: its source is the destination, where that
// is local.
func (k *Kernel) sent(pkt *packet) string {
	if k.local(pkt.dst) {
		pkt.src = pkt.dst
	}
	verdict := cmp.Or(stopped(k.run("mangle", "OUTPUT", pkt)), stopped(k.run("nat", "OUTPUT", pkt)))
	if verdict != "" {
		return verdict
	}
	if answer, served := k.scheduled(pkt); served {
		return answer
	}
	if verdict := stopped(k.run("filter", "OUTPUT", pkt)); verdict != "" {
		return verdict
	}
	if k.skipsLocal(pkt) || !k.local(pkt.dst) {
		return "sent away"
	}
	// What is for the node itself comes in again by lo.
	pkt.in = "lo"
	return k.delivered(pkt)
}

// stopped is a verdict that ends the way, else "".
func stopped(verdict string) string {
	switch verdict {
	case "DROP":
		return "dropped"
	case "REJECT":
		return "refused"
	case "REDIRECT":
		return "the node's own"
	}
	return ""
}

// scheduled is what IPVS does: a virtual server with the packet's mark comes
// first, and one without real servers refuses. Each real server has its words.
func (k *Kernel) scheduled(pkt *packet) (answer string, served bool) {
	marked := k.marked
	if pkt.dst.Is6() {
		marked = k.marked6
	}
	key := endpoint{pkt.protocol, netip.AddrPortFrom(pkt.dst, pkt.dport)}
	vs, served := marked[pkt.mark]
	if !served || pkt.mark == 0 {
		vs, served = k.virtualServers[key]
	}
	if !served {
		return "", false
	}
	var out []string
	for to, options := range vs.realServers {
		if active(options) {
			out = append(out, k.dispatched(*pkt, key, to))
		}
	}
	if len(out) == 0 {
		return "refused", true
	}
	slices.Sort(out)
	return strings.Join(out, ", "), true
}

// active tells whether a real server takes new connections.
func active(options string) bool { return !strings.Contains(options+" ", "-w 0 ") }

// dispatched is a packet that IPVS has given a real server. It is in OUTPUT
// again, and nat does not look at it there a second time.
func (k *Kernel) dispatched(pkt packet, key endpoint, to netip.AddrPort) string {
	pkt.served, pkt.in = &key, ""
	pkt.dst, pkt.dport = to.Addr(), to.Port()
	verdict := cmp.Or(stopped(k.run("mangle", "OUTPUT", &pkt)), stopped(k.run("filter", "OUTPUT", &pkt)))
	if verdict != "" {
		return to.String() + " " + verdict
	}
	if m := k.run("nat", "POSTROUTING", &pkt); m == "MASQUERADE" || m == "SNAT" {
		return to.String() + " masqueraded"
	}
	return to.String() + " as itself"
}
