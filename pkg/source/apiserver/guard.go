package apiserver

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/service"
)

// settleTime is how long no object may have been added or changed before objects that are still
// missing are deleted. longestSettling limits the whole wait, because in a large cluster objects
// change all the time. It is long enough to restore 10,000 objects at 20 a second.
const (
	settleTime      = 500 * time.Millisecond
	longestSettling = 10 * time.Minute
)

// guard keeps an API server that has lost its data from removing every Service from the
// node. Such a server returns an empty list, or only the objects that it creates itself
// (default/kubernetes), which does not happen in a cluster in use. The objects missing
// from such a list are kept until another object appears: then the data has been
// restored, and objects that are still missing are deleted.
//
// Deletions that a watch reports are never delayed.
type guard struct {
	missing map[types.NamespacedName]struct{} // known objects that the last list lacks
	timer   *time.Timer                       // runs while objects appear or change
	began   time.Time                         // when timer was started first
	keeping bool
}

// isOwn reports whether the API server creates an object itself: its own Service and
// the slice of that Service.
func isOwn(name types.NamespacedName) bool {
	return name == service.APIServer
}

// wait schedules decide for settleTime after the last object that appeared. The caller
// holds the lock, here and below.
func (s *store[T]) wait() {
	if s.guard.timer != nil {
		if time.Since(s.guard.began) < longestSettling {
			s.guard.timer.Reset(settleTime)
		}
		return
	}
	s.guard.began = time.Now()
	s.guard.timer = time.AfterFunc(settleTime, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.guard.timer = nil
		s.decide()
	})
}

// decide deletes the missing objects, unless the list has no object but the API server's own.
func (s *store[T]) decide() {
	lost := 0
	for k := range s.known.All() {
		if _, missing := s.guard.missing[k.name]; !missing && !isOwn(k.name) {
			s.release()
			return
		} else if missing && !isOwn(k.name) {
			lost++
		}
	}
	if lost <= 1 { // a single object may have been deleted while the watch was broken
		s.release()
		return
	}
	if !s.guard.keeping {
		s.guard.keeping = true
		s.logger.Error(nil, "API server returned an empty list, possibly after data loss; keeping cached objects",
			"kept", lost)
	}
}

func (s *store[T]) release() {
	if s.guard.keeping {
		s.guard.keeping = false
		s.logger.Info("API server lists objects again", "deleted", len(s.guard.missing))
	}
	for name := range s.guard.missing {
		s.drop(name)
	}
	s.guard.missing = nil // to free its memory: a map never shrinks
}
