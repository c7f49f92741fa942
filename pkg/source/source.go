// Package source defines what every source of Services delivers. The sources are in the
// subpackages apiserver and manifest.
package source

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Sink receives what a source delivers. Objects are handed over: neither side changes
// them afterwards. Calls are not concurrent, return quickly, and may repeat known state.
type Sink interface {
	SetService(*corev1.Service)
	DeleteService(types.NamespacedName)
	SetEndpointSlice(*discoveryv1.EndpointSlice)
	DeleteEndpointSlice(types.NamespacedName)
	SetNode(*corev1.Node) // only the node that the proxy runs on
	DeleteNode()          // its object was deleted; the node may serve on
	// SetUnreachableNodes delivers the names of all unreachable nodes, sorted. A source that
	// cannot know them never calls it.
	SetUnreachableNodes([]string)
	// Begun is called once, after the node, if there is one, and after the Services and
	// EndpointSlices that other programs on the node need to start, if these can be read in time. A source that
	// delivers everything at once need not call it.
	Begun()
	// Synced is called once, after everything that existed at the start. Before that, a
	// missing object does not count as deleted.
	Synced()
}

// Source delivers to a sink until the context ends. It returns an error only if it
// cannot start; later failures are reported and retried.
type Source interface {
	Run(ctx context.Context, sink Sink) error
}

// Loader is a source that can deliver its content once. The error lists unusable
// objects; the rest has been delivered. If Synced was not called, the delivery is incomplete
// and must not be used.
type Loader interface {
	Load(ctx context.Context, sink Sink) error
}
