package apply

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// Conflict is a virtual server that a Service claims and another one has.
type Conflict struct {
	Key           ipvs.Key
	Loser, Winner types.NamespacedName
}

// conflicts knows the virtual servers that several Services claim. Lists of
// names have the winner first. A mark is left out: it stands for an address
// and port, of which the conflict is told already.
type conflicts struct {
	standing map[ipvs.Key][]types.NamespacedName
	told     map[ipvs.Key][]types.NamespacedName // as it was when it was last asked
	changed  map[ipvs.Key]struct{}               // since then
	losers   int                                 // in all that stand
}

func newConflicts() conflicts {
	return conflicts{
		standing: map[ipvs.Key][]types.NamespacedName{},
		told:     map[ipvs.Key][]types.NamespacedName{},
		changed:  map[ipvs.Key]struct{}{},
	}
}

// claimed notes who claims a virtual server now.
func (c *conflicts) claimed(key ipvs.Key, owners []types.NamespacedName) {
	was := c.standing[key]
	if key.FWMark != 0 || len(owners) < 2 && was == nil {
		return
	}
	c.changed[key] = struct{}{}
	if was != nil {
		c.losers -= len(was) - 1
		delete(c.standing, key)
	}
	if len(owners) > 1 {
		c.losers += len(owners) - 1
		c.standing[key] = owners
	}
}

// take gives what has begun since it was last called.
func (c *conflicts) take() []Conflict {
	var begun []Conflict
	for key := range c.changed {
		was, is := c.told[key], c.standing[key]
		for i, loser := range is {
			if i > 0 && (!slices.Contains(was, loser) || was[0] != is[0]) {
				begun = append(begun, Conflict{key, loser, is[0]})
			}
		}
		if is == nil {
			delete(c.told, key)
		} else {
			c.told[key] = is
		}
	}
	clear(c.changed)
	slices.SortFunc(begun, func(a, b Conflict) int {
		return cmp.Or(strings.Compare(a.Loser.String(), b.Loser.String()),
			strings.Compare(a.Winner.String(), b.Winner.String()), a.Key.Compare(b.Key))
	})
	return begun
}

// Conflicts counts what Services claim in vain.
func (a *Applier) Conflicts() int { return a.conflicts.losers }

// TakeConflicts gives the conflicts that have begun since it was last called,
// by loser, winner and key.
func (a *Applier) TakeConflicts() []Conflict { return a.conflicts.take() }
