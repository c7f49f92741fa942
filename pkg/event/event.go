// Package event writes Events, by which those who look at an object learn what
// the proxy has to say about it.
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
	Related   *corev1.ObjectReference // another object that has to do with it, or nil
	Reason    string                  // one word, CamelCase
	Note      string                  // cut to what an Event holds
}

// Discard takes warnings where nobody can be told of them.
type Discard struct{}

// Warn does nothing.
func (Discard) Warn(Warning) {}

const (
	controller = "kube-ipvs.io/kube-ipvs"
	// action is what was done when the condition was found. The API asks for a word.
	action = "Program"
	// maxNote and maxInstance are the API's.
	maxNote, maxInstance = 1024, 128

	// An Event is a courtesy, as the log has it too: what is more than a few is
	// written slowly, and what is more than many not at all.
	burst, perSecond = 20, 0.1
	queued           = 100
)

// retry is for an API server that is not there for a while.
var retry = wait.Backoff{Duration: 5 * time.Second, Factor: 2, Jitter: 0.5, Steps: 6}

// Client creates Events, each in its namespace. Package apiclient has it.
type Client interface {
	CreateEvent(context.Context, *eventsv1.Event) error
}

// Writer writes Events to an API server.
//
// A condition that all nodes find at once is written once: its name follows
// from what it says, and who comes second is told that it exists. client-go's
// recorder would write one for every node, and keep but the first of the notes
// that have one reason.
type Writer struct {
	client   Client
	instance string
	queue    chan Warning
	limit    flowcontrol.RateLimiter
}

// NewWriter makes a Writer for the proxy on a node.
func NewWriter(client Client, node string) *Writer {
	return &Writer{
		client: client, instance: cut(node, maxInstance),
		queue: make(chan Warning, queued), limit: flowcontrol.NewTokenBucketRateLimiter(perSecond, burst),
	}
}

// Warn has a condition written. It returns at once; the caller says each
// condition once.
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

// final tells a refusal, which another try would meet too, from an API server
// that does not answer.
func final(err error) bool {
	var status *apierrors.StatusError
	return errors.As(err, &status) && !apierrors.IsTooManyRequests(err) && status.ErrStatus.Code < 500
}

func (w *Writer) event(c Warning) *eventsv1.Event {
	namespace := c.Regarding.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // where the API wants those of a Node
	}
	return &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: name(c)},
		EventTime:           metav1.NowMicro(),
		ReportingController: controller, ReportingInstance: w.instance,
		Type: corev1.EventTypeWarning, Action: action, Reason: c.Reason, Note: cut(c.Note, maxNote),
		Regarding: c.Regarding, Related: c.Related,
	}
}

// name is the same for the same condition.
func name(c Warning) string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%s\x00%s", c.Regarding.UID, c.Reason, c.Note)
	if c.Related != nil {
		fmt.Fprintf(h, "\x00%s", c.Related.UID)
	}
	return fmt.Sprintf("kube-ipvs.%016x", h.Sum64())
}

// cut shortens a text to a number of bytes, at the end of a letter.
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
