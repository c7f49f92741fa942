//go:build prove

package prove

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// peer writes what kube-proxy v1.36 in IPVS mode writes.
type peer struct {
	*Oracle
	node *trace.Node
}

// KubeProxy returns the scenario's node of one family as kube-proxy's IPVS mode leaves
// it.
func KubeProxy(s *Scenario, family ip.Family) (*trace.Node, error) {
	n := s.bare(family)
	p := peer{Oracle: NewOracle(s, family), node: n}
	n.Delivers = s.fabric(family)
	n.Rules = nil
	inv, err := NewKernel(s).Routing.Inventory()
	if err != nil {
		return nil, err
	}
	for _, r := range inv.Rules {
		if r.Family == family {
			n.Rules = append(n.Rules, r)
		}
	}
	n.Sets, n.IPVS = ipset.State{}, ipvs.State{}
	for key, value := range map[string]string{"net/ipv4/vs/conntrack": "1", "net/ipv4/ip_forward": "1"} {
		n.Sysctls[key] = value
	}
	for name, kind := range peerSets {
		n.Sets[name] = ipset.Contents{Set: ipset.Set{Name: name, Type: kind, Family: family}, Entries: map[ipset.Entry]uint32{}}
	}
	for i := range s.Services {
		if s.Services[i].Has(family) {
			p.service(&s.Services[i])
		}
	}
	n.Ruleset, err = nat.ParseSave(p.rules())
	return n, err
}

var peerSets = map[string]ipset.Type{
	"LOOP-BACK": ipset.HashIPPortIP, "CLUSTER-IP": ipset.HashIPPort, "EXTERNAL-IP": ipset.HashIPPort, "EXTERNAL-IP-LOCAL": ipset.HashIPPort,
	"LOAD-BALANCER": ipset.HashIPPort, "LOAD-BALANCER-LOCAL": ipset.HashIPPort, "LOAD-BALANCER-FW": ipset.HashIPPort,
	"SOURCE-CIDR": ipset.HashIPPortNet, "SOURCE-IP": ipset.HashIPPortIP,
	"NODE-PORT-TCP": ipset.BitmapPort, "NODE-PORT-LOCAL-TCP": ipset.BitmapPort, "NODE-PORT-UDP": ipset.BitmapPort, "NODE-PORT-LOCAL-UDP": ipset.BitmapPort,
	"NODE-PORT-SCTP": ipset.HashIPPort, "NODE-PORT-LOCAL-SCTP": ipset.HashIPPort,
	"HEALTH-CHECK": ipset.BitmapPort, "IPVS-IPS": ipset.HashIP,
}

func (p *peer) add(set string, e ipset.Entry) { p.node.Sets[set].Entries[e] = 0 }

func (p *peer) service(s *service.Service) {
	if s.HealthCheckNodePort != 0 {
		p.add("HEALTH-CHECK", ipset.Entry{Port: s.HealthCheckNodePort})
	}
	for i := range s.Ports {
		port := &s.Ports[i]
		for _, e := range port.Endpoints {
			if e.Node == p.Config.NodeName {
				p.add("LOOP-BACK", ipset.Entry{Addr: e.Addr.Addr(), Port: e.Addr.Port(), Protocol: port.Protocol, Addr2: e.Addr.Addr()})
			}
		}
		everywhere, here := p.eligible(port, false), p.eligible(port, true)
		internal, external := everywhere, everywhere
		if s.InternalLocal && (len(here) > 0 || !s.External()) {
			internal = here
		}
		if s.ExternalLocal && len(here) > 0 {
			external = here
		}
		for _, a := range s.ClusterIPs {
			p.vip(a, port, internal, "CLUSTER-IP")
		}
		for _, a := range s.ExternalIPs {
			set := "EXTERNAL-IP"
			if s.ExternalLocal {
				set = "EXTERNAL-IP-LOCAL"
			}
			p.vip(a, port, external, set)
		}
		for _, a := range s.LoadBalancers {
			p.vip(a, port, external, "LOAD-BALANCER")
			p.balancer(a, port, s)
		}
		if port.NodePort != 0 {
			p.nodePort(port, s, external)
		}
	}
}

