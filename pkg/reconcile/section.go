package reconcile

import (
	"fmt"

	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
)

// section is a part of the node's state that no Service owns. It is small, so it is compared
// as a whole. State that Services own is in a table.
type section[C fmt.Stringer] struct {
	// diff returns the changes that turn the cached state into the desired state.
	diff  func() []C
	write func([]C) []kernel.Failure[C]
	// done updates the cached state after write. failures are the refused changes.
	done func(changes []C, failures []kernel.Failure[C])
}

// nodeSection is a section without its type of changes.
type nodeSection interface {
	flush(*Problems) (written bool)
	differences() int
}

// flush writes the changes of a section, and reports whether any was not refused. A refused change
// is a problem of the node.
func (s section[C]) flush(problems *Problems) (written bool) {
	changes := s.diff()
	if len(changes) == 0 {
		return false
	}
	failures := s.write(changes)
	for _, failure := range failures {
		problems.add(nil, failure)
	}
	s.done(changes, failures)
	return len(failures) < len(changes)
}

// differences returns how many changes a section needs.
func (s section[C]) differences() int { return len(s.diff()) }

// flushAll writes the changes of sections, one after the other.
func (f *flush) flushAll(sections ...nodeSection) {
	for _, s := range sections {
		if s.flush(&f.problems) {
			f.ns.sectionWrites++
		}
	}
}

// differences returns how many changes sections need.
func differences(sections []nodeSection) int {
	n := 0
	for _, s := range sections {
		n += s.differences()
	}
	return n
}

// perChange returns a done that applies each successful change to the cached state.
func perChange[C change](do func(C)) func([]C, []kernel.Failure[C]) {
	return func(changes []C, failures []kernel.Failure[C]) {
		succeeded(changes, failures, func(i int) { do(changes[i]) }, func(int, error) {})
	}
}

// whole returns a done for a section whose state is unknown after a refusal: it updates the
// cached state only if no change was refused. Otherwise the observation that follows an error does.
func whole[C fmt.Stringer](do func()) func([]C, []kernel.Failure[C]) {
	return func(_ []C, failures []kernel.Failure[C]) {
		if len(failures) == 0 {
			do()
		}
	}
}

// change is a change of one object.
type change interface {
	comparable
	fmt.Stringer
}

// succeeded calls done with the index of each change that succeeded, and failed with the index
// and error of each that was refused.
func succeeded[C change](changes []C, failures []kernel.Failure[C], done func(int), failed func(int, error)) {
	var refused map[C]error
	for _, f := range failures {
		if refused == nil {
			refused = map[C]error{}
		}
		refused[f.Change] = f
	}
	for i, c := range changes {
		if err, ok := refused[c]; ok {
			failed(i, err)
		} else {
			done(i)
		}
	}
}
