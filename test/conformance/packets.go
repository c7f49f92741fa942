package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Question is a packet whose path is evaluated.
type Question struct {
	From     string // one of Sources
	Protocol string
	To       netip.AddrPort
}

func (q Question) fact() Fact {
	return Fact{Kind: "packet", Name: q.From, Protocol: q.Protocol, At: q.To}
}

// Source is the origin of packets.
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

// Inside reports whether a source is this node or a pod on it. For this node, a pod of
// another node is an external client.
func Inside(source string) bool { return Sources[source].In != "eth0" }

// UnservedPort is a port that no Service has.
const UnservedPort = 9999

// Questions returns questions about every address and port that one of the kernels
// serves, and about related ports: the same port of another protocol, node ports on VIPs,
// and an unserved port. It also asks whether the address answers ping.
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

// protocols maps names to the evaluator's protocols, for IPv4 and IPv6.
var protocols = map[string][2]ip.Protocol{
	"TCP": {ip.TCP, ip.TCP}, "UDP": {ip.UDP, ip.UDP}, "SCTP": {ip.SCTP, ip.SCTP}, "ICMP": {trace.ICMP, trace.ICMPv6},
}

// answer returns what happens to a request, in words, for each real server. It fails if
// the evaluator does not support a rule.
func (k *Kernel) answer(q Question) (string, error) {
	source, family := Sources[q.From], 0
	from := netip.MustParseAddr(source.IPv4)
	if q.To.Addr().Is6() {
		from, family = netip.MustParseAddr(source.IPv6), 1
	}
	n := k.nodes[family]
	x := k.evaluator.Explain(n, trace.Question{Protocol: protocols[q.Protocol][family], From: from, To: q.To, In: source.In})
	if len(x.Doubts) > 0 {
		return "", fmt.Errorf("the evaluator cannot judge it: %s", strings.Join(x.Doubts, "; "))
	}
	var out []string
	for i := range x.RealServers {
		if b := &x.RealServers[i]; b.Weight > 0 {
			out = append(out, b.RealServer+" "+dispatched(n, b))
		}
	}
	switch {
	case len(out) > 0:
		slices.Sort(out)
		return strings.Join(out, ", "), nil
	case x.Verdict.Outcome == trace.Refused:
		return "refused", nil
	case x.Verdict.Outcome == trace.Dropped:
		return "dropped", nil
	case x.Link == "lo":
		return "the node's own", nil
	case source.In == "":
		return "sent away", nil
	}
	return "forwarded", nil
}

// dispatched describes a request after IPVS: the source address that the endpoint sees,
// or that the request does not reach it. Replies are not compared.
func dispatched(n *trace.Node, b *trace.ServerPath) string {
	arrives := b.ReplyEntersBy != "" || b.LeavesBy == "lo"
	switch {
	case !arrives && b.Verdict.Outcome == trace.Refused:
		return "refused"
	case !arrives && b.Verdict.Outcome == trace.Dropped:
		return "dropped"
	case n.LinkOf(netip.MustParseAddr(b.SeenSource)) != "":
		return "masqueraded"
	}
	return "as itself"
}
