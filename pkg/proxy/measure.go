package proxy

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/reconcile"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// changes counts what the source delivered.
type changes struct{ services, endpoints int }

// trigger is a change of a Service's endpoints, and when the cluster saw the pod or
// Service change that caused it.
type trigger struct {
	service types.NamespacedName
	at      time.Time
}

// noteTrigger reads the timestamp that the controller writes on a slice. It ignores a
// known timestamp, as after a relist, and one from before this process started. It must
// be called under the lock, before the slice is stored.
func (i *inbox) noteTrigger(slice *service.Slice) {
	if slice.Trigger == 0 || slice.Trigger < i.began.UnixNano() {
		return
	}
	before := i.store.slices.Get(slice.Name)
	if before != nil && before.Service == slice.Service && before.Trigger == slice.Trigger {
		return
	}
	i.triggers = append(i.triggers, trigger{slice.ServiceName(), time.Unix(0, slice.Trigger)})
}

// take moves the inbox's work to the next pass.
func (p *Proxy) take() work {
	w := p.inbox.take()
	for _, name := range w.services {
		p.dirty[name] = struct{}{}
	}
	p.triggers = append(p.triggers, w.triggers...)
	if w.count != (changes{}) {
		p.Meter.Changes(w.count.services, w.count.endpoints)
	}
	return w
}

// noteNoLocal updates the number of Services without node-local endpoints.
func (p *Proxy) noteNoLocal(name types.NamespacedName, n plan.NoLocalEndpoints) {
	was := p.noLocal[name]
	p.noInternal += boolToInt(n.Internal) - boolToInt(was.Internal)
	p.noExternal += boolToInt(n.External) - boolToInt(was.External)
	if n == (plan.NoLocalEndpoints{}) {
		delete(p.noLocal, name)
	} else {
		p.noLocal[name] = n
	}
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// measure reports a pass to the meter. A refused change does not count as programmed,
// however long it takes. A change that the pass did not plan waits for the next one.
func (p *Proxy) measure(problems reconcile.Problems) {
	p.Meter.Planned(p.planning)
	p.planning = 0
	failed := map[types.NamespacedName]bool{}
	for _, problem := range problems {
		for _, name := range problem.Owners {
			failed[name] = true
		}
	}
	var waiting []trigger
	for _, t := range p.triggers {
		if _, dirty := p.dirty[t.service]; dirty {
			waiting = append(waiting, t)
		} else if !failed[t.service] {
			p.Meter.Programmed(time.Since(t.at))
		}
	}
	p.triggers = waiting
	p.Meter.NoLocalEndpoints(p.noInternal, p.noExternal)
}
