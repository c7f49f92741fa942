// Package apiserver is the source that watches a Kubernetes API server.
package apiserver

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Client lists and watches the kinds that are needed. Package apiclient implements it.
type Client interface {
	Services(namespace string) apiclient.Lister[corev1.Service]
	EndpointSlices(namespace string) apiclient.Lister[discoveryv1.EndpointSlice]
	Nodes() apiclient.Lister[corev1.Node]
}

// Options configure a Source.
type Options struct {
	Node             string        // name of this node's Node
	Resync           time.Duration // of the reflectors; has no effect, see store.Resync
	UnreachableNodes bool          // look for unreachable nodes
}

// Source watches Services and EndpointSlices, with kube-proxy's selectors, and this
// node's Node.
//
// It uses reflectors, the part of an informer that lists and watches. The rest of an
// informer (a queue, an indexed cache and a goroutine per listener) takes as long at
// the start as reading all objects, and duplicates what the sink stores.
type Source struct {
	client Client
	Options
	mu    sync.Mutex // reflectors call concurrently, the sink expects one call at a time
	older atomic.Bool
}

// New creates a source.
func New(client Client, o Options) *Source {
	return &Source{client: client, Options: o}
}

var _ source.Source = (*Source)(nil)

// Run delivers until the context ends. While the API server is unreachable nothing
// counts as deleted; client-go reports and retries.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	logger := klog.FromContext(ctx)
	nodes := newStore(&s.mu, klog.LoggerWithValues(logger, "kind", "Nodes"), sink.SetNode, func(types.NamespacedName) { sink.DeleteNode() })
	services := newStore(&s.mu, klog.LoggerWithValues(logger, "kind", "Services"), sink.SetService, sink.DeleteService)
	slices := newStore(&s.mu, klog.LoggerWithValues(logger, "kind", "EndpointSlices"), sink.SetEndpointSlice, sink.DeleteEndpointSlice)
	unreachable := s.unreachableNodes(slices, sink)
	var running sync.WaitGroup
	defer running.Wait()
	follow := func(kind runtime.Object, lw *cache.ListWatch, store cache.ReflectorStore) {
		r := cache.NewReflectorWithOptions(listing{lw}, kind, store, cache.ReflectorOptions{ResyncPeriod: s.Resync})
		running.Go(func() { r.RunWithContext(ctx) })
	}
	follow(&corev1.Node{}, s.nodes(nodes), nodes)
	s.first(ctx, services, slices)
	if !s.whenSynced(ctx, sink.Begun, nodes.synced) {
		return nil
	}
	follow(&corev1.Service{}, s.services(services), services)
	follow(&discoveryv1.EndpointSlice{}, s.slices(slices), slices)
	if s.whenSynced(ctx, sink.Synced, services.synced, slices.synced) && unreachable != nil {
		running.Go(func() { unreachable.run(ctx) })
	}
	return nil
}

// whenSynced calls a method of the sink once the stores are synced. It returns false if
// the context ended first.
func (s *Source) whenSynced(ctx context.Context, method func(), synced ...<-chan struct{}) bool {
	for _, c := range synced {
		select {
		case <-ctx.Done():
			return false
		case <-c:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	method()
	return true
}

// notHeadless selects Services that have a cluster IP.
var notHeadless = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone)

func (s *Source) servicesOf(namespace string) apiclient.Lister[corev1.Service] {
	return olderLister{s.client.Services(namespace), &s.older}
}

// services sets the selectors. A Service that becomes headless, or another proxy's,
// leaves the selection and is delivered as a deletion.
func (s *Source) services(store *store[*corev1.Service]) *cache.ListWatch {
	return listWatch(store.listed, s.servicesOf(metav1.NamespaceAll), metav1.ListOptions{
		LabelSelector: service.Selector().String(),
		FieldSelector: notHeadless.String(),
	})
}

func (s *Source) slices(store *store[*discoveryv1.EndpointSlice]) *cache.ListWatch {
	return listWatch(store.listed, s.client.EndpointSlices(metav1.NamespaceAll), metav1.ListOptions{LabelSelector: service.EndpointSliceSelector().String()})
}

func (s *Source) nodes(store *store[*corev1.Node]) *cache.ListWatch {
	return listWatch(store.listed, s.client.Nodes(), metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, s.Node).String(),
	})
}

// listWatch lists and watches a selection. It passes the objects of a list to a function while
// the list is read, and gives the reflector a list of the names that the function returns.
func listWatch[T any](listed func(*T) *listedName, client apiclient.Lister[T], selection metav1.ListOptions) *cache.ListWatch {
	selected := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = selection.LabelSelector, selection.FieldSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := &nameList{}
			var err error
			list.ListMeta, err = client.Each(ctx, selected(o), func(object *T) {
				if ctx.Err() == nil { // a reflector that ends does not wait for its list
					list.Items = append(list.Items, listed(object))
				}
			})
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return client.Watch(ctx, selected(o))
		},
	}
}

// listing makes a reflector start with a list. A watch (WatchList) would deliver each
// object in an uncompressed message of its own, with TLS, HTTP and protobuf framing,
// which takes three times as long to read. The API server need not hold the list in
// memory: since Kubernetes 1.33 it encodes it object by object (KEP-5116).
type listing struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported is the method by which client-go detects this.
func (listing) IsWatchListSemanticsUnSupported() bool { return true }
