// Package source says what every source of Services delivers. The sources
// themselves are in the folders below: apiserver and manifest.
package source

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Sink takes what a source delivers. Objects are handed over: neither side
// changes them afterwards. Calls come from one goroutine at a time, return
// soon, and may repeat what is known already.
type Sink interface {
	SetService(*corev1.Service)
	DeleteService(types.NamespacedName)
	SetEndpointSlice(*discoveryv1.EndpointSlice)
	DeleteEndpointSlice(types.NamespacedName)
	SetNode(*corev1.Node) // only ever the node that the proxy runs on
	DeleteNode()
	// SetLostNodes says of which nodes the cluster does not hear any more, by name;
	// sorted, and all of them each time. A source that cannot know never calls it.
	SetLostNodes([]string)
	// Begun is called once, when the node has been delivered, if there is one, and
	// those Services that others on the node need to start, with all that belongs
	// to them, and nothing else. A source that delivers all at once need not call
	// it.
	Begun()
	// Synced is called once, when all that existed at the start has been
	// delivered. Until then nothing may be taken for deleted.
	Synced()
}

// Source delivers to a sink until the context ends. An error means that it
// cannot begin; what goes wrong later it reports and retries.
type Source interface {
	Run(ctx context.Context, sink Sink) error
}

// Loader is a source that can deliver all that it has one time. The error
// tells what of it could not be used, the rest having been delivered; unless
// Synced was called, nothing was.
type Loader interface {
	Load(ctx context.Context, sink Sink) error
}
