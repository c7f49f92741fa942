package proxy

import (
	"context"
	"net/netip"
	"slices"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// setAPIServers records the addresses of the API servers, the endpoints of their
// Service.
func (p *Proxy) setAPIServers(s *service.Service) {
	var list []netip.AddrPort
	for _, port := range s.Ports {
		for _, e := range port.Endpoints {
			list = append(list, e.Addr)
		}
	}
	if slices.Equal(list, p.apiServers) {
		return
	}
	p.apiServers = list
	p.node.APIServer = slices.Concat(p.APIServer, list)
	p.nodeChanged()
}

// refreshListeners rereads the node's listening sockets and the ports of its clients, and requeues
// Services that use, or want, a port on a node address. The kernel does not report changes of
// either.
func (p *Proxy) refreshListeners(ctx context.Context) {
	listeners, err := p.Network.Listeners()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the node's listening sockets, keeping the known ones")
		return
	}
	clients, err := p.Network.ClientPorts()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the ports of the node's clients, keeping the known ones")
		return
	}
	if !slices.Equal(listeners, p.node.Listeners) || !slices.Equal(clients, p.node.ClientPorts) {
		p.node.Listeners, p.node.ClientPorts = listeners, clients
		p.nodeChanged()
	}
}

// nodeChanged follows a change of p.node: it derives the facts, passes the node to the reconciler, and
// requeues the Services that depend on the changed facts.
func (p *Proxy) nodeChanged() {
	facts := plan.NewFacts(&p.Config, &p.node)
	changed := plan.DiffFacts(&p.facts, &facts)
	p.facts = facts
	for _, name := range p.reconciler.SetNode(p.node, changed) {
		p.dirty[name] = struct{}{}
	}
}
