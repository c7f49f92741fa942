// Package apiserver is the source that follows a Kubernetes API server.
package apiserver

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Source follows Services and EndpointSlices, by kube-proxy's selectors, and
// the node's own Node.
type Source struct {
	client   kubernetes.Interface
	node     string
	resync   time.Duration
	mu       sync.Mutex // informers call from a goroutine each, the sink wants one
	services cache.SharedIndexInformer
	slices   cache.SharedIndexInformer
	nodes    cache.SharedIndexInformer
}

// New makes a source. Every resync (0: never) it delivers what it knows again.
func New(client kubernetes.Interface, node string, resync time.Duration) *Source {
	return &Source{client: client, node: node, resync: resync}
}

var _ source.Source = (*Source)(nil)

// Run delivers until the context ends. While the API server cannot be reached
// nothing is taken for deleted; client-go reports and tries again.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	s.makeInformers()
	guardOf := func(kind string, remove func(types.NamespacedName)) *guard {
		return newGuard(&s.mu, kind, klog.FromContext(ctx), remove)
	}
	handlers := []struct {
		informer cache.SharedIndexInformer
		handler  cache.ResourceEventHandler
	}{
		{s.services, handler(guardOf("Services", func(n types.NamespacedName) { sink.DeleteService(n) }), sink.SetService)},
		{s.slices, handler(guardOf("EndpointSlices", func(n types.NamespacedName) { sink.DeleteEndpointSlice(n) }), sink.SetEndpointSlice)},
		{s.nodes, handler(guardOf("Nodes", func(types.NamespacedName) { sink.DeleteNode() }), sink.SetNode)},
	}
	var synced []cache.InformerSynced
	for _, h := range handlers {
		registration, err := h.informer.AddEventHandler(h.handler)
		if err != nil {
			return fmt.Errorf("following the API server: %w", err)
		}
		// The handler's own HasSynced waits until it was told of everything,
		// which is later than the informer's.
		synced = append(synced, registration.HasSynced)
	}
	var running sync.WaitGroup
	for _, h := range handlers {
		running.Go(func() { h.informer.RunWithContext(ctx) })
	}
	if cache.WaitForCacheSync(ctx.Done(), synced...) {
		s.mu.Lock()
		sink.Synced()
		s.mu.Unlock()
	}
	running.Wait()
	return nil
}

// makeInformers sets the selectors. A Service that becomes headless, or
// another proxy's, leaves the selection, which shows as a deletion.
func (s *Source) makeInformers() {
	core := informers.NewSharedInformerFactoryWithOptions(s.client, s.resync, informers.WithTransform(trim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = service.Selector().String()
			o.FieldSelector = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String()
		}))
	s.services = core.Core().V1().Services().Informer()
	discovery := informers.NewSharedInformerFactoryWithOptions(s.client, s.resync, informers.WithTransform(trim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = service.EndpointSliceSelector().String()
		}))
	s.slices = discovery.Discovery().V1().EndpointSlices().Informer()
	nodes := informers.NewSharedInformerFactoryWithOptions(s.client, s.resync, informers.WithTransform(trim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, s.node).String()
		}))
	s.nodes = nodes.Core().V1().Nodes().Informer()
}

// object is what the handler needs of an API object.
type object interface {
	*corev1.Service | *discoveryv1.EndpointSlice | *corev1.Node
	metav1.Object
}

// handler passes events on, one at a time.
func handler[T object](g *guard, set func(T)) cache.ResourceEventHandler {
	put := func(obj any) {
		if o, ok := obj.(T); ok {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.there(types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()})
			set(o)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    put,
		UpdateFunc: func(_, obj any) { put(obj) },
		DeleteFunc: func(obj any) {
			// An object that went while the watch was broken comes as its key.
			name, err := cache.DeletionHandlingObjectToName(obj)
			if err != nil {
				return
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			if _, byList := obj.(cache.DeletedFinalStateUnknown); byList {
				g.notListed(types.NamespacedName{Namespace: name.Namespace, Name: name.Name})
			} else {
				g.deleted(types.NamespacedName{Namespace: name.Namespace, Name: name.Name})
			}
		},
	}
}

// trim is source.Trim before an informer keeps an object.
func trim(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		source.Trim(o)
	}
	return obj, nil
}