// server adds a virtual server.
func (p *peer) server(protocol ip.Protocol, a netip.Addr, port uint16, endpoints []netip.AddrPort) {
	svc := ipvs.Service{VirtualServer: ipvs.VirtualServer{Scheduler: "rr"}, RealServers: map[netip.AddrPort]ipvs.RealServer{}}
	for _, e := range endpoints {
		svc.RealServers[e] = ipvs.RealServer{Weight: 1}
	}
	p.node.IPVS[ipvs.Key{Protocol: protocol, Addr: a, Port: port}] = svc
}

func (p *peer) vip(a netip.Addr, port *service.Port, endpoints []netip.AddrPort, set string) {
	if ip.Of(a) != p.family {
		return
	}
	p.server(port.Protocol, a, port.Port, endpoints)
	p.add(set, ipset.Entry{Addr: a, Port: port.Port, Protocol: port.Protocol})
	if p.nodes[a] {
		return
	}
	p.add("IPVS-IPS", ipset.Entry{Addr: a})
	r := routing.Route{Family: p.family, Table: routing.TableLocal, Dst: netip.PrefixFrom(a, a.BitLen()), Link: routing.DummyLink, Local: true, Src: a}
	if !slices.Contains(p.node.Routes, r) {
		p.node.Routes = append(p.node.Routes, r)
	}
}

func (p *peer) balancer(a netip.Addr, port *service.Port, s *service.Service) {
	if ip.Of(a) != p.family {
		return
	}
	e := ipset.Entry{Addr: a, Port: port.Port, Protocol: port.Protocol}
	if s.ExternalLocal {
		p.add("LOAD-BALANCER-LOCAL", e)
	}
	ranges := slices.DeleteFunc(slices.Clone(s.SourceRanges), func(r netip.Prefix) bool { return ip.Of(r.Addr()) != p.family })
	if len(s.SourceRanges) == 0 || slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Bits() == 0 }) {
		return
	}
	p.add("LOAD-BALANCER-FW", e)
	for _, r := range ranges {
		cidr, self := e, e
		cidr.Net = r
		p.add("SOURCE-CIDR", cidr)
		if r.Contains(p.primary()) {
			self.Addr2 = a
			p.add("SOURCE-IP", self)
		}
	}
}

func (p *peer) nodePort(port *service.Port, s *service.Service, endpoints []netip.AddrPort) {
	for _, a := range p.ports {
		p.server(port.Protocol, a, port.NodePort, endpoints)
		e := ipset.Entry{Port: port.NodePort}
		if port.Protocol == ip.SCTP {
			e = ipset.Entry{Addr: a, Port: port.NodePort, Protocol: ip.SCTP}
		}
		p.add("NODE-PORT-"+port.Protocol.String(), e)
		if s.ExternalLocal {
			p.add("NODE-PORT-LOCAL-"+port.Protocol.String(), e)
		}
	}
}

