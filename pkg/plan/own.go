package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
)

// mayHave tells whether a Service may have an address and port that it was not
// allotted. It must not get hold of what nodes and pods send to the API server, nor
// take a port of the node's from the program that waits there, be it sshd or the
// kubelet. The node's other ports may be had: that is how Services are reached
// where there is no load balancer.
func (b *partBuilder) mayHave(field string, key ipvs.Key) bool {
	b.part.Depends |= OnAPIServer | OnLinks
	if key.Protocol == ip.TCP && b.facts.APIServer[netip.AddrPortFrom(key.Addr, key.Port)] {
		b.unserved(field, "%s: this is where the API server is reached", key)
		return false
	}
	if key.Protocol == ip.TCP && slices.Contains(controlPlanePorts, key.Port) && b.facts.isAPIServer(key.Addr) {
		b.unserved(field, "%s: this is a port of the control plane", key)
		return false
	}
	if !b.facts.OnLinks[key.Addr] {
		return true
	}
	b.part.Depends |= OnListeners
	if b.facts.listens(key) {
		b.unserved(field, "%s: a program of node %s has this port", key, b.facts.NodeName)
		return false
	}
	return true
}

// controlPlanePorts are those of etcd, the kubelet, the controller manager and the
// scheduler. Other ports of a node that runs an API server may be had, as under
// kube-proxy.
var controlPlanePorts = []uint16{2379, 2380, 10250, 10257, 10259}

// isAPIServer reports whether an API server is reached at an address.
func (f *Facts) isAPIServer(a netip.Addr) bool {
	for at := range f.APIServer {
		if at.Addr() == a {
			return true
		}
	}
	return false
}

// listens tells whether a program of the node's waits at an address and port.
// Whoever waits at :: is taken to wait at all IPv4 addresses as well, as is usual.
func (f *Facts) listens(key ipvs.Key) bool {
	for _, a := range []netip.Addr{key.Addr, key.Family().Unspecified(), ip.IPv6.Unspecified()} {
		if f.Listeners[routing.Listener{Protocol: key.Protocol, Addr: a, Port: key.Port}] {
			return true
		}
	}
	return false
}

func (b *partBuilder) unserved(field, format string, args ...any) {
	b.part.Unserved = append(b.part.Unserved, field+": "+fmt.Sprintf(format, args...))
}

// loopbackListeners are the sockets that answer at the loopback address: those of
// it, and of TCP those of all addresses. Sockets of UDP at all addresses are mostly
// clients'.
func loopbackListeners(list []routing.Listener) map[routing.Listener]bool {
	return setOf(filter(list, func(l routing.Listener) bool {
		return l.Addr.IsLoopback() || l.Protocol == ip.TCP && l.Addr.IsUnspecified()
	}))
}

// listensAtLoopback reports whether one of them has a port of the loopback address.
func (f *Facts) listensAtLoopback(key ipvs.Key) bool {
	loopback := Facts{Listeners: f.Loopback}
	return loopback.listens(key)
}

// caches are the sockets that are bound to exactly an address of a dummy interface.
func caches(n *Node) map[routing.Listener]bool {
	out := map[routing.Listener]bool{}
	for _, link := range n.Inventory.Links {
		if link.Type != "dummy" {
			continue
		}
		for _, a := range link.Addresses {
			for _, l := range n.Listeners {
				if l.Addr == a.Prefix.Addr() {
					out[l] = true
				}
			}
		}
	}
	return out
}

// cachedHere reports whether a program on the node serves a port of a cluster IP in the
// place of its endpoints, as NodeLocal DNSCache does: it gives the address to a dummy
// interface and listens at exactly that address and port. IPVS would take the packets
// before the program sees them, so the port is left to it for as long as it listens. An
// interface alone is not enough: a proxy that ran before may have left one with every
// cluster IP.
func (b *partBuilder) cachedHere(key ipvs.Key) bool {
	return b.facts.Caches[routing.Listener{Protocol: key.Protocol, Addr: key.Addr, Port: key.Port}]
}
