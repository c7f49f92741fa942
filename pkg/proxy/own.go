package proxy

import (
	"context"
	"net/netip"
	"slices"

	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// setAPIServers notes where the API servers are: at the endpoints of their Service.
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
	p.reconsider()
}

// lookForListeners has those Services planned again that have a port of the
// node's, or want one. The kernel does not tell when a program begins to wait.
func (p *Proxy) lookForListeners(ctx context.Context) {
	listeners, err := p.Network.Listeners()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the node's ports, keeping what is known")
		return
	}
	if !slices.Equal(listeners, p.node.Listeners) {
		p.node.Listeners = listeners
		p.reconsider()
	}
}

// reconsider derives the facts again, and has those Services planned again whose
// plan depends on what has changed.
func (p *Proxy) reconsider() {
	facts := plan.FactsOf(&p.Config, &p.node)
	p.markAffected(plan.Changed(&p.facts, &facts))
	p.facts = facts
}

func (p *Proxy) markAffected(changed plan.Depends) {
	for name, depends := range p.depends {
		if depends&changed != 0 || changed&plan.OnCaches != 0 {
			p.waiting[name] = struct{}{}
		}
	}
}
