package plan

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// A pod that reaches an endpoint on its own bridge through a VIP gets its
// answer switched, past the node's netfilter, so that nobody gives it back
// the VIP as its source: "reply from unexpected source". Either br_netfilter
// shows what is switched to netfilter, or the node masquerades such flows, so
// that their answers are not switched but come to the node.

// PodBridges are the bridges that have something attached, by name.
func PodBridges(inv *routing.Inventory) []routing.Link {
	return filter(inv.Links, func(l routing.Link) bool {
		return l.Type == "bridge" && slices.ContainsFunc(inv.Links, func(m routing.Link) bool { return m.Master == l.Name })
	})
}

// addBridgeSysctls has br_netfilter show bridged packets to the rules of each
// family.
func addBridgeSysctls(s sysctl.State, cfg *Config, n *Node) {
	if !n.BridgeNetfilter || len(PodBridges(&n.Inventory)) == 0 {
		return
	}
	for _, family := range cfg.Families {
		s[BridgeSysctls[family]] = "1"
	}
}

// BridgeSysctls are br_netfilter's parameters.
var BridgeSysctls = map[ip.Family]string{
	ip.IPv4: "net/bridge/bridge-nf-call-iptables",
	ip.IPv6: "net/bridge/bridge-nf-call-ip6tables",
}

// bridgeWarnings says that pods of a bridge do not see each other's address.
func bridgeWarnings(n *Node) []string {
	var out []string
	for _, bridge := range PodBridges(&n.Inventory) {
		if !n.BridgeNetfilter {
			out = append(out, "what pods of "+bridge.Name+" send each other through a Service is masqueraded: br_netfilter is not loaded, or "+
				BridgeSysctls[ip.IPv4]+" or its like of IPv6 is 0 and cannot be set")
		}
	}
	return out
}

// bridgeRules masquerade where there is no br_netfilter. Of what is switched
// nothing comes here, so what leaves by the bridge that it came from is what
// IPVS has sent back there:
//
//	-A KUBE-POSTROUTING -s 10.244.1.0/24 -o cni0 -j MASQUERADE --random-fully
func (r *ruleset) bridgeRules(n *Node) []nat.Rule {
	if n.BridgeNetfilter {
		return nil
	}
	var rules []nat.Rule
	for _, bridge := range PodBridges(&n.Inventory) {
		for _, a := range bridge.Addresses {
			if a.Global && ip.Of(a.Prefix.Addr()) == r.family {
				rules = append(rules, rule("back to the same bridge", "-s "+a.Prefix.Masked().String()+" -o "+bridge.Name, "MASQUERADE --random-fully"))
			}
		}
	}
	return rules
}
