package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/apiserver"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/manifest"
)

// nameOptions say where the Services' names come from.
type nameOptions struct {
	kubeconfig, manifests string
}

func (o *nameOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server; default: as a pod of the cluster does")
	fs.StringVar(&o.manifests, "manifests", "", "the folder that the Services come from, in place of the API server")
}

// names reads the Services. Outside a cluster, and with neither folder nor
// kubeconfig, there are none.
func (o *nameOptions) names(ctx context.Context, limit time.Duration) (*inspect.Names, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s", limit))
	defer cancel()
	from, err := o.source()
	if err != nil {
		return nil, err
	}
	names, err := inspect.Load(ctx, from)
	if err != nil {
		return nil, fmt.Errorf("reading the Services: %w", err)
	}
	return names, nil
}

func (o *nameOptions) source() (source.Source, error) {
	if o.manifests != "" {
		return manifest.New(o.manifests, ""), nil
	}
	if _, err := rest.InClusterConfig(); err != nil && o.kubeconfig == "" {
		return nil, nil
	}
	client, err := newClient(&config.Source{Kubeconfig: o.kubeconfig})
	if err != nil {
		return nil, err
	}
	return apiserver.New(client, apiserver.Options{}), nil
}
