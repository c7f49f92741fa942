package plan

import (
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/sysctl"
)

// When a pod reaches an endpoint on its own bridge through a VIP, the bridge switches
// the reply past the node's netfilter. Nothing restores the VIP as the source, and the
// client reports "reply from unexpected source". Either br_netfilter passes bridged
// packets to netfilter, or the node masquerades these flows so that replies are sent to
// the node.

// BridgeNetfilter reports whether the kernel passes bridged packets to the rules of
// every served family.
type BridgeNetfilter uint8

// BridgeUnavailable: br_netfilter is not loaded, or a parameter of BridgeSysctls is 0
// and cannot be set. BridgeAvailable: a parameter is 0 and can be set. BridgeEnabled:
// bridged packets pass the rules.
const (
	BridgeUnavailable BridgeNetfilter = iota
	BridgeAvailable
	BridgeEnabled
)

// Refuses returns the families whose forwarded packets another program may drop, for Node.Refuses.
// It decides by the observed rules of iptables and of nftables (native).
func Refuses(rules map[ip.Family]nat.State, native []nft.MarkUse) map[ip.Family]bool {
	out := map[ip.Family]bool{}
	for family, s := range rules {
		if len(s.Refusing) > 0 || slices.ContainsFunc(native, func(u nft.MarkUse) bool { return u.Refuses && u.Affects(family) }) {
			out[family] = true
		}
	}
	return out
}

// PodBridges returns the bridges that pods of this node are attached to, by name:
// bridges with an address in the pod range or with the configured name, except uplinks
// without a pod; and bridges that have an address and only veths as ports. Other
// uplinks, bridges of virtual machines and bridges without an address are excluded.
func PodBridges(cfg *Config, n *Node) []routing.Link {
	return filter(attachedBridges(&n.Inventory), func(l routing.Link) bool { return isPodBridge(cfg, n, &l) })
}

// attachedBridges returns the bridges that have a port.
func attachedBridges(inv *routing.Inventory) []routing.Link {
	return filter(inv.Links, func(l routing.Link) bool {
		return l.Type == "bridge" && len(portsOf(inv, l.Name)) > 0
	})
}

// portsOf returns the links that are attached to a bridge.
func portsOf(inv *routing.Inventory, bridge string) []routing.Link {
	return filter(inv.Links, func(l routing.Link) bool { return l.Master == bridge })
}

func isPodBridge(cfg *Config, n *Node, l *routing.Link) bool {
	ports := portsOf(&n.Inventory, l.Name)
	veths := len(filter(ports, func(m routing.Link) bool { return m.Type == "veth" }))
	uplink := slices.ContainsFunc(n.Inventory.Defaults, func(r routing.Route) bool { return r.Link == l.Name })
	if inPodRange(cfg, n, l) || isPodLink(cfg, n, l) {
		return !uplink || veths > 0
	}
	hasAddress := slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Global })
	return !uplink && hasAddress && veths == len(ports)
}

func inPodRange(cfg *Config, n *Node, l *routing.Link) bool {
	ranges := podRanges(cfg, n)
	return slices.ContainsFunc(l.Addresses, func(a routing.Address) bool { return a.Global && containsAny(ranges, a.Prefix.Addr()) })
}

// podRanges returns the ranges of pods' addresses, as far as they are known.
func podRanges(cfg *Config, n *Node) []netip.Prefix {
	if cfg.LocalTraffic.Mode == DetectClusterCIDR {
		return slices.Concat(n.PodCIDRs, cfg.LocalTraffic.CIDRs)
	}
	return n.PodCIDRs
}

// MayEnableBridgeNetfilter reports whether kube-ipvs may pass the packets of all bridges to the
// rules. The parameter and the module affect every bridge of the node, so both are left unchanged
// unless all bridges are known to be for pods. libvirt, for example, requires 0, and a bridge of
// PodBridges outside the pods' ranges may belong to Docker or LXD. Both are also left unchanged if
// another program may drop forwarded packets: it might drop packets between pods of one bridge, which
// pass no rule under kube-proxy.
func MayEnableBridgeNetfilter(cfg *Config, n *Node) bool {
	return !refusesForwarded(cfg, n) && !hasOtherBridges(cfg, n)
}

