package reconcile

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
)

// Retries start early, because most refusals are short, and slow down to a rate that a
// node with a permanent fault can sustain.
const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 30 * time.Second
)

// retries schedules the retries of failed Services, each with its own backoff. The zero name
// stands for the node.
type retries struct {
	backoff *flowcontrol.Backoff
	due     map[types.NamespacedName]time.Time
}

func newRetries() *retries {
	return &retries{
		backoff: flowcontrol.NewBackOff(minBackoff, maxBackoff),
		due:     map[types.NamespacedName]time.Time{},
	}
}

// failed schedules the next retry and returns the time until then.
func (r *retries) failed(name types.NamespacedName, now time.Time) time.Duration {
	id := name.String()
	r.backoff.Next(id, now)
	wait := r.backoff.Get(id)
	r.due[name] = now.Add(wait)
	return wait
}

// succeeded cancels a retry and resets the backoff.
func (r *retries) succeeded(name types.NamespacedName) {
	delete(r.due, name)
	r.backoff.DeleteEntry(name.String())
}

// take removes and returns the names that are due.
func (r *retries) take(now time.Time) []types.NamespacedName {
	var out []types.NamespacedName
	for name, at := range r.due {
		if !at.After(now) {
			out = append(out, name)
			delete(r.due, name)
		}
	}
	return out
}

// next returns when the first retry is due, or zero if there is none.
func (r *retries) next() time.Time {
	var first time.Time
	for _, at := range r.due {
		if first.IsZero() || at.Before(first) {
			first = at
		}
	}
	return first
}
