package apiserver

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// settleTime is for how long no deletion has come of those that one list brings,
// before they are looked at together.
const settleTime = 500 * time.Millisecond

// guard keeps an API server that has lost its data from taking every Service off
// the node. That one answers, with a list that holds nothing, or what it makes by
// itself (default/kubernetes); of a cluster in use there is no such list. What such
// a list takes away is kept until one object more is there: then the data are back,
// and what is still not among them goes.
//
// It is for one kind of objects. Deletions that a watch tells are not its business:
// each of them was made.
type guard struct {
	mu      *sync.Mutex // the source's
	kind    string
	logger  klog.Logger
	remove  func(types.NamespacedName)
	known   map[types.NamespacedName]struct{}
	missing map[types.NamespacedName]struct{} // of the known ones, in the last list
	timer   *time.Timer                       // runs while deletions come
	keeping bool
}

// isOwn tells whether the API server makes an object by itself: the Service by which
// it is reached, and the slice of that.
func isOwn(name types.NamespacedName) bool {
	return name == service.APIServer
}

func newGuard(mu *sync.Mutex, kind string, logger klog.Logger, remove func(types.NamespacedName)) *guard {
	return &guard{
		mu: mu, kind: kind, logger: logger, remove: remove,
		known: map[types.NamespacedName]struct{}{}, missing: map[types.NamespacedName]struct{}{},
	}
}

// there notes that an object is there. The source's lock is held, here and below.
func (g *guard) there(name types.NamespacedName) {
	delete(g.missing, name)
	g.known[name] = struct{}{}
	if g.keeping {
		g.wait()
	}
}

// deleted passes on a deletion that was made.
func (g *guard) deleted(name types.NamespacedName) {
	delete(g.known, name)
	delete(g.missing, name)
	g.remove(name)
}

// notListed notes that an object is in a list no more.
func (g *guard) notListed(name types.NamespacedName) {
	g.missing[name] = struct{}{}
	g.wait()
}

// wait has what is missing looked at when the whole list has been gone through.
func (g *guard) wait() {
	if g.timer != nil {
		g.timer.Reset(settleTime)
		return
	}
	g.timer = time.AfterFunc(settleTime, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.timer = nil
		g.decide()
	})
}

// decide deletes what is missing, unless nothing is left.
func (g *guard) decide() {
	lost := 0
	for name := range g.known {
		if _, missing := g.missing[name]; !missing && !isOwn(name) {
			g.release()
			return
		} else if missing && !isOwn(name) {
			lost++
		}
	}
	if lost <= 1 { // it can have been deleted while nobody watched
		g.release()
		return
	}
	if !g.keeping {
		g.keeping = true
		g.logger.Error(nil, "The API server lists nothing any more, as one that has lost its data; keeping what it listed before until it lists something again",
			"kind", g.kind, "kept", lost)
	}
}

func (g *guard) release() {
	if g.keeping {
		g.keeping = false
		g.logger.Info("The API server lists objects again", "kind", g.kind, "gone", len(g.missing))
	}
	for name := range g.missing {
		g.deleted(name)
	}
}
