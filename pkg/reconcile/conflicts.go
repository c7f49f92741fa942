package reconcile

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ipvs"
)

// Conflict is a virtual server that two Services want. Winner has precedence.
type Conflict struct {
	Key           ipvs.Key
	Loser, Winner types.NamespacedName
}

// conflicts tracks the virtual servers that several Services want. Lists of names have the
// winner first. Fwmark keys are not tracked, because their address and port is.
type conflicts struct {
	active   map[ipvs.Key][]types.NamespacedName
	reported map[ipvs.Key][]types.NamespacedName // as of the last call of begun
	changed  map[ipvs.Key]struct{}               // since the last call of begun
	losers   int                                 // in all active conflicts
}

func newConflicts() conflicts {
	return conflicts{
		active:   map[ipvs.Key][]types.NamespacedName{},
		reported: map[ipvs.Key][]types.NamespacedName{},
		changed:  map[ipvs.Key]struct{}{},
	}
}

// update records the Services that want a virtual server now, the winner first.
func (c *conflicts) update(key ipvs.Key, owners []types.NamespacedName) {
	was := c.active[key]
	if key.FWMark != 0 || len(owners) < 2 && was == nil {
		return
	}
	c.changed[key] = struct{}{}
	if was != nil {
		c.losers -= len(was) - 1
		delete(c.active, key)
	}
	if len(owners) > 1 {
		c.losers += len(owners) - 1
		c.active[key] = owners
	}
}

// begun returns the conflicts that began since its last call.
func (c *conflicts) begun() []Conflict {
	var begun []Conflict
	for key := range c.changed {
		was, is := c.reported[key], c.active[key]
		for i, loser := range is {
			if i > 0 && (!slices.Contains(was, loser) || was[0] != is[0]) {
				begun = append(begun, Conflict{key, loser, is[0]})
			}
		}
		if is == nil {
			delete(c.reported, key)
		} else {
			c.reported[key] = is
		}
	}
	clear(c.changed)
	slices.SortFunc(begun, func(a, b Conflict) int {
		return cmp.Or(strings.Compare(a.Loser.String(), b.Loser.String()),
			strings.Compare(a.Winner.String(), b.Winner.String()), a.Key.Compare(b.Key))
	})
	return begun
}
