package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// addLocalhost makes requests from the node to node ports of its loopback address carry
// the node's own address as source (package nft explains why). It also masquerades
// them, so that each has an address of the interface through which it leaves:
//
//	raw -A OUTPUT -d 127.0.0.1/32 -j KUBE-IPVS-LOCALHOST
//	raw -A KUBE-IPVS-LOCALHOST -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j MARK --set-xmark 0x4000/0x4000
//
// The mark identifies these packets to the nftables rules, which cannot match the set. All of
// these are written on demand: a jump in raw OUTPUT and a base chain of nftables cost 3,400
// instructions of each connection through IPVS.
func addLocalhost(plan *NodePlan, cfg *Config, n *Node, facts *Facts, family ip.Family) {
	if !usesLocalhost(cfg, n, facts, family) || n.postpones(DemandedLocalhost, family) {
		return
	}
	if plan.Loopback == nil {
		plan.Loopback = nft.Loopback{}
	}
	m := cfg.MasqueradeMark
	plan.Loopback[family] = nft.Exchange{Mark: m, Source: facts.Primary[family]}
	r := ruleset{state: &plan.NAT, cfg: cfg, family: family}
	r.jumpIf(nat.Raw, "OUTPUT", "-d "+r.localhost(), chainLocalhost, "kubernetes localhost node ports")
	r.chain(nat.Raw, chainLocalhost, rule("node ports of localhost", r.match(NodePorts, "dst,dst"), fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", m)))
}

// usesLocalhost reports whether there are node ports of the loopback address.
func usesLocalhost(cfg *Config, n *Node, facts *Facts, family ip.Family) bool {
	return servesLocalhost(cfg, facts, family) && n.Uses.Has(NodePorts, family)
}

// hasLocalhostPlaceholders reports whether placeholder rules match packets to node ports of the
// loopback address; see Demands.
func hasLocalhostPlaceholders(cfg *Config, n *Node, facts *Facts, family ip.Family) bool {
	return usesLocalhost(cfg, n, facts, family) && n.hasPlaceholders(DemandedLocalhost, family)
}

// localhostPlaceholders returns the placeholder rules of KUBE-SERVICES for addLocalhost. IPVS drops
// the packet before its conntrack entry is confirmed, unless the endpoint is an address of the node
// (localEndpointPlaceholders). The client's next packet gets the node's address as its source, so
// conntrack and IPVS treat it as another connection:
//
//	-A KUBE-SERVICES -s 127.0.0.0/8 -d 127.0.0.1/32 -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j SET --add-set KUBE-IPVS-DEMAND-LO dst
func (r *ruleset) localhostPlaceholders() []nat.Rule {
	if !r.hasLocalhostPlaceholders {
		return nil
	}
	match := fmt.Sprintf("-s %s -d %s %s", r.loopback(), r.localhost(), r.match(NodePorts, "dst,dst"))
	return []nat.Rule{rule("rules are written on demand", match, r.addTo(DemandedLocalhost, "dst"))}
}

// localEndpointPlaceholders returns the rule of KUBE-IPVS-FILTER that drops the first packet to a node
// port of the loopback address if its endpoint is an address of the node. Otherwise the endpoint would
// answer, and the connection would break once the rules on demand change the source of later packets:
//
//	-A KUBE-IPVS-FILTER -i lo -m conntrack --ctstate NEW --ctorigsrc 127.0.0.0/8 --ctorigdst 127.0.0.1 -m ipvs --ipvs -j DROP
//
// Packets from a loopback address to another VIP, such as a cluster IP, have no rules on demand.
func (r *ruleset) localEndpointPlaceholders() []nat.Rule {
	if !r.hasLocalhostPlaceholders {
		return nil
	}
	// Unlike -s, this option prints a single address without its prefix length.
	from := strings.TrimSuffix(r.loopback(), "/128")
	match := fmt.Sprintf("-i lo -m conntrack --ctstate NEW --ctorigsrc %s --ctorigdst %s -m ipvs --ipvs", from, r.family.Loopback())
	return []nat.Rule{rule("the client sends it again", match, "DROP")}
}

// loopback returns the prefix of all loopback addresses.
func (r *ruleset) loopback() string {
	if r.family == ip.IPv6 {
		return r.localhost()
	}
	return "127.0.0.0/8"
}

// localhost returns the loopback address with node ports, as a prefix.
func (r *ruleset) localhost() string {
	a := r.family.Loopback()
	return fmt.Sprintf("%s/%d", a, a.BitLen())
}

// defaultNodePorts is the default of the API server's --service-node-port-range.
var defaultNodePorts = routing.PortRange{First: 30000, Last: 32767}

// clientPortWarnings warns about node ports that are not served on the loopback address, because the
// kernel may give them to clients. It assumes the default range of node ports.
func clientPortWarnings(cfg *Config, n *Node) []string {
	var shared []string
	for _, r := range n.ClientPorts {
		both := routing.PortRange{First: max(r.First, defaultNodePorts.First), Last: min(r.Last, defaultNodePorts.Last)}
		if both.First <= both.Last {
			shared = append(shared, both.String())
		}
	}
	if len(shared) == 0 {
		return nil
	}
	facts := NewFacts(cfg, n)
	if !slices.ContainsFunc(cfg.Families, func(f ip.Family) bool { return usesLocalhost(cfg, n, &facts, f) }) {
		return nil
	}
	return []string{fmt.Sprintf("node ports %s are not served on the loopback address, because clients on this node may get these ports "+
		"(net.ipv4.ip_local_port_range): add them to net.ipv4.ip_local_reserved_ports", strings.Join(shared, ","))}
}
