package main

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/config"
	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/proxy"
	"github.com/kube-ipvs/kube-ipvs/pkg/source/manifest"
)

// nodeLimit is how long the start waits for the Node and its addresses, as in kube-proxy.
// nodePeriod is the time between two attempts, and attemptLimit the time for one.
const (
	nodeLimit    = 30 * time.Second
	nodePeriod   = time.Second
	attemptLimit = 5 * time.Second
)

// findPrimaryFamily returns the node's primary family; see primaryFamily. A folder of manifests is
// read once, and the API server is asked once before a cleanup, which often runs without one.
func findPrimaryFamily(ctx context.Context, cfg *config.Config) ip.Family {
	limit := nodeLimit
	if cfg.Source.Manifests != "" || cfg.Action == config.Cleanup {
		limit = 0
	}
	return primaryFamily(ctx, cfg.Plan.NodeAddress, limit, func(ctx context.Context) (*corev1.Node, error) { return readNode(ctx, cfg) })
}

// primaryFamily returns the family that the node cannot do without, as kube-proxy chooses it
// (detectNodeIPs in cmd/kube-proxy/app/server.go): that of --bind-address, else of the Node's first
// address. It reads the Node until it has an address or the limit has passed. Then IPv4 is the
// primary family.
func primaryFamily(ctx context.Context, bind netip.Addr, limit time.Duration, read func(context.Context) (*corev1.Node, error)) ip.Family {
	if bind.IsValid() {
		return ip.Of(bind)
	}
	attempt := func() (*corev1.Node, error) {
		ctx, cancel := context.WithTimeout(ctx, attemptLimit)
		defer cancel()
		return read(ctx)
	}
	for began := time.Now(); ; {
		node, err := attempt()
		if a := firstAddress(node); a.IsValid() {
			return ip.Of(a)
		}
		if time.Since(began) >= limit || !wait(ctx, nodePeriod) {
			klog.FromContext(ctx).Info("The Node has no address, taking IPv4 for the node's primary family", "err", err)
			return ip.IPv4
		}
	}
}

// wait returns false if the context ended first.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// firstAddress returns the Node's first internal address, else its first external one. The zero
// Addr means that it has none, or that there is no Node.
func firstAddress(node *corev1.Node) netip.Addr {
	if node == nil {
		return netip.Addr{}
	}
	if valid, _ := proxy.NodeAddresses(node); len(valid) > 0 {
		return valid[0]
	}
	return netip.Addr{}
}

// readNode reads the Node from the configured source. It returns nil if there is none.
func readNode(ctx context.Context, cfg *config.Config) (*corev1.Node, error) {
	var nodes []*corev1.Node
	if dir := cfg.Source.Manifests; dir != "" {
		var all objectSink
		err := manifest.New(dir, cfg.Plan.NodeName, "").Load(ctx, &all)
		if nodes = all.Nodes; len(nodes) == 0 {
			return nil, err
		}
		return nodes[0], nil // other documents may be invalid
	}
	client, err := newClient(&cfg.Source)
	if err != nil {
		return nil, err
	}
	nodes, err = apiclient.All(ctx, client.Nodes(), metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, cfg.Plan.NodeName).String(),
	})
	if err != nil || len(nodes) == 0 {
		return nil, err
	}
	return nodes[0], nil
}
