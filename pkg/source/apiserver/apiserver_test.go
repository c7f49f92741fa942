package apiserver

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// recorder is a sink that sends its calls as text.
type recorder chan string

func (r recorder) SetService(s *corev1.Service) { r <- "set service " + s.Name }
func (r recorder) DeleteService(n types.NamespacedName) {
	r <- "delete service " + n.String()
}
func (r recorder) SetEndpointSlice(s *discoveryv1.EndpointSlice) { r <- "set slice " + s.Name }
func (r recorder) DeleteEndpointSlice(n types.NamespacedName) {
	r <- "delete slice " + n.String()
}
func (r recorder) SetNode(n *corev1.Node)         { r <- "set node " + n.Name }
func (r recorder) DeleteNode()                    { r <- "delete node" }
func (r recorder) SetUnreachableNodes(n []string) { r <- fmt.Sprintf("lost %q", n) }
func (r recorder) Begun()                         { r <- "begun" }
func (r recorder) Synced()                        { r <- "synced" }

// await reads until a text arrives, and returns those before it.
func (r recorder) await(t *testing.T, want string) []string {
	t.Helper()
	var before []string
	for {
		select {
		case got := <-r:
			if got == want {
				return before
			}
			before = append(before, got)
		case <-time.After(30 * time.Second):
			t.Fatalf("%q did not arrive, only %q", want, before)
		}
	}
}

func meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name}
}

// fakeClient is client-go's fake of an API server, as a Client.
type fakeClient struct{ *fake.Clientset }

func (f fakeClient) Services(namespace string) apiclient.Lister[corev1.Service] {
	return fakeLister[corev1.Service, *corev1.ServiceList]{f.CoreV1().Services(namespace)}
}

func (f fakeClient) EndpointSlices(namespace string) apiclient.Lister[discoveryv1.EndpointSlice] {
	return fakeLister[discoveryv1.EndpointSlice, *discoveryv1.EndpointSliceList]{f.DiscoveryV1().EndpointSlices(namespace)}
}

func (f fakeClient) Nodes() apiclient.Lister[corev1.Node] {
	return fakeLister[corev1.Node, *corev1.NodeList]{f.CoreV1().Nodes()}
}

// clientLister is what a client of client-go has for one kind.
type clientLister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// fakeLister reads the objects of a fake list one by one.
type fakeLister[T any, L runtime.Object] struct{ clientLister[L] }

func (f fakeLister[T, L]) Each(ctx context.Context, o metav1.ListOptions, do func(*T)) (metav1.ListMeta, error) {
	list, err := f.List(ctx, o)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	accessor, err := apimeta.ListAccessor(list)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	return metav1.ListMeta{ResourceVersion: accessor.GetResourceVersion()}, apimeta.EachListItem(list, func(o runtime.Object) error { do(any(o).(*T)); return nil })
}

// replace passes a complete list to a store, as a reflector does.
func replace[T object](s *store[T], objects ...T) error {
	var names []any
	for _, o := range objects {
		names = append(names, s.listed(o))
	}
	return s.Replace(names, "")
}

