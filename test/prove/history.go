//go:build prove

package prove

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/ipset"
)

// history applies random events to a node: changes, restarts, crashes, and set members that
// another program removes.
type history struct {
	*Product
	family ip.Family
	calm   *Product // has had the same changes, but no crash and no removed member
	links  bool     // an interface was added or removed
	counts
}

// counts are the numbers of events and states of one or more histories.
type counts struct{ histories, changes, crashes, removed, states, opened int }

func (c *counts) add(d counts) {
	c.histories, c.changes, c.crashes = c.histories+d.histories, c.changes+d.changes, c.crashes+d.crashes
	c.removed, c.states, c.opened = c.removed+d.removed, c.states+d.states, c.opened+d.opened
}

func newHistory(s *Scenario, family ip.Family) (*history, error) {
	p, err := NewProduct(s)
	if err != nil {
		return nil, err
	}
	calm, err := NewProduct(s)
	return &history{Product: p, family: family, calm: calm, counts: counts{histories: 1}}, err
}

// event draws and applies the next event, and returns the packet classes that it breaks.
func (h *history) event(t *rapid.T) ([]Failure, error) {
	if rapid.IntRange(0, 3).Draw(t, "event") == 3 {
		return h.removeMember(t)
	}
	return h.update(t)
}

// update draws and applies a change. In one of three cases the process crashes during it, and
// is started again.
func (h *history) update(t *rapid.T) ([]Failure, error) {
	from := h.scenario
	var possible []Update
	for _, u := range slices.Concat(Updates, Restarts) {
		if !u.Reverse && u.Apply(from.clone()) {
			possible = append(possible, u)
		}
	}
	u := possible[rapid.IntRange(0, len(possible)-1).Draw(t, "change")]
	to := from.clone()
	u.Apply(to)
	h.links = h.links || changesLinks(from, to)
	if err := enter(h.calm, from, to, u.Restart).change(); err != nil {
		return nil, err
	}
	r := enter(h.Product, from, to, u.Restart)
	before, err := r.Observed(h.family)
	if err != nil {
		return nil, err
	}
	name, do := u.Name, r.change
	if rapid.IntRange(0, 2).Draw(t, "crash") == 2 {
		write := rapid.IntRange(0, mostWrites).Draw(t, "crash before write")
		is, err := r.crash(write)
		if err != nil {
			return nil, err
		}
		if is {
			name = fmt.Sprintf("%s; crash before write %d, restart", u.Name, write+1)
			h.crashes++
		}
		r.scenario, do = to, r.Start
	}
	between, at, err := r.watch(h.family, do)
	if err != nil {
		return nil, err
	}
	after, err := r.Observed(h.family)
	if err != nil {
		return nil, err
	}
	c := newComparison(from, to, h.family, before, after)
	h.add(counts{changes: 1, states: len(between), opened: len(c.opened)})
	failures := append(c.judge(name, between, r.writes, at), h.unlike(name)...)
	for i := range failures {
		failures[i].Path = "writes:\n  " + strings.Join(r.writes[len(r.writes)-len(between):], "\n  ")
	}
	return failures, nil
}

// mostWrites limits the write at which a crash is drawn; few changes have more writes.
const mostWrites = 12

// removeMember removes a member of one of our sets, as another program might. A resync must
// restore it.
func (h *history) removeMember(t *rapid.T) ([]Failure, error) {
	before, err := h.Observed(h.family)
	if err != nil {
		return nil, err
	}
	var all []ipset.Change
	for _, name := range slices.Sorted(maps.Keys(before.Sets)) {
		entries := slices.SortedFunc(maps.Keys(before.Sets[name].Entries), func(a, b ipset.Entry) int { return cmp.Compare(a.String(), b.String()) })
		for _, e := range entries {
			all = append(all, ipset.Change{Op: ipset.DeleteEntry, Set: before.Sets[name].Set, Entry: e})
		}
	}
	if len(all) == 0 {
		return nil, nil
	}
	c := all[rapid.IntRange(0, len(all)-1).Draw(t, "member")]
	for _, f := range h.IPSet.Apply([]ipset.Change{c}) {
		return nil, f
	}
	h.removed++
	if err := h.Resync(); err != nil {
		return nil, err
	}
	return h.unlike("another program removes " + c.String()), nil
}

// unlike returns a failure if the kernel state differs from that of a new process. Once an
// interface was added or removed, the state of the calm process is right too: see changesLinks.
func (h *history) unlike(when string) []Failure {
	fails := func(got string) []Failure {
		return []Failure{{
			Subject: h.scenario.Name, Class: &Class{}, When: when, Got: got,
			Want: Want{Sentence: "the state is that of a node that has only had the new configuration"},
		}}
	}
	fresh, err := NewProduct(h.scenario)
	if err != nil {
		return fails(err.Error())
	}
	got, err := h.Observed(h.family)
	if err != nil {
		return fails(err.Error())
	}
	right := []*Product{fresh}
	if h.links {
		right = append(right, h.calm)
	}
	what := ""
	for _, p := range right {
		want, err := p.Observed(h.family)
		if err != nil {
			return fails(err.Error())
		}
		if what = differs(got, want); what == "" {
			return nil
		}
	}
	return fails(what)
}
