package trace

import (
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
	"github.com/kube-ipvs/kube-ipvs/pkg/nft"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// Chains of nftables for devices and for bridges are outside of the hooks of
// iptables: a packet passes them before PREROUTING and after POSTROUTING.

// arrives follows a packet that enters by p.in to PREROUTING.
func (w *walk) arrives(p *packet) end {
	if verdict := w.device("ingress", p.in, p); verdict != undecided {
		return verdict
	}
	if verdict := w.bridge("prerouting", p.in, p); verdict != undecided {
		return verdict
	}
	return w.bridge("input", p.in, p)
}

// leavesBy follows a packet that leaves by p.out, after POSTROUTING.
func (w *walk) leavesBy(p *packet) end {
	if verdict := w.bridge("output", p.out, p); verdict != undecided {
		return verdict
	}
	if verdict := w.bridge("postrouting", p.out, p); verdict != undecided {
		return verdict
	}
	return w.device("egress", p.out, p)
}

// switched follows a frame that a bridge passes from one of its ports to another.
func (w *walk) switched(bridge string, p *packet) end { return w.bridge("forward", bridge, p) }

// loops follows a packet that the node sends to itself, from POSTROUTING to the route.
func (w *walk) loops(p *packet) end {
	p.in, p.out = "lo", ""
	if verdict := w.arrives(p); verdict != undecided {
		return verdict
	}
	return w.hooks("PREROUTING", p, nat.Raw, nat.Mangle)
}

// device evaluates the chains of an interface, and of its ports if it is a bridge or a bond.
// Which port a packet uses is unknown.
func (w *walk) device(hook, link string, p *packet) end {
	if w.Native == nil {
		return undecided
	}
	for _, c := range w.Native.Link {
		if c.Hook != hook {
			continue
		}
		if slices.Contains(c.Devices, link) {
			if verdict := w.nativeBase(c, p); verdict == dropped || verdict == refused {
				return verdict
			}
			continue
		}
		isPort := slices.ContainsFunc(w.ports(link), func(port string) bool { return slices.Contains(c.Devices, port) })
		if (isPort || c.Devices == nil) && w.mayDrop(c, p) {
			return dropped
		}
	}
	return undecided
}

// mayDrop reports whether a chain would drop a packet, and this evaluation assumes that the
// packet traverses the chain, which is unknown.
func (w *walk) mayDrop(c *nft.Chain, p *packet) bool {
	try, conn := *p, *p.conn
	try.conn = &conn
	verdict := w.nativeBase(c, &try)
	return (verdict == dropped || verdict == refused) && w.assumed("%s: it is unknown whether the packet passes it", c)
}

// bridge evaluates the chains of bridges at a hook.
func (w *walk) bridge(hook, link string, p *packet) end {
	if w.Native == nil || len(w.Native.Link) == 0 || !w.isBridge(link) {
		return undecided
	}
	for _, c := range w.Native.Link {
		if c.Family == "bridge" && c.Hook == hook {
			if verdict := w.nativeBase(c, p); verdict == dropped || verdict == refused {
				return verdict
			}
		}
	}
	return undecided
}

func (n *Node) isBridge(link string) bool {
	return slices.ContainsFunc(n.Links, func(l routing.Link) bool { return l.Name == link && l.Type == "bridge" })
}