// rules returns rules in the format of iptables-save, with short names for sets.
func (p *peer) rules() string {
	var b strings.Builder
	in := func(set, flags string) string { return "-m set --match-set " + set + " " + flags }
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	loop, reject := "127.0.0.0/8", "icmp-port-unreachable"
	if p.family == ip.IPv6 {
		loop, reject = "::1/128", "icmp6-port-unreachable"
	}
	line("*nat")
	for _, c := range []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"} {
		line(":%s ACCEPT [0:0]", c)
	}
	for _, c := range []string{"KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT"} {
		line(":%s - [0:0]", c)
	}
	line("-A PREROUTING -j KUBE-SERVICES")
	line("-A OUTPUT -j KUBE-SERVICES")
	line("-A POSTROUTING -j KUBE-POSTROUTING")
	line("-A KUBE-SERVICES -s %s -j RETURN", loop)
	line("-A KUBE-SERVICES %s -j KUBE-LOAD-BALANCER", in("LOAD-BALANCER", "dst,dst"))
	line("-A KUBE-LOAD-BALANCER %s -j RETURN", in("LOAD-BALANCER-LOCAL", "dst,dst"))
	line("-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ")
	for protocol, flags := range map[string]string{"TCP": "dst", "UDP": "dst", "SCTP": "dst,dst"} {
		match := "-p " + strings.ToLower(protocol) + " "
		line("-A KUBE-NODE-PORT %s%s -j RETURN", match, in("NODE-PORT-LOCAL-"+protocol, flags))
		line("-A KUBE-NODE-PORT %s%s -j KUBE-MARK-MASQ", match, in("NODE-PORT-"+protocol, flags))
	}
	line("-A KUBE-SERVICES %s -j KUBE-MARK-MASQ", p.notLocal(in("CLUSTER-IP", "dst,dst"), in("CLUSTER-IP", "src,dst")))
	line("-A KUBE-SERVICES %s -j KUBE-MARK-MASQ", in("EXTERNAL-IP", "dst,dst"))
	for _, set := range []string{"EXTERNAL-IP", "EXTERNAL-IP-LOCAL"} {
		line("-A KUBE-SERVICES %s -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT", in(set, "dst,dst"))
		line("-A KUBE-SERVICES %s -m addrtype --dst-type LOCAL -j ACCEPT", in(set, "dst,dst"))
	}
	line("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT")
	line("-A KUBE-SERVICES %s -j ACCEPT", in("CLUSTER-IP", "dst,dst"))
	line("-A KUBE-SERVICES %s -j ACCEPT", in("LOAD-BALANCER", "dst,dst"))
	line("-A KUBE-POSTROUTING %s -j MASQUERADE", in("LOOP-BACK", "dst,dst,src"))
	line("-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN")
	line("-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0")
	line("-A KUBE-POSTROUTING -j MASQUERADE --random-fully")
	line("-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
	line("COMMIT\n*mangle")
	for _, c := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
		line(":%s ACCEPT [0:0]", c)
	}
	line("COMMIT\n*filter")
	for _, c := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		line(":%s ACCEPT [0:0]", c)
	}
	for _, c := range []string{"KUBE-PROXY-FIREWALL", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-FORWARD", "KUBE-NODE-PORT", "KUBE-IPVS-FILTER"} {
		line(":%s - [0:0]", c)
	}
	line("-A INPUT -j KUBE-IPVS-FILTER")
	line("-A INPUT -j KUBE-PROXY-FIREWALL")
	line("-A INPUT -j KUBE-NODE-PORT")
	line("-A FORWARD -j KUBE-PROXY-FIREWALL")
	line("-A FORWARD -j KUBE-FORWARD")
	line("-A KUBE-PROXY-FIREWALL %s -j KUBE-SOURCE-RANGES-FIREWALL", in("LOAD-BALANCER-FW", "dst,dst"))
	line("-A KUBE-SOURCE-RANGES-FIREWALL %s -j RETURN", in("SOURCE-CIDR", "dst,dst,src"))
	line("-A KUBE-SOURCE-RANGES-FIREWALL %s -j RETURN", in("SOURCE-IP", "dst,dst,src"))
	line("-A KUBE-SOURCE-RANGES-FIREWALL -j DROP")
	line("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT")
	line("-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	line("-A KUBE-NODE-PORT %s -j ACCEPT", in("HEALTH-CHECK", "dst"))
	for _, set := range []string{"LOAD-BALANCER", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL"} {
		line("-A KUBE-IPVS-FILTER %s -j RETURN", in(set, "dst,dst"))
	}
	line("-A KUBE-IPVS-FILTER %s -j RETURN", in("HEALTH-CHECK", "dst"))
	line("-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW %s -j REJECT --reject-with %s", in("IPVS-IPS", "dst"), reject)
	line("COMMIT")
	return b.String()
}

// notLocal is the match of cluster IP traffic that is masqueraded.
func (p *peer) notLocal(to, fromVIP string) string {
	if p.Config.MasqueradeAll {
		return to
	}
	cidrs := p.Config.LocalTraffic.CIDRs
	switch p.Config.LocalTraffic.Mode {
	case plan.DetectBridgeInterface:
		return "! -i " + p.Config.LocalTraffic.Interface + " " + to
	case plan.DetectInterfaceNamePrefix:
		return "! -i " + p.Config.LocalTraffic.Interface + "+ " + to
	case plan.DetectNodeCIDR:
		cidrs = p.Node.PodCIDRs
	}
	for _, c := range cidrs {
		if ip.Of(c.Addr()) == p.family && p.Config.LocalTraffic.Mode != "" {
			return "! -s " + c.String() + " " + to
		}
	}
	return fromVIP
}
