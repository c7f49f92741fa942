package apiserver

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// settleTime is for how long nothing has come back of what was kept, before the
// rest of it is deleted.
const settleTime = 500 * time.Millisecond

// guard keeps an API server that has lost its data from taking every Service off
// the node. That one answers, with a list that holds nothing, or what it makes by
// itself (default/kubernetes); of a cluster in use there is no such list. What such
// a list takes away is kept until one object more is there: then the data are back,
// and what is still not among them goes.
//
// Deletions that a watch tells are not its business: each of them was made.
type guard struct {
	missing map[types.NamespacedName]struct{} // of the known ones, in the last list
	timer   *time.Timer                       // runs while kept objects come back
	keeping bool
}

// isOwn tells whether the API server makes an object by itself: the Service by which
// it is reached, and the slice of that.
func isOwn(name types.NamespacedName) bool {
	return name == service.APIServer
}

// wait has what is missing looked at again once all that comes back has come. The
// lock is held, here and below.
func (s *store[T]) wait() {
	if s.guard.timer != nil {
		s.guard.timer.Reset(settleTime)
		return
	}
	s.guard.timer = time.AfterFunc(settleTime, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.guard.timer = nil
		s.decide()
	})
}

// decide deletes what is missing, unless nothing is left.
func (s *store[T]) decide() {
	lost := 0
	for name := range s.known {
		if _, missing := s.guard.missing[name]; !missing && !isOwn(name) {
			s.release()
			return
		} else if missing && !isOwn(name) {
			lost++
		}
	}
	if lost <= 1 { // it can have been deleted while nobody watched
		s.release()
		return
	}
	if !s.guard.keeping {
		s.guard.keeping = true
		s.logger.Error(nil, "The API server lists nothing any more, as one that has lost its data; keeping what it listed before until it lists something again",
			"kept", lost)
	}
}

func (s *store[T]) release() {
	if s.guard.keeping {
		s.guard.keeping = false
		s.logger.Info("The API server lists objects again", "gone", len(s.guard.missing))
	}
	for name := range s.guard.missing {
		s.drop(name)
	}
	s.guard.missing = nil // a map keeps the size that it has had
}