// start runs a source on a fake API server, and returns the selectors of its requests.
func start(t *testing.T, objects ...runtime.Object) (*fake.Clientset, recorder, func() map[string]string) {
	client := fake.NewClientset(objects...)
	asked := make(chan [2]string, 100)
	client.PrependReactor("list", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		restrictions := a.(k8stesting.ListAction).GetListRestrictions()
		asked <- [2]string{a.GetResource().Resource, fmt.Sprintf("labels %q fields %q", restrictions.Labels, restrictions.Fields)}
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	sink := make(recorder, 100)
	done := make(chan error, 1)
	go func() { done <- New(fakeClient{client}, Options{Node: "node1", UnreachableNodes: true}).Run(ctx, sink) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return client, sink, func() map[string]string {
		selectors := map[string]string{}
		for len(asked) > 0 {
			a := <-asked
			selectors[a[0]] = a[1]
		}
		return selectors
	}
}

func TestSyncedIsLast(t *testing.T) {
	_, sink, _ := start(t, &corev1.Service{ObjectMeta: meta("web")}, &discoveryv1.EndpointSlice{ObjectMeta: meta("web-1")})
	before := sink.await(t, "synced")
	if len(before) != 3 || !slices.Contains(before, "begun") {
		t.Errorf("delivered %q before Synced, want the Service, the slice, and Begun", before)
	}
}

// TestIssue133773First delivers the Services that are needed to start before all others,
// each after its endpoints.
func TestIssue133773First(t *testing.T) {
	var objects []runtime.Object
	for _, namespace := range []string{"default", "kube-system", "shop"} {
		m := metav1.ObjectMeta{Namespace: namespace, Name: namespace}
		slice := &discoveryv1.EndpointSlice{ObjectMeta: m}
		slice.Labels = map[string]string{discoveryv1.LabelServiceName: "kubernetes"}
		objects = append(objects, &corev1.Service{ObjectMeta: m}, slice)
	}
	_, sink, _ := start(t, objects...)
	before := sink.await(t, "begun")
	want := []string{"set slice default", "set service default", "set slice kube-system", "set service kube-system"}
	if !slices.Equal(before, want) {
		t.Errorf("first: %q, want %q", before, want)
	}
	after := sink.await(t, "synced")
	slices.Sort(after)
	if want := []string{"set service shop", "set slice shop"}; !slices.Equal(after, want) {
		t.Errorf("then: %q, want %q", after, want)
	}
}

func TestSelectorsEqualKubeProxy(t *testing.T) {
	_, sink, selectors := start(t)
	sink.await(t, "synced")
	want := map[string]string{
		"services":       `labels "!service.kubernetes.io/service-proxy-name" fields "spec.clusterIP!=None"`,
		"endpointslices": `labels "!service.kubernetes.io/headless" fields ""`,
		"nodes":          `labels "" fields "metadata.name=node1"`,
	}
	got := selectors()
	for resource, selector := range want {
		if got[resource] != selector {
			t.Errorf("%s: %s, want %s", resource, got[resource], selector)
		}
	}
}

// TestOldAPIServer runs the source on an API server before 1.31, which refuses a field selector for
// cluster IPs.
func TestOldAPIServer(t *testing.T) {
	client := fake.NewClientset(&corev1.Service{ObjectMeta: meta("web")})
	refuse := func(selector string) (bool, runtime.Object, error) {
		if !strings.Contains(selector, "spec.clusterIP") {
			return false, nil, nil
		}
		return true, nil, apierrors.NewBadRequest(`field label not supported: spec.clusterIP`)
	}
	client.PrependReactor("list", "services", func(a k8stesting.Action) (bool, runtime.Object, error) {
		return refuse(a.(k8stesting.ListAction).GetListRestrictions().Fields.String())
	})
	client.PrependWatchReactor("services", func(a k8stesting.Action) (bool, watch.Interface, error) {
		refused, _, err := refuse(a.(k8stesting.WatchAction).GetWatchRestrictions().Fields.String())
		return refused, nil, err
	})
	sink := make(recorder, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- New(fakeClient{client}, Options{Node: "node1"}).Run(ctx, sink) }()
	t.Cleanup(func() { cancel(); <-done })
	if before := sink.await(t, "synced"); !slices.Contains(before, "set service web") {
		t.Errorf("before synced: %q, want set service web", before)
	}
	if _, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{ObjectMeta: meta("shop")}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sink.await(t, "set service shop")
	once := make(recorder, 100)
	if err := NewListing(fakeClient{client}, "").Load(ctx, once); err != nil {
		t.Error(err)
	}
	once.await(t, "synced")
}

func TestChangesAndDeletions(t *testing.T) {
	client, sink, _ := start(t)
	sink.await(t, "synced")
	ctx := t.Context()
	svc := &corev1.Service{ObjectMeta: meta("web")}
	steps := []struct {
		do   func() error
		want string
	}{
		{func() error {
			_, err := client.CoreV1().Services("default").Create(ctx, svc, metav1.CreateOptions{})
			return err
		}, "set service web"},
		{func() error {
			_, err := client.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{ObjectMeta: meta("web-1")}, metav1.CreateOptions{})
			return err
		}, "set slice web-1"},
		{func() error {
			_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, metav1.CreateOptions{})
			return err
		}, "set node node1"},
		{func() error { return client.CoreV1().Services("default").Delete(ctx, "web", metav1.DeleteOptions{}) }, "delete service default/web"},
		{func() error {
			return client.DiscoveryV1().EndpointSlices("default").Delete(ctx, "web-1", metav1.DeleteOptions{})
		}, "delete slice default/web-1"},
		{func() error { return client.CoreV1().Nodes().Delete(ctx, "node1", metav1.DeleteOptions{}) }, "delete node"},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			t.Fatal(err)
		}
		sink.await(t, s.want)
	}
}

