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

// BridgeNetfilter says whether the kernel shows bridged packets to the rules of
// every family that is served.
type BridgeNetfilter uint8

// The values. Unavailable: br_netfilter is not loaded, or a parameter of
// BridgeSysctls is 0 and cannot be set. Available: one is 0 and can be set.
const (
	BridgeUnavailable BridgeNetfilter = iota
	BridgeAvailable
	BridgeShown
)

// PodBridges returns the bridges with pods of this node attached, by name: those
// with an address of the pods' range or with the configured name, unless they are
// uplinks without a pod, and those of veths alone that lead nowhere else. An
// uplink, a bridge of virtual machines and one without an address are not.
func PodBridges(cfg *Config, n *Node) []routing.Link {
	return filter(attachedBridges(&n.Inventory), func(l routing.Link) bool { return isPodBridge(cfg, n, &l) })
}

// attachedBridges are the bridges that have a port.
func attachedBridges(inv *routing.Inventory) []routing.Link {
	return filter(inv.Links, func(l routing.Link) bool {
		return l.Type == "bridge" && slices.ContainsFunc(inv.Links, func(m routing.Link) bool { return m.Master == l.Name })
	})
}

func isPodBridge(cfg *Config, n *Node, l *routing.Link) bool {
	ports := filter(n.Inventory.Links, func(m routing.Link) bool { return m.Master == l.Name })
	veths := len(filter(ports, func(m routing.Link) bool { return m.Type == "veth" }))
	uplink := slices.ContainsFunc(n.Inventory.Defaults, func(r routing.Route) bool { return r.Link == l.Name })
	if inPodRange(cfg, n, l) || isPodLink(cfg, n, l) {
		return !uplink || veths > 0
	}
	hasAddress := slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Global })
	return !uplink && hasAddress && veths == len(ports)
}

func inPodRange(cfg *Config, n *Node, l *routing.Link) bool {
	ranges := n.PodCIDRs
	if cfg.LocalTraffic.Mode == DetectClusterCIDR {
		ranges = slices.Concat(ranges, cfg.LocalTraffic.CIDRs)
	}
	return slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Global && containsAny(ranges, a.Prefix.Addr()) })
}

// MayShowBridges reports whether kube-ipvs may have all bridges' packets shown to
// the rules. The parameter and the module are for all bridges of the node, so it
// leaves both as they are where a bridge of others would be affected: libvirt, for
// one, asks for 0.
func MayShowBridges(cfg *Config, n *Node) bool {
	return len(PodBridges(cfg, n)) == len(attachedBridges(&n.Inventory))
}

// NeedsBridgeNetfilter reports whether br_netfilter is of use on this node and
// may be loaded.
func NeedsBridgeNetfilter(cfg *Config, n *Node) bool {
	return len(PodBridges(cfg, n)) > 0 && MayShowBridges(cfg, n)
}

// bridgesShown reports whether bridged packets are shown, or will be by
// addBridgeSysctls.
func bridgesShown(cfg *Config, n *Node) bool {
	return n.BridgeNetfilter == BridgeShown || n.BridgeNetfilter == BridgeAvailable && MayShowBridges(cfg, n)
}

// addBridgeSysctls has br_netfilter show bridged packets to the rules of each
// family.
func addBridgeSysctls(s sysctl.State, cfg *Config, n *Node) {
	if n.BridgeNetfilter == BridgeUnavailable || !NeedsBridgeNetfilter(cfg, n) {
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
func bridgeWarnings(cfg *Config, n *Node) []string {
	if bridgesShown(cfg, n) {
		return nil
	}
	why := "br_netfilter is not loaded, or " + BridgeSysctls[ip.IPv4] + " or its like of IPv6 is 0 and cannot be set"
	if !MayShowBridges(cfg, n) {
		why = "br_netfilter is not loaded, or " + BridgeSysctls[ip.IPv4] + " or its like of IPv6 is 0, and kube-ipvs does not change that where there are other bridges"
	}
	var out []string
	for _, bridge := range PodBridges(cfg, n) {
		out = append(out, "what pods of "+bridge.Name+" send each other through a Service is masqueraded: "+why)
	}
	return out
}

// bridgeRules masquerade where there is no br_netfilter. Of what is switched
// nothing arrives here, so what leaves by the bridge that it came from, and is not
// the node's own, was sent back there by IPVS:
//
//	-A KUBE-POSTROUTING -s 10.244.1.0/24 -o cni0 -m addrtype ! --src-type LOCAL -j MASQUERADE --random-fully
func (r *ruleset) bridgeRules(n *Node) []nat.Rule {
	if bridgesShown(r.cfg, n) {
		return nil
	}
	var rules []nat.Rule
	for _, bridge := range PodBridges(r.cfg, n) {
		for _, a := range bridge.Addresses {
			if a.Global && ip.Of(a.Prefix.Addr()) == r.family {
				match := "-s " + a.Prefix.Masked().String() + " -o " + bridge.Name + " -m addrtype ! --src-type LOCAL"
				rules = append(rules, rule("back to the same bridge", match, "MASQUERADE --random-fully"))
			}
		}
	}
	return rules
}
