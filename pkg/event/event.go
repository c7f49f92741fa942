// Package event writes Events about conditions of Services and Nodes.
package event

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
)

// Warning is a condition of an object.
type Warning struct {
	Regarding corev1.ObjectReference
	Related   *corev1.ObjectReference // another object involved, or nil
	Reason    string                  // one word, CamelCase
	Note      string                  // truncated to the API's limit
}

// Discard drops warnings. It is used without an API server.
type Discard struct{}

// Warn does nothing.
func (Discard) Warn(Warning) {}

// Controller is the reporting controller of all Events.
const Controller = "kube-ipvs.io/kube-ipvs"

const (
	// action is a required field of an Event.
	action = "Program"
	// maxNote and maxInstance are limits of the API.
	maxNote, maxInstance = 1024, 128

	// Events repeat the log, so they are rate limited and dropped when there are too
	// many.
	burst, perSecond = 20, 0.1
	queued           = 100
)

// retry is the backoff while the API server is unavailable.
var retry = wait.Backoff{Duration: 5 * time.Second, Factor: 2, Jitter: 0.5, Steps: 6}

// Client creates Events, each in its namespace. Package apiclient implements it.
type Client interface {
	CreateEvent(context.Context, *eventsv1.Event) error
}

// Writer writes Events to an API server.
//
// A condition that all nodes find at once becomes one Event: its name is derived from
// its content, so that all but the first creation fail with AlreadyExists. client-go's
// recorder would create one per node, and keep only the first note per reason.
type Writer struct {
	client   Client
	instance string
	queue    chan Warning
	limit    flowcontrol.RateLimiter
}

// NewWriter creates a Writer for the proxy on a node.
func NewWriter(client Client, node string) *Writer {
	return &Writer{
		client: client, instance: cut(node, maxInstance),
		queue: make(chan Warning, queued), limit: flowcontrol.NewTokenBucketRateLimiter(perSecond, burst),
	}
}

// Warn queues a condition and returns at once. The caller reports each condition once.
func (w *Writer) Warn(c Warning) {
	select {
	case w.queue <- c:
	default:
	}
}

// Run writes until the context ends.
func (w *Writer) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-w.queue:
			if w.limit.Wait(ctx) == nil {
				w.write(ctx, c)
			}
		}
	}
}

func (w *Writer) write(ctx context.Context, c Warning) {
	e := w.event(c)
	err := wait.ExponentialBackoffWithContext(ctx, retry, func(ctx context.Context) (bool, error) {
		err := w.client.CreateEvent(ctx, e)
		if err == nil || apierrors.IsAlreadyExists(err) {
			return true, nil
		}
		if final(err) {
			return false, err
		}
		return false, nil
	})
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot write an Event", "object", klog.KRef(c.Regarding.Namespace, c.Regarding.Name), "reason", c.Reason)
	}
}

// final reports whether an error is a rejection, which a retry would not change.
func final(err error) bool {
	var status *apierrors.StatusError
	return errors.As(err, &status) && !apierrors.IsTooManyRequests(err) && status.ErrStatus.Code < 500
}

func (w *Writer) event(c Warning) *eventsv1.Event {
	namespace := c.Regarding.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // required by the API for Events about Nodes
	}
	return &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: name(c)},
		EventTime:           metav1.NowMicro(),
		ReportingController: Controller, ReportingInstance: w.instance,
		Type: corev1.EventTypeWarning, Action: action, Reason: c.Reason, Note: cut(c.Note, maxNote),
		Regarding: c.Regarding, Related: c.Related,
	}
}

// name derives a name from the condition.
func name(c Warning) string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%s\x00%s", c.Regarding.UID, c.Reason, c.Note)
	if c.Related != nil {
		fmt.Fprintf(h, "\x00%s", c.Related.UID)
	}
	return fmt.Sprintf("kube-ipvs.%016x", h.Sum64())
}

// cut truncates a text to a number of bytes, at the end of a character.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	const more = "…"
	end := 0
	for i := range text {
		if i > most-len(more) {
			break
		}
		end = i
	}
	return text[:end] + more
}
