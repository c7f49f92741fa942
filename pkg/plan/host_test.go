package plan_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// host simulates one family of a node on which the plan of a scenario is installed.
type host struct {
	*firewall
	family    ip.Family
	inventory *routing.Inventory
	main      []routing.Route // of the main table, except its default routes
	rules     []routing.Rule
	validMark bool // src_valid_mark: the reverse-path check uses the mark
	servers   map[ipvs.Key][]netip.AddrPort
	bound     map[netip.Addr]bool // addresses on kube-ipvs0
	policy    uint32              // added to each packet's mark by a policy engine's rules in INPUT
	claimed   map[netip.Addr]bool // VIPs in the table of claimed ports
	table     int                 // number of that table
}

func newHost(t *testing.T, s *scenario, family ip.Family) *host {
	t.Helper()
	parts := partsOf(&s.Config, &s.Node, s.Services)
	part := plan.ForNode(&s.Config, &s.Node)
	facts := plan.NewFacts(&s.Config, &s.Node)
	h := &host{
		family: family, inventory: &s.Node.Inventory,
		validMark: part.Sysctls["net/ipv4/conf/all/src_valid_mark"] == "1",
		servers:   map[ipvs.Key][]netip.AddrPort{},
		bound:     map[netip.Addr]bool{},
		claimed:   map[netip.Addr]bool{},
		table:     s.Config.VIPs.Table,
	}
	var members []plan.Member
	for _, p := range parts {
		members = append(members, p.Members...)
		for _, vs := range p.VirtualServers {
			h.servers[vs.Key] = nil
			for _, rs := range vs.RealServers {
				h.servers[vs.Key] = append(h.servers[vs.Key], rs.AddrPort)
			}
		}
		for _, v := range p.VIPs {
			into := map[plan.ClaimMode]map[netip.Addr]bool{plan.ClaimAddress: h.bound, plan.ClaimRoute: h.bound, plan.ClaimPort: h.claimed}
			into[v.Claim][v.Addr] = true
		}
	}
	local := map[netip.Addr]bool{}
	for a := range h.bound {
		local[a] = true
	}
	for a := range facts.NodeIPs {
		local[a] = true
	}
	h.firewall = newFirewall(t, family, part, members, local)
	h.addRoutes(s)
	h.addRules(part.Rules)
	return h
}

func (h *host) addRoutes(s *scenario) {
	h.main = slices.Clone(s.Routes)
	for _, l := range s.Node.Inventory.Links {
		for _, a := range l.Addresses {
			h.main = append(h.main, routing.Route{Dst: a.Prefix.Masked(), Link: l.Name})
		}
	}
	slices.SortStableFunc(h.main, func(a, b routing.Route) int { return cmp.Compare(b.Dst.Bits(), a.Dst.Bits()) })
}

func (h *host) addRules(ours []routing.Rule) {
	for _, r := range slices.Concat(h.inventory.Rules, ours, []routing.Rule{{Family: h.family, Priority: 32766, Table: 254}}) {
		if r.Family == h.family {
			h.rules = append(h.rules, r)
		}
	}
	slices.SortStableFunc(h.rules, func(a, b routing.Rule) int { return cmp.Compare(a.Priority, b.Priority) })
}

// route returns the interface through which a packet leaves; "lo" if it is for the
// node.
func (h *host) route(src, dst netip.Addr, mark uint32) string {
	skips := slices.ContainsFunc(h.rules, func(r routing.Rule) bool {
		return r.Action == routing.SkipLocal && r.IIf == "" && mark&r.Mask == r.Mark
	})
	if h.local[dst] && !skips {
		return "lo"
	}
	for _, r := range h.rules {
		if r.Action != routing.Lookup {
			continue
		}
		if r.From.IsValid() && !r.From.Contains(src) || r.To.IsValid() && !r.To.Contains(dst) || mark&r.Mask != r.Mark {
			continue
		}
		if link := h.lookUp(r.Table, dst); link != "" {
			return link
		}
	}
	h.t.Fatalf("no route from %s to %s", src, dst)
	return ""
}

func (h *host) lookUp(table int, dst netip.Addr) string {
	if table == h.table && h.claimed[dst] {
		return "lo"
	}
	if table == 254 {
		for _, r := range h.main {
			if r.Dst.Contains(dst) {
				return r.Link
			}
		}
	}
	for _, r := range h.inventory.Defaults {
		if r.Family == h.family && r.Table == table {
			return r.Link
		}
	}
	return ""
}

// address returns the address that MASQUERADE uses: the interface's first one, or, if
// it has none, the first of any other interface.
func (h *host) address(link string) netip.Addr {
	var other netip.Addr
	for _, l := range h.inventory.Links {
		for _, a := range l.Addresses {
			if ip.Of(a.Prefix.Addr()) != h.family || !a.Global {
				continue
			}
			if l.Name == link {
				return a.Prefix.Addr()
			}
			if !other.IsValid() {
				other = a.Prefix.Addr()
			}
		}
	}
	return other
}

// outcome is what happens to the first packet of a connection.
type outcome struct {
	verdict string // DROP, REJECT; REFUSED without real servers; FORWARD by an interface; LOCAL if IPVS does not serve the packet
	sent    []sent // one per real server
}

// sent is a packet on its way to a real server.
type sent struct {
	to     netip.AddrPort
	source netip.Addr
	link   string
	connmk uint32
}

