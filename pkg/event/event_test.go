package event

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// world is an API server with Writers of several nodes, in a synctest bubble.
type world struct {
	t      *testing.T
	client *fake.Clientset
	tries  atomic.Int32
	fail   atomic.Pointer[error] // the server's error; nil: none
}

// fakeClient is client-go's fake of an API server, as a Client.
type fakeClient struct{ *fake.Clientset }

func (f fakeClient) CreateEvent(ctx context.Context, e *eventsv1.Event) error {
	_, err := f.EventsV1().Events(e.Namespace).Create(ctx, e, metav1.CreateOptions{})
	return err
}

func run(t *testing.T, test func(*world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, client: fake.NewClientset()}
		w.client.PrependReactor("create", "events", func(k8stesting.Action) (bool, runtime.Object, error) {
			w.tries.Add(1)
			if err := w.fail.Load(); err != nil {
				return true, nil, *err
			}
			return false, nil, nil
		})
		test(w)
	})
}

func (w *world) writer(node string) *Writer {
	writer := NewWriter(fakeClient{w.client}, node)
	ctx, cancel := context.WithCancel(w.t.Context())
	w.t.Cleanup(cancel)
	go writer.Run(ctx)
	return writer
}

func (w *world) after(d time.Duration) []eventsv1.Event {
	time.Sleep(d)
	synctest.Wait()
	list, err := w.client.EventsV1().Events("").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

func conflict(note string) Warning {
	return Warning{
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "shop", Name: "web", UID: "1"},
		Reason:    "Conflict", Note: note,
	}
}

func TestOneEventForAllNodes(t *testing.T) {
	run(t, func(w *world) {
		for i := range 5 {
			writer := w.writer(fmt.Sprintf("node%d", i))
			writer.Warn(conflict("taken"))
			writer.Warn(conflict("taken twice"))
		}
		events := w.after(time.Second)
		if len(events) != 2 {
			t.Fatalf("%d Events, want one for each of two conditions", len(events))
		}
		e := events[0]
		if e.Namespace != "shop" || e.Regarding.Name != "web" || e.Type != corev1.EventTypeWarning || e.Reason != "Conflict" || !strings.HasPrefix(e.ReportingInstance, "node") {
			t.Errorf("%+v", e)
		}
		if w.tries.Load() != 10 {
			t.Errorf("%d attempts, want one of each node", w.tries.Load())
		}
	})
}

func TestEventOfANodeIsInTheDefaultNamespace(t *testing.T) {
	run(t, func(w *world) {
		w.writer("node1").Warn(Warning{Regarding: corev1.ObjectReference{Kind: "Node", Name: "node1"}, Reason: "NodeConflict", Note: strings.Repeat("€", 1000)})
		events := w.after(time.Second)
		if len(events) != 1 || events[0].Namespace != metav1.NamespaceDefault {
			t.Fatalf("%+v", events)
		}
		if note := events[0].Note; len(note) > maxNote || !strings.HasSuffix(note, "€…") {
			t.Errorf("%d bytes that end in %q", len(note), note[len(note)-9:])
		}
	})
}

func TestRetriedUntilTheServerAnswers(t *testing.T) {
	run(t, func(w *world) {
		w.fail.Store(ptr.To(errors.New("connection refused")))
		w.writer("node1").Warn(conflict("taken"))
		if events := w.after(8 * time.Second); len(events) != 0 || w.tries.Load() != 2 {
			t.Errorf("%d Events after %d tries", len(events), w.tries.Load())
		}
		w.fail.Store(nil)
		if events := w.after(time.Minute); len(events) != 1 {
			t.Errorf("%d Events after the server is available again", len(events))
		}
	})
}

func TestRejectionIsNotRetried(t *testing.T) {
	run(t, func(w *world) {
		w.fail.Store(ptr.To[error](apierrors.NewForbidden(eventsv1.Resource("events"), "", errors.New("no"))))
		w.writer("node1").Warn(conflict("taken"))
		w.after(time.Hour)
		if w.tries.Load() != 1 {
			t.Errorf("%d tries", w.tries.Load())
		}
	})
}

func TestManyConditionsAreRateLimited(t *testing.T) {
	run(t, func(w *world) {
		writer := w.writer("node1")
		for i := range 10 * queued {
			writer.Warn(conflict(fmt.Sprint(i)))
		}
		if n := len(w.after(time.Second)); n != burst {
			t.Errorf("%d Events in a second, want %d", n, burst)
		}
		if n := len(w.after(time.Hour)); n < queued || n > queued+burst {
			t.Errorf("%d Events of 1,000, want about %d", n, queued)
		}
	})
}
