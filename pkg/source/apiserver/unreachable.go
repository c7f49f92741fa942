package apiserver

import (
	"context"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/apiclient"
	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// When to read the Node of a suspect.
const (
	firstCheckMin = 1 * time.Second // the Node is updated before its pods, which all proxies see at once
	firstCheckMax = 4 * time.Second
	recheckMin    = 10 * time.Second // doubled each time
	recheckMax    = 5 * time.Minute
	checkTimeout  = 10 * time.Second // for a response
)

// unreachableNodes finds unreachable nodes, so that connections to their endpoints can be
// reset (kubernetes#89392, #77903).
//
// Watching all Nodes would cost each node a message per other node every few minutes.
// When a node dies, the node controller marks its pods as not ready, which EndpointSlices
// show. So unreachableNodes reads a Node from the API server only when endpoints on that node were
// ready and none is ready now.
type unreachableNodes struct {
	client   Client
	own      string // name of this node, which counts as reachable
	slices   *store[*discoveryv1.EndpointSlice]
	report   func(nodes []string) // nodes is sorted; called under mu
	mu       *sync.Mutex          // the source's; guards the fields below
	suspects map[string]*suspect  // by name of the node
	begun    bool
	reported []string
	many     bool // too many nodes are unreachable to report them
	wake     chan struct{}
}

// suspect is the state of a node that may be unreachable.
type suspect struct {
	checkAt     time.Time // time of the next request
	wait        time.Duration
	unreachable bool
}

// unreachableNodes returns an unreachableNodes to which the store reports slices. It returns nil
// if the options do not request unreachable nodes.
func (s *Source) unreachableNodes(slices *store[*discoveryv1.EndpointSlice], sink source.Sink) *unreachableNodes {
	if !s.UnreachableNodes {
		return nil
	}
	u := &unreachableNodes{client: s.client, own: s.Node, slices: slices, report: sink.SetUnreachableNodes, mu: &s.mu, suspects: map[string]*suspect{}, wake: make(chan struct{}, 1)}
	slices.pods = podsOf
	deliver := slices.set
	slices.set = func(slice *discoveryv1.EndpointSlice) {
		u.see(slices.known.Get(nameOf(slice)), slice)
		deliver(slice)
	}
	return u
}

// pod is what the store remembers of an endpoint.
type pod struct {
	node    unique.Handle[string] // "" if it has none
	address uint64                // hash of its addresses, with the lowest bit set if it was ready
}

// podsOf returns what the store remembers of a slice's endpoints.
func podsOf(slice *discoveryv1.EndpointSlice) []pod {
	pods := make([]pod, len(slice.Endpoints))
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		pods[i] = pod{unique.Make(ptr.Deref(e.NodeName, "")), hashOf(e.Addresses) &^ 1}
		if isReady(e) {
			pods[i].address |= 1
		}
	}
	return pods
}

func (p pod) wasReady() bool { return p.address&1 != 0 }

// hashOf returns a hash of a list of addresses. A collision only causes an unnecessary
// read of a Node.
func hashOf(addresses []string) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, a := range addresses {
		_, _ = h.WriteString(a) // never fails
		_ = h.WriteByte(0)
	}
	return h.Sum64()
}

// see compares a slice with its previous version. A pod that was never ready or is
// terminating does not make its node a suspect. The initial list has no previous version:
// there, every endpoint that is not ready counts, because its node may have died before. The
// caller holds the lock, here and below, except in run and check.
func (l *unreachableNodes) see(was *known, is *discoveryv1.EndpointSlice) {
	for i := range is.Endpoints {
		e := &is.Endpoints[i]
		switch {
		case e.NodeName == nil || *e.NodeName == "" || *e.NodeName == l.own:
		case isReady(e):
			l.clear(*e.NodeName)
		case ptr.Deref(e.Conditions.Terminating, false):
		case was == nil && !l.begun, was != nil && wasReady(was.pods, e):
			l.suspect(*e.NodeName)
		}
	}
}

// isReady reports whether an endpoint's pod is ready. It reads serving, which is
// independent of terminating and of publishNotReadyAddresses. Unset means true.
func isReady(e *discoveryv1.Endpoint) bool {
	return ptr.Deref(e.Conditions.Serving, ptr.Deref(e.Conditions.Ready, true))
}

func wasReady(was []pod, e *discoveryv1.Endpoint) bool {
	address := hashOf(e.Addresses) | 1
	return slices.ContainsFunc(was, func(p pod) bool { return p.address == address })
}

func (l *unreachableNodes) clear(node string) {
	if d := l.suspects[node]; d != nil {
		delete(l.suspects, node)
		l.wakeUp()
	}
}

