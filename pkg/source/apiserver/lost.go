package apiserver

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kube-ipvs/kube-ipvs/pkg/source"
)

// When a node is asked for that none of its endpoints answers on.
const (
	askFrom   = 1 * time.Second // the Node is written before its pods; all proxies hear of them at once
	askUntil  = 4 * time.Second
	askAgain  = 10 * time.Second // doubled each time
	askSeldom = 5 * time.Minute
	askLimit  = 10 * time.Second // for an answer
)

// lostNodes tells of which nodes the cluster does not hear any more, so that
// connections to their endpoints need not wait for an answer (kubernetes#89392,
// #77903).
//
// To watch all Nodes would cost each node a message for each other one every few
// minutes. When a node dies, the node controller has its pods be not ready, which the
// EndpointSlices say: only if endpoints that answered do so no more, and none on their
// node does, the API server is asked for that one Node.
type lostNodes struct {
	client Client
	own    string // by hearing of it one knows that it is not lost
	slices *store[*discoveryv1.EndpointSlice]
	tell   func(nodes []string) // sorted; called under mu
	mu     *sync.Mutex          // the source's, for what follows
	doubts map[string]*doubt    // by node
	begun  bool
	told   []string
	many   bool // too many are lost to be told
	wake   chan struct{}
}

// doubt is about a node.
type doubt struct {
	ask  time.Time // when, next
	wait time.Duration
	lost bool
}

// lostNodes has slices looked at for them, if they are asked for.
func (s *Source) lostNodes(slices *store[*discoveryv1.EndpointSlice], sink source.Sink) *lostNodes {
	if !s.LostNodes {
		return nil
	}
	lost := &lostNodes{client: s.client, own: s.Node, slices: slices, tell: sink.SetLostNodes, mu: &s.mu, doubts: map[string]*doubt{}, wake: make(chan struct{}, 1)}
	deliver := slices.set
	slices.set = func(slice *discoveryv1.EndpointSlice) {
		lost.see(slices.known[nameOf(slice)], slice)
		deliver(slice)
	}
	return lost
}

// see looks at a slice that has come, in the place of another one or of none. A pod
// that has not been ready yet is no reason for doubt, nor is one that is told to end;
// at the start it is not known what has been. The lock is held, here and below, but
// for run and ask.
func (l *lostNodes) see(was, is *discoveryv1.EndpointSlice) {
	for i := range is.Endpoints {
		e := &is.Endpoints[i]
		switch {
		case e.NodeName == nil || *e.NodeName == "" || *e.NodeName == l.own:
		case answers(e):
			l.isBack(*e.NodeName)
		case ptr.Deref(e.Conditions.Terminating, false):
		case was == nil && !l.begun, was != nil && answered(was, e):
			l.doubt(*e.NodeName)
		}
	}
}

// answers tells whether an endpoint's pod is ready. Serving says so whether or not it
// terminates, and even where an endpoint is to count as ready all the time
// (publishNotReadyAddresses). What is not said is true.
func answers(e *discoveryv1.Endpoint) bool {
	return ptr.Deref(e.Conditions.Serving, ptr.Deref(e.Conditions.Ready, true))
}

func answered(slice *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) bool {
	return slices.ContainsFunc(slice.Endpoints, func(other discoveryv1.Endpoint) bool {
		return slices.Equal(other.Addresses, e.Addresses) && answers(&other)
	})
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
	default: // it has not taken the last one yet
	}
}

// run asks for nodes until the context ends.
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
				klog.FromContext(ctx).V(2).Info("Cannot ask for a node of which no endpoint is ready, trying again", "node", node, "error", err.Error())
			}
			l.note(node, lost, err)
		}
		timer.Reset(time.Until(l.publish(klog.FromContext(ctx))))
	}
}

// due gives the nodes to be asked for. Those of which an endpoint answers, or that have
// none any more, are in doubt no longer.
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

// nodes are those of which an endpoint answers, and those that have one.
func (l *lostNodes) nodes() (answering, there map[string]bool) {
	answering, there = map[string]bool{}, map[string]bool{}
	for _, slice := range l.slices.known {
		for i := range slice.Endpoints {
			if e := &slice.Endpoints[i]; e.NodeName != nil {
				there[*e.NodeName] = true
				if answers(e) {
					answering[*e.NodeName] = true
				}
			}
		}
	}
	return answering, there
}

// ask has the API server say, from its cache, whether it has a Node that is heard of.
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

// unheard tells whether the node controller waits for a node in vain, or somebody has
// said that it is shut down.
func unheard(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	}) || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService || t.Key == taintShutdown
	})
}

// taintShutdown is what the cloud's controller puts on a node whose machine is off.
const taintShutdown = "node.cloudprovider.kubernetes.io/shutdown"

// note keeps an answer, and what was known if there is none.
func (l *lostNodes) note(node string, lost bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.doubts[node]
	if d == nil {
		return // it has come back meanwhile
	}
	if err == nil {
		d.lost = lost
	}
	d.ask, d.wait = time.Now().Add(d.wait), min(2*d.wait, askSeldom)
}

// publish tells which nodes are lost, if that has changed, and gives when the next one
// is to be asked for.
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
		logger.Info("Nodes that are not heard of have changed; connections to their endpoints end where there are others", "nodes", lost, "before", l.told)
		l.told = lost
		l.tell(lost)
	}
	return next
}

// few tells whether no more nodes are lost than answer. Else it will be those who watch
// them that are cut off, and what was told before holds.
func (l *lostNodes) few(logger klog.Logger, lost []string) bool {
	answering, _ := l.nodes()
	many := len(lost) > len(answering)
	if many && !l.many {
		logger.Info("More nodes are not heard of than are; leaving connections to them as they are", "notHeardOf", len(lost), "others", len(answering))
	}
	l.many = many
	return !many
}