func refusesForwarded(cfg *Config, n *Node) bool {
	return slices.ContainsFunc(cfg.Families, func(f ip.Family) bool { return n.Refuses[f] })
}

// hasOtherBridges reports whether the node has a bridge that is not known to be for pods.
func hasOtherBridges(cfg *Config, n *Node) bool {
	known := len(podRanges(cfg, n)) > 0 || cfg.LocalTraffic.Interface != ""
	return slices.ContainsFunc(attachedBridges(&n.Inventory), func(l routing.Link) bool {
		return !isPodBridge(cfg, n, &l) || known && !inPodRange(cfg, n, &l) && !isPodLink(cfg, n, &l)
	})
}

// NeedsBridgeNetfilter reports whether this node benefits from br_netfilter and the
// module may be loaded.
func NeedsBridgeNetfilter(cfg *Config, n *Node) bool {
	return len(PodBridges(cfg, n)) > 0 && MayEnableBridgeNetfilter(cfg, n)
}

// bridgeNetfilterEnabled reports whether bridged packets pass the rules, or will after
// addBridgeSysctls.
func bridgeNetfilterEnabled(cfg *Config, n *Node) bool {
	return n.BridgeNetfilter == BridgeEnabled || n.BridgeNetfilter == BridgeAvailable && MayEnableBridgeNetfilter(cfg, n)
}

// addBridgeSysctls makes br_netfilter pass bridged packets to the rules of each family. Once set, a
// parameter keeps its value, even if another program begins to drop forwarded packets: that may be a
// policy engine, which relies on the parameter and does not set it again.
func addBridgeSysctls(s sysctl.State, cfg *Config, n *Node) {
	if n.BridgeNetfilter == BridgeUnavailable || !NeedsBridgeNetfilter(cfg, n) {
		return
	}
	for _, family := range cfg.Families {
		s[BridgeSysctls[family]] = "1"
	}
}

// BridgeSysctls holds br_netfilter's parameter of each family.
var BridgeSysctls = map[ip.Family]string{
	ip.IPv4: "net/bridge/bridge-nf-call-iptables",
	ip.IPv6: "net/bridge/bridge-nf-call-ip6tables",
}

// bridgeWarnings warns that pods of a bridge do not see each other's address in Service
// traffic.
func bridgeWarnings(cfg *Config, n *Node) []string {
	if bridgeNetfilterEnabled(cfg, n) {
		return nil
	}
	why := "br_netfilter is not loaded, or " + BridgeSysctls[ip.IPv4] + " or its IPv6 counterpart is 0 and cannot be set"
	if !MayEnableBridgeNetfilter(cfg, n) {
		reason := "the node has other bridges"
		if !hasOtherBridges(cfg, n) {
			reason = "another program may drop forwarded packets"
		}
		why = "br_netfilter is not loaded, or " + BridgeSysctls[ip.IPv4] + " or its IPv6 counterpart is 0, and kube-ipvs does not change it, because " + reason
	}
	var out []string
	for _, bridge := range PodBridges(cfg, n) {
		out = append(out, "Service traffic between pods of "+bridge.Name+" is masqueraded: "+why)
	}
	return out
}

// bridgeRules masquerades packets that IPVS sends back through the bridge they came from, unless
// br_netfilter is in use for every family. If it is in use for one, packets that the bridge only
// switches pass this rule too; the match of ipvs excludes them:
//
//	-A KUBE-POSTROUTING -s 10.244.1.0/24 -o cni0 -m addrtype ! --src-type LOCAL -m ipvs --ipvs -j MASQUERADE --random-fully
func (r *ruleset) bridgeRules(n *Node) []nat.Rule {
	if bridgeNetfilterEnabled(r.cfg, n) {
		return nil
	}
	var rules []nat.Rule
	for _, bridge := range PodBridges(r.cfg, n) {
		for _, a := range bridge.Addresses {
			if a.Global && ip.Of(a.Prefix.Addr()) == r.family {
				match := "-s " + a.Prefix.Masked().String() + " -o " + bridge.Name + " -m addrtype ! --src-type LOCAL -m ipvs --ipvs"
				rules = append(rules, rule("back to the same bridge", match, "MASQUERADE --random-fully"))
			}
		}
	}
	return rules
}