func (l *unreachableNodes) suspect(node string) {
	if l.suspects[node] != nil {
		return
	}
	l.suspects[node] = &suspect{checkAt: time.Now().Add(firstCheckMin + rand.N(firstCheckMax-firstCheckMin)), wait: recheckMin}
	l.wakeUp()
}

func (l *unreachableNodes) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default: // an earlier signal is pending
	}
}

// run reads the Nodes of suspects until the context ends.
func (l *unreachableNodes) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-timer.C:
		}
		for _, node := range l.due(time.Now()) {
			unreachable, err := l.check(ctx, node)
			if err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot read the Node of a node without ready endpoints, retrying", "node", node, "err", err)
			}
			l.note(node, unreachable, err)
		}
		timer.Reset(time.Until(l.publish(klog.FromContext(ctx))))
	}
}

// due returns the nodes whose Node must be read now. It drops suspects with a ready
// endpoint, or without endpoints.
func (l *unreachableNodes) due(now time.Time) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = true
	due := map[string]bool{}
	for node, d := range l.suspects {
		if !now.Before(d.checkAt) {
			due[node] = true
		}
	}
	if len(due) == 0 {
		return nil
	}
	ready, present := l.nodes()
	for node := range due {
		if ready[node] || !present[node] {
			delete(due, node)
			delete(l.suspects, node)
		}
	}
	return slices.Sorted(maps.Keys(due))
}

// nodes returns the nodes that have a ready endpoint, and those that have any endpoint.
func (l *unreachableNodes) nodes() (ready, present map[string]bool) {
	ready, present = map[string]bool{}, map[string]bool{}
	none := unique.Make("")
	for slice := range l.slices.known.All() {
		for _, p := range slice.pods {
			if p.node == none {
				continue
			}
			present[p.node.Value()] = true
			if p.wasReady() {
				ready[p.node.Value()] = true
			}
		}
	}
	return ready, present
}

// check reads a Node from the API server's cache and reports whether it is unreachable.
func (l *unreachableNodes) check(ctx context.Context, node string) (unreachable bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	nodes, err := apiclient.All(ctx, l.client.Nodes(), metav1.ListOptions{
		ResourceVersion: fromCache, FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(),
	})
	if err != nil {
		return false, err
	}
	at := slices.IndexFunc(nodes, func(n *corev1.Node) bool { return n.Name == node })
	return at < 0 || isUnreachable(nodes[at]), nil
}

// isUnreachable reports whether the node controller has lost contact with a node, or the
// node is marked as shut down.
func isUnreachable(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	}) || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService || t.Key == taintShutdown
	})
}

// taintShutdown is set by the cloud controller manager on a node whose machine is off.
const taintShutdown = "node.cloudprovider.kubernetes.io/shutdown"

// note records a response. Without one, the previous state is kept.
func (l *unreachableNodes) note(node string, unreachable bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.suspects[node]
	if d == nil {
		return // it has a ready endpoint again
	}
	if err == nil {
		d.unreachable = unreachable
	}
	d.checkAt, d.wait = time.Now().Add(d.wait), min(2*d.wait, recheckMax)
}

// publish reports the unreachable nodes if they have changed, and returns when the next
// Node is to be read.
func (l *unreachableNodes) publish(logger klog.Logger) (next time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next = time.Now().Add(recheckMax)
	var unreachable []string
	for node, d := range l.suspects {
		if d.checkAt.Before(next) {
			next = d.checkAt
		}
		if d.unreachable {
			unreachable = append(unreachable, node)
		}
	}
	slices.Sort(unreachable)
	if !slices.Equal(unreachable, l.reported) {
		unreachable = l.credible(logger, unreachable)
	}
	if !slices.Equal(unreachable, l.reported) {
		logger.Info("Unreachable nodes changed, resetting connections to their endpoints", "nodes", unreachable, "before", l.reported)
		l.reported = unreachable
		l.report(unreachable)
	}
	return next
}

// credible returns the nodes to report as unreachable. If more nodes are unreachable than have a
// ready endpoint, the controllers are probably cut off: then these are only those that were
// reported before.
func (l *unreachableNodes) credible(logger klog.Logger, unreachable []string) []string {
	ready, _ := l.nodes()
	many := len(unreachable) > len(ready)
	if many && !l.many {
		logger.Info("Most nodes are unreachable, possibly because controllers are cut off; keeping connections", "unreachable", len(unreachable), "reachable", len(ready))
	}
	l.many = many
	if many {
		return slices.DeleteFunc(unreachable, func(node string) bool { return !slices.Contains(l.reported, node) })
	}
	return unreachable
}
