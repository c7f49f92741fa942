package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/plan"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// scripted is an API server controlled by a test.
type scripted struct {
	*httptest.Server

	mu       sync.Mutex
	changed  *sync.Cond
	objects  map[string]map[string]metav1.Object // by resource and name
	events   map[string][]scriptedEvent
	revision int
	oldest   int  // older watches get "too old"
	down     bool // existing connections are cut, new ones refused
	epoch    int  // watches of an earlier epoch end
	lists    map[string]int
	watches  map[string]int
}

type scriptedEvent struct {
	revision int
	line     []byte
}

const (
	services = "services"
	epslices = "endpointslices"
)

func newScripted(t *testing.T) *scripted {
	s := &scripted{objects: map[string]map[string]metav1.Object{services: {}, epslices: {}, "nodes": {}}, events: map[string][]scriptedEvent{},
		revision: 1000, lists: map[string]int{}, watches: map[string]int{}}
	s.changed = sync.NewCond(&s.mu)
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() { s.set(func() { s.down = true }); s.CloseClientConnections(); s.Close() })
	return s
}

// set changes the server's behavior and ends all watches.
func (s *scripted) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.epoch++
	s.lists, s.watches = map[string]int{}, map[string]int{}
	s.changed.Broadcast()
}

// put stores an object and notifies the watches.
func (s *scripted) put(resource, event string, o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	o.SetResourceVersion(strconv.Itoa(s.revision))
	s.objects[resource][o.GetName()] = o
	s.tell(resource, event, o)
}

func (s *scripted) tell(resource, event string, o metav1.Object) {
	line, err := json.Marshal(map[string]any{"type": event, "object": o})
	if err != nil {
		panic(err)
	}
	s.events[resource] = append(s.events[resource], scriptedEvent{s.revision, line})
	s.changed.Broadcast()
}

func (s *scripted) serve(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	query := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.down:
		panic(http.ErrAbortHandler)
	case query.Get("sendInitialEvents") != "":
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case query.Get("watch") != "":
		from, err := strconv.Atoi(query.Get("resourceVersion"))
		if err != nil || from < s.oldest {
			refuse(w, http.StatusGone, metav1.StatusReasonExpired)
			return
		}
		s.watches[resource]++
		s.watch(w, resource, from)
	default:
		s.lists[resource]++
		kind := map[string]metav1.TypeMeta{
			services: {Kind: "ServiceList", APIVersion: "v1"}, "nodes": {Kind: "NodeList", APIVersion: "v1"},
			epslices: {Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"},
		}[resource]
		list := map[string]any{"kind": kind.Kind, "apiVersion": kind.APIVersion, "metadata": metav1.ListMeta{ResourceVersion: strconv.Itoa(s.revision)}, "items": slices.Collect(maps.Values(s.objects[resource]))}
		text, err := json.Marshal(list)
		if err != nil {
			panic(err)
		}
		_, _ = w.Write(text)
	}
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	text, err := json.Marshal(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason, Code: int32(code)})
	if err != nil {
		panic(err)
	}
	_, _ = w.Write(text)
}

// watch writes events until the epoch ends.
func (s *scripted) watch(w http.ResponseWriter, resource string, from int) {
	sent, epoch := 0, s.epoch
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for s.epoch == epoch && !s.down {
		for _, e := range s.events[resource][sent:] {
			if sent++; e.revision > from {
				_, _ = w.Write(append(e.line, '\n'))
			}
		}
		w.(http.Flusher).Flush()
		s.changed.Wait()
	}
}

// settled waits until everything is watched again, and for the consequences.
func (s *scripted) settled(t *testing.T) {
	t.Helper()
	await(t, "the watches", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.watches[services] > 0 && s.watches[epslices] > 0 && s.watches["nodes"] > 0
	})
	time.Sleep(time.Second) // wait for nothing to happen
}

func await(t *testing.T, what string, ready func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Minute); !ready(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not happen", what)
		}
	}
}

// behind is a machine whose process watches a scripted API server.
type behind struct {
	*machine
	t      *testing.T
	server *scripted
	stop   func()

	mu         sync.Mutex
	operations []string
}

func newBehind(t *testing.T) *behind {
	b := &behind{machine: newMachine(t), t: t, server: newScripted(t)}
	b.refuse(func(text string) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.operations = append(b.operations, text)
		return nil
	})
	return b
}

// run starts a process that replaces the previous one.
func (b *behind) run() {
	b.t.Helper()
	if b.stop != nil {
		b.stop()
	}
	w := &world{checks: map[types.NamespacedName]plan.HealthCheck{}}
	o := b.options(w)
	o.MinSyncPeriod = 10 * time.Millisecond
	client, err := apiclient.New(&rest.Config{Host: b.server.URL, QPS: -1})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.context())
	done := make(chan error, 1)
	go func() { done <- New(o).Run(ctx, apiserver.New(client, apiserver.Options{Node: b.cfg.NodeName})) }()
	b.stop = sync.OnceFunc(func() { cancel(); <-done })
	b.t.Cleanup(b.stop)
}

// taken returns the operations on the kernel since the last call.
func (b *behind) taken() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.operations
	b.operations = nil
	return out
}

// programmed returns the number of virtual servers of cluster IPs.
func (b *behind) programmed() int {
	state, err := b.IPVS.Observe()
	if err != nil {
		b.t.Fatal(err)
	}
	n := 0
	for key := range state {
		if key.Addr.As16()[12] == 10 {
			n++
		}
	}
	return n
}

