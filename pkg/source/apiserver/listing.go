package apiserver

import (
	"context"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// Listing delivers the content of an API server once. It does not watch, retry or log. It
// does not trim objects, so pod names are included: a command that exits immediately can
// afford the memory.
type Listing struct {
	client Client
	node   string
}

// NewListing creates a Listing. Without the name of a node it delivers no Node.
func NewListing(client Client, node string) *Listing { return &Listing{client, node} }

var _ source.Loader = (*Listing)(nil)

// Load delivers everything, or fails at the first list that fails. It calls Synced only
// after delivering everything.
func (l *Listing) Load(ctx context.Context, sink source.Sink) error {
	if l.node != "" {
		nodes, err := apiclient.All(ctx, l.client.Nodes(), metav1.ListOptions{
			ResourceVersion: fromCache, FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, l.node).String(),
		})
		if err != nil {
			return err
		}
		for _, node := range nodes {
			sink.SetNode(node)
		}
	}
	slices, err := apiclient.All(ctx, l.client.EndpointSlices(metav1.NamespaceAll), metav1.ListOptions{
		ResourceVersion: fromCache, LabelSelector: service.EndpointSliceSelector().String(),
	})
	if err != nil {
		return err
	}
	list := olderLister{l.client.Services(metav1.NamespaceAll), &atomic.Bool{}}
	services, err := apiclient.All(ctx, list, metav1.ListOptions{
		ResourceVersion: fromCache, LabelSelector: service.Selector().String(), FieldSelector: notHeadless.String(),
	})
	if err != nil {
		return err
	}
	for _, slice := range slices {
		sink.SetEndpointSlice(slice)
	}
	for _, svc := range services {
		sink.SetService(svc)
	}
	sink.Synced()
	return nil
}

// Run calls Load; it implements Source.
func (l *Listing) Run(ctx context.Context, sink source.Sink) error { return l.Load(ctx, sink) }
