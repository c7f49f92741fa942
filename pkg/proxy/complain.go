package proxy

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
)

// complain reports what is wrong with a Service, once for each complaint.
func (p *Proxy) complain(ctx context.Context, name types.NamespacedName, err error) {
	if p.news(name, err) {
		klog.FromContext(ctx).Error(err, "Parts of a Service cannot be used, serving the rest", "service", name)
	}
}

func (p *Proxy) complainOfNode(ctx context.Context, err error) {
	if p.news(nobody, err) {
		klog.FromContext(ctx).Error(err, "Parts of the Node cannot be used, using the rest", "node", p.Config.NodeName)
	}
}

// warn says what cannot work on this node, or is at odds with another program,
// once for as long as it stands.
func (p *Proxy) warn(ctx context.Context) {
	now := map[string]bool{}
	for _, w := range plan.Warnings(&p.Config, &p.node, &p.nodePart, p.applier.Seen()) {
		if !p.warned[w] {
			klog.FromContext(ctx).Error(nil, "The node is in the way of Services", "problem", w)
		}
		now[w] = true
	}
	p.warned = now
}

// news tells whether an error is another one than the last.
func (p *Proxy) news(name types.NamespacedName, err error) bool {
	if err == nil {
		delete(p.reported, name)
		return false
	}
	text := err.Error()
	if p.reported[name] == text {
		return false
	}
	p.reported[name] = text
	return true
}
