package proxy

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/routing"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// draft is the plan of one Service.
type draft struct {
	name  types.NamespacedName
	svc   *service.Parsed  // nil: nothing is to be served
	plan  plan.ServicePlan // without fwmarks
	owner reconcile.Owner
	err   error // unusable parts of the Service
	took  time.Duration
	// noScheduler means that the kernel does not have the scheduler.
	noScheduler bool
}

// scratches has one element while drafts follow each other. The garbage collector frees it later.
var scratches = sync.Pool{New: func() any { return &service.Scratch{} }}

// draft plans one Service as it is now. At most one draft may run at a time, because it may
// record a scheduler. The facts must not change meanwhile; a draft of the API server's Service
// changes them itself.
func (p *Proxy) draft(name types.NamespacedName) draft {
	began := time.Now()
	svc, endpointSlices := p.inbox.get(name)
	if svc == nil || !svc.Proxied() {
		return draft{name: name}
	}
	scratch := scratches.Get().(*service.Scratch)
	defer scratches.Put(scratch)
	s, err := svc.In(scratch, endpointSlices)
	schedulerErr := p.checkScheduler(&s)
	err = errors.Join(err, schedulerErr)
	if name == service.APIServer {
		p.setAPIServers(&s)
	}
	return draft{
		name: name, svc: svc, plan: plan.ForService(&p.Config, &p.facts, &s),
		owner: reconcile.Owner{Name: name, Created: s.Created}, err: err, took: time.Since(began), noScheduler: schedulerErr != nil,
	}
}

// accept records a draft as the Service's plan and passes it to the reconciler.
func (p *Proxy) accept(ctx context.Context, d draft) {
	began := time.Now()
	defer func() { p.planning += d.took + time.Since(began) }()
	delete(p.dirty, d.name)
	if d.svc == nil {
		p.forget(d.name)
		return
	}
	owner := d.owner // copied, because a pointer into the draft would keep the whole draft alive
	markErr := p.reconciler.Set(&owner, d.plan)
	p.reportUnusable(ctx, d.svc, errors.Join(d.err, unservedError(d.name, d.plan.Rejected), markErr))
	if delete(p.noScheduler, d.name); d.noScheduler {
		p.noScheduler[d.name] = struct{}{}
	}
	p.noteNoLocal(d.name, d.plan.NoLocal)
	p.setHealthCheck(d.name, d.plan.HealthCheck)
}

// setHealthCheck changes a health check node port. It reports fewer endpoints at once, and more
// only after the next flush, whether or not the kernel accepts them.
func (p *Proxy) setHealthCheck(name types.NamespacedName, check plan.HealthCheck) {
	before := p.checks[name]
	delete(p.raised, name)
	switch {
	case check.Port == 0:
		delete(p.checks, name)
		p.HealthChecks.Delete(name)
		return
	case before.Port == check.Port && check.ReadyHere <= before.ReadyHere:
		p.HealthChecks.Set(name, check)
	default:
		p.raised[name] = struct{}{}
	}
	p.checks[name] = check
}

// flush programs what has been planned.
func (p *Proxy) flush() reconcile.Problems {
	problems := p.reconciler.Flush()
	for name := range p.raised {
		p.HealthChecks.Set(name, p.checks[name])
	}
	clear(p.raised)
	return problems
}

// planService drafts and accepts the plan of one Service.
func (p *Proxy) planService(ctx context.Context, name types.NamespacedName) {
	p.accept(ctx, p.draft(name))
}

// draftAhead drafts one batch after another, each while the previous one is written to
// the kernel.
func (p *Proxy) draftAhead(batches [][]types.NamespacedName) <-chan []draft {
	out := make(chan []draft, 1)
	go func() {
		defer close(out)
		for _, names := range batches {
			drafts := make([]draft, len(names))
			for i, name := range names {
				drafts[i] = p.draft(name)
			}
			out <- drafts
		}
	}()
	return out
}

// unservedError returns an error for the fields of a Service that are not served, or
// nil.
func unservedError(name types.NamespacedName, list []string) error {
	var errs []error
	for _, what := range list {
		errs = append(errs, errors.New("Service "+name.String()+": "+what))
	}
	return errors.Join(errs...)
}

func (p *Proxy) forget(name types.NamespacedName) {
	delete(p.reported, name)
	delete(p.noScheduler, name)
	p.noteNoLocal(name, plan.NoLocalEndpoints{})
	p.reconciler.Delete(name)
	p.setHealthCheck(name, plan.HealthCheck{})
}

// renewAffected rereads the node and requeues the Services that depend on the changed
// facts.
func (p *Proxy) renewAffected(ctx context.Context) {
	p.renew, p.renewAt = false, time.Time{}
	if err := p.renewNode(ctx); err != nil {
		// Keep the known facts until the node can be read: a failed list of interfaces
		// is not an empty one (kubernetes#129146).
		p.renewAt = time.Now().Add(p.renewing.Step())
		if p.node.Inventory.Reroute == routing.RerouteUnneeded {
			p.node.Inventory.Reroute = routing.RerouteNeeded
			p.nodeChanged()
		}
		klog.FromContext(ctx).Error(err, "Cannot read the node's network, keeping the known state")
		return
	}
	p.renewing = newBackoff()
}

// renewNode reads the node's network. Together with what is known from the Node object, it is the
// node that the plans are for; see nodeChanged.
func (p *Proxy) renewNode(ctx context.Context) error {
	node, unreachable := p.inbox.getNode()
	p.reportNode(node)
	inventory, err := p.Network.Inventory()
	if err != nil {
		return err
	}
	listeners, err := p.Network.Listeners()
	if err != nil {
		return err
	}
	clients, err := p.Network.ClientPorts()
	if err != nil {
		return err
	}
	most := max(p.node.Services, p.inbox.services())
	p.node, err = nodeOf(node)
	p.reportUnusableNode(ctx, err)
	p.node.UnreachableNodes = unreachable
	p.node.Lingering = p.linger.update(&inventory, time.Now())
	p.node.MainGone = p.linger.mainGone()
	p.node.Inventory = inventory
	p.node.Listeners, p.node.ClientPorts = listeners, clients
	p.node.APIServer = slices.Concat(p.APIServer, p.apiServers)
	p.node.Services = most
	p.node.Kernel = p.KernelVersion
	p.node.BridgeNetfilter = p.BridgeNetfilter(plan.NeedsBridgeNetfilter(&p.Config, &p.node))
	p.node.ReadOnly, p.node.Watched, p.node.OnDemand = p.ReadOnly, p.watched, p.watched || p.Running
	p.nodeChanged()
	p.renewed = time.Now()
	return nil
}

// deletionCandidateTaint is set by the cluster autoscaler on a node that it is about to
// remove (KEP-3836).
const deletionCandidateTaint = "ToBeDeletedByClusterAutoscaler"

func (p *Proxy) reportNode(n *corev1.Node) {
	if n == nil {
		p.Observer.Node(false, false, false)
		return
	}
	candidate := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == deletionCandidateTaint })
	p.Observer.Node(true, n.DeletionTimestamp != nil, candidate)
}
