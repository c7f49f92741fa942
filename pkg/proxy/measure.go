package proxy

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/apply"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// changes counts what the source has delivered.
type changes struct{ services, endpoints int }

// trigger is a change of a Service's endpoints, and when the cluster saw the pod
// or Service change that it comes from.
type trigger struct {
	service types.NamespacedName
	at      time.Time
}

// noteTrigger reads the time that the controller writes on a slice. One that was
// known already is no new change, as when everything is delivered again; one from
// before this process says nothing about it. It is called under the lock, before
// the slice is filed.
func (i *inbox) noteTrigger(slice *discoveryv1.EndpointSlice) {
	const key = corev1.EndpointsLastChangeTriggerTime
	at, err := time.Parse(time.RFC3339Nano, slice.Annotations[key])
	owner, ours := service.Owner(slice)
	if err != nil || !ours || at.Before(i.began) {
		return
	}
	name := types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}
	if before := i.store.slice(owner, name); before != nil && before.Annotations[key] == slice.Annotations[key] {
		return
	}
	i.triggers = append(i.triggers, trigger{owner, at})
}

// take gets what has come, and has it wait for the next pass.
func (p *Proxy) take() work {
	w := p.inbox.take()
	for _, name := range w.services {
		p.waiting[name] = struct{}{}
	}
	p.triggers = append(p.triggers, w.triggers...)
	if w.count != (changes{}) {
		p.Meter.Changes(w.count.services, w.count.endpoints)
	}
	return w
}

// noteNoLocal notes what a Service's plan says.
func (p *Proxy) noteNoLocal(name types.NamespacedName, n plan.NoLocal) {
	was := p.noLocal[name]
	p.noInternal += count(n.Internal) - count(was.Internal)
	p.noExternal += count(n.External) - count(was.External)
	if n == (plan.NoLocal{}) {
		delete(p.noLocal, name)
	} else {
		p.noLocal[name] = n
	}
}

func count(counts bool) int {
	if counts {
		return 1
	}
	return 0
}

// measure tells the meter what a pass came to. A change that was refused has
// not been programmed, however long that takes.
func (p *Proxy) measure(problems apply.Problems) {
	p.Meter.Planned(p.planning)
	p.planning = 0
	failed := map[types.NamespacedName]bool{}
	for _, problem := range problems {
		for _, name := range problem.Owners {
			failed[name] = true
		}
	}
	for _, t := range p.triggers {
		if !failed[t.service] {
			p.Meter.Programmed(time.Since(t.at))
		}
	}
	p.triggers = nil
	p.Meter.NoLocalEndpoints(p.noInternal, p.noExternal)
}
