package apiserver

import (
	"context"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
)

// olderLister lists Services without notHeadless if the API server refuses it: those before
// Kubernetes 1.31 do not know the field. Headless Services are then delivered too. They get no
// virtual servers; see service.Proxied.
type olderLister struct {
	apiclient.Lister[corev1.Service]
	older *atomic.Bool // the API server has refused it
}

func (l olderLister) Each(ctx context.Context, o metav1.ListOptions, do func(*corev1.Service)) (meta metav1.ListMeta, err error) {
	err = l.try(&o, func() error {
		meta, err = l.Lister.Each(ctx, o, do)
		return err
	})
	return meta, err
}

func (l olderLister) Watch(ctx context.Context, o metav1.ListOptions) (w watch.Interface, err error) {
	err = l.try(&o, func() error {
		w, err = l.Lister.Watch(ctx, o)
		return err
	})
	return w, err
}

// try makes a request, and makes it again without the selector if it is refused.
func (l olderLister) try(o *metav1.ListOptions, request func() error) error {
	selects := o.FieldSelector == notHeadless.String()
	if selects && l.older.Load() {
		o.FieldSelector, selects = "", false
	}
	err := request()
	if !selects || !apierrors.IsBadRequest(err) {
		return err
	}
	o.FieldSelector = ""
	if err = request(); err == nil {
		l.older.Store(true)
	}
	return err
}
