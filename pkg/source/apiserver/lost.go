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

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// When to read the Node of a node without ready endpoints.
const (
	askFrom   = 1 * time.Second // the Node is updated before its pods, which all proxies see at once
	askUntil  = 4 * time.Second
	askAgain  = 10 * time.Second // doubled each time
	askSeldom = 5 * time.Minute
	askLimit  = 10 * time.Second // for a response
)

// lostNodes finds unreachable nodes, so that connections to their endpoints can be
// reset (kubernetes#89392, #77903).
//
// Watching all Nodes would cost each node a message per other node every few minutes.
// When a node dies, the node controller marks its pods as not ready, which
// EndpointSlices show. So the API server is asked for a single Node only if endpoints
// on it were ready and none is any more.
type lostNodes struct {
	client Client
	own    string // a node that runs us is reachable
	slices *store[*discoveryv1.EndpointSlice]
	tell   func(nodes []string) // nodes is sorted; called under mu
	mu     *sync.Mutex          // the source's; guards the fields below
	doubts map[string]*doubt    // by name of the node
	begun  bool
	told   []string
	many   bool // too many nodes are unreachable to report them
	wake   chan struct{}
}

// doubt is the state of a node that may be unreachable.
type doubt struct {
	ask  time.Time // time of the next request
	wait time.Duration
	lost bool
}

// lostNodes makes the store report slices to it, if unreachable nodes are wanted.
func (s *Source) lostNodes(slices *store[*discoveryv1.EndpointSlice], sink source.Sink) *lostNodes {
	if !s.LostNodes {
		return nil
	}
	lost := &lostNodes{client: s.client, own: s.Node, slices: slices, tell: sink.SetLostNodes, mu: &s.mu, doubts: map[string]*doubt{}, wake: make(chan struct{}, 1)}
	slices.pods = podsOf
	deliver := slices.set
	slices.set = func(slice *discoveryv1.EndpointSlice) {
		was, known := slices.known[nameOf(slice)]
		lost.see(was.pods, known, slice)
		deliver(slice)
	}
	return lost
}

// pod is what is remembered of an endpoint.
type pod struct {
	node    unique.Handle[string] // "" if it has none
	address uint64                // of its addresses, with the lowest bit set if it answered
}

// podsOf returns what is remembered of a slice's endpoints.
func podsOf(slice *discoveryv1.EndpointSlice) []pod {
	pods := make([]pod, len(slice.Endpoints))
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		pods[i] = pod{unique.Make(ptr.Deref(e.NodeName, "")), hashOf(e.Addresses) &^ 1}
		if answers(e) {
			pods[i].address |= 1
		}
	}
	return pods
}

func (p pod) answered() bool { return p.address&1 != 0 }

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

// see examines a slice that replaces another one, or none. A pod that was never ready
// or is being terminated raises no doubt; neither does the initial list, before which
// nothing is known. The caller holds the lock, here and below, except in run and ask.
func (l *lostNodes) see(was []pod, known bool, is *discoveryv1.EndpointSlice) {
	for i := range is.Endpoints {
		e := &is.Endpoints[i]
		switch {
		case e.NodeName == nil || *e.NodeName == "" || *e.NodeName == l.own:
		case answers(e):
			l.isBack(*e.NodeName)
		case ptr.Deref(e.Conditions.Terminating, false):
		case !known && !l.begun, known && answered(was, e):
			l.doubt(*e.NodeName)
		}
	}
}

// answers reports whether an endpoint's pod is ready. It reads serving, which is set
// whether or not the pod is terminating, and also if unready addresses are published
// (publishNotReadyAddresses). Unset means true.
func answers(e *discoveryv1.Endpoint) bool {
	return ptr.Deref(e.Conditions.Serving, ptr.Deref(e.Conditions.Ready, true))
}

func answered(was []pod, e *discoveryv1.Endpoint) bool {
	address := hashOf(e.Addresses) | 1
	return slices.ContainsFunc(was, func(p pod) bool { return p.address == address })
}

func (l *lostNodes) isBack(node string) {
	if d := l.doubts[node]; d != nil {
		delete(l.doubts, node)
		l.wakeUp()
	}
}