// TestNewList delivers the deletions and changes during a broken watch.
func TestNewList(t *testing.T) {
	sink := make(recorder, 100)
	var mu sync.Mutex
	store := newStore(&mu, klog.Background(), sink.SetService, sink.DeleteService)
	object := func(name, version string) *corev1.Service {
		svc := &corev1.Service{ObjectMeta: meta(name)}
		svc.ResourceVersion = version
		return svc
	}
	lists := []struct {
		objects []*corev1.Service
		want    []string
	}{
		{[]*corev1.Service{object("a", "1"), object("b", "1")}, []string{"set service a", "set service b"}},
		{[]*corev1.Service{object("a", "1"), object("b", "2"), object("c", "3")}, []string{"set service b", "set service c"}},
		{[]*corev1.Service{object("c", "3"), object("a", "1")}, []string{"delete service default/b"}},
		{[]*corev1.Service{object("a", "1")}, []string{"delete service default/c"}},
		{nil, []string{"delete service default/a"}},
	}
	for i, list := range lists {
		if err := replace(store, list.objects...); err != nil {
			t.Fatal(err)
		}
		var got []string
		for len(sink) > 0 {
			got = append(got, <-sink)
		}
		if !slices.Equal(got, list.want) {
			t.Errorf("list %d: %q, want %q", i, got, list.want)
		}
	}
	if err := store.Add(&corev1.Node{}); err == nil {
		t.Error("a Node was taken for a Service")
	}
	if err := store.Replace([]any{object("a", "1")}, ""); err == nil {
		t.Error("an object was taken for one that is already passed on")
	}
}

func TestTrimsBeforeItDelivers(t *testing.T) {
	svc := &corev1.Service{ObjectMeta: meta("web")}
	svc.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
	svc.Annotations = map[string]string{"drop": "this", service.AnnotationPrefix + "keep": "this"}
	client := fake.NewClientset(svc)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sink := trimmed{recorder: make(recorder, 100), services: make(chan *corev1.Service, 1)}
	go func() { _ = New(fakeClient{client}, Options{Node: "node1"}).Run(ctx, sink) }()
	got := <-sink.services
	if got.ManagedFields != nil || len(got.Annotations) != 1 {
		t.Errorf("kept: %+v", got.ObjectMeta)
	}
}

// trimmed is a recorder that keeps Services.
type trimmed struct {
	recorder
	services chan *corev1.Service
}

func (s trimmed) SetService(svc *corev1.Service) { s.services <- svc }

// TestResync delivers only what has changed.
func TestResync(t *testing.T) {
	client := fake.NewClientset(&corev1.Service{ObjectMeta: meta("web")})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sink := make(recorder, 100)
	go func() {
		_ = New(fakeClient{client}, Options{Node: "node1", Resync: 50 * time.Millisecond}).Run(ctx, sink)
	}()
	sink.await(t, "set service web")
	sink.await(t, "synced")
	select {
	case again := <-sink:
		t.Errorf("again: %s", again)
	case <-time.After(time.Second):
	}
}

