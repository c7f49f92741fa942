package apiserver

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// firstLimit limits the wait for the first Services.
const firstLimit = 5 * time.Second

// fromCache is the resource version that accepts any state in the API server's cache.
const fromCache = "0"

// first delivers the Services that other programs on a node need to start, before
// thousands of other Services are read (kubernetes#133773): the API server's own Service,
// and those of namespace kube-system, which include DNS. It ignores failures; the list of
// all Services reports them.
func (s *Source) first(ctx context.Context, services *store[*corev1.Service], slices *store[*discoveryv1.EndpointSlice]) {
	ctx, cancel := context.WithTimeout(ctx, firstLimit)
	defer cancel()
	apiServer := service.APIServer
	s.firstOf(ctx, apiServer.Namespace, services, slices,
		fields.OneTermEqualSelector(metav1.ObjectNameField, apiServer.Name).String(), discoveryv1.LabelServiceName+"="+apiServer.Name)
	s.firstOf(ctx, metav1.NamespaceSystem, services, slices, notHeadless.String(), service.EndpointSliceSelector().String())
}

// firstOf delivers the Services of a namespace, each after its slices: no Service is
// planned without its endpoints.
func (s *Source) firstOf(ctx context.Context, namespace string, services *store[*corev1.Service], slices *store[*discoveryv1.EndpointSlice], serviceFields, sliceLabels string) {
	endpoints, err := apiclient.All(ctx, s.client.EndpointSlices(namespace), metav1.ListOptions{ResourceVersion: fromCache, LabelSelector: sliceLabels})
	if err != nil {
		return
	}
	list, err := apiclient.All(ctx, s.servicesOf(namespace), metav1.ListOptions{
		ResourceVersion: fromCache, LabelSelector: service.Selector().String(), FieldSelector: serviceFields,
	})
	if err != nil {
		return
	}
	for _, slice := range endpoints {
		_ = slices.Add(slice) // cannot fail: the type is right
	}
	for _, svc := range list {
		_ = services.Add(svc)
	}
}