func (l *lostNodes) doubt(node string) {
	if l.doubts[node] != nil {
		return
	}
	l.doubts[node] = &doubt{ask: time.Now().Add(askFrom + rand.N(askUntil-askFrom)), wait: askAgain}
	l.wakeUp()
}

func (l *lostNodes) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default: // an earlier signal is pending
	}
}

// run reads the Nodes in doubt until the context ends.
func (l *lostNodes) run(ctx context.Context) {
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
			lost, err := l.ask(ctx, node)
			if err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot read the Node of a node without ready endpoints, retrying", "node", node, "error", err.Error())
			}
			l.note(node, lost, err)
		}
		timer.Reset(time.Until(l.publish(klog.FromContext(ctx))))
	}
}

// due returns the nodes whose Node is to be read now. It drops nodes with a ready
// endpoint, or without endpoints.
func (l *lostNodes) due(now time.Time) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = true
	due := map[string]bool{}
	for node, d := range l.doubts {
		if !now.Before(d.ask) {
			due[node] = true
		}
	}
	if len(due) == 0 {
		return nil
	}
	answering, there := l.nodes()
	for node := range due {
		if answering[node] || !there[node] {
			delete(due, node)
			delete(l.doubts, node)
		}
	}
	return slices.Sorted(maps.Keys(due))
}

// nodes returns the nodes that have a ready endpoint, and those that have any endpoint.
func (l *lostNodes) nodes() (answering, there map[string]bool) {
	answering, there = map[string]bool{}, map[string]bool{}
	none := unique.Make("")
	for _, slice := range l.slices.known {
		for _, p := range slice.pods {
			if p.node == none {
				continue
			}
			there[p.node.Value()] = true
			if p.answered() {
				answering[p.node.Value()] = true
			}
		}
	}
	return answering, there
}

// ask reads a Node from the API server's cache and reports whether it is unreachable.
func (l *lostNodes) ask(ctx context.Context, node string) (lost bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	list, err := l.client.Nodes().List(ctx, metav1.ListOptions{
		ResourceVersion: fromCache, FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(),
	})
	if err != nil {
		return false, err
	}
	at := slices.IndexFunc(list.Items, func(n corev1.Node) bool { return n.Name == node })
	return at < 0 || unheard(&list.Items[at]), nil
}

// unheard reports whether the node controller has lost contact with a node, or the node
// is marked as shut down.
func unheard(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	}) || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService || t.Key == taintShutdown
	})
}

// taintShutdown is set by the cloud's controller on a node whose machine is off.
const taintShutdown = "node.cloudprovider.kubernetes.io/shutdown"

// note records a response. Without one, the previous state is kept.
func (l *lostNodes) note(node string, lost bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.doubts[node]
	if d == nil {
		return // it has a ready endpoint again
	}
	if err == nil {
		d.lost = lost
	}
	d.ask, d.wait = time.Now().Add(d.wait), min(2*d.wait, askSeldom)
}

// publish reports the unreachable nodes if they have changed, and returns when the next
// Node is to be read.
func (l *lostNodes) publish(logger klog.Logger) (next time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next = time.Now().Add(askSeldom)
	var lost []string
	for node, d := range l.doubts {
		if d.ask.Before(next) {
			next = d.ask
		}
		if d.lost {
			lost = append(lost, node)
		}
	}
	slices.Sort(lost)
	if !slices.Equal(lost, l.told) && l.few(logger, lost) {
		logger.Info("Unreachable nodes changed, resetting connections to their endpoints", "nodes", lost, "before", l.told)
		l.told = lost
		l.tell(lost)
	}
	return next
}

// few reports whether fewer nodes are unreachable than reachable. Otherwise the
// controllers are more likely to be cut off, and the last reported state remains.
func (l *lostNodes) few(logger klog.Logger, lost []string) bool {
	answering, _ := l.nodes()
	many := len(lost) > len(answering)
	if many && !l.many {
		logger.Info("Most nodes are unreachable, possibly because controllers are cut off; keeping connections", "unreachable", len(lost), "reachable", len(answering))
	}
	l.many = many
	return !many
}