// from sends a packet that enters through an interface, or, if the interface is "", one
// of the node itself.
func (h *host) from(p packet) outcome {
	if p.in == "" {
		return h.fromItself(p)
	}
	h.mustAccept(nat.Mangle, "PREROUTING", &p)
	if got := h.hook(nat.NAT, "PREROUTING", &p); got.verdict == "REDIRECT" {
		p.dst = h.address(p.in)
	} else if got.verdict != "ACCEPT" {
		h.t.Fatalf("%s in nat PREROUTING", got.verdict)
	}
	if p.out = h.route(p.src, p.dst, p.mark); p.out != "lo" {
		return h.forward(p)
	}
	for _, table := range []nat.Table{nat.Mangle, nat.Filter} {
		if got := h.hook(table, "INPUT", &p); got.verdict != "ACCEPT" {
			return outcome{verdict: got.verdict}
		}
	}
	p.mark |= h.policy
	return h.serve(p)
}

func (h *host) forward(p packet) outcome {
	for _, table := range []nat.Table{nat.Mangle, nat.Filter} {
		if got := h.hook(table, "FORWARD", &p); got.verdict != "ACCEPT" {
			return outcome{verdict: got.verdict}
		}
	}
	return outcome{verdict: "FORWARD by " + p.out}
}

// fromItself sends a packet of the node: IPVS takes it before filter OUTPUT sees it.
func (h *host) fromItself(p packet) outcome {
	if got := h.hook(nat.Mangle, "OUTPUT", &p); got.verdict != "ACCEPT" {
		return outcome{verdict: got.verdict}
	}
	h.mustAccept(nat.NAT, "OUTPUT", &p)
	out, link := h.serve(p), h.route(p.src, p.dst, p.mark)
	if out.verdict == "LOCAL" && link != "lo" {
		p.out = link
		source := p.src
		if got := h.hook(nat.NAT, "POSTROUTING", &p); got.verdict == "MASQUERADE" {
			source = h.address(link)
		}
		if h.bound[source] {
			h.t.Errorf("to %s: leaves with the VIP %s as its source", p.dst, source)
		}
		out.verdict = "FORWARD by " + link
	}
	if len(out.sent) > 0 && link != "lo" {
		h.t.Errorf("to %s: an endpoint in the node's own network is not reached through %s", p.dst, link)
	}
	return out
}

func (h *host) mustAccept(table nat.Table, chain string, p *packet) {
	if got := h.hook(table, chain, p); got.verdict != "ACCEPT" {
		h.t.Fatalf("%s in %s %s", got.verdict, table, chain)
	}
}

// serve selects the virtual server: by the whole mark first, then by address and port.
func (h *host) serve(p packet) outcome {
	servers, served := h.servers[ipvs.Key{Addr: h.family.Unspecified(), FWMark: p.mark}]
	if p.mark == 0 || !served {
		servers, served = h.servers[ipvs.Key{Protocol: p.protocol, Addr: p.dst, Port: p.dport}]
	}
	switch {
	case !served:
		return outcome{verdict: "LOCAL"}
	case len(servers) == 0:
		return outcome{verdict: "REFUSED"}
	}
	var out outcome
	for _, to := range servers {
		out.sent = append(out.sent, h.send(p, to))
	}
	return out
}

// send continues after IPVS has changed the destination: local output again, where a
// drop would lose the packet, and postrouting.
func (h *host) send(p packet, to netip.AddrPort) sent {
	p.dst, p.dport, p.ipvs = to.Addr(), to.Port(), true
	p.in = ""
	h.mustAccept(nat.Mangle, "OUTPUT", &p)
	p.out = h.route(p.src, to.Addr(), p.mark)
	if p.mark&0x9 != 0 {
		h.t.Errorf("the packet to %s is routed with the mark %#x", to, p.mark)
	}
	got := h.hook(nat.NAT, "POSTROUTING", &p)
	out := sent{to: to, source: p.src, link: p.out, connmk: p.connmk}
	switch got.verdict {
	case "SNAT":
		out.source = got.source
	case "MASQUERADE":
		out.source = h.address(p.out)
	case "ACCEPT":
		return out
	default:
		h.t.Fatalf("%s in POSTROUTING", got.verdict)
	}
	if p.mark&0x4000 != 0 && p.src != p.dst {
		h.t.Errorf("the packet to %s leaves with the masquerade mark", to)
	}
	return out
}

// replyPasses reports whether the reply passes the strict reverse-path check of the
// interface that the network delivers it to. The check runs after the source is
// restored, so it looks up the route from the client's address to the server.
func (h *host) replyPasses(client netip.Addr, s sent, by string) bool {
	reply := packet{src: s.to.Addr(), dst: s.source, protocol: ip.TCP, in: by, connmk: s.connmk, reply: true}
	h.mustAccept(nat.Mangle, "PREROUTING", &reply)
	mark := reply.mark
	if !h.validMark {
		mark = 0
	}
	return h.route(client, s.to.Addr(), mark) == by
}

// text returns an outcome with host names instead of addresses.
func (o outcome) text(name func(netip.Addr) string) string {
	if o.verdict != "" {
		return o.verdict
	}
	var out []string
	for _, s := range o.sent {
		out = append(out, fmt.Sprintf("%s:%d by %s as %s", name(s.to.Addr()), s.to.Port(), s.link, name(s.source)))
	}
	return strings.Join(out, ", ")
}
