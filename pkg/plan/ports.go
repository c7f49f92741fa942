package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// mayServe reports whether a Service may use an address and port that was not allocated to it, for
// a port with these endpoints. It rejects the API server's address and port, unless the status gives
// them to a load balancer of the API servers. It also rejects the control plane's ports on that
// address, and any port on a node address that a process of the node listens on, such as sshd or the
// kubelet. Other ports on node addresses are allowed: clusters without a load balancer expose
// Services that way.
//
// Some load balancers add their IPs to an interface of the node (kube-vip, PureLB). On such an
// address only a process that listens on exactly this address keeps its port. One that listens on
// all addresses is for the node's own addresses, as under kube-proxy.
func (b *serviceBuilder) mayServe(field string, key ipvs.Key, precedence Precedence, endpoints []service.Endpoint) bool {
	b.plan.Deps |= OnAPIServer | OnNodeIPs
	at := netip.AddrPortFrom(key.Addr, key.Port)
	balances := precedence == FromStatus && b.facts.leadToAPIServers(endpoints, at)
	if key.Protocol == ip.TCP && b.facts.APIServer.Has(at) && !balances {
		b.reject(field, "%s is the address of the API server", key)
		return false
	}
	if key.Protocol == ip.TCP && slices.Contains(controlPlanePorts, key.Port) && b.facts.isAPIServer(key.Addr) {
		b.reject(field, "%s is a port of the control plane", key)
		return false
	}
	if !b.facts.NodeIPs.Has(key.Addr) {
		return true
	}
	b.plan.Deps |= OnListeners
	listens := b.facts.listens(key)
	if precedence == FromStatus {
		b.plan.Deps |= OnPrimary
		if b.facts.mayBelongToLoadBalancer(key.Addr) {
			listens = b.facts.listensAt(key, key.Addr)
		}
	}
	if listens {
		b.reject(field, "%s: a program on node %s listens on this port", key, b.facts.NodeName)
		return false
	}
	return true
}

// leadToAPIServers reports whether all endpoints of a Service are API servers at other addresses and
// ports than its own.
func (f *Facts) leadToAPIServers(endpoints []service.Endpoint, own netip.AddrPort) bool {
	return len(endpoints) > 0 && !slices.ContainsFunc(endpoints, func(e service.Endpoint) bool {
		return e.Addr == own || !f.APIServer.Has(e.Addr)
	})
}

// mayBelongToLoadBalancer reports whether an address of the node may be one that a load balancer has
// added: it is known not to be the node's own.
func (f *Facts) mayBelongToLoadBalancer(a netip.Addr) bool {
	return len(f.OwnIPs) > 0 && !f.OwnIPs.Has(a)
}

// controlPlanePorts are the ports of etcd, the kubelet, the controller manager and the
// scheduler. Other ports of a node that runs an API server are available to Services,
// as under kube-proxy.
var controlPlanePorts = []uint16{2379, 2380, 10250, 10257, 10259}

// isAPIServer reports whether the API server has an address, on any port.
func (f *Facts) isAPIServer(a netip.Addr) bool {
	for at := range f.APIServer {
		if at.Addr() == a {
			return true
		}
	}
	return false
}

// serverSockets returns the sockets that do not belong to clients. A UDP socket belongs to a client
// if it is bound to all addresses and has a port that the kernel gives to clients.
func serverSockets(list []routing.Listener, clients []routing.PortRange) []routing.Listener {
	return filter(list, func(l routing.Listener) bool {
		return l.Protocol != ip.UDP || !l.Addr.IsUnspecified() ||
			!slices.ContainsFunc(clients, func(r routing.PortRange) bool { return r.Has(l.Port) })
	})
}

// listens reports whether a process of the node listens on an address and port. A socket on
// :: is assumed to accept IPv4 as well, as is the default.
func (f *Facts) listens(key ipvs.Key) bool {
	return f.listensAt(key, key.Addr, key.Family().Unspecified(), ip.IPv6.Unspecified())
}

// listensAt reports whether a process of the node has a socket bound to one of the addresses, on
// the port of key.
func (f *Facts) listensAt(key ipvs.Key, addresses ...netip.Addr) bool {
	return slices.ContainsFunc(addresses, func(a netip.Addr) bool {
		return f.Listeners.Has(routing.Listener{Protocol: key.Protocol, Addr: a, Port: key.Port})
	})
}

// reject records that a field is not served, with the reason.
func (b *serviceBuilder) reject(field, format string, args ...any) {
	b.plan.Rejected = append(b.plan.Rejected, field+": "+fmt.Sprintf(format, args...))
}

// loopbackListeners returns the sockets that accept connections on the loopback
// address: those bound to it or, except for sockets of clients, to all addresses.
func loopbackListeners(list []routing.Listener, clients []routing.PortRange) sets.Set[routing.Listener] {
	return sets.New(filter(serverSockets(list, clients), func(l routing.Listener) bool {
		return l.Addr.IsLoopback() || l.Addr.IsUnspecified()
	})...)
}

// listensAtLoopback reports whether a process of the node listens on a port of the loopback
// address.
func (f *Facts) listensAtLoopback(key ipvs.Key) bool {
	loopback := Facts{Listeners: f.Loopback}
	return loopback.listens(key)
}

// dummyListeners returns the sockets bound to exactly an address of a dummy interface.
func dummyListeners(n *Node) sets.Set[routing.Listener] {
	out := sets.New[routing.Listener]()
	for _, link := range n.Inventory.Links {
		if link.Type != "dummy" {
			continue
		}
		for _, a := range link.Addresses {
			for _, l := range n.Listeners {
				if l.Addr == a.Prefix.Addr() {
					out.Insert(l)
				}
			}
		}
	}
	return out
}

// servedOnDummy reports whether a process of the node serves a cluster IP's port in place of its
// endpoints, as NodeLocal DNSCache does. Such a process adds the address to a dummy interface and
// listens on exactly that address and port. IPVS would take the packets before the process sees
// them, so the port is left to the process while it listens. The interface alone is not enough: an
// earlier proxy may have left one with every cluster IP.
func (b *serviceBuilder) servedOnDummy(key ipvs.Key) bool {
	return b.facts.DummyListeners.Has(routing.Listener{Protocol: key.Protocol, Addr: key.Addr, Port: key.Port})
}
