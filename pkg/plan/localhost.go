package plan

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
)

// addLocalhost makes requests from the node to node ports of its loopback address carry
// the node's own address as source (package nft explains why). It also masquerades
// them, so that a request leaves through any interface with an address of that
// interface:
//
//	raw -A OUTPUT -d 127.0.0.1/32 -j KUBE-IPVS-LOCALHOST
//	raw -A KUBE-IPVS-LOCALHOST -m set --match-set KUBE-IPVS-NODE-PORT dst,dst -j MARK --set-xmark 0x4000/0x4000
//
// The mark identifies these packets to the nftables rules, which cannot match the set.
func addLocalhost(plan *NodePlan, cfg *Config, n *Node, facts *Facts, family ip.Family) {
	if !servesLocalhost(cfg, facts, family) || !n.Uses.Has(NodePorts, family) {
		return
	}
	if plan.Loopback == nil {
		plan.Loopback = nft.Loopback{}
	}
	m, address := cfg.MasqueradeMark, family.Loopback()
	plan.Loopback[family] = nft.Exchange{Mark: m, Source: facts.Primary[family]}
	r := ruleset{state: &plan.NAT, cfg: cfg, family: family}
	to := fmt.Sprintf("-d %s/%d", address, address.BitLen())
	r.jumpIf(nat.Raw, "OUTPUT", to, "KUBE-IPVS-LOCALHOST", "kubernetes localhost node ports")
	r.chain(nat.Raw, "KUBE-IPVS-LOCALHOST", rule("node ports of localhost", r.match(NodePorts, "dst,dst"), fmt.Sprintf("MARK --set-xmark %#[1]x/%#[1]x", m)))
}
