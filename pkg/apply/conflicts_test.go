package apply

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
)

// TestConflictsAreToldOnce has claims come and go; who loses to whom is told
// when it begins, and not again while it stands.
func TestConflictsAreToldOnce(t *testing.T) {
	c := newConflicts()
	k := key(ip.TCP, "10.96.0.1:80")
	for i, step := range []struct {
		owners string // a letter each
		losers int
		told   []string // loser and winner
	}{
		{"a", 0, nil},
		{"ab", 1, []string{"ba"}},
		{"ab", 1, nil},
		{"abc", 2, []string{"ca"}},
		{"ac", 1, nil},
		{"c", 0, nil},
		{"ac", 1, []string{"ca"}},
		{"bac", 2, []string{"ab", "cb"}},
		{"", 0, nil},
	} {
		var owners []types.NamespacedName
		for _, letter := range step.owners {
			owners = append(owners, types.NamespacedName{Name: string(letter)})
		}
		c.claimed(k, owners)
		var told []string
		for _, begun := range c.take() {
			told = append(told, begun.Loser.Name+begun.Winner.Name)
		}
		if !slices.Equal(told, step.told) || c.losers != step.losers {
			t.Errorf("step %d, %q: %d losers, told %v, want %+v", i, step.owners, c.losers, told, step)
		}
	}
	if s := fmt.Sprint(len(c.standing), len(c.told), len(c.changed)); s != "0 0 0" {
		t.Errorf("kept %s", s)
	}
}

// What was over before anybody asked is not told.
func TestConflictThatIsOverIsNotTold(t *testing.T) {
	c := newConflicts()
	a, b := types.NamespacedName{Name: "a"}, types.NamespacedName{Name: "b"}
	k := key(ip.TCP, "10.96.0.1:80")
	c.claimed(k, []types.NamespacedName{a, b})
	c.claimed(k, []types.NamespacedName{b})
	c.claimed(fwm(7), []types.NamespacedName{a, b})
	if told := c.take(); len(told) > 0 || c.losers != 0 {
		t.Errorf("%v, %d losers", told, c.losers)
	}
}