// TestReliabilityAPIServer runs the real client and informers against an API server
// that misbehaves, with fakes of the kernel. Nothing may be written unless something
// changed. OUTAGE sets the length of the first outage.
func TestReliabilityAPIServer(t *testing.T) {
	record := reliability.Begin(t, reliability.Source, "scripted")
	count := reliability.Times(300, 44125)
	b := newBehind(t)
	node := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: b.cfg.NodeName}}
	b.server.put("nodes", "ADDED", node)
	for i := range count {
		svc, slice := small(i)
		b.server.put(services, "ADDED", svc)
		b.server.put(epslices, "ADDED", slice)
	}
	b.run()
	await(t, "all Services", func() bool { return b.programmed() == count })
	b.server.settled(t)
	b.taken()
	wrong := 0
	still := func(what string) {
		t.Helper()
		b.server.settled(t)
		if got := b.taken(); len(got) > 0 {
			wrong += len(got)
			t.Errorf("%s: %d operations on the kernel: %q", what, len(got), got[:min(len(got), 5)])
		}
	}
	short := time.Duration(reliability.Times(1, 60)) * time.Second
	outage := outage(t, short)
	gone := func(duration time.Duration) {
		b.server.set(func() { b.server.down = true })
		b.server.CloseClientConnections()
		time.Sleep(duration)
	}
	back := func() { b.server.set(func() { b.server.down = false }) }

	gone(outage)
	back()
	still("the API server was gone")
	for range reliability.Times(2, 20) {
		b.server.set(func() {})
		still("watches were closed")
	}
	b.server.set(func() { b.server.oldest = b.server.revision + 1 })
	await(t, "the list", func() bool { b.server.mu.Lock(); defer b.server.mu.Unlock(); return b.server.lists[services] > 0 })
	b.server.set(func() { b.server.oldest = 0 })
	still("everything was listed again")
	b.server.set(func() { b.server.revision = 7; b.server.events = map[string][]scriptedEvent{} })
	still("its revision fell, as after a restored backup")
	b.duplicates(count)
	still("events came twice, and old ones after new ones")

	kept := b.server.objects
	b.server.set(func() {
		b.server.objects = map[string]map[string]metav1.Object{services: {}, epslices: {}, "nodes": {node.Name: node}}
		b.server.events, b.server.revision, b.server.oldest = map[string][]scriptedEvent{}, 9, 1<<30
	})
	await(t, "the list", func() bool { b.server.mu.Lock(); defer b.server.mu.Unlock(); return b.server.lists[services] > 0 })
	b.server.set(func() { b.server.oldest = 0 })
	still("it had lost its data")
	first, _ := small(0)
	b.server.set(func() {
		delete(kept[services], first.Name)
		delete(kept[epslices], first.Name+"-1")
		b.server.objects, b.server.revision, b.server.oldest = kept, 5000, 4000
	})
	await(t, "one Service to go", func() bool { return b.programmed() == count-1 })
	b.server.set(func() { b.server.oldest = 0 })
	b.server.settled(t)
	b.taken()

	b.stop()
	gone(short)
	b.run()
	time.Sleep(short)
	if got := b.taken(); len(got) > 0 {
		wrong += len(got)
		t.Errorf("a start without an API server: %q", got[:min(len(got), 5)])
	}
	back()
	still("a start, and then the API server")
	if n := b.programmed(); n != count-1 {
		t.Errorf("%d Services in the end, want %d", n, count-1)
	}
	record(
		reliability.Figure{Name: "Services", Value: float64(count), Shows: "listed and watched with the real client, fakes of the kernel"},
		reliability.Figure{Name: "first outage of the API server", Value: outage.Seconds(), Unit: "s"},
		reliability.Figure{Name: "second outage", Value: 2 * short.Seconds(), Unit: "s", Shows: "the process was started during it"},
		reliability.Figure{Name: "watches closed", Value: float64(reliability.Times(2, 20) * 3)},
		reliability.Figure{Name: "operations on the kernel because of these events", Value: float64(wrong), Shows: "also of a complete new list, a lower revision, repeated and unordered events, and an empty list"},
	)
}

// outage returns the duration in OUTAGE, or else the usual one.
func outage(t *testing.T, usual time.Duration) time.Duration {
	text := os.Getenv("OUTAGE")
	if text == "" {
		return usual
	}
	chosen, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("OUTAGE: %v", err)
	}
	return chosen
}

// duplicates sends a MODIFIED event for every tenth object, twice.
func (b *behind) duplicates(count int) {
	b.server.mu.Lock()
	defer b.server.mu.Unlock()
	for i := 0; i < count; i += 10 {
		svc, slice := small(i)
		for resource, o := range map[string]metav1.Object{services: b.server.objects[services][svc.Name], epslices: b.server.objects[epslices][slice.Name]} {
			for range 2 {
				b.server.revision++
				b.server.tell(resource, "MODIFIED", o)
			}
		}
	}
}

// small returns a Service with one port, and its slice.
func small(i int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	svc, slice := exposed(fmt.Sprint("web", i), 1, nil, at("10.244.0.2", "10.244.1.2")...)
	vip := fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250)
	svc.TypeMeta = metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}
	slice.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
	svc.Spec = corev1.ServiceSpec{ClusterIP: vip, ClusterIPs: []string{vip}, Type: corev1.ServiceTypeClusterIP, Ports: svc.Spec.Ports[:1]}
	svc.Spec.Ports[0].NodePort, svc.Status = 0, corev1.ServiceStatus{}
	slice.Ports = slice.Ports[:1]
	return svc, slice
}
