package proxy

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/event"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// Reasons of Events.
const (
	reasonUnusable     = "Unusable"     // parts of a Service cannot be used
	reasonConflict     = "Conflict"     // another Service has precedence for a virtual server
	reasonNodeConflict = "NodeConflict" // something on the node conflicts with Services

	// A health check node port cannot be bound. kube-proxy uses the same reason.
	reasonHealthCheck = "FailedToStartServiceHealthcheck"
)

// EventReason documents a reason in the reference.
type EventReason struct{ Reason, Regarding, Meaning string }

// EventReasons lists every reason of the Events that the proxy writes; each is a
// Warning.
var EventReasons = []EventReason{
	{reasonUnusable, "Service", "A field or an annotation of the Service, or an endpoint, cannot be used. The rest of the Service is served. The note names the field and the value."},
	{reasonConflict, "Service", "Another Service has precedence for an address and port of this Service and is served there: cluster IPs precede LoadBalancer IPs, these precede external IPs, and older Services precede younger ones. The related object is the other Service."},
	{reasonHealthCheck, "Service", "A node cannot listen on the Service's `healthCheckNodePort` and retries, or serves another Service there; load balancers may take the node out of service. The reason is kube-proxy's. The note names the node, the address and port, and the error. Each affected node writes one for each address."},
	{reasonNodeConflict, "Node", "The kernel refuses a part of the node's state, or the node's configuration conflicts with Services: a mark, a policy rule, `rp_filter`, or a bridge without br_netfilter. The note names the cause and what to change."},
}

// reportUnusable logs what is unusable in a Service and writes an Event, once per
// error.
func (p *Proxy) reportUnusable(ctx context.Context, svc *service.Parsed, err error) {
	name := svc.Name
	if p.isNew(name, err) {
		klog.FromContext(ctx).Error(err, "Parts of a Service cannot be used, serving the rest", "service", name)
		p.Events.Warn(event.Warning{Regarding: *serviceRef(svc), Reason: reasonUnusable, Note: err.Error()})
	}
}

func (p *Proxy) reportUnusableNode(ctx context.Context, err error) {
	if p.isNew(nodeKey, err) {
		klog.FromContext(ctx).Error(err, "Parts of the Node cannot be used, using the rest", "node", p.Config.NodeName)
	}
}

// reportState reports what cannot work on this node or conflicts with another program, once
// while the problem lasts, and changed modes of interfaces.
func (p *Proxy) reportState(ctx context.Context, s *reconcile.Status) {
	if !slices.Equal(s.Modes, p.modes) {
		p.modes = s.Modes
		p.Meter.Interfaces(s.Modes)
	}
	now := map[string]bool{}
	for _, w := range s.Warnings {
		if !p.warned[w] {
			klog.FromContext(ctx).Error(nil, "Node configuration conflicts with Service traffic", "problem", w)
			p.warnOfNode(w)
		}
		now[w] = true
	}
	p.warned = now
}

// Findings returns what Once found on the node: conflicts with other programs, as sorted
// sentences, and the mode of each secondary interface (SNAT or reply routing).
func (p *Proxy) Findings() (warnings []string, modes []plan.InterfaceMode) {
	return slices.Sorted(maps.Keys(p.warned)), p.modes
}

// warnOfNode writes an Event about the Node object, if it exists.
func (p *Proxy) warnOfNode(note string) {
	if n, _ := p.inbox.getNode(); n != nil {
		p.Events.Warn(event.Warning{
			Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID},
			Reason:    reasonNodeConflict, Note: note,
		})
	}
}

// persistent is the backoff from which a refused change of the node is reported as an Event.
const persistent = 3 * time.Second

// reportFailingNode writes one Event for each reason why the node cannot be programmed, as
// long as it lasts. Such errors name no Service, although they affect Services: for example,
// a set type that the kernel lacks.
func (p *Proxy) reportFailingNode(problems reconcile.Problems, wait time.Duration) {
	if wait < persistent {
		return
	}
	changes := map[string][]string{} // by reason
	for _, problem := range problems {
		if len(problem.Owners) == 0 {
			why := reason(problem.Err)
			changes[why] = append(changes[why], strings.TrimSuffix(problem.Err.Error(), ": "+why))
		}
	}
	for _, why := range slices.Sorted(maps.Keys(changes)) {
		slices.Sort(changes[why])
		note := fmt.Sprintf("Cannot program the node (%s): %s", why, strings.Join(changes[why], ", "))
		if !p.failingNode[note] {
			if p.failingNode == nil {
				p.failingNode = map[string]bool{}
			}
			p.failingNode[note] = true
			p.warnOfNode(note)
		}
	}
}

// reportConflicts reports virtual servers that a Service wants and another one has, once per
// pair of Services.
func (p *Proxy) reportConflicts(ctx context.Context, s *reconcile.Status) {
	p.Observer.Conflicts(s.Conflicts)
	conflicts := s.NewConflicts
	for len(conflicts) > 0 {
		first, n := conflicts[0], 0
		var keys []string
		for n < len(conflicts) && conflicts[n].Loser == first.Loser && conflicts[n].Winner == first.Winner {
			keys = append(keys, conflicts[n].Key.String())
			n++
		}
		p.reportConflict(ctx, first, strings.Join(keys, ", "))
		conflicts = conflicts[n:]
	}
}

func (p *Proxy) reportConflict(ctx context.Context, c reconcile.Conflict, keys string) {
	klog.FromContext(ctx).Info("Two Services want the same address and port",
		"virtualServers", keys, "service", c.Loser, "winner", c.Winner)
	loser, _ := p.inbox.get(c.Loser)
	winner, _ := p.inbox.get(c.Winner)
	if loser == nil || winner == nil {
		return // one was deleted, so the conflict is about to end
	}
	p.Events.Warn(event.Warning{
		Regarding: *serviceRef(loser), Related: serviceRef(winner), Reason: reasonConflict,
		Note: fmt.Sprintf("%s: already served by Service %s, which takes precedence; this Service takes over once the address and port are released", keys, c.Winner),
	})
}

// HealthCheckRefused writes an Event about a Service whose health check node port cannot be
// bound to an address. It may be called concurrently with Run.
func (p *Proxy) HealthCheckRefused(name types.NamespacedName, address string, err error) {
	svc, _ := p.inbox.get(name)
	if svc == nil {
		return // deleted meanwhile, with its port
	}
	p.Events.Warn(event.Warning{
		Regarding: *serviceRef(svc), Reason: reasonHealthCheck,
		Note: fmt.Sprintf("node %s failed to start healthcheck %q on %s: %v", p.Config.NodeName, name, address, err),
	})
}

func serviceRef(svc *service.Parsed) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: svc.Name.Namespace, Name: svc.Name.Name, UID: svc.UID()}
}

// isNew reports whether an error differs from the last one about the same object, and
// remembers it.
func (p *Proxy) isNew(name types.NamespacedName, err error) bool {
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