// TestOneCallAtATime delivers all three kinds at once; the race detector would find
// concurrent calls.
func TestOneCallAtATime(t *testing.T) {
	var objects []runtime.Object
	for i := range 50 {
		objects = append(objects,
			&corev1.Service{ObjectMeta: meta(fmt.Sprintf("s%d", i))},
			&discoveryv1.EndpointSlice{ObjectMeta: meta(fmt.Sprintf("e%d", i))})
	}
	ctx, cancel := context.WithCancel(t.Context())
	sink := &counter{synced: make(chan int, 1)}
	done := make(chan error, 1)
	go func() {
		done <- New(fakeClient{fake.NewClientset(objects...)}, Options{Node: "node1", UnreachableNodes: true}).Run(ctx, sink)
	}()
	if calls := <-sink.synced; calls != 100 {
		t.Errorf("%d calls before Synced, want 100", calls)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// counter counts calls without synchronization.
type counter struct {
	calls  int
	synced chan int
}

func (c *counter) SetService(*corev1.Service)                  { c.calls++ }
func (c *counter) DeleteService(types.NamespacedName)          { c.calls++ }
func (c *counter) SetEndpointSlice(*discoveryv1.EndpointSlice) { c.calls++ }
func (c *counter) DeleteEndpointSlice(types.NamespacedName)    { c.calls++ }
func (c *counter) SetNode(*corev1.Node)                        { c.calls++ }
func (c *counter) DeleteNode()                                 { c.calls++ }
func (c *counter) SetUnreachableNodes([]string)                { c.calls++ }
func (c *counter) Begun()                                      {}
func (c *counter) Synced()                                     { c.synced <- c.calls }

// brokenLister fails its first lists after the first object.
type brokenLister struct {
	apiclient.Lister[corev1.Service]
	fails *int
}

func (b brokenLister) Each(ctx context.Context, o metav1.ListOptions, do func(*corev1.Service)) (metav1.ListMeta, error) {
	count := 0
	listMeta, err := b.Lister.Each(ctx, o, func(s *corev1.Service) {
		if count++; *b.fails == 0 || count == 1 {
			do(s)
		}
	})
	if err == nil && *b.fails > 0 {
		*b.fails--
		err = io.ErrUnexpectedEOF
	}
	return listMeta, err
}

// TestBrokenList reads a list that breaks off: what was read is delivered, nothing counts as
// deleted or synced, and the next list delivers the rest.
func TestBrokenList(t *testing.T) {
	var mu sync.Mutex
	sink := make(recorder, 100)
	store := newStore(&mu, klog.Background(), sink.SetService, sink.DeleteService)
	kept := &corev1.Service{ObjectMeta: meta("old")}
	if err := replace(store, kept, &corev1.Service{ObjectMeta: meta("gone")}); err != nil {
		t.Fatal(err)
	}
	client := fakeClient{fake.NewClientset(&corev1.Service{ObjectMeta: meta("a")}, &corev1.Service{ObjectMeta: meta("b")}, kept)}
	fails := 1
	lw := listWatch(store.listed, brokenLister{client.Services(metav1.NamespaceAll), &fails}, metav1.ListOptions{})
	for len(sink) > 0 {
		<-sink
	}
	if _, err := lw.ListWithContextFunc(t.Context(), metav1.ListOptions{}); err == nil {
		t.Fatal("a list that broke off is complete")
	}
	if got := <-sink; got != "set service a" || len(sink) > 0 {
		t.Errorf("the broken list delivered %q and %d more", got, len(sink))
	}
	list, err := lw.ListWithContextFunc(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	items, err := apimeta.ExtractList(list)
	if err != nil || len(items) != 3 {
		t.Fatalf("%d items, %v", len(items), err)
	}
	names := make([]any, len(items))
	for i := range items {
		names[i] = items[i]
	}
	if err := store.Replace(names, ""); err != nil {
		t.Fatal(err)
	}
	var got []string
	for len(sink) > 0 {
		got = append(got, <-sink)
	}
	if want := []string{"set service b", "delete service default/gone"}; !slices.Equal(got, want) {
		t.Errorf("the next list delivered %q, want %q", got, want)
	}
}
